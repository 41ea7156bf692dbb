"""The streaming regime through the command line: the bound is kept and reached, nothing is lost or trained on twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from steadyrl.errors import CheckpointError
from steadyrl.recipe import load_config
from steadyrl.run import train as train_here
from steadyrl.trainer import learner

RECIPES = Path(__file__).parent.parent.parent / "recipes"
STEADYRL = [sys.executable, "-c", "from steadyrl.cli import main; main()"]
SMALL = [
    "trainer.lr=3e-4",
    "evaluation.every_steps=4",
    "evaluation.prompts=6",
    "pipeline.prompts_per_batch=4",
    "pipeline.responses_per_prompt=4",
    "sampling.max_response_tokens=20",
    "record.rollouts_every_batches=1",
]
STREAMING = ["pipeline.regime=streaming", "pipeline.lag=1"]


def command(folder: Path, *arguments: str) -> list[str]:
    return [*STEADYRL, "train", str(RECIPES / "smoke.toml"), f"run_dir={folder}", *SMALL, *arguments]


def train(folder: Path, *arguments: str) -> str:
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def trained_prompts(folder: Path) -> list[str]:
    """The prompt of every group that was trained on, in order."""
    files = sorted((folder / "rollouts").iterdir())
    groups = [rollout for file in files for rollout in map(json.loads, file.read_text().splitlines())][::4]
    return [rollout["prompt_id"] for rollout in groups if rollout["train_version"] is not None]


def check_books(folder: Path) -> None:
    for row in rows(folder, "metrics.jsonl"):
        count = {name: row["metrics"][f"counts/{name}"] for name in ("generated", "trained", "dropped", "buffered")}
        assert count["generated"] == count["trained"] + count["dropped"] + count["buffered"]
        assert count["trained"] == 16 * row["step"]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sync") / "run"
    train(folder, "pipeline.regime=sync", "pipeline.lag=0", "trainer.steps=6", "pipeline.backend=inline")
    return folder


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_a_bound_of_0_is_the_synchronous_run(synchronous, tmp_path, backend):
    train(tmp_path / "run", *STREAMING, "pipeline.max_lag=0", "trainer.steps=6", f"pipeline.backend={backend}")
    assert rows(tmp_path / "run", "evaluations.jsonl") == rows(synchronous, "evaluations.jsonl")
    pairs = zip(rows(tmp_path / "run", "metrics.jsonl"), rows(synchronous, "metrics.jsonl"), strict=True)
    for streamed, expected in pairs:
        metrics = {name: value for name, value in streamed["metrics"].items() if name in expected["metrics"]}
        assert metrics == expected["metrics"]
        assert streamed["histograms"] == expected["histograms"]


@pytest.mark.parametrize(("max_lag", "backend"), [(1, "inline"), (3, "process"), (8, "inline"), (8, "process")])
def test_the_bound_is_reached_and_never_exceeded(tmp_path, max_lag, backend):
    train(
        tmp_path / "run",
        *STREAMING,
        f"pipeline.max_lag={max_lag}",
        f"pipeline.groups_in_flight={4 * (max_lag + 1)}",
        f"pipeline.queue_groups={4 * (max_lag + 1)}",
        "engine.max_sequences=48",
        f"trainer.steps={2 * max_lag + 6}",
        f"pipeline.backend={backend}",
    )
    steps = rows(tmp_path / "run", "metrics.jsonl")
    assert max(row["metrics"]["staleness/lag_max"] for row in steps) == max_lag
    check_books(tmp_path / "run")
    trained = trained_prompts(tmp_path / "run")
    assert sorted(trained, key=lambda name: int(name.split("/")[1])) == [f"train/{i}" for i in range(len(trained))]
    for row in steps:  # the parts make up the whole, token by token
        lag, generating, queued = (row["histograms"][name] for name in ("lag", "lag_generating", "lag_queued"))
        assert sum(lag) == sum(generating) == sum(queued) == row["metrics"]["sampled_tokens"]
        means = [sum(i * count for i, count in enumerate(part)) for part in (lag, generating, queued)]
        assert means[0] == means[1] + means[2]


def test_weights_arrive_in_the_middle_of_responses(tmp_path):
    train(
        tmp_path / "run",
        *STREAMING,
        "pipeline.max_lag=4",
        "pipeline.groups_in_flight=12",
        "engine.max_sequences=16",
        "trainer.steps=8",
        "pipeline.backend=inline",
    )
    rollouts = [json.loads(line) for file in (tmp_path / "run" / "rollouts").iterdir() for line in file.open()]
    versions = [{v for v in rollout["versions"] if v >= 0} for rollout in rollouts]
    assert any(len(seen) > 1 for seen in versions)
    for rollout in rollouts:
        sampled = [v for v in rollout["versions"] if v >= 0]
        assert sampled == sorted(sampled)


def test_a_disk_that_fills_up_costs_nothing_that_was_saved(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    arguments = [*SMALL, *STREAMING, "pipeline.max_lag=3", "pipeline.groups_in_flight=12", "checkpoint.every_steps=1"]
    arguments += ["trainer.steps=6", "pipeline.backend=inline", f"run_dir={folder}"]
    config, save_model = load_config(RECIPES / "smoke.toml", arguments), learner.save_model

    def save(model, tokenizer, folder: Path, *rest) -> None:
        save_model(model, tokenizer, folder, *rest)
        if "step_000004" in str(folder):
            (folder / "model.safetensors").write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(learner, "save_model", save)
    with pytest.raises(CheckpointError, match=r"step_000004.*No space left.*last complete checkpoint is .*step_000003"):
        train_here(config)
    monkeypatch.undo()
    assert train_here(config, resume=True).finished
    assert [row["step"] for row in rows(folder, "metrics.jsonl")] == list(range(1, 7))
    check_books(folder)
    assert max(Counter(trained_prompts(folder)).values()) == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_resumed_run_trains_on_every_prompt_once(tmp_path, how):
    folder = tmp_path / "run"
    arguments = [*STREAMING, "pipeline.max_lag=3", "trainer.steps=14", "checkpoint.every_steps=2"]
    arguments += ["pipeline.groups_in_flight=12", "engine.max_sequences=16", "pipeline.backend=process"]
    process = subprocess.Popen(command(folder, *arguments), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + 300
        while not (folder / "metrics.jsonl").exists() or len(rows(folder, "metrics.jsonl")) < 5:
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(process.pid, how)
        process.wait(timeout=300)
    train(folder, *arguments, "--resume")
    assert [row["step"] for row in rows(folder, "metrics.jsonl")] == list(range(1, 15))
    check_books(folder)
    trained = trained_prompts(folder)
    assert len(trained) == 4 * 14
    assert max(Counter(trained).values()) == 1
    assert max(row["metrics"]["staleness/lag_max"] for row in rows(folder, "metrics.jsonl")) <= 3
