"""What the adapters share: from another trainer's settings and tensors to `policy_loss`, and back.

A trainer keeps what is its own: rewards, advantages, the denominators of the loss, entropy, and mostly the KL
penalty. The objective decides what a token's gradient is multiplied with. So an adapter

    1. reads an objective, a preset's name or the `[objective]` table of a recipe     `settings.objective_for`
    2. lays the trainer's tensors end to end                                          `from_padded`, `from_responses`
    3. asks for the loss, each token with its share in the trainer's own reduction    `objective_loss`, `shares_of`
    4. hands over (sum, count) statistics in the trainer's own form                   `means`

q of SAT and the limit of M2PO are taken over the tokens of one call. With `quantile_scope = "batch"` and an
`all_reduce` of the trainer's data-parallel group they are taken over the calls that its ranks make together.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steadyrl.adapters.settings import is_batch_relative
from steadyrl.axes import M2poBoundary, SatBoundary
from steadyrl.diagnostics.mismatch import mismatch_sums
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import anchor_of, batch_threshold, masked_sum, policy_loss, trust_region_score
from steadyrl.objective.mask_rules import m2po_limit
from steadyrl.objective.penalty import kl_k3
from steadyrl.objective.quantile import order_statistic_across
from steadyrl.objective.ratio import token_log_ratio, tokens_per_sequence
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts, Sums

AllReduce = Callable[[Tensor], Tensor]
MISMATCH = ("d_bar", "k3", "zero", "not_finite")
SIDES = ("objective/outside_band", "objective/clip_low", "objective/clip_high")


# ---- tensors ----


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call, end to end. All tensors are [T]; masked places may hold anything."""

    layout: Layout
    logp: Tensor  # with gradient
    advantage: Tensor
    share: Tensor  # above 0, of the token in the trainer's loss: 1 / tokens of the batch, and the like
    behavior_logp: Tensor | None = None  # of the engine
    old_logp: Tensor | None = None  # the trainer's own, of earlier weights
    reference_logp: Tensor | None = None
    age: Tensor | None = None  # int64, lag in optimizer steps
    weight: Tensor | None = None  # not negative; an importance weight that the trainer brings along


def from_padded(loss_mask: Tensor, **columns: Tensor | None) -> Tokens:
    """Tokens from rows of one width, padded on either side.

    Args:
        loss_mask: [B, W], true (or not 0) on the tokens that are trained on.
        columns: the fields of `Tokens`, [B, W], or 0-d, [B] and [B, 1] for one value of the call or of each response.
    """
    rows, width = loss_mask.shape
    sequence = torch.arange(rows, device=loss_mask.device).repeat_interleave(width)

    def flat(column: Tensor | None) -> Tensor | None:
        if column is None:
            return None
        return (column[:, None] if column.dim() == 1 else column).expand(rows, width).reshape(-1)  # 0-d expands, too

    laid_out: dict[str, Any] = {name: flat(column) for name, column in columns.items()}
    return Tokens(Layout(loss_mask.bool().reshape(-1), sequence, rows), **laid_out)


def layout_of(loss_mask: Tensor, lengths: Sequence[int] | Tensor) -> Layout:
    """Of responses end to end: loss_mask [T], and how many places each takes, masked ones too."""
    counts = torch.as_tensor(lengths, device=loss_mask.device)
    sequence = torch.arange(len(counts), device=loss_mask.device).repeat_interleave(counts)
    return Layout(loss_mask.bool(), sequence, len(counts))


def from_flat(loss_mask: Tensor, lengths: Sequence[int] | Tensor, **columns: Tensor | None) -> Tokens:
    """Tokens from a stream that is already flat; arguments as of `layout_of`, columns [T] or 0-d."""
    given: dict[str, Any] = {name: None if c is None else c.expand(len(loss_mask)) for name, c in columns.items()}
    return Tokens(layout_of(loss_mask, lengths), **given)


