"""What a person at the terminal sees while a run trains.

On a terminal, a live panel; elsewhere (a log file, CI) a plain line now and then. A metric that a step
does not have is shown as "-", and a terminal or log that cannot be written to is left alone: the display
never stops a run.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from steadyrl.reports.recorder import Row

if TYPE_CHECKING:
    from steadyrl.config import RunConfig
    from steadyrl.types import StepReport

PLAIN_EVERY_S = 10.0
PLAIN_EVERY_SHARE = 0.1  # of all steps
RECENT_STEPS = 10  # for speeds
SPARK_STEPS = 40
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class TrainingProgress:
    """Use as a context manager around the training loop."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._console.file = cast(IO[str], _Sturdy(self._console.file))
        self._live: Live | None = None
        self._method = ""
        self._num_steps = self._done = self._first_step = 0
        self._start = self._step_time = self._plain_time = time.monotonic()
        self._plain_step = 0
        self._metrics: dict[str, float] = {}
        self._largest_lag = 0.0  # of the run so far: it swings with every broadcast
        self._waited = _Share()
        self._idle = _Share()
        self._rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)  # tokens, seconds
        self._evaluations: list[Row] = []

    def __enter__(self) -> TrainingProgress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def start(self, config: RunConfig, resumed_from: int = 0) -> None:
        self._num_steps = config.trainer.steps
        self._done = self._first_step = self._plain_step = resumed_from
        self._start = self._step_time = self._plain_time = time.monotonic()
        objective = config.objective
        self._method = objective.preset or f"{objective.boundary.rule} ({objective.unit})"
        resumed = f", resumed after step {resumed_from}" if resumed_from else ""
        self.message(
            f"training {self._method} for {self._num_steps} optimizer steps{resumed}; run_dir {config.run_dir}"
        )

    def step(self, report: StepReport) -> None:
        seconds = report.seconds
        self._done, self._step_time = report.step, time.monotonic()
        self._metrics = report.metrics
        self._largest_lag = max(self._largest_lag, report.metrics.get("staleness/lag_max", 0.0))
        self._rewards.append(_value(report.metrics, "reward/mean"))
        self._recent.append((_value(report.metrics, "sampled_tokens"), _value(seconds, "step")))
        self._waited.add(_value(seconds, "wait"), _value(seconds, "step"))
        idle = _value(seconds, "engine_idle")
        self._idle.add(idle, idle + _value(seconds, "generate"))
        if self._live is None and self._plain_is_due():
            self._plain_time, self._plain_step = time.monotonic(), self._done
            self._print(self._plain_line())

    def evaluation(self, row: Row) -> None:
        self._evaluations.append(row)
        if self._live is None:
            self._print(f"evaluation after step {row.get('step', '-')}: {_score(row)}")

    def message(self, text: str) -> None:
        """A line that stays, above the live panel."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        if self._live is None:
            self._console.file.flush()

    def _plain_is_due(self) -> bool:
        return (
            self._done >= self._num_steps
            or self._done - self._plain_step >= PLAIN_EVERY_SHARE * self._num_steps
            or time.monotonic() - self._plain_time >= PLAIN_EVERY_S
        )

    def _plain_line(self) -> str:
        shown = (
            "reward",
            "d-bar",
            "lag max",
            "gate rate",
            "intervention",
            "clipped",
            "grad norm",
            "tokens/s",
            "trainer waits",
        )
        numbers = dict(self._numbers())
        parts = [f"{name} {numbers[name]}" for name in shown if numbers[name] != "-"]
        return f"step {self._done}/{self._num_steps}: {', '.join(parts)}, {self._remaining()}"

    def _numbers(self) -> list[tuple[str, str]]:
        metrics = self._metrics
        clipped = _value(metrics, "objective/clip_low") + _value(metrics, "objective/clip_high")
        return [
            ("reward", _decimal(_value(metrics, "reward/mean"))),
            ("d-bar", _decimal(_value(metrics, "mismatch/d_bar"))),
            ("lag max", _decimal(self._largest_lag)),
            ("gate rate", _percent(_value(metrics, "sat/gate_rate"))),
            ("intervention", _percent(_value(metrics, "sat/intervention_rate"))),
            ("clipped", _percent(clipped)),
            ("grad norm", _decimal(_value(metrics, "optim/grad_norm"))),
            ("response tokens", _decimal(_value(metrics, "response/tokens"))),
            ("tokens/s", _decimal(self._speed())),
            ("trainer waits", _percent(self._waited.mean())),
            ("engine idle", _percent(self._idle.mean())),
        ]

    def _speed(self) -> float:
        known = [(tokens, seconds) for tokens, seconds in self._recent if not math.isnan(tokens + seconds)]
        seconds = sum(item[1] for item in known)
        return sum(item[0] for item in known) / seconds if seconds else math.nan

    def _remaining(self) -> str:
        made = self._done - self._first_step
        if made <= 0:
            return "time left unknown"
        left = (self._step_time - self._start) / made * (self._num_steps - self._done)
        return f"{_clock(max(0.0, left - (time.monotonic() - self._step_time)))} left"

    def _panel(self) -> Panel:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=max(self._num_steps, 1), completed=self._done)
        head.add_row(bar, f"{self._done}/{self._num_steps} steps, {self._remaining()}")
        title = f"steadyrl: {self._method}" if self._method else "steadyrl"
        return Panel(
            Group(head, Text(), self._grid(), Text(), self._curves()),
            title=Text(title),
            title_align="left",
        )

    def _curves(self) -> Table:
        """The two that say whether it learns: evaluation, first and last, and the recent reward."""
        scores = [_score(row) for row in self._evaluations]
        rows = Table.grid(padding=(0, 2))
        rows.add_row(Text("evaluation", style="dim"), " -> ".join(scores[:1] + scores[1:][-1:]) or "-")
        rows.add_row(Text("recent reward", style="dim"), Text(sparkline(self._rewards), style="cyan", no_wrap=True))
        return rows

    def _grid(self) -> Table:
        """The numbers in as many columns as the terminal holds."""
        columns = max(1, min(4, (self._console.width - 4) // 27))
        grid = Table.grid(padding=(0, 2))
        numbers = self._numbers()
        rows = math.ceil(len(numbers) / columns)
        for row in range(rows):
            cells = [cell for name, value in numbers[row::rows] for cell in (Text(name, style="dim"), Text(value))]
            grid.add_row(*cells)
        return grid


class _Sturdy:
    """A file whose writes do not fail: what its encoding lacks becomes "?", and a broken one falls silent."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except UnicodeEncodeError:
            return self.write(text.encode("ascii", "replace").decode("ascii"))
        except (OSError, ValueError):  # ValueError: closed
            self._fall_silent()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except (OSError, ValueError):
            self._fall_silent()

    def _fall_silent(self) -> None:
        """Let the rest, what waits in the buffer included, go nowhere."""
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._file.fileno())


class _Share:
    """Sum of parts over sum of wholes."""

    def __init__(self) -> None:
        self._part = self._whole = 0.0

    def add(self, part: float, whole: float) -> None:
        if math.isfinite(part + whole):
            self._part, self._whole = self._part + part, self._whole + whole

    def mean(self) -> float:
        return self._part / self._whole if self._whole else math.nan


def sparkline(series: deque[float] | list[float]) -> str:
    """The series as a row of blocks, lowest to highest; a blank where there is no number."""
    present = [value for value in series if math.isfinite(value)]
    if not present:
        return "-"
    low, high = min(present), max(present)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale)] if math.isfinite(value) else " " for value in series)


def _value(numbers: dict[str, float], name: str) -> float:
    value = numbers.get(name)
    return math.nan if value is None else float(value)


def _decimal(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.3g}%"


def _score(row: Row) -> str:
    value, error = _value(row, "avg_at_k"), _value(row, "avg_at_k_se")
    return _decimal(value) if math.isnan(error) else f"{value:.3f} +- {error:.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
