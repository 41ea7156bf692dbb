"""Drawing basics of the figures: palette, axes, light smoothing, and the forms in which a figure leaves.

Text and frames are drawn in one sentinel colour that becomes `currentColor` in a page, so that a figure
follows it into dark mode; ids are prefixed, so that figures on one page do not mix up their clip paths.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

INK = "#123456"  # becomes currentColor
# Okabe and Ito's colours, told apart by colour-blind readers; mid tones that hold on white and on black
PALETTE = ("#0f7fc4", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8f6fd1", "#7f7f7f")
DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.6)), (0, (1.4, 1.4)))
DASHED = DASHES[1]
PANEL = 4.6  # inches wide; the page puts panels side by side, or on a phone below each other
WIDE = 9.2
DPI = 160  # of a PNG
LONGEST_NAME = 30  # characters in a legend
MOST_ENTRIES = 24  # of a legend

PLAIN = FuncFormatter(lambda value, _: f"{value:.4g}")  # no offset, no exponent over the panel
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%")

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "steadyrl",
    "text.parse_math": False,  # a $ in the name of a run is a $
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
    "legend.fontsize": 9,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Plot:
    """One figure and the numbers in it."""

    name: str  # of its files, and in front of its ids on a page
    description: str  # for who cannot see it
    figure: Figure
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    is_wide: bool = False


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dashes(index: int) -> Any:
    """Solid for the first eight colours, dashed for those who get a colour again."""
    return DASHES[index // len(PALETTE) % len(DASHES)]


def panel(title: str, height: float = 3.0, width: float = PANEL) -> tuple[Figure, Axes]:
    """An empty panel. Call inside `with style()`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


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


def curve(axes: Axes, x: Sequence[float], y: Sequence[float], tint: str, line: Any = "solid") -> None:
    """A noisy series: thin as measured, bold as a running mean."""
    series = np.asarray(y, float)
    if not np.isfinite(series).any():
        return
    axes.plot(x, series, color=tint, linewidth=0.7, alpha=0.3)
    marker = "o" if np.isfinite(series).sum() == 1 else None
    axes.plot(x, running_mean(series), color=tint, linewidth=1.9, linestyle=line, marker=marker, markersize=4)


def step_axis(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.margins(x=0.02)


def from_zero(axes: Axes) -> None:
    """Down to 0 where that costs no more than half of the panel; then sizes can be compared by eye."""
    low, high = axes.get_ylim()
    if 0 < low <= high / 2:
        axes.set_ylim(bottom=0)


def log_if_wide(axes: Axes) -> None:
    """A log scale where the values differ by a factor of ten and more, and none is 0."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or [np.empty(0)])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) and drawn.min() > 0 and drawn.max() / drawn.min() >= 10:
        formatter = axes.yaxis.get_major_formatter()
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if drawn.max() / drawn.min() < 200 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(formatter)


def legend(figure: Figure, entries: Sequence[tuple[str, str, Any]]) -> None:
    """(name, colour, line style) above the panel; nothing where one line needs no name."""
    if len(entries) < 2:
        return
    if len(entries) > MOST_ENTRIES:
        entries = [*entries[:MOST_ENTRIES], (f"and {len(entries) - MOST_ENTRIES} more", INK, (0, (1, 3)))]
    handles = [
        Line2D([], [], color=tint, linewidth=2.4, linestyle=line, label=shortened(name)) for name, tint, line in entries
    ]
    longest = max(len(shortened(name)) for name, _, _ in entries)
    room = int((72 if figure.get_figwidth() == PANEL else 150) // (longest + 7))  # characters of this size in a row
    figure.legend(handles=handles, loc="outside upper left", ncols=max(1, min(len(entries), room)))
    grow(figure, 0.19 * -(-len(entries) // max(1, room)))


def grow(figure: Figure, inches: float) -> None:
    """Room for what stands above the panel."""
    figure.set_figheight(figure.get_figheight() + inches)


def run_entries(names: Sequence[str]) -> list[tuple[str, str, Any]]:
    """The legend of runs laid over each other: a colour each."""
    return [(name, colour(index), dashes(index)) for index, name in enumerate(names)]


def svg(plot: Plot) -> str:
    """The figure as inline SVG, scaled by its container."""
    buffer = io.StringIO()
    with style():
        _arrange(plot.figure)
        plot.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id=")', rf"\g<1>{plot.name}-", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{plot.name}-", text)
    text = re.sub(r" font-family: [^;]*;", "", text)  # the page's font
    text = text.replace("*{stroke-linejoin", f"#{plot.name} *{{stroke-linejoin")  # a style must not leave its figure
    text = text.replace(INK, "currentColor")
    # a hundredth of a point is below what a screen shows, and halves the page
    text = re.sub(r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), text)
    viewbox = re.search(r'viewBox="[^"]*"', text)
    assert viewbox is not None
    body = text[text.index(">") + 1 :]
    return (
        f'<svg id="{plot.name}" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{viewbox.group()} role="img" aria-label="{html.escape(plot.description)}">{body}'
    )


def png(plot: Plot) -> bytes:
    """The figure on white."""
    buffer = io.BytesIO()
    with style():
        _arrange(plot.figure)
        plot.figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _arrange(figure: Figure) -> None:
    """Lay the figure out, once: left to `savefig`, it would be drawn twice."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def shortened(name: str) -> str:
    """A long name without its middle: what tells runs apart often stands at the end."""
    half = (LONGEST_NAME - 3) // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[-half:]}"
