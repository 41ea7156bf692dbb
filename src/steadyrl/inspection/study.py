"""From files to findings: read once, then measure step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from steadyrl.diagnostics.buckets import by_age, by_position, by_probability, mismatch_by
from steadyrl.diagnostics.mismatch import derived, max_abs, mismatch_sums, sequence_sums
from steadyrl.diagnostics.split import split_derived, split_sums
from steadyrl.errors import ConfigError
from steadyrl.inspection.archive import UNKNOWN_AGE, Archive, Block, Step
from steadyrl.inspection.checks import Check, run_checks
from steadyrl.inspection.evidence import Evidence
from steadyrl.inspection.formats import Format, Source
from steadyrl.inspection.response import BadRow
from steadyrl.inspection.rules import (
    Rule,
    RuleTotals,
    add_outcome,
    apply_rule,
    select_rules,
    threshold_key,
    unanswered,
)
from steadyrl.inspection.sources import find_sources, notes
from steadyrl.inspection.thresholds import step_thresholds
from steadyrl.types import Sums, add_sums, pooled

OLDEST = 63  # lags above it share the last bucket
LONGEST = 1 << 24  # tokens of a response; sets the number of position buckets
DRIFT_EDGES = 10.0 ** np.arange(-6, 1.76, 0.25)  # of the histogram of |d|
QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99}
Progress = Callable[[str, int, int], None]
"""(what is being done, done, total), called often."""


@dataclass
class StepRow:
    """One optimizer step: a row of steps.csv."""

    step: str
    responses: int
    tokens: int
    means: dict[str, float]


@dataclass
class Findings:
    """All that was found out about a dump."""

    names: list[str]  # of what was named
    formats: list[Format]
    files: int
    notes: list[str]
    evidence: Evidence
    checks: list[Check]
    steps: list[StepRow]
    means: dict[str, float]  # mismatch/..., split/... over all measured tokens
    breakdowns: dict[str, Sums]  # age, position, probability -> (sum [B], count [B])
    labels: dict[str, tuple[str, ...]]
    drift: NDArray[np.int64]  # tokens by |d|: exactly 0, then below each of DRIFT_EDGES, then above
    rules: list[RuleTotals]
    refused: dict[str, str]  # preset -> why no dump can answer it
    has_advantage: bool


def inspect(
    paths: Sequence[Path], rules: Sequence[str] | None = None, progress: Progress = lambda what, done, total: None
) -> Findings:
    """Read token data and find out what can be known about it without a model.

    Args:
        paths: run folders, folders and files of the formats in docs/inspect.md.
        rules: presets to replay; None for all that can be answered.
        progress: called with what is being done, how far it is, and how far it goes.

    Raises:
        ConfigError: nothing can be read, or a preset is unknown.
    """
    chosen, refused = select_rules(rules)
    sources = find_sources(paths)
    evidence = Evidence()
    with Archive() as archive:
        _read(sources, evidence, archive, progress)
        if not evidence.responses:
            raise ConfigError(_nothing(evidence))
        measured = _Measured([RuleTotals(rule) for rule in chosen])
        steps = archive.steps()
        total = sum(step.num_tokens for step in steps)
        done = 0
        for step in steps:
            for block_tokens in measured.add_step(archive, step):
                done += block_tokens
                progress("measuring", done, total)
    means = pooled(measured.sums)
    means |= derived(means)
    if "split/product" in means:
        means |= split_derived(means)
    formats = list(dict.fromkeys(format for format, _ in sources))
    remarks = [*notes([source.path for _, source in sources]), *(f"{f.name}: {f.steps}" for f in formats)]
    return Findings(
        names=[str(path) for path in paths],
        formats=formats,
        files=len(sources),
        notes=remarks,
        evidence=evidence,
        checks=run_checks(evidence, means),
        steps=measured.rows,
        means=means,
        breakdowns=measured.breakdowns,
        labels=measured.labels,
        drift=measured.drift,
        rules=measured.rules,
        refused=refused,
        has_advantage=bool(steps) and all(step.has_advantage for step in steps),
    )


def _read(sources: list[tuple[Format, Source]], evidence: Evidence, archive: Archive, progress: Progress) -> None:
    sizes = [source.path.stat().st_size for _, source in sources]
    total, before = sum(sizes), 0
    for (format, source), size in zip(sources, sizes, strict=True):
        for row, done in format.rows(source.path):
            progress("reading", before + done, total)
            if isinstance(row, str):
                evidence.left_out(row)
                continue
            try:
                response = format.response(row, source)
            except BadRow as problem:
                evidence.left_out(f"{source.path.name}: {problem}")
                continue
            if evidence.add(response):
                archive.add(response)
        before += size


def _nothing(evidence: Evidence) -> str:
    if not evidence.rows:
        return "the files hold no rows: name files that were written to"
    reasons = [f"{count:,} like {evidence.examples[kind]}" for kind, count in evidence.unusable.most_common(3)]
    reasons += [f"{count:,} responses with unusable numbers ({side})" for side, count in evidence.not_finite.items()]
    if evidence.empty:
        reasons.append(f"{evidence.empty:,} responses without a token to train on")
    return (
        f"none of the {evidence.rows:,} rows can be used ({'; '.join(reasons)}): docs/inspect.md says what a row needs"
    )


@dataclass
class _Measured:
    rules: list[RuleTotals]
    sums: Sums = field(default_factory=dict)
    breakdowns: dict[str, Sums] = field(default_factory=dict)
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    drift: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(DRIFT_EDGES) + 2, np.int64))
    rows: list[StepRow] = field(default_factory=list)

    def add_step(self, archive: Archive, step: Step) -> Iterator[int]:
        """Measure a step; yields the number of tokens of each block that is done."""
        answered: list[tuple[RuleTotals, Rule]] = []
        for totals in self.rules:
            reason = unanswered(totals.rule, step)
            if reason:
                totals.missing = reason
            else:
                totals.steps += 1
                answered.append((totals, totals.rule))
        objectives = {threshold_key(rule): rule.objective for _, rule in answered}
        limits, quantiles = step_thresholds(archive, step, objectives, QUANTILES)
        own: Sums = {}
        largest = 0.0
        for block in archive.blocks(step):
            marks = {}
            for totals, rule in answered:
                outcome = apply_rule(rule, block, step, limits[threshold_key(rule)])
                add_outcome(totals, outcome)
                if rule.name in ("grpo", "sat-grpo", "sat-gspo"):
                    marks |= {f"{rule.name}/{name}": mark for name, mark in outcome.marks.items()}
                    add_sums(own, {f"{rule.name}:{name}": value for name, value in outcome.sums.items()})
            self._mismatch(block, step, own, marks)
            largest = max(largest, float(max_abs(block.logp, block.behavior_logp, block.layout.loss_mask)))
            yield len(block.logp)
        means = pooled(own)
        means |= derived(means)
        means["mismatch/max_abs"] = largest
        means |= {f"mismatch/{name}": value for name, value in quantiles.items()}
        kind, number = step.key
        label = str(number) if kind == "step" else f"file {number + 1}"
        self.rows.append(StepRow(label, len(step.responses), step.num_tokens, means))

    def _mismatch(self, block: Block, step: Step, own: Sums, marks: dict[str, torch.Tensor]) -> None:
        mask, logp, behavior = block.layout.loss_mask, block.logp, block.behavior_logp
        part = {**mismatch_sums(logp, behavior, mask), **sequence_sums(logp, behavior, block.layout)}
        if step.has_old:
            part |= split_sums(logp, block.old_logp, behavior, mask)
        known = block.age != UNKNOWN_AGE
        if bool(known.any()):
            count = known.sum(dtype=torch.float64)
            part["staleness/lag"] = (torch.where(known, block.age, 0).sum(dtype=torch.float64), count)
        add_sums(self.sums, part)
        add_sums(own, part)
        drift = (logp.double() - behavior.double()).abs().numpy()
        bins = np.searchsorted(DRIFT_EDGES, drift, side="right") + (drift > 0)
        self.drift += np.bincount(bins, minlength=len(self.drift))
        placed = known & (block.age >= 0)
        kinds = {
            "age": (by_age(OLDEST, OLDEST - block.age.clamp(0, OLDEST), placed, OLDEST), placed),
            "position": (by_position(block.layout, LONGEST), mask),
            "probability": (by_probability(behavior), mask),
        }
        for kind, (buckets, used) in kinds.items():
            self.labels[kind] = buckets.labels
            sums = mismatch_by(buckets, logp, behavior, used, shares=marks)
            add_sums(self.breakdowns.setdefault(kind, {}), sums)
