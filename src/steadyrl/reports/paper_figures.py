"""Figures 2 to 5 of the paper (arXiv 2607.18722) for any runs: thin lines are seeds, bold ones their mean.

The band is one standard error of the mean. Runs that are not whole are drawn thin and left out of the mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from steadyrl.reports.canvas import (
    INK,
    PLAIN,
    Plot,
    colour,
    dashes,
    from_zero,
    legend,
    panel,
    running_mean,
    shortened,
    step_axis,
    style,
)
from steadyrl.reports.comparison import Comparison, collapsed_at, outcome
from steadyrl.reports.recorder import RunData
from steadyrl.reports.summary import number
from steadyrl.statistics import mean_interval

TOGETHER = 4  # conditions in one panel; beyond, every row gets its own
POINTS = 200  # drawn of one line

Series = dict[int, float]  # optimizer step -> value


@dataclass(frozen=True)
class Line:
    """One condition in a panel."""

    row: str
    column: str
    label: str
    index: int  # of its colour


def drift(comparison: Comparison) -> list[Plot]:
    """Figure 2: mean |log ratio| and KL over training, the lags against each other."""
    conditions = _conditions(comparison)
    several = len(comparison.columns) > 1
    groups = {"": [Line(*pair, _joined(*pair) if several else pair[0], i) for i, pair in enumerate(conditions)]}
    if len(conditions) > TOGETHER:
        groups = {
            row: [Line(row, column, column, comparison.columns.index(column)) for r, column in conditions if r == row]
            for row in comparison.rows
        }
    plots = []
    for row, lines in groups.items():
        for key, name, title in (
            ("mismatch/d_bar", "drift", "Mean |log ratio|"),
            ("mismatch/k3", "kl", "KL to the sampling policy (k3)"),
        ):
            slug = f"figure-2-{name}" + (f"-{_slug(row, comparison.rows)}" if row else "")
            heading = f"{row}: {title}" if row else title
            plots.append(_panel(comparison, slug, heading, lines, _metric(key), is_smooth=True))
    return [plot for plot in plots if plot is not None]


def scores(comparison: Comparison) -> list[Plot]:
    """Figure 3: evaluation score over training; a cross stands where a run collapsed."""
    return _by_column(comparison, "figure-3-score", "Evaluation score", _evaluations, is_score=True)


def drift_by_column(comparison: Comparison) -> list[Plot]:
    """Figure 4: d-bar over training, as measured, a line per row and a panel per column."""
    return _by_column(comparison, "figure-4-drift", "d-bar", _metric("mismatch/d_bar"))


def best_scores(comparison: Comparison) -> Plot | None:
    """Figure 5: the best score of every row, a bar per column, with 95 % intervals over seeds."""
    found = {
        (row, column): [
            (seed, best)
            for seed, run in comparison.whole(row, column).items()
            if (best := outcome(run).best) is not None
        ]
        for row, column in _conditions(comparison)
    }
    if not any(found.values()):
        return None
    rows: list[tuple[Any, ...]] = []
    with style():
        figure, axes = panel("Best score", height=1.0 + 0.16 * len(found) + 0.24 * len(comparison.rows))
        width = 0.8 / len(comparison.columns)
        for (row, column), bests in found.items():
            rows += [(row, column, *pair) for pair in bests]
            if not bests:
                continue
            index = comparison.columns.index(column)
            place = comparison.rows.index(row) + (index - (len(comparison.columns) - 1) / 2) * width
            interval = mean_interval([best for _, best in bests])
            axes.barh(place, interval.mean, width * 0.9, color=colour(index), linewidth=0)
            axes.plot([interval.low, interval.high], [place, place], color=INK, linewidth=1.2)
            axes.plot([best for _, best in bests], [place] * len(bests), "o", color=INK, markersize=2.5)
            end = max(interval.high, *(best for _, best in bests)) if len(bests) > 1 else interval.mean
            axes.text(end, place, f" {interval.mean:.3f}", va="center", fontsize=8.5)
        axes.set_yticks(range(len(comparison.rows)), [shortened(row) for row in comparison.rows])
        axes.set_ylim(len(comparison.rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(left=0)
        axes.margins(x=0.18)
        legend(figure, [(column, colour(index), "solid") for index, column in enumerate(comparison.columns)])
    columns = (comparison.row_axis, comparison.column_axis or "column", "seed", "best score")
    return Plot("figure-5-best-score", "Best score of every row, with intervals over seeds", figure, columns, rows)


def _by_column(
    comparison: Comparison,
    name: str,
    title: str,
    series: Callable[[RunData], Series],
    is_score: bool = False,
) -> list[Plot]:
    """A panel per column; a row keeps its colour in all of them."""
    plots = []
    for column in comparison.columns:
        lines = [
            Line(row, column, row, comparison.rows.index(row))
            for row, other in _conditions(comparison)
            if other == column
        ]
        slug = f"{name}-{_slug(column, comparison.columns)}" if len(comparison.columns) > 1 else name
        heading = f"{title}, {column}" if column else title
        plots.append(_panel(comparison, slug, heading, lines, series, is_score=is_score))
    return [plot for plot in plots if plot is not None]


def _panel(
    comparison: Comparison,
    name: str,
    title: str,
    lines: Sequence[Line],
    series: Callable[[RunData], Series],
    is_smooth: bool = False,
    is_score: bool = False,
) -> Plot | None:
    """One bold line per condition, thin ones for its seeds."""
    rows: list[tuple[Any, ...]] = []
    with style():
        figure, axes = panel(title)
        for line in lines:
            tint, dash = colour(line.index), dashes(line.index)
            cells = comparison.at(line.row, line.column)
            found = [(cell, values) for cell in cells if (values := series(cell.of_run))]
            whole = [values for cell, values in found if cell.problem is None]
            for cell, values in found:
                rows += [(line.row, line.column, cell.seed, step, value) for step, value in values.items()]
                if len(found) > 1 or not whole or is_smooth:
                    steps = _strided(sorted(values))
                    axes.plot(steps, [values[step] for step in steps], color=tint, linewidth=0.7, alpha=0.3)
                if is_score:
                    _mark_collapse(axes, cell.of_run, values, tint)
                if is_score and len(found) == 1:
                    _error_bars(axes, cell.of_run, tint)
            if whole:
                _draw_mean(axes, whole, tint, dash, is_smooth)
        if not rows:
            return None
        step_axis(axes)
        axes.yaxis.set_major_formatter(PLAIN)
        from_zero(axes)
        legend(figure, [(line.label, colour(line.index), dashes(line.index)) for line in lines])
    columns = (comparison.row_axis, comparison.column_axis or "column", "seed", "step", "value")
    return Plot(name, f"{title} over optimizer steps", figure, columns, rows)


def _mark_collapse(axes: Axes, run: RunData, values: Series, tint: str) -> None:
    step = collapsed_at(run)
    if step is not None:
        axes.plot(step, values[step], "X", color=tint, markeredgecolor=INK, markersize=9, zorder=5)


def _error_bars(axes: Axes, run: RunData, tint: str) -> None:
    """Standard errors over the held-out prompts, where there is no second seed to judge by."""
    rows = [row for row in run.evaluations if row["avg_at_k"] is not None]
    errors = [number(row.get("avg_at_k_se") or 0.0) for row in rows]
    points = [row["step"] for row in rows], [row["avg_at_k"] for row in rows]
    axes.errorbar(*points, yerr=errors, fmt="none", ecolor=tint, elinewidth=1.2, capsize=3)


def _draw_mean(axes: Axes, parts: list[Series], tint: str, dash: Any, is_smooth: bool) -> None:
    """Mean and standard error over the seeds, at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(part) for part in parts)))
    table = np.array([[part[step] for step in steps] for part in parts])
    mean, error = table.mean(axis=0), _standard_error(table)
    if is_smooth:
        mean, error = running_mean(mean), running_mean(error)
    shown = _strided(range(len(steps)))
    x, y, e = np.array(steps)[shown], mean[shown], error[shown]
    marker = "o" if len(shown) < 30 else None
    axes.plot(x, y, color=tint, linestyle=dash, linewidth=1.9, marker=marker, markersize=3.5)
    if len(parts) > 1:
        axes.fill_between(x, y - e, y + e, color=tint, alpha=0.18, linewidth=0)


