"""Statistics by age, by position in the response, and by probability of the token.

Drift of the policy grows with age; noise of an engine does not, and grows with position (its cache) or
sits on improbable tokens. A breakdown tells one from the other where a mean cannot.

A breakdown is name -> (sum [B], count [B]), float64, one entry per bucket. Breakdowns with the same
buckets pool by addition (`types.add_sums`), and `bucket_means` divides once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from steadyrl.diagnostics.layout import Layout
from steadyrl.diagnostics.mismatch import mismatch_values, token_gap
from steadyrl.diagnostics.staleness import lag_histogram
from steadyrl.types import Sums

PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99)
STATISTICS = ("d_bar", "delta", "k3", "tv_estimate")  # of `mismatch_values`


@dataclass(frozen=True)
class Buckets:
    """Which bucket every token is in. Tokens outside the loss mask may be in any."""

    labels: tuple[str, ...]  # B of them
    index: Tensor  # [T] int64, 0 .. B - 1


def by_age(learner_version: int, versions: Tensor, loss_mask: Tensor, largest: int) -> Buckets:
    """One bucket for each lag 0 .. `largest`; an active token outside that range is an error of ours."""
    lag_histogram(learner_version, versions, loss_mask, largest)  # asserts the range
    lag = torch.where(loss_mask, learner_version - versions, 0)
    return Buckets(tuple(str(age) for age in range(largest + 1)), lag)


def by_position(layout: Layout, longest: int) -> Buckets:
    """Buckets 0, 1, 2-3, 4-7, 8-15, ... of the token's place among the active tokens of its response.

    Args:
        layout: [T]; the tokens of a response are in order, wherever they lie in the micro-batch.
        longest: most active tokens that a response can have; it alone sets the number of buckets, so
            that micro-batches pool.
    """
    position = _positions(layout)
    assert bool(((position < longest) | ~layout.loss_mask).all()), f"a response has more than {longest} tokens"
    edges = [2**power for power in range((max(longest, 1) - 1).bit_length())]
    labels = ["0", *(str(edge) if edge == 1 else f"{edge}-{2 * edge - 1}" for edge in edges)]
    index = torch.bucketize(position, position.new_tensor(edges), right=True)
    return Buckets(tuple(labels), index)


def by_probability(behavior_logp: Tensor) -> Buckets:
    """Buckets [0, .01), [.01, .1), [.1, .5), [.5, .9), [.9, .99), [.99, 1] of the token under the sampling policy."""
    edges = behavior_logp.new_tensor(PROBABILITY_EDGES, dtype=torch.float64)
    limits = ("0", *(f"{edge:g}" for edge in PROBABILITY_EDGES), "1")
    labels = [f"[{low}, {high})" for low, high in pairwise(limits)]
    labels[-1] = labels[-1].replace(")", "]")
    index = torch.bucketize(behavior_logp.detach().to(torch.float64).exp(), edges, right=True)
    return Buckets(tuple(labels), index)


def bucket_sums(buckets: Buckets, values: Mapping[str, Tensor], used: Tensor) -> Sums:
    """(sum [B], count [B]) of each of `values`, over the tokens that are `used`.

    Args:
        values: name -> [T], number or bool.
        used: [T] bool; other tokens may hold anything.
    """
    size = len(buckets.labels)
    index = buckets.index[used]
    count = torch.bincount(index, minlength=size).to(torch.float64)
    sums: Sums = {}
    for name, value in values.items():
        # bincount gives integers when there is nothing to weigh, whatever the weights' type
        weighed = torch.bincount(index, weights=value.detach()[used].to(torch.float64), minlength=size)
        sums[name] = (weighed.to(torch.float64), count)
    return sums


def mismatch_by(
    buckets: Buckets,
    logp: Tensor,
    behavior_logp: Tensor,
    loss_mask: Tensor,
    quantile: Tensor | None = None,
    shares: Mapping[str, Tensor] | None = None,
) -> Sums:
    """d_bar, delta, k3 and the TV estimate per bucket, and what a trust region did there.

    The counts are tokens per bucket. Tokens that are not finite are left out, as in `mismatch_sums`.

    Args:
        quantile: 0-d, q of SAT against the rollout, per token; adds `gated`, the share with |delta| > q, 0
            everywhere if q is 0 (paper, Eq. 16). With another anchor or unit, give `gated` among the shares.
        shares: name -> [T] bool, such as `outside` and `removed` of a boundary's output.
    """
    gap = token_gap(logp, behavior_logp, loss_mask)
    all_values = mismatch_values(gap)
    values = {name: all_values[name] for name in STATISTICS}
    if quantile is not None:
        q = quantile.detach()
        # in q's precision: q is one of the |delta|, and must not lie below itself after rounding
        values["gated"] = (gap.delta.abs().to(q.dtype) > q) & (q > 0)
    return bucket_sums(buckets, {**values, **(shares or {})}, gap.used)


def bucket_means(sums: Sums) -> dict[str, list[float]]:
    """Mean per bucket, NaN where nothing was counted."""
    means = {}
    for name, (value, count) in sums.items():
        quotient = torch.as_tensor(value, dtype=torch.float64) / torch.as_tensor(count, dtype=torch.float64)
        means[name] = quotient.tolist()  # 0 / 0 is NaN
    return means


def _positions(layout: Layout) -> Tensor:
    """[T] int64: active tokens of the same response before this one."""
    order = torch.argsort(layout.sequence, stable=True)
    active = layout.loss_mask[order].to(torch.int64)
    before = active.cumsum(0) - active  # in this and all earlier responses
    zeros = torch.zeros(layout.num_sequences, dtype=torch.int64, device=active.device)
    lengths = zeros.index_add(0, layout.sequence, layout.loss_mask.to(torch.int64))
    position = before - (lengths.cumsum(0) - lengths)[layout.sequence[order]]
    return torch.zeros_like(position).scatter(0, order, position)
