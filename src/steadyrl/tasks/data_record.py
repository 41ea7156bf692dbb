"""What a run was fed with, as `Task.data` has it: said, stored with the run, and compared when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from steadyrl.errors import ConfigError, SteadyRLError
from steadyrl.tasks.problems import SourceCount

DATA = "data.json"  # in a run folder


def describe(data: dict[str, Any]) -> list[str]:
    """A sentence for each source and each bad row, and one for each split; none for a procedural task."""
    sentences = []
    for split, found in data.items():
        sentences += [f"{split} data: {SourceCount(**source).sentence()}" for source in found["sources"]]
        sentences += [f"{split} data: bad row left out: {row}" for row in found["bad_rows"]]
        if found["sources"]:
            sentences.append(f"{split} data: {found['problems']:,} problems, checksum {found['checksum']}")
    return sentences


def store_data(folder: Path, data: dict[str, Any]) -> None:
    """Write `data.json` into a run folder, where there is something to say."""
    if not data:
        return
    try:
        (folder / DATA).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise SteadyRLError(f"{folder / DATA} could not be written ({error}): make room for it") from error


def check_same_data(folder: Path, data: dict[str, Any]) -> None:
    """A resumed run goes on by positions, and they mean the same prompts only in the same data.

    Raises:
        ConfigError: the data are not those that the run was begun with.
    """
    if not data:
        return
    try:
        before = json.loads((folder / DATA).read_text(encoding="utf-8"))
        sums = {split: before[split]["checksum"] for split in data}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / DATA} cannot be read ({error}), so nobody knows what it trained on: start a new run_dir"
        ) from None
    for split, found in data.items():
        if found["checksum"] != sums[split]:
            raise ConfigError(
                f"the {split} data of {folder} have changed (checksum {sums[split]}, now {found['checksum']}): "
                "restore them, or start a new run_dir"
            )
