"""The figures of a report. Each takes the runs to overlay and returns SVG, or None without data."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from steadyrl.reports.canvas import INK, colour, curve, key, panels, run_legend, style, to_svg
from steadyrl.reports.recorder import RunData
from steadyrl.reports.summary import lag_counts, number, values

PLAIN = FuncFormatter(lambda value, _: f"{value:.4g}")  # no offset, no exponent over the panel
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")
MOST_LABELS = 24  # on bars


def reward(runs: list[RunData]) -> str | None:
    """Training reward per step, and the evaluations with their standard errors."""
    if not any(run.evaluations for run in runs) and not _has(runs, "reward/mean"):
        return None
    with style():
        figure, (axes,) = panels(1, height=3.6)
        for index, run in enumerate(runs):
            curve(axes, _steps(run), values(run.steps, "reward/mean"), colour(index))
            _evaluation_points(axes, run, colour(index))
        axes.set_title("Score: training reward (line), evaluation avg@k (points)")
        _step_axis(axes)
        run_legend(figure, _names(runs))
        return to_svg(figure, "reward", "Reward over optimizer steps, with evaluations")


def mismatch(runs: list[RunData]) -> str | None:
    """How far the trained policy is from the one that sampled."""
    if not _has(runs, "mismatch/d_bar", "mismatch/k3"):
        return None
    with style():
        figure, (left, right) = panels(2)
        _draw(left, runs, "mismatch/d_bar")
        left.set_title("d-bar: mean |log ratio|")
        _draw(right, runs, "mismatch/k3")
        right.set_title("KL to the sampling policy (k3)")
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(PLAIN)
        run_legend(figure, _names(runs))
        return to_svg(figure, "mismatch", "Mean absolute log ratio and KL over optimizer steps")


def lags(runs: list[RunData]) -> str | None:
    """Share of the trained tokens at each lag."""
    counts = [lag_counts(run) for run in runs]
    if not any(sum(row) for row in counts):
        return None
    with style():
        figure, (axes,) = panels(1, height=2.9)
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
        axes.set_title("Tokens trained on, by lag")
        axes.set_xlabel("lag (optimizer steps between sampling and training)")
        run_legend(figure, _names(runs))
        return to_svg(figure, "lags", "Share of tokens at each lag")


def trust_region(runs: list[RunData]) -> str | None:
    """What the boundary does: tokens beyond the clip, tokens gated, tokens whose gradient SAT removed."""
    has_clip = _has(runs, "objective/clip_low", "objective/clip_high")
    has_gate = _has(runs, "sat/gate_rate")
    if not has_clip and not has_gate:
        return None
    with style():
        figure, axes = panels(has_clip + has_gate)
        if has_clip:
            _pair(axes[0], runs, "objective/clip_high", "objective/clip_low", "Clipped tokens", ("high", "low"))
            axes[0].yaxis.set_major_formatter(PERCENT)
        if has_gate:
            _pair(axes[-1], runs, "sat/gate_rate", "sat/intervention_rate", "SAT", ("gate rate", "intervention rate"))
            axes[-1].yaxis.set_major_formatter(PERCENT)
            _log_if_wide(axes[-1])
        run_legend(figure, _names(runs))
        return to_svg(figure, "trust-region", "Clip fractions, gate rate and intervention rate over optimizer steps")


def sat_radii(runs: list[RunData]) -> str | None:
    """The interval that SAT left on average, and the quantile that steered it."""
    if not _has(runs, "sat/radius_low", "sat/q"):
        return None
    with style():
        figure, (left, right) = panels(2)
        _pair(left, runs, "sat/radius_high", "sat/radius_low", "Mean effective radius", ("upper", "lower"))
        _draw(right, runs, "sat/q")
        right.set_title("q: quantile of |log ratio|")
        for axes in (left, right):
            axes.yaxis.set_major_formatter(PLAIN)
        _log_if_wide(right)
        run_legend(figure, _names(runs))
        return to_svg(figure, "sat-radii", "Effective radii and the quantile over optimizer steps")


def optimisation(runs: list[RunData]) -> str | None:
    """Gradient norm and response length."""
    names = [name for name in ("optim/grad_norm", "response/tokens") if _has(runs, name)]
    if not names:
        return None
    titles = {"optim/grad_norm": "Gradient norm before clipping", "response/tokens": "Response length (tokens)"}
    with style():
        figure, axes = panels(len(names))
        for panel, name in zip(axes, names, strict=True):
            _draw(panel, runs, name)
            panel.set_title(titles[name])
            panel.yaxis.set_major_formatter(PLAIN)
            if name == "optim/grad_norm":
                _log_if_wide(panel)
        run_legend(figure, _names(runs))
        return to_svg(figure, "optimisation", "Gradient norm and response length over optimizer steps")


def _names(runs: list[RunData]) -> list[str]:
    return [run.name for run in runs]


def _steps(run: RunData) -> list[float]:
    return [row["step"] for row in run.steps]


def _has(runs: list[RunData], *names: str) -> bool:
    return any(not math.isnan(value) for run in runs for name in names for value in values(run.steps, name))


def _draw(axes: Axes, runs: list[RunData], name: str, dashed: bool = False) -> None:
    for index, run in enumerate(runs):
        curve(axes, _steps(run), values(run.steps, name), colour(index), dashed)
    _step_axis(axes)


def _pair(axes: Axes, runs: list[RunData], solid: str, dashed: str, title: str, labels: tuple[str, str]) -> None:
    _draw(axes, runs, solid)
    _draw(axes, runs, dashed, dashed=True)
    axes.set_title(title)
    key(axes, *labels)


def _evaluation_points(axes: Axes, run: RunData, tint: str) -> None:
    if not run.evaluations:
        return
    axes.errorbar(
        [row["step"] for row in run.evaluations],
        [number(row.get("avg_at_k")) for row in run.evaluations],
        yerr=[number(row.get("avg_at_k_se") or 0.0) for row in run.evaluations],
        fmt="o",
        markersize=5,
        color=tint,
        markeredgecolor=INK,
        markeredgewidth=0.8,
        ecolor=tint,
        elinewidth=1.4,
        capsize=3,
        zorder=4,
    )


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.margins(x=0.02)


def _log_if_wide(axes: Axes) -> None:
    """A log scale where the values differ by a factor of ten and more, and none is 0."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or [np.empty(0)])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) and drawn.min() > 0 and drawn.max() / drawn.min() >= 10:
        formatter = axes.yaxis.get_major_formatter()
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if drawn.max() / drawn.min() < 200 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(formatter)


def _percent(share: float) -> str:
    return "" if share == 0 else f"{share:.0f}%" if share >= 1 else "<1%"
