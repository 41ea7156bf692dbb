"""Batches that many tests of the objective share, and the losses of their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import LossOutput, anchor_of, batch_threshold, policy_loss, trust_region_score
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts

AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(frozen=True)
class Batch:
    """Packed responses; every tensor is [T]."""

    logp: Tensor
    behavior_logp: Tensor
    old_logp: Tensor
    reference_logp: Tensor
    advantage: Tensor
    divergence: Tensor
    age: Tensor
    loss_mask: Tensor
    sequence: Tensor
    num_sequences: int

    @property
    def layout(self) -> Layout:
        return Layout(self.loss_mask, self.sequence, self.num_sequences)

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(int(self.loss_mask.sum()), len(self.sequence[self.loss_mask].unique()))

    def take(self, responses: Sequence[int]) -> Batch:
        """Some of the responses, renumbered; gradients still reach this batch."""
        places = torch.cat(
            [torch.zeros(0, dtype=torch.long), *((self.sequence == b).nonzero()[:, 0] for b in responses)]
        )
        number = torch.full((self.num_sequences,), -1)
        number[torch.tensor(list(responses), dtype=torch.long)] = torch.arange(len(responses))
        taken = {f.name: getattr(self, f.name)[places] for f in fields(self) if f.name != "num_sequences"}
        return Batch(**{**taken, "sequence": number[taken["sequence"]], "num_sequences": len(responses)})

    def padded(self, fill: float) -> Batch:
        """The same responses as right-padded rows that are all as wide as the longest, with `fill` in the padding."""
        lengths = torch.bincount(self.sequence, minlength=self.num_sequences)
        width = int(lengths.max())
        row = torch.arange(self.num_sequences).repeat_interleave(width)
        start = lengths.cumsum(0) - lengths
        column = torch.arange(width).repeat(self.num_sequences)
        real = column < lengths[row]
        place = torch.where(real, start[row] + column, 0)
        taken: dict[str, Any] = {
            f.name: getattr(self, f.name)[place] for f in fields(self) if f.name != "num_sequences"
        }
        for name, values in taken.items():
            if values.is_floating_point():
                taken[name] = torch.where(real, values, fill)
        taken |= {"loss_mask": taken["loss_mask"] & real, "sequence": row}
        return Batch(**taken, num_sequences=self.num_sequences)

    def filled(self, fill: float, age: int) -> Batch:
        """`fill` at every masked place of every float, `age` at those of the ages."""
        changed = {}
        for f in fields(self):
            values = getattr(self, f.name)
            if f.name == "age":
                changed[f.name] = torch.where(self.loss_mask, values, age)
            elif isinstance(values, Tensor) and values.is_floating_point():
                changed[f.name] = torch.where(self.loss_mask, values, fill)
        return replace(self, **changed)


def make_batch(
    lengths: Sequence[int] = (7, 1, 12, 4, 3, 9, 2), *, seed: int = 0, drift: float = 0.25, dtype=torch.float64
) -> Batch:
    """Heavy-tailed drift; of each response the first token is active and some of the others are not.

    The third from last response, if there are that many, is masked as a whole.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def uniform(size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    total = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths)))
    first = torch.cat([torch.tensor([True]), sequence[1:] != sequence[:-1]])[:total]
    mask = first | (uniform(total) > 0.3)
    if len(lengths) >= 3:
        mask &= sequence != len(lengths) - 3
    behavior = -0.05 - 3 * uniform(total)
    old = behavior + 0.3 * drift * normal(total)
    return Batch(
        logp=(old + drift * (normal(total) ** 3 + normal(len(lengths))[sequence])).clamp(max=-1e-3).to(dtype),
        behavior_logp=behavior.to(dtype),
        old_logp=old.clamp(max=-1e-3).to(dtype),
        reference_logp=(behavior + 0.3 * normal(total)).to(dtype),
        advantage=normal(len(lengths))[sequence].to(dtype),
        divergence=(0.3 * uniform(total)).to(dtype),
        age=(4 * uniform(total)).long(),
        loss_mask=mask,
        sequence=sequence,
        num_sequences=len(lengths),
    )


def objective_of(preset: str, aggregation: str | None = None, **changes) -> ObjectiveConfig:
    if aggregation is not None:
        changes["aggregation"] = aggregation
        if aggregation == "constant":
            changes.setdefault("aggregation_tokens", 8)
    return ObjectiveConfig.model_validate({"preset": preset, **changes})


def loss_of(
    objective: ObjectiveConfig, batch: Batch, counts: BatchCounts, threshold: Tensor | None, reference: bool = True
) -> LossOutput:
    return policy_loss(
        objective,
        logp=batch.logp,
        behavior_logp=batch.behavior_logp,
        advantage=batch.advantage,
        layout=batch.layout,
        counts=counts,
        old_logp=batch.old_logp,
        reference_logp=batch.reference_logp if reference else None,
        age=batch.age,
        divergence=batch.divergence,
        threshold=threshold,
    )


def scores_of(objective: ObjectiveConfig, batch: Batch) -> Tensor:
    anchor = anchor_of(objective, batch.logp, batch.behavior_logp, batch.old_logp, batch.age)
    return trust_region_score(objective, batch.logp, anchor, batch.layout)


def threshold_of(objective: ObjectiveConfig, batch: Batch) -> Tensor | None:
    """For rules that are relative to more than a micro-batch."""
    return batch_threshold(objective, scores_of(objective, batch), batch.layout, batch.age)


def loss_and_gradient(
    objective: ObjectiveConfig,
    batch: Batch,
    parts: Sequence[Sequence[int]] | None = None,
    reference: bool = True,
) -> tuple[Tensor, Tensor]:
    """Of the whole batch, or added up over micro-batches that are made of these responses."""
    leaf = replace(batch, logp=batch.logp.detach().clone().requires_grad_())
    threshold = threshold_of(objective, batch)
    pieces = [leaf] if parts is None else [leaf.take(part) for part in parts]
    losses = [loss_of(objective, piece, batch.counts, threshold, reference).loss for piece in pieces]
    loss = torch.stack(losses).sum()
    (gradient,) = torch.autograd.grad(loss, leaf.logp)
    return loss.detach(), gradient
