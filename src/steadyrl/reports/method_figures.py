"""Pictures of the boundary rules: surrogate and gradient weight against the ratio, for both signs of the advantage.

Nothing is re-implemented here: every curve is the answer of the rule that training uses, on a grid of ratios.
Rules whose loss is a detached weight times log p have no surrogate that depends on the ratio alone. For them the
figures show the function with the same slope: the weight, integrated over log r from the value A at ratio 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from steadyrl import axes as m
from steadyrl.objective import boundary
from steadyrl.objective.loss import RULES
from steadyrl.objective.rule import BoundaryOutput, Layout, RuleInput
from steadyrl.reports.canvas import INK, STYLE, colour

TEXT = "#222222"  # on white: these files leave the page and its dark mode
GREY = "#8a8a8a"
LINES = ("solid", (0, (5, 1.6)), (0, (1.6, 1.4)), (0, (6, 1.5, 1.5, 1.5)))


@dataclass(frozen=True)
class Setting:
    """What a rule sees beside the ratio, and how a figure calls it."""

    label: str = ""
    p0: float = 0.5  # the anchor's probability of the token
    q: float | None = None  # quantile of SAT
    divergence: float | None = None  # of the state
    drift: float | None = None  # root mean square of the log-ratios of the rest of the batch


@dataclass(frozen=True)
class Picture:
    """A figure: one rule under several settings."""

    name: str
    title: str
    rule: m.Boundary
    settings: tuple[Setting, ...] = (Setting(),)
    span: tuple[float, float] = (0.0, 2.0)  # of the ratio
    letter: str = "r"


PROBABILITIES = tuple(Setting(f"p0 = {p0:g}", p0=p0) for p0 in (0.2, 0.5, 0.9))
QUANTILES = (Setting("q = 0.003", q=0.003), Setting("q = 0.02", q=0.02), Setting("q = 0.08", q=0.08))
STATES = (Setting("D_TV 0.05", divergence=0.05), Setting("D_TV 0.2", divergence=0.2))
TOP_K = (Setting("D = 0.05", divergence=0.05), Setting("D = 0.3", divergence=0.3))
DRIFTS = tuple(Setting(f"batch drift {drift:g}", drift=drift) for drift in (0.1, 0.3, 0.6))
NEAR = (0.72, 1.28)

PICTURES = (
    Picture("clip", "PPO clip, radius 0.2", m.ClipBoundary()),
    Picture("clip-dual", "Dual clip, radius 0.2, c = 1.5", m.ClipBoundary(dual=1.5)),
    Picture("sat", "SAT, radius 0.2", m.SatBoundary(), QUANTILES, NEAR),
    *(
        Picture(f"sat-{kernel}", f"SAT, kernel {kernel} (our variant)", rule, QUANTILES, NEAR)
        for kernel in ("exp", "exp_continuous", "gauss", "power", "shifted_hill", "const", "zero")
        for rule in [m.SatBoundary(kernel=kernel, strength=0.5 if kernel == "const" else 1.0)]
    ),
    Picture("band", "DIS: double-sided mask, here (0.7, 1.3)", m.BandBoundary(low=0.3, high=0.3)),
    Picture("dppo-tv", "DPPO-TV, delta 0.15", m.DppoBoundary(), PROBABILITIES),
    Picture("dppo-kl", "DPPO-KL, delta 0.05", m.DppoBoundary(divergence="kl", low=0.05, high=0.05), PROBABILITIES),
    Picture("dppo-topk", "DPPO-TopK, delta 0.15", m.DppoBoundary(divergence="topk_tv"), TOP_K),
    Picture("ipo", "IPO, |p - p0| <= 0.1", m.IpoBoundary(), PROBABILITIES),
    Picture("kpop", "KPop, phi 0.1", m.KpopBoundary(), PROBABILITIES),
    Picture("m2po", "M2PO, budget 0.04", m.M2poBoundary(), DRIFTS),
    Picture("vaco", "VACO mask, bound 0.2", m.VacoBoundary()),
    Picture("trpo", "TRPO as a gate, delta 0.1", m.TrpoBoundary(), STATES),
    Picture("importance", "Importance sampling, cap 1.5 (TIS)", m.ImportanceBoundary(cap=1.5)),
    Picture("cispo", "CISPO, here with cap 1.5", m.CispoBoundary(high=0.5)),
    Picture("spo", "SPO, eps 0.2", m.SpoBoundary()),
    Picture("drpo", "DRPO, delta 0.15", m.DrpoBoundary(), PROBABILITIES),
    Picture("sapo", "SAPO, tau 1 / 1.05", m.SapoBoundary()),
    Picture("vespo", "VESPO, k 2 / 3, lambda 3 / 2", m.VespoBoundary(), letter="W"),
    Picture("unbounded_positive", "Unbounded positive, radius 0.2 for A < 0", m.UnboundedPositiveBoundary()),
    Picture("topr", "TOPR", m.ToprBoundary()),
)
PAPER = ("clip", "trpo", "dppo-tv", "sat")  # Figures 8 and 9 of the SAT paper
OVERVIEW = tuple(picture for picture in PICTURES if not picture.name.startswith("sat-"))


def write_figures(folder: Path) -> list[Path]:
    """Draw every rule, the paper's comparison and the overview into `folder`, as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context({key: TEXT if value == INK else value for key, value in STYLE.items()}):
        for picture in PICTURES:
            written += _save(rule_figure(picture), folder / f"rule-{picture.name}")
        for sign, name in ((1.0, "paper-figure-8"), (-1.0, "paper-figure-9")):
            written += _save(paper_figure(sign), folder / name)
        written += _save(overview(), folder / "overview")
    return written


