"""Figures of what every optimizer step logged, runs laid over each other; a colour each. None without data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from steadyrl.reports.canvas import (
    DASHED,
    INK,
    PERCENT,
    PLAIN,
    Plot,
    colour,
    curve,
    from_zero,
    grow,
    legend,
    log_if_wide,
    panel,
    run_entries,
    step_axis,
    style,
)
from steadyrl.reports.recorder import RunData
from steadyrl.reports.summary import lag_counts, number, values

MOST_LABELS = 12  # on bars


def reward(runs: list[RunData]) -> Plot | None:
    """Training reward per step."""
    return metric(runs, "reward", "Training reward", "reward/mean")


def signal(runs: list[RunData]) -> Plot | None:
    """Groups whose rewards are all equal teach nothing."""
    title = "Groups without signal (all rewards equal)"
    return metric(runs, "groups-without-signal", title, "reward/groups_without_signal", PERCENT)


def truncation(runs: list[RunData]) -> Plot | None:
    return metric(runs, "truncation", "Truncated responses", "reward/truncated", PERCENT)


def lengths(runs: list[RunData]) -> Plot | None:
    return metric(runs, "response-length", "Response length (tokens)", "response/tokens")


def clipped(runs: list[RunData]) -> Plot | None:
    """Tokens whose gradient the boundary removed, by the side of the interval."""
    names = {"upper edge": "objective/clip_high", "lower edge": "objective/clip_low"}
    return metrics(runs, "clipped", "Gradient removed, share of tokens", names, PERCENT)


def gates(runs: list[RunData]) -> Plot | None:
    """Tokens whose interval SAT narrowed, and those that lost their gradient to that alone."""
    names = {"gate rate": "sat/gate_rate", "intervention rate": "sat/intervention_rate"}
    return metrics(runs, "sat-gates", "Tokens gated by SAT", names, PERCENT, may_be_log=True)


def radii(runs: list[RunData]) -> Plot | None:
    names = {"upper": "sat/radius_high", "lower": "sat/radius_low"}
    return metrics(runs, "sat-radii", "Mean radius that SAT left", names)


def quantile(runs: list[RunData]) -> Plot | None:
    return metric(runs, "sat-q", "q: quantile of |log ratio|", "sat/q", may_be_log=True)


def contraction(runs: list[RunData]) -> Plot | None:
    title = "Strongest contraction (1 = none)"
    return metric(runs, "sat-contraction", title, "sat/min_contraction", may_be_log=True)


def split(runs: list[RunData]) -> Plot | None:
    """d = policy lag + engine numerics (paper, Eq. 2)."""
    names = {"policy lag": "split/policy_d_bar", "engine numerics": "split/engine_d_bar"}
    return metrics(runs, "split", "Mean |part of d|", names, may_be_log=True)


def variances(runs: list[RunData]) -> Plot | None:
    """Var(d) and its two parts; the rest is twice the covariance."""
    names = {"policy lag": "split/policy_variance", "engine numerics": "split/engine_variance"}
    return metrics(runs, "split-variance", "Variance of each part of d", names, may_be_log=True)


def routing(runs: list[RunData]) -> Plot | None:
    title = "Tokens x layers routed differently"
    return metric(runs, "routing-disagreement", title, "routing/disagreement", PERCENT)


def tails(runs: list[RunData]) -> Plot | None:
    names = {"99th percentile": "mismatch/q99", "median": "mismatch/q50"}
    return metrics(runs, "mismatch-quantiles", "|log ratio| of tokens", names, may_be_log=True)


def gradient_norm(runs: list[RunData]) -> Plot | None:
    return metric(runs, "gradient-norm", "Gradient norm before clipping", "optim/grad_norm", may_be_log=True)


def penalty(runs: list[RunData]) -> Plot | None:
    return metric(runs, "kl-reference", "KL to the starting weights (k3)", "penalty/kl_ref")


def lag_over_time(runs: list[RunData]) -> Plot | None:
    return metric(runs, "lag-mean", "Mean lag of a step (optimizer steps)", "staleness/lag")


def lag_parts(runs: list[RunData]) -> Plot | None:
    """Of streamed rollouts: versions that came while a response was generated, and while it was queued (Eq. 25)."""
    names = {"while generated": "staleness/lag_generating_mean", "while queued": "staleness/lag_queued_mean"}
    return metrics(runs, "lag-parts", "Mean lag gained (optimizer steps)", names)


def lags(runs: list[RunData]) -> Plot | None:
    """Share of the trained tokens at each lag."""
    counts = [lag_counts(run) for run in runs]
    if not any(sum(row) for row in counts):
        return None
    with style():
        figure, axes = panel("Tokens trained on, by lag")
        width = 0.8 / len(runs)
        for index, row in enumerate(counts):
            shares = 100 * np.asarray(row) / max(sum(row), 1.0)
            offset = (index - (len(runs) - 1) / 2) * width
            bars = axes.bar(np.arange(len(row)) + offset, shares, width * 0.92, color=colour(index))
            if len(row) * len(runs) <= MOST_LABELS:
                axes.bar_label(bars, labels=[_percent(share) for share in shares], padding=2, fontsize=9)
        axes.grid(axis="x", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.margins(y=0.15)
        axes.set_xlabel("lag (optimizer steps between sampling and training)")
        legend(figure, run_entries(_names(runs)))
    rows = [(run.name, lag, count) for run, row in zip(runs, counts, strict=True) for lag, count in enumerate(row)]
    return Plot("lags", "Share of tokens at each lag", figure, ("run", "lag", "tokens"), rows)


def metric(
    runs: list[RunData],
    name: str,
    title: str,
    key: str,
    formatter: FuncFormatter = PLAIN,
    may_be_log: bool = False,
) -> Plot | None:
    """One metric over the optimizer steps."""
    return metrics(runs, name, title, {"": key}, formatter, may_be_log)


def metrics(
    runs: list[RunData],
    name: str,
    title: str,
    keys: dict[str, str],
    formatter: FuncFormatter = PLAIN,
    may_be_log: bool = False,
) -> Plot | None:
    """Up to two metrics over the optimizer steps, the second one dashed: label -> name in `metrics`."""
    if not has(runs, *keys.values()):
        return None
    with style():
        figure, axes = panel(title)
        for index, run in enumerate(runs):
            for line, key in zip(("solid", DASHED), keys.values(), strict=False):
                curve(axes, _steps(run), values(run.steps, key), colour(index), line)
        step_axis(axes)
        axes.yaxis.set_major_formatter(formatter)
        if may_be_log:
            log_if_wide(axes)
        if axes.get_yscale() == "linear":
            from_zero(axes)
        if formatter is PERCENT and axes.get_ylim()[0] < 0:
            axes.set_ylim(bottom=0)
        legend(figure, run_entries(_names(runs)))
        if len(keys) > 1:
            line_key(axes, *keys)
            grow(figure, 0.2)
    columns = ("run", "step", *keys.values())
    return Plot(name, f"{title} over optimizer steps", figure, columns, _step_rows(runs, list(keys.values())))


def line_key(axes: Axes, solid: str, dashed: str) -> None:
    """Which of two line styles is which, below the title and clear of the data."""
    lines = [
        Line2D([], [], color=INK, linewidth=1.6, label=solid),
        Line2D([], [], color=INK, linewidth=1.6, linestyle=DASHED, label=dashed),
    ]
    axes.set_title(axes.get_title(loc="left"), pad=20)
    axes.legend(handles=lines, loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=2, borderpad=0.1)


def has(runs: list[RunData], *names: str) -> bool:
    return any(not math.isnan(value) for run in runs for name in names for value in values(run.steps, name))


def _names(runs: list[RunData]) -> list[str]:
    return [run.name for run in runs]


def _steps(run: RunData) -> list[float]:
    return [row["step"] for row in run.steps]


def _step_rows(runs: list[RunData], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return [
        (run.name, row["step"], *(number(row["metrics"].get(key)) for key in keys)) for run in runs for row in run.steps
    ]


def _percent(share: float) -> str:
    return "" if share == 0 else f"{share:.0f}%" if share >= 1 else "<1%"
