"""What a person at the terminal sees while a sweep runs."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from steadyrl.experiments.sweep import SweepState


class SweepProgress:
    """A live table on a terminal; elsewhere a line whenever a run ends. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._told = -1  # runs that had ended at the last line

    def __enter__(self) -> SweepProgress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, state: SweepState) -> None:
        if self._live is not None:
            self._live.update(_panel(state))
        elif state.ended != self._told:
            self._told = state.ended
            self._console.print(Text(headline(state)), soft_wrap=True)
            self._console.file.flush()


def headline(state: SweepState) -> str:
    parts = [f"{state.ended} of {state.total} runs"]
    if state.kept:
        parts.append(f"{state.kept} of them from before")
    if state.failed:
        parts.append(f"{len(state.failed)} failed")
    remaining = state.remaining_s()
    if state.ended < state.total:
        parts.append("time left unknown" if remaining is None else f"about {_duration(remaining)} left")
    return ", ".join(parts)


def _panel(state: SweepState) -> Group:
    table = Table.grid(padding=(0, 2))
    for name, (done, steps) in state.running.items():
        table.add_row(Text(name), ProgressBar(total=steps, completed=done, width=30), Text(f"{done}/{steps}"))
    bar = ProgressBar(total=state.total, completed=state.ended, width=60)
    return Group(Text(headline(state), style="bold"), bar, table)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
