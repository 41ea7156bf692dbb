"""When weights are broadcast and which version generates which batch: pure functions of step numbers.

The clock has no say in it, so every backend gives the same data to the same step. M is
`steps_per_batch`, n is `lag`, both in optimizer steps; `docs/staleness.md` derives the bound.
"""

from __future__ import annotations

from steadyrl.config import PipelineConfig


def batches_ahead(pipeline: PipelineConfig) -> int:
    """How many batches may be generated ahead of the one that is trained on."""
    return 0 if pipeline.regime == "sync" else 1


def generation_version(pipeline: PipelineConfig, batch: int) -> int:
    """The weight version that generates a batch (counted from 0).

    Synchronous: the version at which the trainer reaches the batch. Batch-wise: generation of batch k
    starts together with the training on batch k - 1, with the newest broadcast, a multiple of n. So
    with M = n the batches 0 and 1 come from version 0, batch 2 from n, batch 3 from 2n.
    """
    if pipeline.regime == "sync":
        return batch * pipeline.steps_per_batch
    reached = max(0, batch - 1) * pipeline.steps_per_batch
    return reached - reached % pipeline.lag


def is_broadcast_version(pipeline: PipelineConfig, version: int) -> bool:
    """Whether some batch will be generated from exactly this version."""
    steps = pipeline.steps_per_batch
    if pipeline.regime == "sync":
        return version % steps == 0
    if version % pipeline.lag:
        return False
    if pipeline.regime == "streaming":
        return True
    # a generation starts at multiples of M; is there one before the next broadcast replaces this one?
    next_start = -(-version // steps) * steps
    return next_start < version + pipeline.lag


def snapshots_needed(pipeline: PipelineConfig, step: int) -> set[int]:
    """The versions that batches may still come from, once `step` steps are done.

    Those of the current and the next batch, and the newest broadcast, which a later batch may ask for.
    """
    if pipeline.regime == "streaming":
        return set()  # the present weights are broadcast, no earlier ones
    batch = step // pipeline.steps_per_batch
    versions = {generation_version(pipeline, batch + ahead) for ahead in range(batches_ahead(pipeline) + 1)}
    return versions | {step - step % pipeline.lag} if pipeline.regime == "batch" else versions


def anchor_version(pipeline: PipelineConfig, anchor: str, batch: int) -> int | None:
    """The weight version that scores a batch for an anchor, or None where no scoring pass is needed."""
    if anchor == "old_actor":
        return generation_version(pipeline, batch)
    if anchor == "step_start":
        return batch * pipeline.steps_per_batch
    return None
