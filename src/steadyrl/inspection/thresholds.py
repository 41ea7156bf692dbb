"""q of SAT and the limit of M2PO over a whole optimizer step, with one block of it in memory at a time.

The functions of `objective` that find them are made for ranks that exchange counts. Here the ranks take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import Tensor

from steadyrl.axes import M2poBoundary, SatBoundary
from steadyrl.inspection.archive import Archive, Block, Step
from steadyrl.method import ObjectiveConfig
from steadyrl.objective.boundary import LAG_BUCKETS, lag_bucket
from steadyrl.objective.loss import anchor_of, trust_region_score
from steadyrl.objective.mask_rules import m2po_limit
from steadyrl.objective.quantile import order_statistic_across
from steadyrl.objective.ratio import tokens_per_sequence
from steadyrl.objective.rule import Layout

AllReduce = Callable[[Tensor], Tensor]
Question = Callable[[Block, AllReduce], Tensor]
DIGITS = 1 << 16


class _Summand(Exception):
    """A rank has come to a sum that is not known yet."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def in_turn(blocks: Callable[[], Iterator[Block]], questions: Mapping[Hashable, Question]) -> dict[Hashable, Tensor]:
    """What every question answers on every rank, when every block is a rank.

    The k-th call of `all_reduce` on a rank may depend on its values and on the sums before, as in
    `order_statistic_across`. So the blocks are gone through once for each sum: everybody is told the sums that are
    known, and hands in a part of the next. All questions share these rounds.
    """
    known: dict[Hashable, list[Tensor]] = {key: [] for key in questions}
    answers: dict[Hashable, Tensor] = {}
    while len(answers) < len(questions):
        totals: dict[Hashable, Tensor] = {}
        for block in blocks():
            open_questions = [key for key in questions if key not in answers]
            if not open_questions:
                break
            for key in open_questions:
                try:
                    # with all sums known, the first block's answer is everybody's
                    answers[key] = questions[key](block, _replay(known[key]))
                except _Summand as part:
                    totals[key] = totals[key] + part.value if key in totals else part.value
        for key, total in totals.items():
            known[key].append(total)
    return answers


def step_thresholds(
    archive: Archive, step: Step, objectives: Mapping[str, ObjectiveConfig], alphas: Mapping[str, float]
) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """`batch_threshold` of some objectives, and quantiles of |trainer_logp - behavior_logp|, over all tokens of a step.

    Args:
        archive: where the step's tokens are.
        step: the step.
        objectives: by a name.
        alphas: orders of quantiles by a name; each is one of the values (arXiv 2607.18722, Eq. 14).

    Returns:
        By the same names: thresholds in float32, None for a rule without one, and the quantiles.
    """
    questions: dict[Hashable, Question] = {("quantile", name): _drift_quantile(alpha) for name, alpha in alphas.items()}
    buckets = _lag_buckets(archive, step) if any(map(_is_by_lag, objectives.values())) else []
    for name, objective in objectives.items():
        if _is_by_lag(objective):
            questions |= {(name, bucket): _sat_quantile(objective, bucket) for bucket in buckets}
        elif isinstance(objective.boundary, SatBoundary):
            questions[name] = _sat_quantile(objective, None)
    answers = in_turn(lambda: archive.blocks(step), questions)
    found: dict[str, Tensor | None] = {}
    for name, objective in objectives.items():
        if _is_by_lag(objective):
            nothing = torch.zeros(())
            found[name] = torch.stack([answers.get((name, bucket), nothing) for bucket in range(LAG_BUCKETS)])
        elif isinstance(objective.boundary, M2poBoundary):
            found[name] = _m2po_limit(archive, step, objective, objective.boundary)
        else:
            found[name] = answers.get(name)
    return found, {name: float(answers["quantile", name]) for name in alphas}


def _replay(known: list[Tensor]) -> AllReduce:
    told = iter(known)

    def all_reduce(part: Tensor) -> Tensor:
        for value in told:
            return value
        raise _Summand(part)

    return all_reduce


def _drift_quantile(alpha: float) -> Question:
    def ask(block: Block, all_reduce: AllReduce) -> Tensor:
        drift = (block.logp - block.behavior_logp).abs()
        return order_statistic_across(drift, block.layout.loss_mask, alpha, all_reduce)

    return ask


def _sat_quantile(objective: ObjectiveConfig, bucket: int | None) -> Question:
    """`sat_quantile` across ranks, of all tokens or of those in one bucket of lags."""
    rule = objective.boundary
    assert isinstance(rule, SatBoundary)

    def ask(block: Block, all_reduce: AllReduce) -> Tensor:
        layout = block.layout
        mask = layout.loss_mask if bucket is None else lag_bucket(block.age) == bucket
        weights = None
        if rule.quantile_weight == "response":
            lengths = tokens_per_sequence(mask, layout.sequence, layout.num_sequences)
            weights = 1.0 / lengths[layout.sequence]
        return order_statistic_across(_score(objective, block), mask, rule.alpha, all_reduce, weights)

    return ask


def _m2po_limit(archive: Archive, step: Step, objective: ObjectiveConfig, rule: M2poBoundary) -> Tensor:
    """`m2po_limit` across ranks: it asks for some 60 sums, so first find the few values that the answer lies among.

    The mean square of the values up to a bound grows with the bound. Their count and sum by the upper half of their
    bits show in which of these digits it crosses the budget; all smaller values enter as one summand.
    """
    totals = torch.zeros(2, DIGITS, dtype=torch.float64)
    for block in archive.blocks(step):
        values = _score(objective, block)
        digit = _digit(values)
        totals[0] += torch.bincount(digit, minlength=DIGITS)
        totals[1] += torch.bincount(digit, weights=values.double().square(), minlength=DIGITS)
    up_to = totals.cumsum(1)
    crossed = ((up_to[1] >= rule.budget * up_to[0]) & (totals[0] > 0)).nonzero().flatten()
    at = int(crossed[0]) if len(crossed) else DIGITS
    below = up_to[:, at - 1] if at else torch.zeros(2, dtype=torch.float64)
    scores = (_score(objective, block) for block in archive.blocks(step))
    inside = torch.cat([values[_digit(values) == at] for values in scores])
    everything = torch.ones(len(inside), dtype=torch.bool)
    layout = Layout(everything, torch.zeros(len(inside), dtype=torch.int64), 1)
    return m2po_limit(rule, inside, layout, lambda total: total + below)


def _score(objective: ObjectiveConfig, block: Block) -> Tensor:
    anchor = anchor_of(objective, block.logp, block.behavior_logp, block.old_logp, block.age)
    return trust_region_score(objective, block.logp, anchor, block.layout)


def _is_by_lag(objective: ObjectiveConfig) -> bool:
    return isinstance(objective.boundary, SatBoundary) and objective.boundary.quantile_scope == "lag"


def _lag_buckets(archive: Archive, step: Step) -> list[int]:
    found: set[int] = set()
    for block in archive.blocks(step):
        found |= set(lag_bucket(block.age).unique().tolist())
    return sorted(found)


def _digit(values: Tensor) -> Tensor:
    """The upper half of the bits of floats that are not negative; they are ordered like the floats."""
    return values.view(torch.int32).bitwise_right_shift(16).long()
