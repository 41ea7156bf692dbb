"""The figures of the page. Each takes the findings and gives a plot, or None without data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from steadyrl.diagnostics.buckets import bucket_means
from steadyrl.inspection.answers import ENOUGH
from steadyrl.inspection.study import DRIFT_EDGES, Findings
from steadyrl.inspection.table_files import rule_values
from steadyrl.reports.canvas import PERCENT, PLAIN, Plot, colour, curve, legend, log_if_wide, panel, step_axis, style

MOST_BARS = 26


def over_steps(f: Findings) -> Plot | None:
    """d-bar and its tail, step by step."""
    if len(f.steps) < 2:
        return None
    names = {"mean (d-bar)": "mismatch/d_bar", "q90": "mismatch/q90", "q99": "mismatch/q99"}
    series = {label: [row.means[name] for row in f.steps] for label, name in names.items()}
    return _lines(f, "drift", "|log-ratio| of the tokens of a step", series)


def sat_over_steps(f: Findings) -> Plot | None:
    """How much SAT gates, and how much it takes, step by step."""
    if len(f.steps) < 2:
        return None
    names = {
        "sat-grpo gates": "sat-grpo:sat/gate_rate",
        "sat-grpo steps in": "sat-grpo:sat/intervention_rate",
        "sat-gspo gates": "sat-gspo:sat/gate_rate",
        "sat-gspo steps in": "sat-gspo:sat/intervention_rate",
    }
    if not f.has_advantage:
        names = {label: name for label, name in names.items() if "gates" in label}
    series = {label: [row.means[name] for row in f.steps] for label, name in names.items()}
    return _lines(f, "sat-steps", "SAT, share of the tokens", series, share=True)


def drift_histogram(f: Findings) -> Plot | None:
    """How the |log-ratio| is spread."""
    total = int(f.drift.sum())
    if not total:
        return None
    zero, counts = int(f.drift[0]), f.drift[1:]
    with style():
        figure, axes = panel("Tokens by |log-ratio|")
        edges = [DRIFT_EDGES[0] / 10**0.25, *DRIFT_EDGES, DRIFT_EDGES[-1] * 10**0.25]
        axes.stairs(counts / total, edges, fill=True, color=colour(0), alpha=0.85)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(100.0, numticks=8))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
        axes.set_xlabel(f"|log-ratio|; exactly 0 on {zero / total:.1%} of the tokens")
        axes.yaxis.set_major_formatter(PERCENT)
        return Plot(
            "drift-histogram",
            "Share of the tokens by the size of their log-ratio",
            figure,
            ("below", "tokens"),
            [(0.0, zero), *zip([*DRIFT_EDGES.tolist(), math.inf], counts.tolist(), strict=True)],
        )


def lags(f: Findings) -> Plot | None:
    """Share of the trained tokens at each lag."""
    ages = {age: count for age, count in sorted(f.evidence.ages.items()) if age >= 0}
    total = sum(ages.values())
    if not total:
        return None
    with style():
        figure, axes = panel("Trained tokens by lag")
        axes.bar(list(ages), [count / total for count in ages.values()], color=colour(0), width=0.8)
        axes.grid(axis="x", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("lag (optimizer steps)")
        return Plot("lag", "Share of the tokens at each lag", figure, ("lag", "tokens"), list(ages.items()))


def by_bucket(f: Findings, kind: str, title: str, label: str) -> Plot | None:
    """d-bar by lag, position or probability, and where sat-grpo stepped in."""
    if kind not in f.breakdowns:
        return None
    means = bucket_means(f.breakdowns[kind])
    counts = np.asarray(f.breakdowns[kind]["d_bar"][1])
    shown = np.flatnonzero(counts >= min(ENOUGH, max(counts.max(), 1)))
    if len(shown) < 2:
        return None
    names = [f.labels[kind][index] for index in shown]
    heights = [means["d_bar"][index] for index in shown]
    with style():
        figure, axes = panel(title)
        axes.bar(range(len(shown)), heights, color=colour(0), width=0.75)
        axes.grid(axis="x", visible=False)
        axes.set_xticks(range(len(shown)), names, rotation=45 if max(map(len, names)) * len(names) > 40 else 0)
        _thin(axes, len(names))
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set_xlabel(label)
        rows = [(name, height, counts[index]) for name, height, index in zip(names, heights, shown, strict=True)]
        return Plot(f"by-{kind}", f"{title}, as bars", figure, (kind, "d_bar", "tokens"), rows)


def cuts(f: Findings) -> Plot | None:
    """Share of the tokens whose gradient each rule takes away."""
    if not f.has_advantage:
        return None
    shares = [
        (totals.rule.name, value)
        for totals in f.rules
        if totals.steps and (value := rule_values(totals, True)["no_gradient"])
    ]
    shares = sorted(shares, key=lambda share: -share[1])[:MOST_BARS]
    if not shares:
        return None
    names, values = zip(*shares, strict=True)
    with style():
        figure, axes = panel("Without a gradient", height=1.2 + 0.2 * len(shares))
        tints = [colour(1) if name.startswith("sat") else colour(0) for name in names]
        axes.barh(range(len(names)), values, color=tints, height=0.7)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("share of the tokens (logarithmic)")
        description = "Share of the tokens without a gradient under each rule"
        return Plot("cuts", description, figure, ("rule", "no_gradient"), shares)


def _lines(f: Findings, name: str, title: str, series: dict[str, list[float]], share: bool = False) -> Plot:
    steps = [float(row.step) for row in f.steps] if all(row.step.isdigit() for row in f.steps) else range(len(f.steps))
    with style():
        figure, axes = panel(title)
        for index, values in enumerate(series.values()):
            curve(axes, list(steps), _visible(values) if share else values, colour(index))
        step_axis(axes)
        axes.yaxis.set_major_formatter(PERCENT if share else PLAIN)
        log_if_wide(axes)
        legend(figure, [(label, colour(index), "solid") for index, label in enumerate(series)])
        rows = list(zip(steps, *series.values(), strict=True))
        return Plot(name, f"{title}, over optimizer steps", figure, ("step", *series), rows)


def _visible(values: Sequence[float]) -> list[float]:
    """A share of 0 has no place on a logarithmic axis."""
    return [value if value > 0 else math.nan for value in values]


def _thin(axes: Axes, count: int) -> None:
    """Every label where there is room, else every second, fourth, ..."""
    every = 1
    while count / every > 16:
        every *= 2
    for index, text in enumerate(axes.get_xticklabels()):
        text.set_visible(index % every == 0)