def from_responses(loss_masks: Sequence[Tensor], **columns: Sequence[Tensor] | None) -> Tokens:
    """Tokens from a list of responses of any lengths: each argument has one [n] per response."""
    flat = {name: None if parts is None else torch.cat(list(parts)) for name, parts in columns.items()}
    return from_flat(torch.cat(list(loss_masks)), [len(mask) for mask in loss_masks], **flat)


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Several calls as one; a field that is not in all of them is left out."""
    first = [0, *accumulate(part.layout.num_sequences for part in parts)]
    sequence = torch.cat([part.layout.sequence + start for part, start in zip(parts, first, strict=False)])
    columns: dict[str, Any] = {}
    for name in (item.name for item in fields(Tokens) if item.name != "layout"):
        values = [getattr(part, name) for part in parts]
        columns[name] = None if any(value is None for value in values) else torch.cat(values)
    return Tokens(Layout(torch.cat([part.layout.loss_mask for part in parts]), sequence, first[-1]), **columns)


# ---- the loss ----


@dataclass(frozen=True)
class Outcome:
    """A loss to differentiate, and statistics that pool over micro-batches and ranks."""

    loss: Tensor  # 0-d
    sums: Sums = field(default_factory=dict)
    extremes: dict[str, Tensor] = field(default_factory=dict)  # 0-d; pooled by their minimum


def objective_loss(
    objective: ObjectiveConfig,
    tokens: Tokens,
    *,
    kl_coef: float = 0.0,
    all_reduce: AllReduce | None = None,
    threshold: Tensor | None = None,
) -> Outcome:
    """`policy_loss` of the trainer's tokens, added up as the trainer adds up: sum over active tokens of share * term.

    Args:
        objective: from `settings.objective_for`; its aggregation and KL coefficient are replaced by the trainer's.
        tokens: of one call, whole responses.
        kl_coef: of k3 towards `reference_logp`, where the trainer leaves that to its loss.
        all_reduce: sum over the ranks that call this together, for rules that are relative to the batch.
        threshold: 0-d, where the adapter has it from more tokens than these.
    """
    if threshold is None and all_reduce is not None:
        threshold = threshold_across(objective, tokens, all_reduce)
    output = policy_loss(
        # a plain sum: the shares are in the advantages
        objective.model_copy(update={"aggregation": "sequence_sum", "kl_coef": 0.0, "log_ratio_coef": 0.0}),
        counts=BatchCounts(num_tokens=1, num_sequences=1),
        logp=tokens.logp,
        behavior_logp=_behavior(tokens),
        advantage=_shared_advantage(objective, tokens),
        layout=tokens.layout,
        old_logp=tokens.old_logp,
        age=tokens.age,
        threshold=threshold,
    )
    loss, mask = output.loss, tokens.layout.loss_mask
    sums = {name: value for name, value in output.sums.items() if name in SIDES or not name.startswith("objective/")}
    if objective.log_ratio_coef > 0:
        drift = token_log_ratio(tokens.logp, _anchor(objective, tokens), mask)
        loss = loss + objective.log_ratio_coef * _share_of(tokens, drift**2)
        sums["penalty/log_ratio_squared"] = masked_sum(drift**2, mask)
    if kl_coef > 0:
        assert tokens.reference_logp is not None, "a KL penalty needs the log-probabilities of the reference"
        penalty = kl_k3(tokens.logp, tokens.reference_logp, mask)
        loss = loss + kl_coef * _share_of(tokens, penalty)
        sums["penalty/kl_ref"] = masked_sum(penalty, mask)
    if tokens.behavior_logp is not None:
        found = mismatch_sums(tokens.logp, tokens.behavior_logp, mask)
        sums |= {f"mismatch/{name}": found[f"mismatch/{name}"] for name in MISMATCH}
    return Outcome(loss, sums, output.extremes)


def shares_of(reduce: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The share of each token in a trainer's own reduction of [..] terms to 0-d, which has to be linear.

    Args:
        reduce: for example the trainer's masked mean, with its counts filled in.
        like: a tensor of the shape that it takes.

    Returns:
        The shape of `like`, float32 (float64 if `like` is), 0 where the reduction masks.
    """
    dtype = torch.promote_types(like.dtype, torch.float32) if like.is_floating_point() else torch.float32
    terms = torch.zeros(like.shape, dtype=dtype, device=like.device, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(reduce(terms), terms)[0]


def per_response(loss_mask: Tensor) -> Tensor:
    """Shares with which a sum over [B, W] tokens is a sum over rows of the mean over their active tokens."""
    return 1 / loss_mask.sum(-1, keepdim=True).clamp(min=1).expand(loss_mask.shape)


def _share_of(tokens: Tokens, terms: Tensor) -> Tensor:
    return (torch.where(tokens.layout.loss_mask, tokens.share, 0.0) * terms).sum()


def _shared_advantage(objective: ObjectiveConfig, tokens: Tokens) -> Tensor:
    """Advantage * share * weight: every rule is proportional to |A| and looks at its sign alone.

    A response with one ratio has one surrogate, S of the sign of A, so the terms share_t w_t S add up to T times the
    mean of share_t w_t; that mean is what its tokens get. An advantage for each token (a critic's) is averaged, too.
    """
    advantage = tokens.advantage.detach() * tokens.share
    if tokens.weight is not None:
        advantage = advantage * tokens.weight.detach()
    if objective.unit not in ("sequence", "product"):
        return advantage
    mask, sequence, responses = tokens.layout.loss_mask, tokens.layout.sequence, tokens.layout.num_sequences
    active = torch.where(mask, advantage, 0.0).double()
    total = active.new_zeros(responses).index_add(0, sequence, active)
    return (total / tokens_per_sequence(mask, sequence, responses))[sequence].to(advantage.dtype)


def _behavior(tokens: Tokens) -> Tensor:
    # without an engine's there is an anchor of the trainer's, and nothing that compares the two
    return tokens.logp.detach() if tokens.behavior_logp is None else tokens.behavior_logp


def _anchor(objective: ObjectiveConfig, tokens: Tokens) -> Tensor:
    return anchor_of(objective, tokens.logp.detach(), _behavior(tokens), tokens.old_logp, tokens.age)


def score_of(objective: ObjectiveConfig, tokens: Tokens) -> Tensor:
    """|log-ratio| in the objective's unit, which thresholds are taken over: [T], detached, 0 where masked."""
    return trust_region_score(objective, tokens.logp.detach(), _anchor(objective, tokens), tokens.layout)


def threshold_across(objective: ObjectiveConfig, tokens: Tokens, all_reduce: AllReduce = lambda x: x) -> Tensor | None:
    """q of SAT, or the limit of M2PO, over the tokens of all ranks together: 0-d; None for other rules.

    Every rank has to call this equally often. With `quantile_scope = "microbatch"` no rank waits for another.
    """
    rule, layout = objective.boundary, tokens.layout
    if isinstance(rule, M2poBoundary):
        return m2po_limit(rule, score_of(objective, tokens), layout, all_reduce)
    if not isinstance(rule, SatBoundary) or not is_batch_relative(objective):
        return None
    weights = None
    if rule.quantile_weight == "response":
        weights = 1 / tokens_per_sequence(layout.loss_mask, layout.sequence, layout.num_sequences)[layout.sequence]
    return order_statistic_across(score_of(objective, tokens), layout.loss_mask, rule.alpha, all_reduce, weights)


def sum_over(group: Any = None) -> AllReduce | None:
    """The sum over the ranks of a process group (None: all ranks); None where there is one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return None

    def total(counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    return total


def sum_over_data_parallel() -> AllReduce | None:
    """`sum_over` Megatron's data-parallel ranks where Megatron trains, and all ranks elsewhere.

    Under Megatron the pipeline stages that compute no loss are not waited for. Elsewhere ranks that share their data
    (tensor or sequence parallel) all count it; an order statistic of data that each occur n times is that of the data.
    """
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        return sum_over(megatron.get_data_parallel_group())
    return sum_over()


class RecentScores:
    """The scores of the last responses, for trainers that call their loss for one response at a time.

    A quantile over one response would be a number about that response alone. With `sat-gspo`, where a response has one
    score, nothing would ever be above it.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens, self._held = num_tokens, 0
        self._scores: deque[Tensor] = deque()

    def threshold(self, objective: ObjectiveConfig, tokens: Tokens) -> Tensor | None:
        """Take in the responses of this call, and give q or the limit over them and the last `num_tokens` before."""
        if not is_batch_relative(objective):
            return None
        score, layout = score_of(objective, tokens), tokens.layout
        self._scores.extend(score[layout.loss_mask & (layout.sequence == b)] for b in range(layout.num_sequences))
        self._held += int(layout.loss_mask.sum())
        while self._held - len(self._scores[0]) >= self._num_tokens:
            self._held -= len(self._scores.popleft())
        lengths = torch.tensor([len(part) for part in self._scores], device=score.device)
        scores, sequence = torch.cat([*self._scores]), torch.arange(len(lengths), device=score.device)
        everything = torch.ones_like(scores, dtype=torch.bool)
        return batch_threshold(objective, scores, Layout(everything, sequence.repeat_interleave(lengths), len(lengths)))


# ---- statistics ----


def means(outcome: Outcome, prefix: str = "", all_reduce: AllReduce | None = None) -> dict[str, float]:
    """Every statistic as a float, in one transfer from the device; 0 where no token is active.

    Args:
        all_reduce: pools the means over the ranks, where the trainer does not do that itself.
    """
    pairs = [torch.stack([torch.as_tensor(number) for number in pair]) for pair in outcome.sums.values()]
    totals = torch.stack(pairs)  # [statistics, 2] float64
    if all_reduce is not None:
        totals = all_reduce(totals)
    values = [*(totals[:, 0] / totals[:, 1].clamp(min=1)), *(value.double() for value in outcome.extremes.values())]
    names = (prefix + name for name in (*outcome.sums, *outcome.extremes))
    return dict(zip(names, torch.stack(values).tolist(), strict=True))
