"""Over how many devices a run spreads, as the recipe says."""

from __future__ import annotations

from dataclasses import dataclass

from steadyrl.config import RunConfig


@dataclass(frozen=True)
class Placement:
    """Ranks that share the trainer's tensors, and engines that each hold the whole model."""

    trainer_ranks: int
    engines: int
    gpus_per_engine: int  # over which an engine splits the model


def placement_of(config: RunConfig, gpus_per_engine: int) -> Placement:
    return Placement(config.trainer.ranks, config.engine.count, gpus_per_engine)
