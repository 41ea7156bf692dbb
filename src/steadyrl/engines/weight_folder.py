"""Weights on their way to servers: Hugging Face checkpoints in a folder that trainer and servers both see."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from steadyrl.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")


class WeightFolder:
    """A new folder, with a checkpoint for each version that may still be asked for.

    Args:
        parent: where to make it; "" = in shared memory where there is some, else among the temporary files, for this
            user alone.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, parent: str, name: str) -> None:
        try:
            if parent:
                self.path = Path(parent).expanduser().resolve() / name
                self.path.mkdir(parents=True)
            else:
                memory = str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
                self.path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=memory))
        except OSError as error:
            raise ConfigError(
                f"no folder for weights can be made in engine.weights_dir = {parent!r} ({error}): set it to a folder "
                "that this process can write to and the rollout servers can read"
            ) from None

    def write(self, model: PreTrainedModel, name: str) -> Path:
        """The model as a checkpoint under its published names; under `name` it is whole or not there.

        Raises:
            OSError: there is no room, or the folder is gone.
        """
        partial, whole = self.path / f"{name}.partial", self.path / name
        for left_over in (partial, whole):  # of a broadcast that failed
            shutil.rmtree(left_over, ignore_errors=True)
        model.save_pretrained(partial)
        partial.rename(whole)
        return whole

    def keep_only(self, name: str) -> None:
        for folder in self.path.iterdir():
            if folder.name != name:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
