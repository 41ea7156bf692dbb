"""Whole runs through the command line: the same numbers whatever the backend, and after a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).parent.parent.parent / "recipes"
STEADYRL = [sys.executable, "-c", "from steadyrl.cli import main; main()"]
# ten optimizer steps on a lag that no batch boundary meets, with evaluations in between
SMALL = [
    "trainer.steps=10",
    "trainer.lr=3e-4",
    "pipeline.lag=3",
    "evaluation.every_steps=4",
    "evaluation.prompts=6",
    "pipeline.prompts_per_batch=4",
    "pipeline.responses_per_prompt=4",
    "sampling.max_response_tokens=20",
]


def command(folder: Path, *arguments: str) -> list[str]:
    return [*STEADYRL, "train", str(RECIPES / "smoke.toml"), f"run_dir={folder}", *SMALL, *arguments]


def train(folder: Path, *arguments: str) -> str:
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def numbers(folder: Path) -> list:
    """Everything that a run logs, but for the clock."""
    steps = [
        {key: row[key] for key in ("step", "batch_id", "metrics", "histograms")}
        for row in rows(folder, "metrics.jsonl")
    ]
    return [steps, rows(folder, "evaluations.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run that the others are compared with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, "pipeline.backend=inline")
    return folder


def test_a_run_leaves_a_complete_folder(whole):
    steps, evaluations = numbers(whole)
    assert [row["step"] for row in steps] == list(range(1, 11))
    assert [row["version"] for row in evaluations] == [0, 4, 8, 10]
    assert max(row["metrics"]["staleness/lag_max"] for row in steps) == 3
    for row in steps:
        metrics = row["metrics"]
        parts = (metrics["counts/trained"], metrics["counts/dropped"], metrics["counts/buffered"])
        assert metrics["counts/generated"] == sum(parts) == 16 * row["step"]
    assert json.loads((whole / "status.json").read_text())["state"] == "finished"
    assert (whole / "report.html").stat().st_size > 10_000
    assert (whole / "checkpoints" / "step_000010" / "model" / "config.json").is_file()
    assert len(list((whole / "rollouts").iterdir())) == 10


def test_the_process_backend_gives_the_same_numbers(whole, tmp_path):
    train(tmp_path / "run", "pipeline.backend=process")
    assert numbers(tmp_path / "run") == numbers(whole)


def test_again_is_the_same(whole, tmp_path):
    train(tmp_path / "run")
    assert numbers(tmp_path / "run") == numbers(whole)


def test_another_seed_is_not_the_same(whole, tmp_path):
    train(tmp_path / "run", "seed=1")
    assert numbers(tmp_path / "run") != numbers(whole)


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_five_and_five_steps_are_ten(whole, tmp_path, backend):
    folder = tmp_path / "run"
    train(folder, f"pipeline.backend={backend}", "trainer.steps=5")
    train(folder, f"pipeline.backend={backend}", "--resume")
    steps, evaluations = numbers(folder)
    assert steps == numbers(whole)[0]
    # the shorter run also evaluated its own last step
    assert [row for row in evaluations if row["version"] != 5] == numbers(whole)[1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal_and_resumed(whole, tmp_path, signum):
    folder = tmp_path / "run"
    arguments = ("pipeline.backend=process", "trainer.steps=10")
    process = subprocess.Popen(command(folder, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(process, folder, 2)
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    state = json.loads((folder / "status.json").read_text())
    if state["state"] == "stopped":  # a fast machine may have been done already
        assert "--resume" in out
        train(folder, "pipeline.backend=process", "--resume")
    assert numbers(folder) == numbers(whole)


def test_several_optimizer_steps_per_batch_resume_inside_a_batch(tmp_path):
    shape = [
        "pipeline.steps_per_batch=2",
        "pipeline.lag=3",
        "trainer.steps=8",
        "checkpoint.every_steps=3",
        "checkpoint.keep=9",
    ]
    train(tmp_path / "whole", *shape)
    halted = tmp_path / "halted"
    train(halted, *shape)
    for later in ("step_000006", "step_000008"):
        (halted / "checkpoints" / later / "state.json").unlink()
    train(halted, *shape, "--resume")
    assert numbers(halted) == numbers(tmp_path / "whole")
    assert max(row["metrics"]["staleness/lag_max"] for row in rows(halted, "metrics.jsonl")) == 5


def test_extending_a_run_does_not_evaluate_its_last_step_twice(tmp_path):
    folder = tmp_path / "run"
    train(folder, "trainer.steps=4")  # evaluation.every_steps is 4
    train(folder, "trainer.steps=8", "--resume")
    assert [row["version"] for row in rows(folder, "evaluations.jsonl")] == [0, 4, 8]


def test_broadcasts_that_fall_inside_a_batch(tmp_path):
    shape = ["pipeline.steps_per_batch=3", "pipeline.prompts_per_batch=3", "pipeline.lag=4", "trainer.steps=15"]
    train(tmp_path / "run", *shape)
    assert max(row["metrics"]["staleness/lag_max"] for row in rows(tmp_path / "run", "metrics.jsonl")) == 8


def test_a_killed_engine_ends_the_run_with_its_cause_and_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(folder, "pipeline.backend=process", "trainer.steps=2000"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wait_for_step(process, folder, 1)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True, check=False
    )
    os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the engine process died (signal SIGKILL)" in err
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    reached = rows(folder, "metrics.jsonl")[-1]["step"]
    assert (folder / "checkpoints" / f"step_{reached:06d}" / "state.json").is_file()


def test_a_killed_trainer_leaves_no_engine_behind(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(folder, "pipeline.backend=process", "trainer.steps=2000"),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_for_step(process, folder, 1)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a child process outlived its trainer"
        time.sleep(0.1)


def test_an_unknown_key_exits_with_2_and_names_the_right_one():
    done = subprocess.run(
        [*STEADYRL, "train", str(RECIPES / "tiny.toml"), "pipelin.lag=8"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pipeline.lag" in done.stderr
    assert "Traceback" not in done.stderr


def test_resuming_nothing_or_another_recipe_exits_with_2(whole, tmp_path):
    nothing = subprocess.run(command(tmp_path / "none", "--resume"), capture_output=True, text=True, check=False)
    assert nothing.returncode == 2
    assert "start without --resume" in nothing.stderr
    other = subprocess.run(
        command(whole, "--resume", "trainer.lr=1e-3", "trainer.steps=20"), capture_output=True, text=True, check=False
    )
    assert other.returncode == 2
    assert "trainer.lr = 0.0003" in other.stderr
    done = subprocess.run(command(whole, "--resume"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "raise trainer.steps" in done.stderr


def test_a_run_is_never_overwritten(whole):
    before = (whole / "metrics.jsonl").read_text()
    out = train(whole, "trainer.steps=2")
    assert f"{whole}-2" in out
    assert (whole / "metrics.jsonl").read_text() == before


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(rows(folder, "metrics.jsonl")) < step:
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, "the run did not reach its first steps"
        time.sleep(0.05)
