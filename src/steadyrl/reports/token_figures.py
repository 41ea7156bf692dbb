"""Figures of which tokens: by the sign of drift and advantage, by age, by position, by probability."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from steadyrl.axes import SatBoundary
from steadyrl.diagnostics.buckets import PROBABILITY_EDGES
from steadyrl.reports.canvas import (
    DASHED,
    INK,
    PERCENT,
    PLAIN,
    Plot,
    colour,
    grow,
    legend,
    panel,
    run_entries,
    style,
)
from steadyrl.reports.clip_rules import GATES, can_judge, judge, own_objective
from steadyrl.reports.figures import line_key
from steadyrl.reports.recorded import readable_batches
from steadyrl.reports.recorder import RunData, read_rollouts
from steadyrl.reports.summary import last_quarter, number, token_mean

Kind = Literal["age", "position", "probability"]
AXES: dict[Kind, str] = {
    "age": "lag of the token (optimizer steps)",
    "position": "place in the response (tokens)",
    "probability": "probability under the engine, from",
}
SIDES = {  # label -> the middle of the metric's name
    "r < 1\nA < 0": "low_negative",
    "r < 1\nA > 0": "low_positive",
    "r > 1\nA < 0": "high_negative",
    "r > 1\nA > 0": "high_positive",
}
BATCHES = 4  # recorded ones that are looked into
FAINT = 0.4


def drift_by(runs: list[RunData], kind: Kind) -> Plot | None:
    """Mean |log ratio|."""
    return _by(runs, kind, "drift", "Mean |log ratio|", {"": "d_bar"}, PLAIN)


def removed_by(runs: list[RunData], kind: Kind) -> Plot | None:
    """Share of tokens beyond the interval, and of those that lost their gradient there."""
    return _by(
        runs, kind, "removed", "Outside and clipped", {"gradient removed": "removed", "outside": "outside"}, PERCENT
    )


def gated_by(runs: list[RunData], kind: Kind) -> Plot | None:
    """Share of tokens whose interval SAT narrowed, and of those that lost their gradient to that alone."""
    keys = {"gated": "gated", "only SAT removed": "intervened"}
    return _by(runs, kind, "sat", "Gated by SAT", keys, PERCENT)


def sides(runs: list[RunData]) -> Plot | None:
    """Tokens outside the interval, and without gradient, by the side of the ratio and the sign of the advantage."""
    shares = [
        [
            [token_mean(run.steps, f"objective/{what}_{middle}") for middle in SIDES.values()]
            for what in ("outside", "removed")
        ]
        for run in runs
    ]
    if all(share is None for run in shares for row in run for share in row):
        return None
    rows: list[tuple[Any, ...]] = []
    with style():
        figure, axes = panel("Outside the interval, and without gradient")
        for index, (run, (outside, removed)) in enumerate(zip(runs, shares, strict=True)):
            _stacked_bars(axes, runs, index, [number(x) for x in outside], [number(x) for x in removed])
            names = [label.replace("\n", ", ") for label in SIDES]
            rows += [(run.name, *values) for values in zip(names, outside, removed, strict=True)]
        _finish_bars(figure, axes, runs, ("outside", "gradient removed"))
    columns = ("run", "side", "share outside", "share without gradient")
    return Plot("sides", "Tokens outside the interval by side and sign of the advantage", figure, columns, rows)


def gated_by_sign(runs: list[RunData]) -> Plot | None:
    """Share of the tokens of the recorded batches that SAT gates, and that lose their gradient to that alone.

    By the side of the ratio, in the rule's unit, and the sign of the advantage; from the rollouts, because no metric
    has it.
    """
    shares = [_sat_by_sign(run) for run in runs]
    if not any(shares):
        return None
    rows: list[tuple[Any, ...]] = []
    with style():
        figure, axes = panel("Gated by SAT, by sign (recorded batches)")
        for index, (run, found) in enumerate(zip(runs, shares, strict=True)):
            if found:
                _stacked_bars(axes, runs, index, [gated for gated, _ in found], [only for _, only in found])
                rows += [(run.name, label.replace("\n", ", "), *pair) for label, pair in zip(SIDES, found, strict=True)]
        _finish_bars(figure, axes, runs, ("gated", "only SAT removed"))
    columns = ("run", "side", "share gated", "share that only SAT removed")
    return Plot("sat-by-sign", "Tokens gated by SAT by side and sign of the advantage", figure, columns, rows)


def bucket_means(run: RunData, name: str) -> list[float]:
    """Mean over the last quarter of the steps of one breakdown in `histograms`; NaN in a bucket without tokens."""
    found = [row.get("histograms", {}).get(name) for row in last_quarter(run.steps)]
    lists = [row for row in found if row]
    size = max(map(len, lists), default=0)
    means = []
    for bucket in range(size):
        present = [row[bucket] for row in lists if bucket < len(row) and row[bucket] is not None]
        means.append(sum(present) / len(present) if present else math.nan)
    return means


def bucket_labels(kind: Kind, size: int) -> list[str]:
    """As the step statistics cut them: see `diagnostics.buckets`."""
    if kind == "age":
        return [str(age) for age in range(size)]
    if kind == "probability":
        return ["0", *(f"{edge:g}" for edge in PROBABILITY_EDGES)][:size]
    return ["0", *("1" if power == 0 else f"{2**power}-{2 ** (power + 1) - 1}" for power in range(size - 1))]


def _sat_by_sign(run: RunData) -> list[tuple[float, float]]:
    """(gated, removed by SAT alone) for each of `SIDES`, shares of all sampled tokens; empty without SAT or records."""
    own = own_objective(run.config)
    if own is None or not isinstance(own.boundary, SatBoundary):
        return []
    counts = np.zeros((2, 2, 2))  # side of the ratio, sign of A, gated or removed by SAT alone
    total = 0
    for file in readable_batches(run, BATCHES):
        rollouts = [rollout for rollout in read_rollouts(file) if can_judge(rollout, own.needs_old_logp)]
        for rollout, verdict in zip(rollouts, judge(own, rollouts), strict=True):
            total += sum(rollout["loss_mask"])
            if rollout["advantage"] == 0:
                continue
            sign = int(rollout["advantage"] > 0)
            for side, (*gated, only) in enumerate(GATES):
                by_sat = verdict.letters.count(only)
                counts[side, sign] += (sum(map(verdict.letters.count, gated)) + by_sat, by_sat)
    return [(float(gated), float(only)) for gated, only in counts.reshape(4, 2) / total] if total else []


def _stacked_bars(axes: Axes, runs: list[RunData], index: int, whole: list[float], part: list[float]) -> None:
    """One run's bars: a share, faint, and what of it is also in `part`."""
    width = 0.8 / len(runs)
    place = np.arange(len(whole)) + (index - (len(runs) - 1) / 2) * width
    for heights, alpha in ((whole, FAINT), (part, 1.0)):
        axes.bar(place, heights, width * 0.92, color=colour(index), alpha=alpha, linewidth=0)


