"""Figures of time: who worked when, and who waited."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from steadyrl.reports.canvas import (
    DASHED,
    INK,
    WIDE,
    Plot,
    colour,
    grow,
    legend,
    panel,
    run_entries,
    shortened,
    style,
)
from steadyrl.reports.figures import line_key
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
    "checkpoint": "#a08a5b",
}
WAITING_ALPHA = 0.16
WINDOW_S = 12.0
STEPS_SHOWN = 6  # in a window, at least; matters where a step takes minutes
BINS = 60


def start_of_run(runs: list[RunData]) -> Plot | None:
    """Who worked and who waited in the first seconds; in the whole run, where it is short."""
    shown = [run for run in runs if run.timeline]
    if not shown:
        return None
    window = max(_window(run) for run in shown)
    if _is_short(shown, window):
        limits = (0.0, max(_length(run) for run in shown) or 1.0)
        return _gantt(shown, "timeline", "Whole run", "seconds", limits, from_end=False)
    title = f"First {window:.0f} s"
    return _gantt(shown, "timeline-start", title, "seconds since the start", (0.0, window), from_end=False)


def end_of_run(runs: list[RunData]) -> Plot | None:
    """The same for the last seconds of a longer run."""
    shown = [run for run in runs if run.timeline]
    if not shown:
        return None
    window = max(_window(run) for run in shown)
    if _is_short(shown, window):
        return None
    title = f"Last {window:.0f} s"
    return _gantt(shown, "timeline-end", title, "seconds before the end", (-window, 0.0), from_end=True)


def utilisation_over_time(runs: list[RunData]) -> Plot | None:
    """Share of time in which trainer and engine worked, through the run."""
    shown = [(index, run) for index, run in enumerate(runs) if run.timeline and _length(run) > 0]
    if not shown:
        return None
    rows = []
    with style():
        figure, axes = panel("Time spent working")
        for index, run in shown:
            start, end = span(run)
            edges = np.linspace(start, end, _num_bins(run) + 1)
            for actor, line in zip(ACTORS, ("solid", DASHED), strict=True):
                stretches = work(run, actor)
                busy = [busy_seconds(stretches, a, b) for a, b in pairwise(edges)]
                share = np.asarray(busy) / np.diff(edges)
                middle = (edges[:-1] + edges[1:]) / 2 - start
                axes.plot(middle, 100 * share, color=colour(index), linestyle=line, linewidth=1.7)
                rows += [(run.name, actor, *pair) for pair in zip(middle.tolist(), share.tolist(), strict=True)]
        axes.set_ylim(0, 104)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_xlabel("seconds since the start")
        legend(figure, run_entries([run.name for run in runs]))
        line_key(axes, *ACTORS)
        grow(figure, 0.2)
    columns = ("run", "actor", "seconds since the start", "share of time working")
    return Plot("utilisation", "Utilisation of trainer and engine over time", figure, columns, rows)


def time_budget(runs: list[RunData]) -> Plot | None:
    """Where the time of trainer and engine went: each phase, and the rest, in which one waited for the other."""
    shown = [run for run in runs if run.timeline and _length(run) > 0]
    if not shown:
        return None
    rows = []
    with style():
        figure, axes = panel("Share of the wall time", height=1.2 + 0.55 * len(shown))
        for lane, run in enumerate(shown):
            for row, actor in enumerate(ACTORS):
                left, length = 0.0, _length(run)
                axes.barh(2.3 * lane + row, 100, 0.8, color=INK, alpha=WAITING_ALPHA, linewidth=0)
                for phase, tint in PHASES.items():
                    seconds = sum(
                        event["end_s"] - event["start_s"]
                        for event in run.timeline
                        if event["actor"] == actor and event["phase"] == phase
                    )
                    share = 100 * seconds / length
                    axes.barh(2.3 * lane + row, share, 0.8, left=left, color=tint, linewidth=0)
                    left += share
                    if seconds:
                        rows.append((run.name, actor, phase, seconds))
                rows.append((run.name, actor, "waiting", length * (1 - left / 100)))
        axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_xlim(0, 100)
        _finish_lanes(axes, shown)
        _phase_legend(figure, shown)
    columns = ("run", "actor", "phase", "seconds")
    return Plot("time-budget", "Share of the wall time of each phase", figure, columns, rows)


def _gantt(
    shown: list[RunData], name: str, title: str, label: str, limits: tuple[float, float], from_end: bool
) -> Plot:
    """One bar per phase, one lane per actor, between two moments counted from the start or the end."""
    rows = []
    with style():
        figure, axes = panel(title, height=1.1 + 0.6 * len(shown), width=WIDE)
        for lane, run in enumerate(shown):
            start, end = span(run)
            zero = end if from_end else start
            left, right = max(start, zero + limits[0]), min(end, zero + limits[1])
            _lanes(axes, run, lane, left, right, zero)
            inside = [event for event in run.timeline if event["end_s"] > left and event["start_s"] < right]
            rows += [
                (run.name, event["actor"], event["phase"], event["start_s"], event["end_s"], event["step"])
                for event in inside
            ]
        axes.set_xlim(*limits)
        axes.set_xlabel(label)
        _finish_lanes(axes, shown)
        _phase_legend(figure, shown)
    columns = ("run", "actor", "phase", "start_s", "end_s", "step")
    return Plot(name, f"Timeline of trainer and engine: {title}", figure, columns, rows, is_wide=True)


def _lanes(axes: Axes, run: RunData, lane: int, left: float, right: float, zero: float) -> None:
    """Both actors between two moments, on an axis that starts at `zero`."""
    for row, actor in enumerate(ACTORS):
        y = 2.3 * lane + row
        # the lane itself is grey; work is laid over it, so what stays visible is waiting
        axes.barh(y, right - left, 0.8, left=left - zero, color=INK, alpha=WAITING_ALPHA, linewidth=0)
        for phase, tint in PHASES.items():
            stretches = [
                (max(event["start_s"], left), min(event["end_s"], right))
                for event in run.timeline
                if event["actor"] == actor and event["phase"] == phase
            ]
            bars = [(start - zero, end - start) for start, end in stretches if end > start]
            axes.broken_barh(bars, (y - 0.4, 0.8), facecolor=tint, linewidth=0)


def _finish_lanes(axes: Axes, shown: list[RunData]) -> None:
    lanes = [2.3 * lane + row for lane in range(len(shown)) for row in range(2)]
    several = len(shown) > 1
    labels = [f"{shortened(run.name)}: {actor}" if several else actor for run in shown for actor in ACTORS]
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(lanes, labels)
    axes.invert_yaxis()


def _phase_legend(figure: Figure, shown: list[RunData]) -> None:
    phases = [Patch(color=tint, label=phase) for phase, tint in PHASES.items() if _occurs(shown, phase)]
    waiting = Patch(color=INK, alpha=WAITING_ALPHA, linewidth=0, label="waiting")
    columns = 8 if figure.get_figwidth() == WIDE else 4
    figure.legend(handles=[*phases, waiting], loc="outside upper left", ncols=columns)
    grow(figure, 0.19 * -(-(len(phases) + 1) // columns))


def _occurs(runs: list[RunData], phase: str) -> bool:
    return any(event["phase"] == phase for run in runs for event in run.timeline)


def _length(run: RunData) -> float:
    start, end = span(run)
    return end - start


def _is_short(shown: list[RunData], window: float) -> bool:
    return all(_length(run) <= 2 * window for run in shown)


def _window(run: RunData) -> float:
    num_steps = len({event["step"] for event in run.timeline if event["phase"] == "train"}) or 1
    return max(WINDOW_S, STEPS_SHOWN * _length(run) / num_steps)


def _num_bins(run: RunData) -> int:
    """Bins of at least two steps; finer ones would show the beat of single steps."""
    num_steps = len({event["step"] for event in run.timeline})
    return max(1, min(BINS, num_steps // 2))