def _standard_error(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the mean over the rows of [seeds, steps]; 0 for one seed."""
    seeds = len(table)
    return table.std(axis=0, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.zeros(table.shape[1])


def _strided(items: Sequence[int]) -> list[int]:
    """Every n-th, and the last one."""
    stride = max(1, -(-len(items) // POINTS))
    return [item for index, item in enumerate(items) if index % stride == 0 or index == len(items) - 1]


def _metric(key: str) -> Callable[[RunData], Series]:
    return lambda run: {
        row["step"]: value for row in run.steps if not math.isnan(value := number(row["metrics"].get(key)))
    }


def _evaluations(run: RunData) -> Series:
    return {row["step"]: row["avg_at_k"] for row in run.evaluations if row["avg_at_k"] is not None}


def _conditions(comparison: Comparison) -> list[tuple[str, str]]:
    return [(row, column) for row in comparison.rows for column in comparison.columns if comparison.at(row, column)]


def _joined(row: str, column: str) -> str:
    return f"{row}, {column}"


def _slug(label: str, labels: Sequence[str]) -> str:
    """A part of a file's name; two labels never share it."""
    slugs = [re.sub(r"[^a-z0-9]+", "-", other.lower()).strip("-") for other in labels]
    index = labels.index(label)
    return slugs[index] if slugs[index] and slugs.count(slugs[index]) == 1 else f"{slugs[index]}-{index + 1}".strip("-")
