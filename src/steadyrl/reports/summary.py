"""The few numbers that say how a run went, and how a metric is read out of one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from steadyrl.reports.recorder import Row, RunData

# what counts as work; "wait" is the rest of the trainer's time
TRAINER_WORK = ("train", "broadcast", "grade")
ENGINE_WORK = ("generate", "evaluate", "load")

Summary = dict[str, float | int | str | None]


def summary(run: RunData) -> Summary:
    """The closing table of a run; None where the run has no such number."""
    first = run.evaluations[0] if run.evaluations else {}
    last = run.evaluations[-1] if len(run.evaluations) > 1 else {}
    return {
        "name": run.name,
        "method": method(run),
        "state": run.status.get("state"),
        "steps": run.steps[-1]["step"] if run.steps else 0,
        "evaluation_k": first.get("k"),
        "evaluation_before": first.get("avg_at_k"),
        "evaluation_before_se": first.get("avg_at_k_se"),
        "evaluation_after": last.get("avg_at_k"),
        "evaluation_after_se": last.get("avg_at_k_se"),
        "largest_lag": _largest(run.steps, "staleness/lag_max"),
        "d_bar": token_mean(run.steps, "mismatch/d_bar"),
        "gate_rate": token_mean(run.steps, "sat/gate_rate"),
        "intervention_rate": token_mean(run.steps, "sat/intervention_rate"),
        "trainer_utilisation": utilisation(run, "trainer"),
        "engine_utilisation": utilisation(run, "engine"),
        "wall_s": wall_seconds(run),
    }


def method(run: RunData) -> str:
    """The preset's name, or the boundary rule and unit where the recipe started from no preset."""
    objective = run.config.get("objective", {})
    if objective.get("preset"):
        return objective["preset"]
    return f"{objective.get('boundary', {}).get('rule', 'unknown')}, {objective.get('unit', 'token')}"


def values(steps: Iterable[Row], name: str) -> list[float]:
    """One metric over the steps; NaN where a step lacks it."""
    return [number(row["metrics"].get(name)) for row in steps]


def number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def token_mean(steps: list[Row], name: str) -> float | None:
    """Mean over all tokens of the run: steps weighted by the tokens they trained on."""
    total = weight = 0.0
    for row in steps:
        value = row["metrics"].get(name)
        if value is not None:
            tokens = row["metrics"].get("sampled_tokens") or 1.0
            total, weight = total + tokens * value, weight + tokens
    return total / weight if weight else None


def last_quarter(steps: list[Row]) -> list[Row]:
    """The last 25 % of the steps, at least one: what a run has settled on (paper, Table 1 and Figure 4)."""
    return steps[-max(1, len(steps) // 4) :] if steps else []


def span(run: RunData) -> tuple[float, float]:
    """Start of the first and end of the last event, in seconds; both 0 without events."""
    if not run.timeline:
        return 0.0, 0.0
    return min(event["start_s"] for event in run.timeline), max(event["end_s"] for event in run.timeline)


def wall_seconds(run: RunData) -> float | None:
    if run.timeline:
        start, end = span(run)
        return end - start
    seconds = [row["seconds"]["step"] for row in run.steps if row["seconds"].get("step") is not None]
    return sum(seconds) if seconds else None


def utilisation(run: RunData, actor: str) -> float | None:
    """Share of the whole run in which the trainer, or the engine, worked."""
    start, end = span(run)
    return busy_seconds(work(run, actor), start, end) / (end - start) if end > start else None


def work(run: RunData, actor: str) -> NDArray[np.float64]:
    """Start and end of every stretch of work of one actor, [n, 2] seconds."""
    phases = TRAINER_WORK if actor == "trainer" else ENGINE_WORK
    events = [event for event in run.timeline if event["actor"] == actor and event["phase"] in phases]
    return np.array([(event["start_s"], event["end_s"]) for event in events]).reshape(-1, 2)


def busy_seconds(stretches: NDArray[np.float64], start_s: float, end_s: float) -> float:
    """Seconds of work between two moments."""
    inside = np.clip(stretches, start_s, end_s)
    return float((inside[:, 1] - inside[:, 0]).sum())


def lag_counts(run: RunData) -> list[float]:
    """Tokens trained on at lag 0, 1, 2, ..., over the whole run."""
    totals: list[float] = []
    for row in run.steps:
        counts = row.get("histograms", {}).get("lag") or []
        totals.extend([0.0] * (len(counts) - len(totals)))
        for lag, count in enumerate(counts):
            totals[lag] += count or 0.0
    return totals


def _largest(steps: list[Row], name: str) -> int | None:
    present = [value for value in values(steps, name) if not math.isnan(value)]
    return round(max(present)) if present else None
