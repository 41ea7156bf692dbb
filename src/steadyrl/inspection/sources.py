"""From what the user names to files with a known format, in the order of their steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from steadyrl.errors import ConfigError
from steadyrl.inspection.formats import NEMO_RL, OWN, OWN_PARQUET, PRIME_RL, SLIME, Format, Source

READABLE = (".jsonl", ".parquet", ".pt")
PICKLES = (".pkl", ".pickle")
FIRST_LINE_BYTES = 1 << 28  # a first line that is longer is no JSON line of ours
LAYOUTS = (
    "rollouts/*.jsonl",  # a run of steadyrl
    "token_exports/step_*/rank_*.jsonl",  # prime-rl
    "step_*/rank_*.jsonl",
    "rank_*.jsonl",
    "train_data/*.pt",  # slime, miles
    "train_data_step*.jsonl",  # NeMo-RL
    "exp_*/train_data_step*.jsonl",
    "*.jsonl",
    "*.parquet",
    "*.pt",
)
NEEDED = {  # to know the format of JSON lines
    OWN: {"behavior_logp", "loss_mask"},
    PRIME_RL: {"inference_logprobs", "loss_mask"},
    NEMO_RL: {"generation_logprobs", "token_loss_mask"},
}
TELLING = {OWN: {"trainer_logp", "old_logp"}, PRIME_RL: {"trainer_logprobs"}, NEMO_RL: {"prev_logprobs"}}
RUN_FILES = {"metrics.jsonl", "evaluations.jsonl", "timeline.jsonl"}  # of a run folder: no token data


def find_sources(paths: Sequence[Path]) -> list[tuple[Format, Source]]:
    """The files behind `paths`, which may be files and folders of any of the layouts.

    Raises:
        ConfigError: nothing there, a format that is not known, or one that cannot be read safely.
    """
    files = [file for path in paths for file in _files(path)]
    doubled = {file for file in files if files.count(file) > 1}
    if doubled:
        raise ConfigError(f"{sorted(doubled)[0]} is named twice: name each file once")
    return [(_format(file), Source(file, place, _step_in_name(file))) for place, file in enumerate(files)]


def notes(files: Iterable[Path]) -> list[str]:
    """What the layout says about completeness."""
    open_steps = sorted(
        {file.parent.name for file in files if file.name.startswith("rank_") and not (file.parent / "STABLE").exists()}
    )
    if not open_steps:
        return []
    return [f"no STABLE marker in {', '.join(open_steps[:3])}: these steps may still have been written"]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"there is no file or folder at {path}")
    for layout in LAYOUTS:
        found = [file for file in path.glob(layout) if file.name not in RUN_FILES]
        if found:
            return sorted(found, key=_natural)
    pickles = [file for ending in PICKLES for file in path.rglob(f"*{ending}")]
    if pickles:
        return sorted(pickles, key=_natural)[:1]  # refused, with the way out
    raise ConfigError(
        f"{path} holds no token data: name a run folder, or a folder or files of {', '.join(READABLE)} "
        "(docs/inspect.md lists the layouts)"
    )


def _format(file: Path) -> Format:
    if file.suffix in PICKLES:
        raise ConfigError(
            f"{file} is a pickle, and loading one runs whatever code is in it, so it is not read: convert it to JSON "
            "lines in the environment that wrote it (for a SkyRL batch, docs/inspect.md has the ten lines)"
        )
    if file.suffix == ".parquet":
        return OWN_PARQUET
    if file.suffix == ".pt":
        return SLIME
    if file.suffix == ".jsonl":
        return _json_format(file)
    raise ConfigError(f"{file} is none of {', '.join(READABLE)}: docs/inspect.md says how to write one of them")


def _json_format(file: Path) -> Format:
    """By the keys of the first row."""
    keys = set(_first_row(file))
    for format, needed in NEEDED.items():
        if needed <= keys:
            return format
    if "generation_logprobs" in keys:
        raise ConfigError(
            f"{file} was written by a NeMo-RL without token_loss_mask, so nobody can tell which tokens were trained "
            "on: add it (docs/inspect.md), or record the run with a version that writes it"
        )
    for format, needed in NEEDED.items():
        there = sorted(keys & (needed | TELLING[format]) - {"loss_mask"})
        if there:
            raise ConfigError(
                f"the first row of {file} has {' and '.join(there)}, but no {' and no '.join(sorted(needed - keys))}: "
                "add it to every row, as docs/inspect.md shows"
            )
    listed = ", ".join(sorted(keys)[:8]) or "none"
    raise ConfigError(
        f"{file} has no log-probabilities under a known name (its first keys: {listed}): docs/inspect.md has the "
        "names of every format, and those of our own"
    )


def _first_row(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as lines:
            whole_lines = enumerate(iter(lambda: lines.readline(FIRST_LINE_BYTES), b""), start=1)
            number, line = next(((number, line) for number, line in whole_lines if line.strip()), (0, b""))
        row = json.loads(line) if line else None
    except (ValueError, RecursionError):
        raise ConfigError(f"the first line of {file} is not JSON: one JSON object per line is needed") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error}): name another file") from None
    if not line:
        raise ConfigError(f"{file} is empty: name files that were written to")
    if not isinstance(row, dict):
        raise ConfigError(f"line {number} of {file} is not an object: one JSON object per line is needed")
    return row


def _step_in_name(file: Path) -> int | None:
    """NeMo-RL says its step nowhere else."""
    found = re.fullmatch(r"train_data_step(\d+)\.jsonl", file.name)
    return int(found.group(1)) if found else None


def _natural(file: Path) -> list[tuple[int, int | str]]:
    """step_2 before step_10."""
    parts = re.split(r"(\d+)", str(file))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
