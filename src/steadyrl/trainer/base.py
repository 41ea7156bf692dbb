"""What the pipeline asks of a learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from steadyrl.types import TrainBatch


class Learner(Protocol):
    """Holds the policy being trained and takes optimizer steps on it."""

    version: int  # optimizer steps completed

    def train_step(
        self, micro_batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """One optimizer step over all the micro-batches; pooled metrics, and histograms.

        `old_weights` are those that the anchors old_actor and step_start score the batch with.

        Raises:
            TrainingError: a gradient is not finite; the weights are those before the step.
        """
        ...

    def named_weights(self) -> dict[str, Tensor]:
        """The weights by name, as they are (no copy)."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, version: int) -> None: ...
