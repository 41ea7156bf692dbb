"""Checkpoints: written beside and renamed, so that a folder with its final name is whole.

checkpoints/step_000040/
    model/                  Hugging Face format: any tool that reads such folders reads it
    optimizer.safetensors
    snapshots/              weights that the engine still needs, one file a version
    state.json              counters and position; lists every file with its size and checksum
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from steadyrl.errors import CheckpointError
from steadyrl.trainer.base import Learner

logger = logging.getLogger(__name__)
STATE = "state.json"
CHUNK_BYTES = 1 << 22


def save_checkpoint(
    root: Path, learner: Learner, state: Mapping[str, Any], snapshots: Mapping[int, Mapping[str, Tensor]], keep: int
) -> Path:
    """Write the checkpoint of `learner.version`, then remove all but the newest `keep`."""
    final = root / f"step_{learner.version:06d}"
    partial = root / f".partial_{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "snapshots").mkdir(parents=True)
    learner.save(partial)
    for version, weights in snapshots.items():
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, partial / "snapshots" / f"version_{version}.safetensors")
    files = {
        str(path.relative_to(partial)): _fingerprint(path) for path in sorted(partial.rglob("*")) if path.is_file()
    }
    _write_synced(partial / STATE, json.dumps({"step": learner.version, "state": state, "files": files}, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(root: Path) -> Path:
    """The newest complete checkpoint; a torn one is passed over with a warning.

    Raises:
        CheckpointError: there is none.
    """
    for folder in reversed(_folders(root)):
        fault = _fault(folder)
        if fault is None:
            return folder
        logger.warning("%s is not used: %s", folder, fault)
    raise CheckpointError(f"there is no complete checkpoint in {root}: start without --resume")


def load_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))["state"]


def load_snapshots(folder: Path) -> dict[int, dict[str, Tensor]]:
    return {
        int(path.stem.removeprefix("version_")): load_file(path)
        for path in (folder / "snapshots").glob("*.safetensors")
    }


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [path for path in root.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((folder / STATE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{STATE} cannot be read ({error})"
    for name, fingerprint in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _fingerprint(path) != fingerprint:
            return f"{name} was changed or cut off"
    return None


def _fingerprint(path: Path) -> str:
    """Size and CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return f"{path.stat().st_size}-{crc:08x}"


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