def evaluate(picture: Picture, setting: Setting, ratio: NDArray[np.float64], sign: float) -> BoundaryOutput:
    """The rule's answer on a grid of ratios; each point is a response of one token."""
    log_ratio = torch.from_numpy(np.log(ratio))
    if setting.drift is not None:  # the rest of the batch, spread like a normal distribution
        share = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
        rest = setting.drift * torch.special.ndtri(share)
        log_ratio = torch.cat([log_ratio, rest])
    count = len(log_ratio)
    anchor = torch.full_like(log_ratio, float(np.log(setting.p0)))
    x = RuleInput(
        log_ratio=log_ratio,
        advantage=torch.full_like(log_ratio, sign),
        logp=anchor + log_ratio,
        anchor_logp=anchor,
        layout=Layout(torch.ones(count, dtype=torch.bool), torch.arange(count), count),
        divergence=None if setting.divergence is None else torch.full_like(log_ratio, setting.divergence),
    )
    rule: Any = picture.rule
    if isinstance(rule, m.SatBoundary):
        q = torch.tensor(0.0 if setting.q is None else setting.q, dtype=torch.float64)
        c_low, c_high = boundary.sat_contraction(rule, x.log_ratio, q)
        answer = boundary.interval(x, rule.low * c_low, rule.high * c_high)
    else:
        answer = RULES[rule.rule](rule, x)
    return replace(answer, surrogate=answer.surrogate[: len(ratio)], coefficient=answer.coefficient[: len(ratio)])


def rule_figure(picture: Picture) -> Figure:
    """Two columns, one for each sign of A; surrogate above, gradient weight below."""
    figure, axes = _panels(2, 2, 5.4)
    _headline(figure, picture.title)
    for column, sign in enumerate((1.0, -1.0)):
        _panel(axes[0][column], picture, sign, "surrogate")
        _panel(axes[1][column], picture, sign, "coefficient")
        axes[0][column].set_title("A = +1" if sign > 0 else "A = -1")
        axes[1][column].set_xlabel(f"ratio {picture.letter}")
    axes[0][0].set_ylabel("surrogate S")
    axes[1][0].set_ylabel("gradient weight")
    _names(axes[1][1], picture, left=0.04, top=0.92)
    return figure


def paper_figure(sign: float) -> Figure:
    """Surrogate and mask of PPO, TRPO, DPPO and SAT for one sign of A."""
    pictures = [next(picture for picture in PICTURES if picture.name == name) for name in PAPER]
    figure, axes = _panels(2, len(PAPER), 5.0, width=13.0)
    _headline(figure, "Surrogate and mask, " + ("A = +1" if sign > 0 else "A = -1"))
    for column, picture in enumerate(pictures):
        _panel(axes[0][column], picture, sign, "surrogate")
        _panel(axes[1][column], picture, sign, "mask")
        axes[0][column].set_title(picture.title)
        axes[1][column].set_xlabel("ratio r")
        _names(axes[1][column], picture, left=0.05 if sign > 0 else 0.56, top=0.62)
    axes[0][0].set_ylabel("surrogate S")
    axes[1][0].set_ylabel("gradient")
    return figure


