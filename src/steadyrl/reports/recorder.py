"""The run folder: what a training loop writes, and what any script can read back.

    config.toml         the whole recipe, defaults filled in
    metrics.jsonl       one StepReport per optimizer step
    evaluations.jsonl   one row per evaluation
    timeline.jsonl      who did what, when: actor, phase, start_s, end_s, step
    rollouts/           batch_000012.jsonl, one rollout per line
    status.json         running, finished, stopped or failed

Every row is on disk before the call returns, so a run that dies loses nothing it reported. The files
are plain JSON: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from steadyrl.errors import ConfigError

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
STEPPED = (METRICS, EVALUATIONS, TIMELINE)  # files whose rows carry a step


class RunFolder:
    """The writing side. Make one with `create` or `resume`."""

    def __init__(self, path: Path, elapsed_s: float = 0.0) -> None:
        self.path = path
        self.elapsed_s = elapsed_s  # training time of earlier processes

    @classmethod
    def create(cls, path: Path | str, config: RunConfig) -> RunFolder:
        """Start a new run, in a folder that holds none."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run_dir={path} is a file: choose another run_dir")
        if any((path / name).exists() for name in (METRICS, STATUS)):
            raise ConfigError(f"{path} already holds a run: choose another run_dir, or continue it with --resume")
        path.mkdir(parents=True, exist_ok=True)
        _write_config(path, config)
        return cls(path)

    @classmethod
    def resume(cls, path: Path | str, config: RunConfig, step: int, evaluated: int) -> RunFolder:
        """Go on after the checkpoint of `step`: rows beyond it are dropped, they will be made again.

        `evaluated` is the last version whose evaluation the checkpoint knows of; a later one is made again.
        """
        path = Path(path)
        _check_is_run(path)
        last = {METRICS: step, EVALUATIONS: evaluated, TIMELINE: step}
        kept = {name: [row for row in _read_rows(path / name) if row["step"] <= last[name]] for name in STEPPED}
        _write_config(path, config)
        for name, rows in kept.items():
            _write_atomically(path / name, "".join(_line(row) for row in rows))
        return cls(path, elapsed_s=max((event["end_s"] for event in kept[TIMELINE]), default=0.0))

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

    def rollouts(self, batch: RolloutBatch) -> None:
        folder = self.path / ROLLOUTS
        folder.mkdir(exist_ok=True)
        text = "".join(_line(rollout.to_json()) for rollout in batch.rollouts)
        _write_atomically(folder / f"batch_{batch.batch_id:06d}.jsonl", text)

    def status(self, state: Literal["running", "finished", "stopped", "failed"], **info: Any) -> None:
        _write_atomically(self.path / STATUS, _line({"state": state, **info}))

    def _append(self, name: str, row: Row) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
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
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
        status = json.loads((path / STATUS).read_text(encoding="utf-8")) if (path / STATUS).exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as a run: {error}") from None
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
    return sorted((run.path / ROLLOUTS).glob("batch_*.jsonl"))


def read_rollouts(file: Path) -> list[Row]:
    """The rollouts of one recorded batch, as `Rollout.to_json` wrote them (a NaN reward is None)."""
    return list(_read_rows(file))


def _write_config(path: Path, config: RunConfig) -> None:
    _write_atomically(path / CONFIG, tomli_w.dumps(_without_none(config.model_dump())))


def _check_is_run(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"there is no run folder at {path}")
    if not (path / CONFIG).exists():
        inside = sorted(child.parent.name for child in path.glob(f"*/{CONFIG}"))
        hint = f"; it contains the runs {', '.join(inside)}: name one of them" if inside else ""
        raise ConfigError(f"{path} is not a run folder: it has no {CONFIG}{hint}")


def _read_rows(file: Path) -> Iterator[Row]:
    """The rows of a JSON-lines file. A last line without its newline is still being written, or was torn."""
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError:
                if not line.endswith("\n"):
                    return
                raise ConfigError(f"{file}, line {number} is not valid JSON: delete that line") from None


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


def _write_atomically(file: Path, text: str) -> None:
    """A reader, or a crash in the middle, finds the old file or the new one, never half of it."""
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)
