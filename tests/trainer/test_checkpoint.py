"""Checkpoints: whole or not there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from steadyrl.errors import CheckpointError
from steadyrl.trainer.checkpoint import latest_checkpoint, load_snapshots, load_state, save_checkpoint


class FakeLearner:
    def __init__(self, version: int) -> None:
        self.version = version

    def save(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(bytes(1000))


def save(root: Path, version: int, keep: int = 3) -> Path:
    snapshots = {version - 1: {"w": torch.full((2, 2), float(version))}}
    return save_checkpoint(root, FakeLearner(version), {"step": version}, snapshots, keep)  # type: ignore[arg-type]


def test_the_newest_is_found_and_only_so_many_are_kept(tmp_path):
    for version in (5, 10, 20, 100):
        save(tmp_path, version)
    latest = latest_checkpoint(tmp_path)
    assert latest.name == "step_000100"
    assert load_state(latest) == {"step": 100}
    assert load_snapshots(latest)[99]["w"].tolist() == [[100.0, 100.0]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000020", "step_000100"]


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
