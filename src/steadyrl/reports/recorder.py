"""The run folder: what a training loop writes, and what any script can read back.

    config.toml         the whole recipe, defaults filled in
    metrics.jsonl       one StepReport per optimizer step
    evaluations.jsonl   one row per evaluation
    timeline.jsonl      who did what, when: actor, phase, start_s, end_s, step
    rollouts/           batch_000012.jsonl, one rollout per line
    status.json         running, finished, stopped or failed
    .lock               held by the process that writes

Every row is on disk before the call returns, so a run that dies loses nothing it reported. The files
are plain JSON: a number that is not finite is written as null.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import tomli_w

from steadyrl.errors import ConfigError, SteadyRLError

if TYPE_CHECKING:  # reading a run needs neither pydantic nor torch
    from steadyrl.config import RunConfig
    from steadyrl.types import RolloutBatch, StepReport

Row = dict[str, Any]

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
TIMELINE = "timeline.jsonl"
STATUS = "status.json"
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"  # held by the one process that writes
STEPPED = (METRICS, EVALUATIONS, TIMELINE)  # files whose rows carry a step


class RunFolder:
    """The writing side; one process at a time has it. Make one with `create` or `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.elapsed_s = 0.0  # training time of earlier processes
        self._lock = hold(path)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write; the end of this one does so too."""
        self._lock.close()

    @classmethod
    def create(cls, path: Path | str, config: RunConfig) -> RunFolder:
        """Start a new run, in a folder that holds none."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run_dir={path} is a file: choose another run_dir")
        if any((path / name).exists() for name in (METRICS, STATUS)):
            raise ConfigError(f"{path} already holds a run: choose another run_dir, or continue it with --resume")
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        _write_config(path, config)
        return folder

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Take over a run that no process writes any more; `rewind` comes next."""
        path = Path(path)
        if not os.path.isfile(path / CONFIG):
            raise ConfigError(f"{path} holds no run to continue: start without --resume")
        return cls(path)

    def rewind(self, config: RunConfig, step: int, evaluated: int) -> None:
        """Go on after the checkpoint of `step`: rows beyond it are dropped, they will be made again.

        `evaluated` is the last version whose evaluation the checkpoint knows of; a later one is made again.
        """
        last = {METRICS: step, EVALUATIONS: evaluated, TIMELINE: step}
        kept = {name: [row for row in _read_rows(self.path / name) if row["step"] <= last[name]] for name in STEPPED}
        _write_config(self.path, config)
        for name, rows in kept.items():
            write_atomically(self.path / name, "".join(_line(row) for row in rows))
        self.elapsed_s = max((event["end_s"] for event in kept[TIMELINE]), default=0.0)

    def step(self, report: StepReport) -> None:
        self._append(
            METRICS,
            {
                "step": report.step,
                "batch_id": report.batch_id,
                "metrics": report.metrics,
                "seconds": report.seconds,
                "histograms": report.histograms,
            },
        )

    def evaluation(self, row: Row) -> None:
        self._append(EVALUATIONS, row)

    def event(self, actor: Literal["trainer", "engine"], phase: str, start_s: float, end_s: float, step: int) -> None:
        """One stretch of work or waiting, in seconds since this process began the run.

        The clock of a resumed run goes on where the kept rows end; the time between is not counted.
        """
        start_s, end_s = start_s + self.elapsed_s, end_s + self.elapsed_s
        self._append(TIMELINE, {"actor": actor, "phase": phase, "start_s": start_s, "end_s": end_s, "step": step})

    def rollouts(self, batch: RolloutBatch, token_text: Callable[[int], str]) -> None:
        """The rollouts of a batch, with the text of each token alone."""
        file = self.path / ROLLOUTS / f"batch_{batch.batch_id:06d}.jsonl"
        rows = [
            {**rollout.to_json(), "token_texts": [token_text(token) for token in rollout.token_ids.tolist()]}
            for rollout in batch.rollouts
        ]
        text = "".join(map(_line, rows))
        with _writing(file):
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, text)

    def status(self, state: Literal["running", "finished", "stopped", "failed"], **info: Any) -> None:
        with _writing(self.path / STATUS):
            write_atomically(self.path / STATUS, _line({"state": state, **info}))

    def _append(self, name: str, row: Row) -> None:
        with _writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(_line(row))


@dataclass(frozen=True)
class RunData:
    """A run folder, read. Numbers that were not finite are None."""

    path: Path
    name: str
    config: dict[str, Any]
    steps: list[Row]
    evaluations: list[Row]
    timeline: list[Row]
    status: Row


def read_run(path: Path | str) -> RunData:
    """Read a run, also one that is still being written.

    Raises:
        ConfigError: if the folder is not a run, or one of its files is damaged.
    """
    path = Path(path)
    _check_is_run(path)
    config = _read_table(path / CONFIG, tomllib.loads)
    if not _is_config(config):
        raise ConfigError(f"{path / CONFIG} is not the recipe of a run: mend it, or report on another run")
    status = _read_table(path / STATUS, json.loads) if (path / STATUS).exists() else {}
    return RunData(
        path=path,
        name=path.resolve().name,
        config=config,
        steps=list(_read_rows(path / METRICS)),
        evaluations=list(_read_rows(path / EVALUATIONS)),
        timeline=list(_read_rows(path / TIMELINE)),
        status=status,
    )


def recorded_batches(run: RunData) -> list[Path]:
    """The rollout files of a run, oldest batch first."""
    files = (run.path / ROLLOUTS).glob("batch_*.jsonl")
    return sorted(file for file in files if re.fullmatch(r"batch_\d+\.jsonl", file.name))


def read_rollouts(file: Path) -> list[Row]:
    """The rollouts of one recorded batch, as `Rollout.to_json` wrote them (a NaN reward is None)."""
    return list(_read_rows(file))


def _write_config(path: Path, config: RunConfig) -> None:
    write_atomically(path / CONFIG, tomli_w.dumps(_without_none(config.model_dump())))


def _check_is_run(path: Path) -> None:
    if not os.path.isdir(path):  # unlike Path.is_dir, false for a name that no file can have
        raise ConfigError(f"there is no run folder at {path}")
    if not os.path.exists(path / CONFIG):
        inside = sorted(child.parent.name for child in path.glob(f"*/{CONFIG}"))
        hint = f"; it contains the runs {', '.join(inside)}: name one of them" if inside else ""
        raise ConfigError(f"{path} is not a run folder: it has no {CONFIG}{hint}")


def _read_rows(file: Path) -> Iterator[Row]:
    """The rows of a JSON-lines file. A last line without its newline is still being written, or was torn."""
    shape = SHAPES.get(file.name, ROLLOUT)
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    if not line.endswith("\n"):
                        return
                    raise ConfigError(f"{file}, line {number} is not valid JSON: delete that line") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{file}, line {number} is not a JSON object: delete that line")
                wrong = [key for key, fits in shape.items() if not fits(row.get(key))]
                if wrong:
                    raise ConfigError(f"{file}, line {number} has no valid {wrong[0]!r}: delete that line")
                yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error}): mend or remove it") from None


def _read_table(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        table = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): mend or remove it") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is not a JSON object: remove it")
    return table


def _is_config(config: dict[str, Any]) -> bool:
    """Whether the parts that reports look into are what they should be."""
    tables = [config.get(name, {}) for name in ("objective", "task", "model", "trainer")]
    if not all(isinstance(table, dict) for table in tables):
        return False
    objective = tables[0]
    return isinstance(objective.get("preset", ""), str) and isinstance(objective.get("boundary", {}), dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_measured(value: Any) -> bool:
    """A number, or None where it was not finite or not taken."""
    return value is None or _is_number(value)


def _are_measured(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_measured, value.values()))


def _are_histograms(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(counts, list) and all(map(_is_measured, counts)) for counts in value.values())
    )


def _is_mask(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


# what readers rely on; a row may hold more
Shape = Mapping[str, Callable[[Any], bool]]
LARGEST = 1e300
SHAPES: dict[str, Shape] = {
    METRICS: {"step": _is_whole, "metrics": _are_measured, "seconds": _are_measured, "histograms": _are_histograms},
    EVALUATIONS: {"step": _is_whole, "k": _is_measured, "avg_at_k": _is_measured, "avg_at_k_se": _is_measured},
    TIMELINE: {
        "step": _is_whole,
        "actor": _is_text,
        "phase": _is_text,
        "start_s": _is_number,
        "end_s": _is_number,
    },
}
ROLLOUT: Shape = {
    "prompt_id": _is_text,
    "group": _is_whole,
    "loss_mask": _is_mask,
    "text": _is_text,
    "reward": _is_measured,
    "status": _is_text,
}


def hold(path: Path) -> IO[str]:
    """Keep other processes from writing to a folder, for as long as the file is open."""
    try:
        file = (path / LOCK).open("a", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is writing to {path}: wait for it, or choose another folder") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to ({error}): choose another run_dir") from None
    return file


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SteadyRLError(
            f"{file} could not be written ({error}): make room for it, then continue from the last checkpoint with "
            "--resume"
        ) from error


def _line(row: Row) -> str:
    return json.dumps(_plain(row), allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """`value` made of what JSON has: arrays and tensors as lists, NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value


def _without_none(table: Any) -> Any:
    """TOML has no null: a key without a value is left out, and its default applies on reading."""
    if isinstance(table, dict):
        return {key: _without_none(value) for key, value in table.items() if value is not None}
    return table


def write_atomically(file: Path, text: str) -> None:
    """A reader, or a crash in the middle, finds the old file or the new one, never half of it."""
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)
