"""Small runs on a Ray cluster, what they wrote, and the processes that they are made of."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from steadyrl.pipeline.ray_cluster import close_the_door, load_ray
from steadyrl.recipe import load_config
from steadyrl.reports.progress import TrainingProgress
from steadyrl.run import RunResult, train
from steadyrl.types import StepReport

RECIPE = Path(__file__).parents[2] / "recipes" / "smoke.toml"
SIZES = [
    "trainer.lr=1e-4",
    "pipeline.prompts_per_batch=4",
    "pipeline.responses_per_prompt=4",
    "evaluation.every_steps=0",
    "evaluation.prompts=4",
    "evaluation.samples_per_prompt=1",
    "record.rollouts_every_batches=0",
    # cast to bfloat16, weights that differ by float32 rounding may differ by a bfloat16, and a sampled token may flip
    "engine.dtype=float32",
    "engine.replicas=2",
]
LAG_4 = [*SIZES, "trainer.steps=20", "pipeline.lag=4"]
FSDP = ["pipeline.backend=ray", "trainer.kind=fsdp", "trainer.ranks=2"]
STREAMING = [*SIZES, "pipeline.regime=streaming", "pipeline.lag=1", "pipeline.max_lag=3", "pipeline.groups_in_flight=8"]

START_TRIES = 10
# counted by a backend, or of the time that something took
OF_THE_BACKEND = ("transport/", "engine/")


class Intruder(TrainingProgress):
    """Does something once a step was reported."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._due, self._action = step, action

    def step(self, report: StepReport) -> None:
        super().step(report)
        if report.step == self._due:
            self._due = -1
            self._action()

    def message(self, text: str) -> None:
        super().message(text)
        self.messages.append(text)


@contextmanager
def shared_cluster(num_cpus: int) -> Iterator[None]:
    """A Ray cluster that several runs use, one after the other."""
    close_the_door()
    ray = load_ray()
    for tries_left in range(START_TRIES - 1, -1, -1):
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
            break
        except Exception:  # a busy machine: Ray gives its own processes 30 s
            for process in descendants(os.getpid()):
                os.kill(process, signal.SIGKILL)
            if not tries_left:
                raise
    try:
        yield
    finally:
        ray.shutdown()


def run(folder: Path, *settings: str, progress: TrainingProgress | None = None) -> list[dict[str, Any]]:
    """Train to the end; the rows of `metrics.jsonl`."""
    result = train(load_config(RECIPE, [*settings, f"run_dir={folder}"]), progress=progress)
    assert result == RunResult(folder, finished=True)
    return rows(folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of a step that do not depend on the backend."""
    return {name: value for name, value in row["metrics"].items() if not name.startswith(OF_THE_BACKEND)}


def descendants(ancestor: int) -> dict[int, str]:
    """Living processes that come from another one, by id, with their command lines."""
    parents, names = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    for process in parents:
        above = process
        while above in parents and above != ancestor:
            above = parents[above]
        if above == ancestor and process != ancestor:
            found[process] = names[process]
    return found


def actors(kind: str) -> list[int]:
    """The processes of this test's Ray actors of a class: no other run's."""
    return sorted(process for process, name in descendants(os.getpid()).items() if name.startswith(f"ray::{kind}"))


def kill_one(kind: str) -> None:
    os.kill(actors(kind)[-1], signal.SIGKILL)


def eventually(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s until {what}"
        time.sleep(0.05)
