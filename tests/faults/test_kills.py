"""Fifty kills at random moments: the run resumes each time, loses nothing, trains on nothing twice, leaves nothing.

Not part of `make test` (it takes minutes): `make test-faults`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from steadyrl.recipe import load_config

pytestmark = pytest.mark.faults
RECIPE = Path(__file__).parents[2] / "recipes" / "smoke.toml"
KILLS = 25  # for each of the two parameters
SMALL = [
    "trainer.lr=1e-5",
    "evaluation.every_steps=3",
    "evaluation.prompts=4",
    "pipeline.prompts_per_batch=4",
    "pipeline.responses_per_prompt=2",
    "sampling.max_response_tokens=16",
    "engine.max_sequences=12",
    "record.rollouts_every_batches=1",
    "checkpoint.every_steps=1",
    "pipeline.regime=streaming",
    "pipeline.lag=1",
    "pipeline.max_lag=3",
    "pipeline.groups_in_flight=8",
]


def run(folder: str, backend: str, steps: int, resume: bool) -> None:
    """A run or its continuation, in a process of its own; ends with exit code 1 if its engine was killed."""
    os.setpgid(0, 0)
    # a run of its own has a process of its own that clears up after it; from the fork server it would share this test's
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    from steadyrl.run import train

    settings = [*SMALL, f"run_dir={folder}", f"trainer.steps={steps}", f"pipeline.backend={backend}"]
    train(load_config(RECIPE, settings), resume=resume)


def rows(folder: Path, name: str) -> list[dict]:
    lines = (folder / name).read_text().split("\n")[:-1] if (folder / name).exists() else []
    return [json.loads(line) for line in lines]


def has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step_*/state.json"))


def newest_step(folder: Path) -> int:
    return max(int(path.parent.name[5:]) for path in (folder / "checkpoints").glob("step_*/state.json"))


def members(group: int) -> list[int]:
    """Processes of a group that still live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def shared_memory(pids: list[int]) -> set[Path]:
    """The blocks of shared memory that these processes have in use; other programs may have their own."""
    used: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
            used |= {Path(line.split()[5]) for line in lines if "/dev/shm/psm_" in line}
    return used


def eventually(condition, what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s until {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_a_run_survives_kills_at_random_moments(tmp_path, backend):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["steadyrl.run"])
    folder, chance = tmp_path / "run", random.Random(backend)
    steps, kills = 1_000_000, 0
    while kills < KILLS:
        resume = has_checkpoint(folder)
        if not resume:
            assert kills == 0, "a checkpoint was lost"
        reached = len(rows(folder, "metrics.jsonl")) if resume else 0
        process = context.Process(target=run, args=(str(folder), backend, steps, resume))
        process.start()
        assert process.pid is not None
        if not resume:
            eventually(lambda: has_checkpoint(folder), "the first checkpoint is there", 120)
        else:  # at least one more step, so that the run gets on; then any moment
            first = newest_step(folder)
            eventually(lambda first=first: newest_step(folder) > first, "the resumed run made a step", 120)
        time.sleep(chance.uniform(0, 0.5))
        used = shared_memory(members(process.pid))
        assert bool(used) == (backend == "process")
        engines = [pid for pid in members(process.pid) if pid != process.pid and is_engine(pid)]
        victim = chance.choice([process.pid, *engines])
        os.kill(victim, signal.SIGKILL)
        kills += 1
        process.join(timeout=60)
        assert process.exitcode is not None, "the run hangs after its engine was killed"
        assert process.exitcode != 0
        eventually(lambda group=process.pid: not members(group), "no orphan is left", 30)
        eventually(lambda used=used: not any(block.exists() for block in used), "no shared memory is left", 30)
        assert len(rows(folder, "metrics.jsonl")) >= reached
    last = rows(folder, "metrics.jsonl")[-1]["step"] + 3
    process = context.Process(target=run, args=(str(folder), backend, last, True))
    process.start()
    process.join(timeout=180)
    assert process.exitcode == 0
    check(folder, last)


def is_engine(pid: int) -> bool:
    try:
        return b"spawn_main" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def check(folder: Path, steps: int) -> None:
    metrics = rows(folder, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    for row in metrics:
        count = {name: row["metrics"][f"counts/{name}"] for name in ("generated", "trained", "dropped", "buffered")}
        assert count["generated"] == count["trained"] + count["dropped"] + count["buffered"]
        assert count["trained"] == 8 * row["step"]
        assert row["metrics"]["staleness/lag_max"] <= 3
    files = sorted((folder / "rollouts").glob("batch_*.jsonl"))[:steps]
    groups = [json.loads(line) for file in files for line in file.read_text().splitlines()][::2]
    trained = Counter(row["prompt_id"] for row in groups if row["train_version"] is not None)
    assert sum(trained.values()) == 4 * steps
    assert max(trained.values()) == 1
    numbers = sorted(int(name.split("/")[1]) for name in trained)
    assert numbers[-1] < 4 * steps + 16  # none was skipped for good: what is missing was in flight or waiting
