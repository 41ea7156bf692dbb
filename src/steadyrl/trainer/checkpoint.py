"""Checkpoints: written beside and renamed, so that a folder with its final name is whole.

checkpoints/step_000040/
    model/                  Hugging Face format: any tool that reads such folders reads it
    optimizer.safetensors   of one process; of several trainer ranks optimizer/, a file a rank
    snapshots/              weights that the engine still needs, one file a version
    buffer.jsonl            streaming: the rollouts that wait to be trained on
    state.json              counters and position; lists every file with its size and checksum
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from steadyrl.errors import CheckpointError
from steadyrl.trainer.base import Learner

logger = logging.getLogger(__name__)
STATE = "state.json"
CONTENT = {"step": int, "state": dict, "files": dict, "checksum": str}  # what state.json holds ...
COUNTED = {"step": int, "counters": dict, "evaluated": int, "source": dict, "config": dict}  # ... and its state
CHUNK_BYTES = 1 << 22


State = Callable[[Path], Mapping[str, Any]]


def save_checkpoint(
    root: Path, learner: Learner, state: State, snapshots: Mapping[int, Mapping[str, Tensor]], keep: int
) -> Path:
    """Write the checkpoint of `learner.version`, then remove all but the newest `keep` up to it.

    `state` gives what comes into `state.json`; it may write files of its own into the folder that it is given.

    Raises:
        CheckpointError: it could not be written; earlier ones are left as they were.
    """
    final = root / f"step_{learner.version:06d}"
    partial = root / f".partial_{final.name}"
    for stale in root.glob(".partial_*"):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        _write(partial, learner, state, snapshots)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except Exception as error:  # OSError, SafetensorError; the tokenizer raises a plain Exception
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{final} could not be written ({error}): {_last_complete(root)}") from error
    made = [folder for folder in _folders(root) if _step(folder) <= learner.version]
    kept = [folder for folder in made if not isinstance(_read_state(folder), str)][-keep:]
    for old in made:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return final


def set_aside(root: Path, step: int) -> None:
    """Rename what lies beyond the checkpoint that a run is resumed from: its steps will be made again."""
    for folder in _folders(root):
        if _step(folder) > step:
            unused = root / f"unused_{folder.name}"
            shutil.rmtree(unused, ignore_errors=True)
            folder.rename(unused)


def _write(partial: Path, learner: Learner, state: State, snapshots: Mapping[int, Mapping[str, Tensor]]) -> None:
    (partial / "snapshots").mkdir(parents=True)
    learner.save(partial)
    for version, weights in snapshots.items():
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, partial / "snapshots" / f"version_{version}.safetensors")
    content = state(partial)
    files = {
        str(path.relative_to(partial)): _fingerprint(path) for path in sorted(partial.rglob("*")) if path.is_file()
    }
    # as it will be read: a tuple is a list then
    table = json.loads(json.dumps({"step": learner.version, "state": content, "files": files}))
    _write_synced(partial / STATE, json.dumps({**table, "checksum": state_checksum(table)}, indent=1))


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


def _last_complete(root: Path) -> str:
    try:
        return f"the last complete checkpoint is {latest_checkpoint(root)}"
    except CheckpointError:
        return "there is no complete checkpoint yet"


def load_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))["state"]


def load_snapshots(folder: Path) -> dict[int, dict[str, Tensor]]:
    return {
        int(path.stem.removeprefix("version_")): load_file(path)
        for path in (folder / "snapshots").glob("*.safetensors")
    }


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(
        (path for path in root.glob("step_*") if re.fullmatch(r"step_\d+", path.name) and path.is_dir()), key=_step
    )


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    content = _read_state(folder)
    if isinstance(content, str):
        return content
    for name, fingerprint in content["files"].items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if _fingerprint(path) != fingerprint:
                return f"{name} was changed or cut off"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None


def _read_state(folder: Path) -> dict[str, Any] | str:
    """What `state.json` holds, or what is wrong with it."""
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{STATE} cannot be read ({error})"
    if not _has(content, CONTENT) or not _has(content["state"], COUNTED) or not content["files"]:
        return f"{STATE} does not hold what a checkpoint does"
    if content["checksum"] != state_checksum(content):
        return f"{STATE} was changed"
    return content


def state_checksum(content: Mapping[str, Any]) -> str:
    """CRC-32 of what `state.json` holds beside it."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return f"{zlib.crc32(json.dumps(rest).encode()):08x}"


def _has(table: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(table, dict) and all(isinstance(table.get(key), kind) for key, kind in kinds.items())


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
