"""Figures of rewards and verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from steadyrl.reports.canvas import (
    INK,
    Plot,
    colour,
    grow,
    legend,
    panel,
    run_entries,
    shortened,
    step_axis,
    style,
)
from steadyrl.reports.recorded import batch_id, readable_batches
from steadyrl.reports.recorder import RunData, read_rollouts
from steadyrl.reports.summary import values

STATUSES = {  # in the order in which they are stacked
    "right": "#009e73",
    "wrong": "#0f7fc4",
    "unparsable": "#cc79a7",
    "truncated": "#d55e00",
    "timeout": "#b58900",
    "error": "#7f7f7f",
}
RUNS_STACKED = 4  # in one figure; more would be too thin to read
BINS = 8
FAINT = 0.4


def group_means(runs: list[RunData]) -> Plot | None:
    """How many groups had which mean reward, in the first and in the last recorded batch."""
    found = [(index, run, _means_of_batches(run)) for index, run in enumerate(runs)]
    found = [(index, run, batches) for index, run, batches in found if any(len(means) for _, means in batches)]
    if not found:
        return None
    everything = np.concatenate([means for _, _, batches in found for _, means in batches])
    low, high = min(0.0, everything.min()), max(1.0, everything.max())
    edges = np.linspace(low, high, BINS + 1)
    rows: list[tuple[Any, ...]] = []
    with style():
        figure, axes = panel("Groups by mean reward")
        width = 0.9 * (edges[1] - edges[0]) / (2 * len(found))
        for place, (index, run, batches) in enumerate(found):
            for second, (batch, means) in enumerate(batches):
                counts, _ = np.histogram(means, edges)
                left = edges[:-1] + 0.05 * (edges[1] - edges[0]) + (2 * place + second) * width
                alpha = FAINT if second == 0 and len(batches) > 1 else 1.0
                axes.bar(left, counts, width, align="edge", color=colour(index), alpha=alpha, linewidth=0)
                bounds = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
                rows += [(run.name, batch, *bound) for bound in bounds]
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("mean reward of the group")
        axes.set_ylabel("groups")
        _first_and_last(axes)
        legend(figure, run_entries([run.name for run in runs]))
        grow(figure, 0.2)
    columns = ("run", "batch", "mean reward from", "to", "groups")
    return Plot("groups-by-reward", "Groups by mean reward, first and last batch", figure, columns, rows)


def statuses(runs: list[RunData]) -> Plot | None:
    """Shares of the verifier's verdicts, stacked, a band per run."""
    found = [(run, _shares(run)) for run in runs]
    found = [(run, shares) for run, shares in found if shares]
    if not found:
        return None
    shown = found[:RUNS_STACKED]
    with style():
        title = "Verdicts" if len(found) == len(shown) else f"Verdicts of the first {len(shown)} runs"
        figure, axes = panel(title, height=2.2 + 0.8 * len(shown))
        for lane, (run, shares) in enumerate(shown):
            base = 1.15 * (len(shown) - 1 - lane)
            steps = [row["step"] for row in run.steps]
            bottom = np.full(len(steps), base)
            for status, series in shares.items():
                top = bottom + np.nan_to_num(np.asarray(series))
                axes.fill_between(steps, bottom, top, color=STATUSES[status], linewidth=0, step="mid", alpha=0.85)
                bottom = top
        ticks = [(1.15 * (len(shown) - 1 - lane), run) for lane, (run, _) in enumerate(shown)]
        middle = "50%" if len(shown) == 1 else "{} 50%"
        axes.set_yticks(
            [base + height for base, _ in ticks for height in (0, 0.5, 1)],
            [label for _, run in ticks for label in ("0%", middle.format(shortened(run.name)), "100%")],
        )
        axes.grid(axis="y", visible=False)
        step_axis(axes)
        present = [status for status in STATUSES if any(any(shares.get(status, ())) for _, shares in found)]
        patches = [Patch(color=STATUSES[status], alpha=0.85, linewidth=0, label=status) for status in present]
        figure.legend(handles=patches, loc="outside upper left", ncols=4)
        grow(figure, 0.19 * -(-len(present) // 4))
    rows = [
        (run.name, row["step"], *(shares.get(status, [None] * len(run.steps))[index] for status in STATUSES))
        for run, shares in found
        for index, row in enumerate(run.steps)
    ]
    return Plot(
        "verdicts", "Shares of the verifier's verdicts over optimizer steps", figure, ("run", "step", *STATUSES), rows
    )


def _shares(run: RunData) -> dict[str, list[float]]:
    found = {status: values(run.steps, f"reward/{status}") for status in STATUSES}
    return {status: series for status, series in found.items() if not np.isnan(series).all()}


def _means_of_batches(run: RunData) -> list[tuple[int, Any]]:
    """(batch, mean reward of each group) of the first and the last recorded batch."""
    found = []
    for file in readable_batches(run, 2):
        groups: dict[int, list[float]] = {}
        for rollout in read_rollouts(file):
            if rollout["reward"] is not None:
                groups.setdefault(rollout["group"], []).append(rollout["reward"])
        means = [sum(rewards) / len(rewards) for rewards in groups.values()]
        found.append((batch_id(file), np.array(means, float)))
    return found


def _first_and_last(axes: Any) -> None:
    handles = [
        Patch(color=INK, alpha=FAINT, linewidth=0, label="first recorded batch"),
        Patch(color=INK, linewidth=0, label="last"),
    ]
    axes.set_title(axes.get_title(loc="left"), pad=20)
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=2, borderpad=0.1)
