"""Says where a run stands when nothing has happened for a while."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class Watchdog:
    """Writes what every thread is doing to a file, once for each silence longer than a limit.

    It ends nothing: every wait has a deadline of its own, and these are longer. Use as a context manager.
    """

    def __init__(self, file: Path, silence_s: float, tell: Callable[[str], None]) -> None:
        self._file = file
        self._silence_s = silence_s
        self._tell = tell
        self._state: Callable[[], str] = lambda: "starting"
        self._last = time.monotonic()
        self._told = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="steadyrl-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def describe_with(self, state: Callable[[], str]) -> None:
        """How to say in a sentence where the run stands; called from the watchdog's thread."""
        self._state = state

    def progress(self) -> None:
        self._last, self._told = time.monotonic(), False

    def _watch(self) -> None:
        while not self._stop.wait(self._silence_s / 10):
            silent_s = time.monotonic() - self._last
            if silent_s >= self._silence_s and not self._told:
                self._told = True
                self._report(silent_s)

    def _report(self, silent_s: float) -> None:
        where = self._state()
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"nothing has happened for {silent_s:.0f} s: {where}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        self._tell(f"nothing has happened for {silent_s:.0f} s: {where}; what every thread does is in {self._file}")
