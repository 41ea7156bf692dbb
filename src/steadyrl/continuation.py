"""The folder that a run writes to, and the checkpoint that it goes on from."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from steadyrl.config import RunConfig
from steadyrl.errors import CheckpointError, ConfigError
from steadyrl.reports.recorder import CHECKPOINTS, LOCK, RunFolder
from steadyrl.trainer.checkpoint import latest_checkpoint, load_state, set_aside

# what may differ between a checkpoint and the recipe that continues it, without changing a number (but for the rounding
# of sums, where other ranks or engines share the work)
MAY_DIFFER = (
    "run_dir",
    "trainer.steps",
    "trainer.kind",
    "trainer.ranks",
    "trainer.device",
    "pipeline.backend",
    "pipeline.ray_address",
    "pipeline.placement",
    "engine.replicas",
    "engine.start_timeout_s",
    "engine.generate_timeout_s",
    "engine.urls",
    "engine.weights_dir",
    "engine.stall_timeout_s",
    "engine.recovery_timeout_s",
    "checkpoint",
    "record",
    "tracking",
)


def claim_folder(run_dir: str) -> Path:
    """`run_dir`, or `run_dir-2`, `-3`, ... if something is in it already: no run is ever overwritten.

    The folder's lock file is made here, so that of two processes only one gets a folder.
    """
    path, number = Path(run_dir), 1
    while True:
        path.mkdir(parents=True, exist_ok=True)
        if not any(path.iterdir()):
            with suppress(FileExistsError):
                (path / LOCK).touch(exist_ok=False)
                return path
        number += 1
        path = Path(f"{run_dir}-{number}")


def new_folder(config: RunConfig) -> RunFolder:
    try:
        return RunFolder.create(claim_folder(config.run_dir), config)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(
            f"no run can be written to run_dir = {config.run_dir!r} ({error}): choose another run_dir"
        ) from None


def rewind(folder: RunFolder, config: RunConfig, checkpoint: Path) -> None:
    """Drop what the run did after its checkpoint."""
    state = load_state(checkpoint)
    try:
        folder.rewind(config, state["step"], state["evaluated"])
        set_aside(checkpoint.parent, state["step"])
    except OSError as error:
        raise ConfigError(f"{folder.path} cannot be written to ({error}): make it writable, then resume") from None


def checkpoint_to_resume(config: RunConfig) -> Path:
    """The newest checkpoint of `run_dir`, if it was made by the same recipe."""
    try:
        checkpoint = latest_checkpoint(Path(config.run_dir) / CHECKPOINTS)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    state = load_state(checkpoint)
    try:
        recorded = RunConfig.model_validate(state["config"])
    except ValidationError:
        raise ConfigError(
            f"{checkpoint} was made by another version of steadyrl: resume it there, or start a new run_dir"
        ) from None
    before, now = _flat(recorded.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in MAY_DIFFER)
    )
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{config.run_dir} was made with {key} = {before.get(key)!r}, not {now.get(key)!r}: a resumed run keeps "
            f"its recipe (it may change {', '.join(MAY_DIFFER)}); start a new run_dir for another one"
        )
    if state["step"] >= config.trainer.steps:
        raise ConfigError(
            f"{config.run_dir} already has its {state['step']} optimizer steps: raise trainer.steps to continue it"
        )
    return checkpoint


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
