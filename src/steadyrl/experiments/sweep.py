"""Run a grid: several runs at a time, one core each, every one in a process of its own.

The folder of a sweep:

    sweep.json      the axes, the seeds, and which folder holds which run
    runs/           one run folder for each cell
    logs/           what each run printed

A run that is finished is not run again, so a sweep that was killed goes on with the runs that are missing; a
run that was in the middle starts anew. A run that fails is a result (a learning rate may well make weights
that are not finite): the others go on, and the failures are listed at the end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError
from steadyrl.experiments.grid import Cell, Grid
from steadyrl.recipe import load_config
from steadyrl.reports.recorder import CONFIG, METRICS, STATUS, hold, write_atomically

INDEX = "sweep.json"
LOGS = "logs"
POLL_S = 1.0


class SweepObserver(Protocol):
    """Who is told how a sweep goes."""

    def update(self, state: SweepState) -> None: ...


@dataclass
class SweepState:
    """Where a sweep stands."""

    total: int  # runs of the grid
    kept: int  # that were finished before
    jobs: int
    finished: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # run -> why
    running: dict[str, tuple[int, int]] = field(default_factory=dict)  # run -> optimizer steps done, and in all
    durations_s: list[float] = field(default_factory=list)  # of the runs that ended
    start_s: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> int:
        return self.kept + self.finished + len(self.failed)

    def remaining_s(self) -> float | None:
        """Seconds until the end, from the mean duration so far; None before there is one to go by."""
        elapsed = time.monotonic() - self.start_s
        begun = sum(done / steps for done, steps in self.running.values())
        units = self.finished + len(self.failed) + begun  # runs' worth of work done in this session
        if units < 0.1:
            return None
        return elapsed / units * (self.total - self.ended - begun)


def run_sweep(grid: Grid, jobs: int, observer: SweepObserver) -> SweepState:
    """Run what the folder lacks of a grid.

    Raises:
        ConfigError: the folder holds runs of another grid, or another process is at work in it.
    """
    grid.out.mkdir(parents=True, exist_ok=True)
    with hold(grid.out):
        missing = [cell for cell in grid.cells if not _is_finished(grid, cell)]
        _write_index(grid)
        state = SweepState(len(grid.cells), len(grid.cells) - len(missing), jobs)
        _run(grid.out, missing, state, observer)
        return state


def _run(out: Path, cells: Sequence[Cell], state: SweepState, observer: SweepObserver) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two runs that share cores wait for each other's threads
    os.environ.setdefault("TQDM_DISABLE", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["steadyrl.run"])  # the heavy imports, once for all runs
    waiting, running = list(reversed(cells)), list[tuple[Cell, BaseProcess, float]]()
    (out / LOGS).mkdir(exist_ok=True)
    try:
        while waiting or running:
            while waiting and len(running) < state.jobs:
                cell = waiting.pop()
                shutil.rmtree(cell.config.run_dir, ignore_errors=True)
                log = out / LOGS / f"{cell.name}.log"
                process = context.Process(target=_work, args=(cell.config, str(log)), name=cell.name)
                process.start()
                running.append((cell, process, time.monotonic()))
            state.running = {cell.name: (_steps_done(cell), cell.config.trainer.steps) for cell, _, _ in running}
            observer.update(state)
            wait([process.sentinel for _, process, _ in running], timeout=POLL_S)
            for entry in [entry for entry in running if not entry[1].is_alive()]:
                running.remove(entry)
                _settle(out, *entry, state)
        state.running = {}
        observer.update(state)
    finally:
        for _, process, _ in running:  # an interrupt: their runs start anew next time
            process.kill()
        for _, process, _ in running:
            process.join()


def _settle(out: Path, cell: Cell, process: BaseProcess, start_s: float, state: SweepState) -> None:
    process.join()
    state.durations_s.append(time.monotonic() - start_s)
    status = _status(cell)
    if process.exitcode == 0 and status.get("state") == "finished":
        state.finished += 1
    else:
        log = out / LOGS / f"{cell.name}.log"
        state.failed[cell.name] = status.get("error") or f"its process ended with code {process.exitcode}, see {log}"


def _work(config: RunConfig, log: str) -> None:
    """A run, in a process of its own that prints to a file and ends with the sweep."""
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the terminal is for the sweep, which kills its runs
    file = open(log, "w", encoding="utf-8")  # noqa: SIM115 - open for as long as the process lives
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    from rich.console import Console

    from steadyrl.reports.progress import TrainingProgress
    from steadyrl.run import train

    train(config, progress=TrainingProgress(Console(file=file, force_terminal=False)))


def _end_with_the_sweep() -> None:
    """The fork server, which is this process's parent, lives on while its children do: watch who asked for them."""
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    wait([sweep.sentinel])
    os._exit(1)


def _is_finished(grid: Grid, cell: Cell) -> bool:
    """Whether the folder has this run, whole.

    Raises:
        ConfigError: it has a run of that name with other settings.
    """
    folder = Path(cell.config.run_dir)
    if _status(cell).get("state") != "finished":
        return False
    if load_config(folder / CONFIG) != cell.config:
        raise ConfigError(
            f"{folder} was run with other settings than this grid has now: choose another folder with --out, or "
            f"remove {folder}"
        )
    return True


def _write_index(grid: Grid) -> None:
    write_atomically(grid.out / INDEX, json.dumps(grid.index(), indent=1))


def _status(cell: Cell) -> dict[str, Any]:
    try:
        return json.loads((Path(cell.config.run_dir) / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _steps_done(cell: Cell) -> int:
    try:
        return (Path(cell.config.run_dir) / METRICS).read_bytes().count(b"\n")
    except OSError:
        return 0
