"""Figures of time: who worked when, and who waited."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from steadyrl.reports.canvas import INK, colour, key, panels, run_legend, style, to_svg
from steadyrl.reports.recorder import RunData
from steadyrl.reports.summary import busy_seconds, span, work

ACTORS = ("trainer", "engine")
PHASES = {
    "train": "#0f7fc4",
    "grade": "#8f6fd1",
    "broadcast": "#d55e00",
    "generate": "#009e73",
    "evaluate": "#56b4e9",
    "load": "#e69f00",
}
WAITING_ALPHA = 0.16
WINDOW_S = 12.0
STEPS_SHOWN = 6  # in a window, at least; matters where a step takes minutes
BINS = 60


def gantt(runs: list[RunData]) -> str | None:
    """The first and the last seconds of each run, one bar per phase, one lane per actor."""
    shown = [run for run in runs if run.timeline]
    if not shown:
        return None
    window = max(_window(run) for run in shown)
    is_short = all(_length(run) <= 2 * window for run in shown)
    with style():
        figure, axes = panels(1 if is_short else 2, height=1.3 + 0.85 * len(shown), sharey=True)
        for lane, run in enumerate(shown):
            start, end = span(run)
            first = (start, end if is_short else min(end, start + window), start)
            last = (max(start, end - window), end, end)
            for panel, (left, right, zero) in zip(axes, (first, last), strict=False):
                _lanes(panel, run, lane, left, right, zero)
        _finish_lanes(axes, shown, is_short, window)
        phases = [Patch(color=tint, label=phase) for phase, tint in PHASES.items() if _occurs(shown, phase)]
        waiting = Patch(color=INK, alpha=WAITING_ALPHA, linewidth=0, label="waiting")
        figure.legend(handles=[*phases, waiting], loc="outside upper left", ncols=7, columnspacing=1.2)
        return to_svg(figure, "gantt", "Timeline of trainer and engine")


def utilisation_over_time(runs: list[RunData]) -> str | None:
    """Share of time in which trainer and engine worked, through the run."""
    shown = [(index, run) for index, run in enumerate(runs) if run.timeline and _length(run) > 0]
    if not shown:
        return None
    with style():
        figure, (axes,) = panels(1, height=2.9)
        for index, run in shown:
            start, end = span(run)
            edges = np.linspace(start, end, _num_bins(run) + 1)
            for actor in ACTORS:
                stretches = work(run, actor)
                busy = [busy_seconds(stretches, a, b) for a, b in pairwise(edges)]
                share = 100 * np.asarray(busy) / np.diff(edges)
                line = "solid" if actor == "trainer" else (0, (3.5, 2))
                tint = colour(index)
                axes.plot((edges[:-1] + edges[1:]) / 2 - start, share, color=tint, linestyle=line, linewidth=1.7)
        axes.set_ylim(0, 104)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_xlabel("seconds since the start")
        axes.set_title("Time spent working")
        key(axes, *ACTORS)
        run_legend(figure, [run.name for run in runs])
        return to_svg(figure, "utilisation", "Utilisation of trainer and engine over time")


def _lanes(axes: Axes, run: RunData, lane: int, left: float, right: float, zero: float) -> None:
    """Both actors between two moments, on an axis that starts at `zero`."""
    for row, actor in enumerate(ACTORS):
        y = 2.3 * lane + row
        # the lane itself is grey; work is laid over it, so what stays visible is waiting
        axes.barh(y, right - left, 0.8, left=left - zero, color=INK, alpha=WAITING_ALPHA, linewidth=0)
        for event in run.timeline:
            start, end = max(event["start_s"], left), min(event["end_s"], right)
            tint = PHASES.get(event["phase"])
            if event["actor"] == actor and tint is not None and end > start:
                axes.barh(y, end - start, 0.8, left=start - zero, color=tint, linewidth=0)


def _finish_lanes(axes: list[Axes], shown: list[RunData], is_short: bool, window: float) -> None:
    lanes = [2.3 * lane + row for lane in range(len(shown)) for row in range(2)]
    several = len(shown) > 1
    labels = [f"{run.name}: {actor}" if several else actor for run in shown for actor in ACTORS]
    longest = max(_length(run) for run in shown)
    whole = [("Whole run", (0, longest or 1.0), "seconds")]
    ends = [
        (f"First {window:.0f} s", (0, window), "seconds since the start"),
        (f"Last {window:.0f} s", (-window, 0), "seconds before the end"),
    ]
    for panel, (title, limits, label) in zip(axes, whole if is_short else ends, strict=True):
        panel.set_title(title)
        panel.set_xlim(*limits)
        panel.set_xlabel(label)
        panel.grid(axis="y", visible=False)
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
    axes[0].set_yticks(lanes, labels)
    axes[0].invert_yaxis()


def _occurs(runs: list[RunData], phase: str) -> bool:
    return any(event["phase"] == phase for run in runs for event in run.timeline)


def _length(run: RunData) -> float:
    start, end = span(run)
    return end - start


def _window(run: RunData) -> float:
    num_steps = len({event["step"] for event in run.timeline if event["phase"] == "train"}) or 1
    return max(WINDOW_S, STEPS_SHOWN * _length(run) / num_steps)


def _num_bins(run: RunData) -> int:
    """Bins of at least two steps; finer ones would show the beat of single steps."""
    num_steps = len({event["step"] for event in run.timeline})
    return max(1, min(BINS, num_steps // 2))
