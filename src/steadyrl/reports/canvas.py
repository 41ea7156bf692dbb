"""Drawing basics of the figures: palette, axes, light smoothing, and SVG that fits into a page.

Text and frames are drawn in one sentinel colour that becomes `currentColor`, so that a figure follows
the page into dark mode; ids are prefixed, so that figures on one page do not mix up their clip paths.
"""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

INK = "#123456"  # becomes currentColor
# Okabe and Ito's colours, told apart by colour-blind readers; mid tones that hold on white and on black
PALETTE = ("#0f7fc4", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8f6fd1", "#7f7f7f")
WIDTH = 9.0  # inches; the page scales figures to its width

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "steadyrl",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.6,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def panels(columns: int, height: float = 3.1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side. Call inside `with style()`."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    return figure, list(axes)


def style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(STYLE)


def running_mean(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred mean over about a twelfth of the run; gaps are bridged, and stay gaps when wide."""
    half = len(series) // 25
    present = np.isfinite(series)
    kernel = np.ones(2 * half + 1)
    # "same" returns the longer operand, and the kernel (at most n / 12) is the shorter one
    total = np.convolve(np.where(present, series, 0.0), kernel, mode="same")
    count = np.convolve(present.astype(float), kernel, mode="same")
    return np.where(count > 0, total / np.maximum(count, 1.0), np.nan)


def curve(axes: Axes, x: list[float], y: list[float], tint: str, dashed: bool = False) -> None:
    """A noisy series: thin as measured, bold as a running mean."""
    series = np.asarray(y, float)
    if not np.isfinite(series).any():
        return
    axes.plot(x, series, color=tint, linewidth=0.7, alpha=0.3)
    marker = "o" if np.isfinite(series).sum() == 1 else None
    line = (0, (3.5, 2)) if dashed else "solid"
    axes.plot(x, running_mean(series), color=tint, linewidth=1.9, linestyle=line, marker=marker, markersize=4)


def key(axes: Axes, solid: str, dashed: str) -> None:
    """Which of two line styles is which, above the panel and clear of the data."""
    lines = [
        Line2D([], [], color=INK, linewidth=1.6, label=solid),
        Line2D([], [], color=INK, linewidth=1.6, linestyle=(0, (3.5, 2)), label=dashed),
    ]
    legend = axes.legend(handles=lines, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, borderpad=0.1)
    legend.set_in_layout(True)
    for text in legend.get_texts():
        text.set_fontsize(9)


def run_legend(figure: Figure, names: list[str]) -> None:
    """One colour per run, only where there are several."""
    if len(names) > 1:
        handles = [Line2D([], [], color=colour(i), linewidth=3, label=name) for i, name in enumerate(names)]
        figure.legend(handles=handles, loc="outside upper left", ncols=min(len(names), 4))


def to_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as inline SVG, scaled by its container; `name` makes its ids unique on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id=")', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r" font-family: [^;]*;", "", svg)  # the page's font
    svg = svg.replace("*{stroke-linejoin", f"#{name} *{{stroke-linejoin")  # a style must not leave its figure
    svg = svg.replace(INK, "currentColor")
    viewbox = re.search(r'viewBox="[^"]*"', svg)
    assert viewbox is not None
    body = svg[svg.index(">") + 1 :]
    return (
        f'<svg id="{name}" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{viewbox.group()} role="img" aria-label="{description}">{body}'
    )