def _finish_bars(figure: Figure, axes: Axes, runs: list[RunData], labels: tuple[str, str]) -> None:
    axes.set_xticks(range(len(SIDES)), list(SIDES))
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_formatter(PERCENT)
    handles = [
        Patch(color=INK, alpha=alpha, linewidth=0, label=label)
        for label, alpha in zip(labels, (FAINT, 1.0), strict=True)
    ]
    axes.set_title(axes.get_title(loc="left"), pad=20)
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=2, borderpad=0.1)
    legend(figure, run_entries([run.name for run in runs]))
    grow(figure, 0.35)


def _by(
    runs: list[RunData], kind: Kind, name: str, title: str, keys: dict[str, str], formatter: FuncFormatter
) -> Plot | None:
    """One or two breakdowns over the buckets; the second one dashed."""
    means = [[bucket_means(run, f"{key}_by_{kind}") for key in keys.values()] for run in runs]
    size = max(len(row) for run in means for row in run)
    if size == 0:
        return None
    labels = bucket_labels(kind, size)
    rows: list[tuple[Any, ...]] = []
    with style():
        figure, axes = panel(f"{title} by {kind}")
        for index, (run, parts) in enumerate(zip(runs, means, strict=True)):
            padded = [row + [math.nan] * (size - len(row)) for row in parts]
            for row, line in zip(padded, ("solid", DASHED), strict=False):
                axes.plot(range(size), row, color=colour(index), linestyle=line, marker="o", markersize=3.5)
            rows += [(run.name, *values) for values in zip(labels, *padded, strict=True)]
        shown = range(0, size, -(-size // 12))
        axes.set_xticks(list(shown), [labels[bucket] for bucket in shown])
        axes.tick_params(axis="x", labelsize=9)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(formatter)
        axes.set_xlabel(AXES[kind])
        legend(figure, run_entries([run.name for run in runs]))
        if len(keys) > 1:
            line_key(axes, *keys)
            grow(figure, 0.2)
    return Plot(f"{name}-by-{kind}", f"{title} by {kind}", figure, ("run", kind, *keys.values()), rows)
