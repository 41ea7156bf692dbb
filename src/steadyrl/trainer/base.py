"""What the pipeline asks of a learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from steadyrl.types import TrainBatch


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step says about itself; everything is of the policy before the step."""

    metrics: dict[str, float]  # pooled over the micro-batches
    histograms: dict[str, list[float]]
    logp: list[Tensor]  # [S, W] float32 for each micro-batch
    old_logp: list[Tensor | None]  # the same of the old_actor and step_start anchors


class Learner(Protocol):
    """Holds the policy being trained and takes optimizer steps on it."""

    version: int  # optimizer steps completed

    def train_step(self, micro_batches: Sequence[TrainBatch], old_weights: Mapping[str, Tensor] | None) -> StepResult:
        """One optimizer step over all the micro-batches, which are as many for each trainer rank, rank after rank.

        `old_weights` are those that the anchors old_actor and step_start score the batch with.

        Raises:
            TrainingError: a gradient is not finite; the weights are those before the step.
        """
        ...

    def named_weights(self) -> dict[str, Tensor]:
        """The weights by name, on the CPU. They may share the memory of the model."""
        ...

    def save(self, folder: Path) -> None:
        """Write all that `load` needs to go on from here."""
        ...

    def load(self, folder: Path, version: int) -> None:
        """Go on from what `save` wrote after `version` optimizer steps."""
        ...