def overview() -> Figure:
    """The gradient weight of every rule in small: what it does, at a glance."""
    columns = 4
    rows = -(-len(OVERVIEW) // columns)
    figure, axes = _panels(rows, columns, 2.2 * rows + 0.7, width=12.0)
    _headline(figure, "Gradient weight against the ratio: what each objective leaves of A grad log p")
    panels = [panel for row in axes for panel in row]
    for panel in panels[len(OVERVIEW) :]:
        panel.set_axis_off()
    for panel, picture in zip(panels, OVERVIEW, strict=False):
        setting = picture.settings[len(picture.settings) // 2]
        ratio = _grid(picture, setting)
        panel.plot(ratio, ratio, color=GREY, linewidth=1.0, linestyle=LINES[2], zorder=1)
        for sign, tint, line in ((1.0, colour(0), LINES[0]), (-1.0, colour(1), LINES[1])):
            _curve(panel, ratio, evaluate(picture, setting, ratio, sign).coefficient.numpy(), tint, line)
        panel.set_title(picture.title.split(",")[0] + (f" ({setting.label})" if setting.label else ""), fontsize=9.5)
        _frame(panel, picture)
        panel.set_ylim(-0.15, 2.1)
    for height, text, tint in ((0.87, "A > 0", colour(0)), (0.73, "A < 0", colour(1)), (0.59, "no boundary", GREY)):
        panels[0].text(0.05, height, text, color=tint, fontsize=10.5, fontweight="bold", transform=panels[0].transAxes)
    return figure


def curve_values(picture: Picture, setting: Setting, ratio: NDArray[np.float64], sign: float) -> NDArray[np.float64]:
    """The surrogate; for a policy gradient with a detached weight, the function with the same slope."""
    answer = evaluate(picture, setting, ratio, sign)
    if not answer.is_weight:
        return answer.surrogate.numpy()
    slope = answer.coefficient.numpy() / ratio
    area = np.concatenate([[0.0], np.cumsum(np.diff(ratio) * (slope[1:] + slope[:-1]) / 2)])
    return sign * (1.0 + area - np.interp(1.0, ratio, area))


def _panels(rows: int, columns: int, height: float, width: float = 9.0) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def _grid(picture: Picture, setting: Setting) -> NDArray[np.float64]:
    """Ratios on which p = r p0 is still a probability."""
    low, high = picture.span
    return np.linspace(max(low, 1e-3), min(high, 0.999 / setting.p0), 1601)


def _panel(axes: Axes, picture: Picture, sign: float, quantity: Literal["surrogate", "coefficient", "mask"]) -> None:
    low, high = picture.span
    everywhere = np.linspace(max(low, 1e-3), high, 50)
    free = {"surrogate": sign * everywhere, "coefficient": everywhere, "mask": np.ones_like(everywhere)}[quantity]
    axes.plot(everywhere, free, color=GREY, linewidth=1.1, linestyle=LINES[2], zorder=1)
    seen = [free]
    for index, setting in enumerate(picture.settings):
        ratio = _grid(picture, setting)
        if quantity == "surrogate":
            values = curve_values(picture, setting, ratio, sign)
        else:
            values = evaluate(picture, setting, ratio, sign).coefficient.numpy()
        if quantity == "mask":
            values = (values != 0) * (1 + 0.05 * index)  # a little apart, to be seen
        _curve(axes, ratio, values, colour(index), LINES[index])
        seen.append(values)
    _frame(axes, picture)
    if quantity == "mask":
        axes.set_ylim(-0.12, 1.3)
        axes.set_yticks([0, 1], ["removed", "kept"])
        return
    bottom = max(min(values.min() for values in seen), -2.2)
    top = min(max(values.max() for values in seen), 2.2)
    axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.10 * (top - bottom))
    axes.annotate(
        f"{picture.letter} A" if quantity == "surrogate" else picture.letter,
        (high, free[-1]),
        xytext=(4, 0),
        textcoords="offset points",
        color=GREY,
        fontsize=9,
        va="center",
        annotation_clip=False,
    )


def _curve(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], tint: str, line: Any) -> None:
    """A curve whose jumps are gaps, with a hint of the way it fell."""
    jump = np.abs(np.diff(y, prepend=y[0])) > 0.04
    broken = np.where(jump, np.nan, y)
    axes.plot(x, broken, color=tint, linewidth=2.2, linestyle=line, zorder=3)
    for index in np.flatnonzero(jump):
        axes.plot(x[index - 1 : index + 1], y[index - 1 : index + 1], color=tint, linewidth=0.8, alpha=0.45, zorder=2)


def _frame(axes: Axes, picture: Picture) -> None:
    low, high = picture.span
    axes.set_xlim(low, high)
    axes.axvline(1.0, color=TEXT, linewidth=0.6, alpha=0.4, zorder=0)
    axes.set_xticks([0, 0.5, 1, 1.5, 2] if high == 2.0 else [0.8, 0.9, 1.0, 1.1, 1.2])


def _names(axes: Axes, picture: Picture, left: float, top: float) -> None:
    """The names of the curves in their colours, where a panel is empty."""
    for index, setting in enumerate(picture.settings):
        height = top - 0.1 * index
        axes.text(left, height, setting.label, color=colour(index), fontsize=9.5, transform=axes.transAxes, va="center")


def _headline(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=13, fontweight="bold", color=TEXT)


def _save(figure: Figure, path: Path) -> list[Path]:
    """The same figure as SVG and as PNG, on white."""
    written = [path.with_name(f"{path.name}.{kind}") for kind in ("svg", "png")]
    figure.savefig(written[0], format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    figure.set_layout_engine("none")  # it has been laid out
    figure.savefig(written[1], format="png", facecolor="white", dpi=160)
    return written
