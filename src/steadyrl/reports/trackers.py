"""Copies of a run's numbers in TensorBoard, Weights & Biases and trackio, on one axis: optimizer steps.

The run folder stays the record; a tracker gets a copy of each row when it is written. `tracking.jsonl` in the run
folder notes what each tracker has, so a resumed run gives it the rows it lacks and none twice. A tracker that fails is
given up with one message; training goes on, and a resume gives it what it missed.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from steadyrl.errors import ConfigError
from steadyrl.reports.recorder import Row, read_run

if TYPE_CHECKING:
    from steadyrl.config import RunConfig, TrackingConfig
    from steadyrl.types import StepReport

NOTES = "tracking.jsonl"
STEP_ROW, EVALUATION_ROW = "step", "evaluation"
# what an evaluation was made with, not what came out
SETTINGS = {"step", "version", "k", "prompts", "samples", "seed"}
SETTINGS |= {"temperature", "top_p", "top_k", "max_response_tokens"}
STEP_AXIS = "optimizer_step"
CLOSE_TIMEOUT_S = 20.0


class Tracker(Protocol):
    """One service that draws curves. It may raise anything: `Tracking` catches it."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Finite numbers of one row, at an optimizer step; steps may come late and out of order."""
        ...

    def close(self, failed: bool) -> None: ...


def check_installed(tracking: TrackingConfig) -> None:
    """Raise ConfigError for a tracker whose package is missing, before anything is started."""
    missing = [name for name in tracking.trackers if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"tracking.trackers names {missing[0]!r}, which is not installed: pip install {missing[0]} (all of them: "
            'pip install "steadyrl[trackers]"), or leave it out'
        )


class Tracking:
    """The trackers of one run; a context manager around the training loop.

    Args:
        config: of the run; `config.tracking` says which trackers.
        folder: the run folder, opened and, on a resume, rewound.
        warn: shows one sentence to the user.
    """

    def __init__(self, config: RunConfig, folder: Path, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        if not config.tracking.trackers:
            return
        self._notes = _Notes(folder / NOTES)
        title = config.tracking.name or folder.resolve().name
        for name in dict.fromkeys(config.tracking.trackers):
            with self._given_up_on_error(name):
                self._trackers[name] = OPENERS[name](config, folder, title, self._notes.run_id)
        run = read_run(folder)
        for row in run.steps:
            self._log(STEP_ROW, row["step"], _step_values(row["metrics"], row["seconds"]))
        for row in run.evaluations:
            self.evaluation(row)

    def step(self, report: StepReport) -> None:
        self._log(STEP_ROW, report.step, _step_values(report.metrics, report.seconds))

    def evaluation(self, row: Row) -> None:
        results = {name: value for name, value in row.items() if name not in SETTINGS}
        self._log(EVALUATION_ROW, row["step"], _finite("evaluation/", results))

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, tracker in list(self._trackers.items()):
            closing = threading.Thread(target=self._close, args=(name, tracker, kind is not None), daemon=True)
            closing.start()
            closing.join(CLOSE_TIMEOUT_S)
            if closing.is_alive():
                self._warn(f"{name} did not close within {CLOSE_TIMEOUT_S:.0f} s; the run folder has every row")
        self._trackers.clear()

    def _close(self, name: str, tracker: Tracker, failed: bool) -> None:
        with self._given_up_on_error(name):
            tracker.close(failed=failed)

    def _log(self, kind: str, step: int, values: dict[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            if not self._notes.has(name, kind, step):
                with self._given_up_on_error(name):
                    tracker.log(values, step)
                    self._notes.add(name, kind, step)

    @contextmanager
    def _given_up_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            self._warn(f"{name} gets no more rows of this run, which goes on ({error!r}); the run folder has them all")


class _Notes:
    """Which rows each tracker has: a line for each, and a first line with the id of the run there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        rows = [row for line in text.splitlines() if (row := _parsed(line))]
        self._seen = {(row.get("tracker"), row.get("row"), row.get("step")) for row in rows}
        ids = [row["run_id"] for row in rows if isinstance(row.get("run_id"), str)]
        self.run_id = ids[0] if ids else secrets.token_hex(4)
        if text and not text.endswith("\n"):
            self._write("\n")  # a line that was torn stays alone
        if not ids:
            self._write(json.dumps({"run_id": self.run_id}) + "\n")

    def has(self, tracker: str, row: str, step: int) -> bool:
        return (tracker, row, step) in self._seen

    def add(self, tracker: str, row: str, step: int) -> None:
        self._seen.add((tracker, row, step))
        self._write(json.dumps({"tracker": tracker, "row": row, "step": step}) + "\n")

    def _write(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text)


class _TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs`."""

    def __init__(self, config: RunConfig, folder: Path, title: str, run_id: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run with an id of its own, in the folder `wandb` of the run folder; WANDB_MODE=offline keeps it there."""

    def __init__(self, config: RunConfig, folder: Path, title: str, run_id: str) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=config.tracking.project,
            name=title,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # it would fight with the live display
        )
        # wandb's own counter drops rows that come late
        self._run.define_metric("*", step_metric=STEP_AXIS)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, STEP_AXIS: step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    """A run in the local database of trackio; `trackio show` draws it."""

    def __init__(self, config: RunConfig, folder: Path, title: str, run_id: str) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=config.tracking.project,
            name=f"{title}-{run_id}",  # a resumed run is found by its name alone
            resume="allow",
            config=config.model_dump(mode="json"),
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


OPENERS: dict[str, Callable[[RunConfig, Path, str, str], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "trackio": _Trackio,
}


def _step_values(metrics: Mapping[str, Any], seconds: Mapping[str, Any]) -> dict[str, float]:
    return _finite("", metrics) | _finite("seconds/", seconds)


def _finite(prefix: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row that a curve can be drawn through, under `prefix`."""
    numbers = {prefix + name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a mere folder of that name, such as ./wandb, has no origin


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
