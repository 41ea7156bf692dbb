"""What an optimizer step computes and what it sends, on average over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steadyrl.axes import M2poBoundary, SatBoundary
from steadyrl.config import PipelineConfig, RunConfig
from steadyrl.pipeline.schedule import generation_version
from steadyrl.planning.lengths import MeanLengths
from steadyrl.planning.memory import FLOAT32, ITEMSIZE, rollout_bytes_per_token
from steadyrl.planning.model_shape import ModelShape
from steadyrl.planning.placement import Placement


@dataclass(frozen=True)
class Traffic:
    """Bytes in one optimizer step, all senders together."""

    name: str
    bytes_per_step: float
    how: str


def responses_per_step(pipeline: PipelineConfig) -> int:
    return pipeline.responses_per_batch // pipeline.steps_per_batch


def micro_batches(config: RunConfig, lengths: MeanLengths, ranks: int) -> int:
    """Of one rank in one optimizer step, if no token were padding."""
    tokens = responses_per_step(config.pipeline) * lengths.sequence
    return max(1, math.ceil(tokens / ranks / config.trainer.tokens_per_micro_batch))


def scoring_passes(config: RunConfig, micro_batches: int) -> int:
    """Forward passes over every token beside the one that is differentiated (trainer/learner.py)."""
    objective = config.objective
    rule = objective.boundary
    averaged = isinstance(rule, SatBoundary) and rule.quantile_scope == "ema"
    threshold = averaged or (micro_batches > 1 and isinstance(rule, SatBoundary | M2poBoundary))
    return (objective.kl_coef > 0) + objective.needs_old_logp + threshold


def broadcasts_per_step(config: RunConfig) -> float:
    """Changes of the engine's weights in a step, those for evaluations left out."""
    pipeline = config.pipeline
    if pipeline.regime == "streaming":
        return 1 / pipeline.lag
    per_batch, every = pipeline.steps_per_batch, pipeline.lag
    period = 1 if pipeline.regime == "sync" else every // math.gcd(every, per_batch)  # batches
    versions = {generation_version(pipeline, batch) for batch in range(1, period + 1)}
    return len(versions) / (period * per_batch)


def traffic(shape: ModelShape, config: RunConfig, placement: Placement, lengths: MeanLengths) -> list[Traffic]:
    """Weights to the engines, rollouts to the trainer, and slices between the trainer's ranks."""
    ranks, dtype = placement.trainer_ranks, config.model.dtype
    weights = ITEMSIZE[config.engine.dtype] * shape.parameters
    often = broadcasts_per_step(config)
    sampled = responses_per_step(config.pipeline) * lengths.sequence
    per_token = rollout_bytes_per_token(shape, config)
    items = [
        Traffic(
            "weights to the engines",
            placement.engines * weights * often,
            f"{placement.engines} x P in {config.engine.dtype}, {often:.3g} times a step",
        ),
        Traffic("rollouts to the trainer", sampled * per_token, f"{sampled:,.0f} tokens x {per_token} bytes"),
    ]
    if ranks > 1:
        parts = micro_batches(config, lengths, ranks)
        passes = 2 + scoring_passes(config, parts)  # forward and backward put every layer together
        gathered = parts * passes * (ranks - 1) * ITEMSIZE[dtype] * shape.parameters
        how = f"{parts} micro-batches x {passes} passes x {ranks - 1} x P in {dtype}"
        items.append(Traffic("layers put together", gathered, how))
        summed = parts * (ranks - 1) * FLOAT32 * shape.parameters
        items.append(Traffic("gradients summed", summed, f"{parts} micro-batches x {ranks - 1} x 4 P"))
    return items
