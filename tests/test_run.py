"""Run folders and resuming, in this process; whole runs are in e2e."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from steadyrl import run
from steadyrl.continuation import claim_folder
from steadyrl.errors import ConfigError
from steadyrl.recipe import build_config
from steadyrl.reports.recorder import RunFolder
from steadyrl.run import train
from steadyrl.trainer.checkpoint import state_checksum

OVERRIDES = [
    "trainer.steps=2",
    "pipeline.backend=inline",
    "evaluation.prompts=2",
    "evaluation.samples_per_prompt=1",
    "pipeline.prompts_per_batch=1",
    "pipeline.responses_per_prompt=2",
    "sampling.max_response_tokens=2",
    "evaluation.max_response_tokens=2",
    "checkpoint.every_steps=1",
]


def small(folder: Path | str, *overrides: str):
    return build_config({"run_dir": str(folder)}, [*OVERRIDES, *overrides])


@pytest.fixture
def trained(tmp_path):
    train(small(tmp_path / "run"))
    return tmp_path / "run"


def make_checkpoint(folder: Path, config: object) -> None:
    checkpoint = folder / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "empty").touch()
    state = {"step": 1, "counters": {}, "evaluated": 0, "source": {}, "config": config}
    content = {"step": 1, "state": state, "files": {"empty": "0-00000000"}}
    (checkpoint / "state.json").write_text(json.dumps({**content, "checksum": state_checksum(content)}))


def test_a_run_can_be_continued_with_other_timeouts_and_leftovers_are_set_aside(trained):
    (trained / "checkpoints" / "step_000002" / "state.json").unlink()
    config = small(trained, "trainer.steps=3", "engine.start_timeout_s=9", "engine.generate_timeout_s=9")
    assert train(config, resume=True).finished
    names = sorted(path.name for path in (trained / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003", "unused_step_000002"]


def test_a_run_in_use_is_not_resumed(trained):
    with RunFolder.open(trained), pytest.raises(ConfigError, match="another process"):
        train(small(trained, "trainer.steps=3"), resume=True)


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    config = small(tmp_path / "run")
    RunFolder.create(tmp_path / "run", config).close()
    make_checkpoint(tmp_path / "run", {**config.model_dump(mode="json"), "gone": 1})
    with pytest.raises(ConfigError, match="another version"):
        train(config, resume=True)


@pytest.mark.parametrize("name", ["file", "file/inside", "/dev/null", "n" * 300, "a\0b", "a\udcffb/c", "/proc/run"])
def test_a_run_dir_that_cannot_be_made_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run_dir"):
        train(small(tmp_path / name))


def test_the_first_error_survives_a_full_disk(tmp_path, monkeypatch):
    def fail(*_):
        (tmp_path / "run" / ".status.json.draft").symlink_to("/dev/full")
        raise ZeroDivisionError("the cause")

    monkeypatch.setattr(run, "build_backend", fail)
    with pytest.raises(ZeroDivisionError, match="the cause"):
        train(small(tmp_path / "run"))


def test_no_two_runs_claim_one_folder(tmp_path):
    (tmp_path / "run").mkdir()
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(claim_folder, [str(tmp_path / "run")] * 16))
    assert sorted(path.name for path in set(claimed)) == sorted(["run", *(f"run-{n}" for n in range(2, 17))])
