"""Checkpoints: whole or not there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from steadyrl.errors import CheckpointError
from steadyrl.trainer.checkpoint import (
    latest_checkpoint,
    load_snapshots,
    load_state,
    save_checkpoint,
    set_aside,
    state_checksum,
)


class FakeLearner:
    def __init__(self, version: int) -> None:
        self.version = version

    def save(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(bytes(1000))


def save(root: Path, version: int, keep: int = 3) -> Path:
    snapshots = {version - 1: {"w": torch.full((2, 2), float(version))}}
    return save_checkpoint(root, FakeLearner(version), lambda _: state(version), snapshots, keep)  # type: ignore[arg-type]


def state(version: int) -> dict:
    return {"step": version, "counters": {}, "evaluated": -1, "source": {}, "config": {}}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_found_and_only_so_many_are_kept(tmp_path):
    for version in (5, 10, 20, 100):
        save(tmp_path, version)
    latest = latest_checkpoint(tmp_path)
    assert latest.name == "step_000100"
    assert load_state(latest) == state(100)
    assert load_snapshots(latest)[99]["w"].tolist() == [[100.0, 100.0]] * 2
    assert names(tmp_path) == ["step_000010", "step_000020", "step_000100"]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "state", "no state"])
def test_a_torn_one_is_passed_over_with_a_sentence(tmp_path, caplog, damage):
    save(tmp_path, 1)
    torn = save(tmp_path, 2)
    weights = torn / "model" / "weights"
    if damage == "cut":
        weights.write_bytes(bytes(500))
    elif damage == "flip":
        weights.write_bytes(bytes(999) + b"x")
    elif damage == "remove":
        weights.unlink()
    elif damage == "state":
        (torn / "state.json").write_text('{"step": 2, "fi')
    else:
        (torn / "state.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path).name == "step_000001"
    assert "step_000002 is not used" in caplog.text


def test_one_that_was_being_written_does_not_count(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".partial_step_000002").mkdir()
    assert latest_checkpoint(tmp_path).name == "step_000001"
    save(tmp_path, 2)
    assert latest_checkpoint(tmp_path).name == "step_000002"


def test_none_at_all_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="start without --resume"):
        latest_checkpoint(tmp_path)


WHOLE = {"step": 2, "state": state(2), "files": {"model/weights": "1000-00000000"}}


def signed(**changes: Any) -> str:
    """What a state.json would hold, with a checksum that agrees."""
    table = json.loads(json.dumps({**WHOLE, **changes}))
    return json.dumps({**table, "checksum": state_checksum(table)})


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "5",
        "{}",
        "[" * 100_000,
        signed(state=None),
        signed(state={"step": 2}),
        signed(state={**state(2), "counters": []}),
        signed(files=["model/weights"]),
        signed(files={}),
        signed(),
        json.dumps(WHOLE),
    ],
    ids=lambda text: text[:60],
)
def test_a_state_that_is_json_but_wrong_is_passed_over(tmp_path, caplog, text):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "state.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path).name == "step_000001"
    assert "step_000002 is not used" in caplog.text


def test_a_state_that_was_edited_is_passed_over(tmp_path, caplog):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "state.json"
    assert latest_checkpoint(tmp_path).name == "step_000002"
    content = json.loads(file.read_text())
    content["state"]["source"] = {"held": 1}
    file.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path).name == "step_000001"
    assert "state.json was changed" in caplog.text


def test_later_and_damaged_ones_do_not_push_out_the_one_just_written(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "state.json").unlink()
    for later in ("step_000050", "step_000060"):
        (tmp_path / later).mkdir()
    (tmp_path / "step_000070").write_text("a file")
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step_000001", "step_000003", "step_000050", "step_000060", "step_000070"]
    assert latest_checkpoint(tmp_path).name == "step_000003"


def test_what_lies_beyond_the_checkpoint_resumed_from_is_set_aside(tmp_path):
    for version in (1, 2, 3):
        (save(tmp_path, version) / "state.json").touch()
    (tmp_path / "unused_step_000003" / "old").mkdir(parents=True)
    set_aside(tmp_path, 1)
    assert names(tmp_path) == ["step_000001", "unused_step_000002", "unused_step_000003"]
    assert not (tmp_path / "unused_step_000003" / "old").exists()


def test_stale_partial_folders_are_removed(tmp_path):
    (tmp_path / ".partial_step_000007" / "model").mkdir(parents=True)
    save(tmp_path, 1)
    assert names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_disk_names_the_last_complete_checkpoint(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("steadyrl.trainer.checkpoint.save_file", fail)
    with pytest.raises(CheckpointError, match=r"step_000001.*there is no complete checkpoint"):
        save(tmp_path, 1)
    monkeypatch.undo()
    save(tmp_path, 1)
    monkeypatch.setattr("steadyrl.trainer.checkpoint.save_file", fail)
    with pytest.raises(CheckpointError, match=r"step_000002.*the last complete checkpoint is .*step_000001"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step_000001"]
