"""What one optimizer step has to say, collected over its micro-batches and divided once, at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steadyrl.diagnostics.buckets import bucket_means, by_age, by_position, by_probability, mismatch_by
from steadyrl.diagnostics.mismatch import QUANTILES, derived, max_abs, mismatch_sums, sequence_sums, token_gap
from steadyrl.diagnostics.routing import disagreement_sums
from steadyrl.diagnostics.split import split_derived, split_sums
from steadyrl.diagnostics.staleness import lag_extremes, lag_histogram, lag_sums
from steadyrl.models.routing import RoutingReplay
from steadyrl.objective.loss import LossOutput
from steadyrl.objective.quantile import order_statistic_across
from steadyrl.objective.rule import Layout
from steadyrl.trainer.ranks import Ranks
from steadyrl.types import Sums, TrainBatch, add_sums, pooled


@dataclass
class StepStatistics:
    """`add` every micro-batch, then ask for the `pooled` numbers."""

    version: int  # of the policy that was trained
    largest_lag: int
    longest_response: int  # tokens
    splits_mismatch: bool  # old_logp is the score of the weights that sampled
    sums: Sums = field(default_factory=dict)
    breakdowns: Sums = field(default_factory=dict)  # (sum [B], count [B]), a bucket each
    minima: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    tokens: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # logp and behavior_logp of active tokens
    lags: Tensor | None = None

    def add(
        self,
        batch: TrainBatch,
        layout: Layout,
        logp: Tensor,
        old_logp: Tensor | None,
        output: LossOutput,
        replay: RoutingReplay | None,
    ) -> None:
        loss_mask = layout.loss_mask
        behavior_logp, versions = batch.behavior_logp.flatten(), batch.versions.flatten()
        self.tokens.append((logp[loss_mask], behavior_logp[loss_mask]))
        add_sums(self.sums, output.sums)
        add_sums(self.sums, mismatch_sums(logp, behavior_logp, loss_mask))
        add_sums(self.sums, sequence_sums(logp, behavior_logp, layout))
        add_sums(self.sums, lag_sums(self.version, versions, loss_mask))
        if self.splits_mismatch and old_logp is not None:
            add_sums(self.sums, split_sums(logp, old_logp, behavior_logp, loss_mask))
        if replay is not None:
            layers = disagreement_sums(torch.stack(replay.disagreements), torch.stack(replay.tokens))
            add_sums(self.breakdowns, {"routing/disagreement_by_layer": layers["routing/disagreement"]})
        for kind, buckets in {
            "age": by_age(self.version, versions, loss_mask, self.largest_lag),
            "position": by_position(layout, self.longest_response),
            "probability": by_probability(behavior_logp),
        }.items():
            part = mismatch_by(buckets, logp, behavior_logp, loss_mask, shares=output.marks)
            add_sums(self.breakdowns, {f"{name}_by_{kind}": value for name, value in part.items()})
        lowest, highest = lag_extremes(self.version, versions, loss_mask)
        _keep(self.minima, torch.minimum, {**output.extremes, "staleness/lag_min": lowest})
        largest_gap = max_abs(logp, behavior_logp, loss_mask)
        _keep(self.maxima, torch.maximum, {"staleness/lag_max": highest, "mismatch/max_abs": largest_gap})
        lags = lag_histogram(self.version, versions, loss_mask, self.largest_lag)
        self.lags = lags if self.lags is None else self.lags + lags

    def pooled(self, ranks: Ranks) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Means and extremes by name, and a list by name for what is broken down: lag, age, position, ...

        They are those of all ranks together, each of which has to call this after as many micro-batches.
        """
        means = pooled(_summed(self.sums, ranks))
        means |= derived(means)
        if "split/product" in means:
            means |= split_derived(means)
        logp, behavior_logp = (torch.cat(parts) for parts in zip(*self.tokens, strict=True))
        lowest, highest = _of_all(self.minima, ranks).amin(dim=0), _of_all(self.maxima, ranks).amax(dim=0)
        means |= dict(zip([*self.minima, *self.maxima], [*lowest.tolist(), *highest.tolist()], strict=True))
        means |= _abs_quantiles(logp, behavior_logp, ranks)
        assert self.lags is not None
        breakdowns = _summed(self.breakdowns, ranks)
        histograms = {"lag": ranks.sum(self.lags).tolist(), **bucket_means(breakdowns)}
        if "routing/disagreement_by_layer" in breakdowns:
            differing, seen = breakdowns["routing/disagreement_by_layer"]
            means["routing/disagreement"] = float(torch.as_tensor(differing).sum() / torch.as_tensor(seen).sum())
        return means, histograms


def _summed(sums: Sums, ranks: Ranks) -> Sums:
    """Each (sum, count) of all ranks, in one exchange of float64."""
    parts = [torch.as_tensor(part, dtype=torch.float64) for pair in sums.values() for part in pair]
    total = ranks.sum(torch.cat([part.flatten() for part in parts]))
    pieces = [p.view_as(part) for p, part in zip(total.split([part.numel() for part in parts]), parts, strict=True)]
    return dict(zip(sums, zip(pieces[::2], pieces[1::2], strict=True), strict=True))


def _of_all(extremes: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
    """[ranks, names] float64."""
    return torch.stack(ranks.gather(torch.stack([value.to(torch.float64) for value in extremes.values()])))


def _abs_quantiles(logp: Tensor, behavior_logp: Tensor, ranks: Ranks) -> dict[str, float]:
    """`diagnostics.mismatch.abs_quantiles` of the tokens of all ranks, which exchange counts only."""
    gap = token_gap(logp, behavior_logp, torch.ones_like(logp, dtype=torch.bool))
    if not ranks.sum(gap.used.sum()):
        return {f"mismatch/{name}": math.nan for name in QUANTILES}
    size = gap.delta.abs()
    return {
        f"mismatch/{name}": float(order_statistic_across(size, gap.used, float(alpha), ranks.sum))
        for name, alpha in QUANTILES.items()
    }


def _keep(kept: dict[str, Tensor], choose: Callable[[Tensor, Tensor], Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        kept[name] = choose(kept[name], value) if name in kept else value
