"""Right-padded batches as other trainers hold them, the objective's own answer on them, and stand-in modules."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.loss import anchor_of, batch_threshold, policy_loss, trust_region_score
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts


@dataclass(frozen=True)
class Padded:
    """B responses in rows of width W; padding holds numbers that must not matter."""

    logp: Tensor  # [B, W], the policy being trained
    behavior: Tensor  # [B, W], the engine
    old: Tensor  # [B, W], the trainer with earlier weights
    reference: Tensor  # [B, W]
    advantage: Tensor  # [B]
    mask: Tensor  # [B, W] bool

    @property
    def rows(self) -> int:
        return len(self.mask)

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    @property
    def layout(self) -> Layout:
        return Layout(self.mask.reshape(-1), torch.arange(self.rows).repeat_interleave(self.width), self.rows)

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(int(self.mask.sum()), int(self.mask.any(1).sum()))

    def leaf(self) -> Padded:
        """The same with log-probabilities that gradients stop at."""
        return replace(self, logp=self.logp.detach().clone().requires_grad_())

    def spread(self, values: Tensor) -> Tensor:
        """[B] to [B, W]."""
        return values[:, None].expand(self.mask.shape)

    def split(self, values: Tensor) -> list[Tensor]:
        """The rows of [B, W] without their padding."""
        return [row[: int(mask.nonzero().max()) + 1] for row, mask in zip(values, self.mask, strict=True)]


def make_padded(rows: int = 6, width: int = 12, *, seed: int = 0, drift: float = 0.1, dtype=torch.float64) -> Padded:
    """Lengths from 2 to W, holes in some masks, drift with a heavy tail."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    lengths = torch.randint(2, width + 1, (rows,), generator=random)
    inside = torch.arange(width) < lengths[:, None]
    holes = torch.rand(rows, width, generator=random) < 0.15
    last = torch.arange(width) == lengths[:, None] - 1
    behavior = -normal(rows, width).abs() - 0.2
    old = behavior + 0.3 * drift * normal(rows, width)
    logp = old + drift * (0.5 * normal(rows, 1) + 0.3 * normal(rows, width) ** 3)
    fields = [logp, behavior, old, behavior + 0.3 * normal(rows, width)]
    logp, behavior, old, reference = (torch.where(inside, f.clamp(max=-1e-3), -7.0).to(dtype) for f in fields)
    return Padded(logp, behavior, old, reference, normal(rows).to(dtype), inside & (~holes | last))


def direct(
    table: Mapping[str, Any],
    batch: Padded,
    *,
    weight: Tensor | None = None,
    age: Tensor | None = None,
    threshold: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient [B, W] of `policy_loss` with the objective's own aggregation and kl_coef (0 by default)."""
    objective = ObjectiveConfig.model_validate({"kl_coef": 0.0, **table})
    leaf = batch.leaf()
    advantage = leaf.spread(leaf.advantage) if weight is None else leaf.spread(leaf.advantage) * weight
    output = policy_loss(
        objective,
        logp=leaf.logp.reshape(-1),
        behavior_logp=leaf.behavior.reshape(-1),
        advantage=advantage.reshape(-1),
        layout=leaf.layout,
        counts=leaf.counts,
        old_logp=leaf.old.reshape(-1),
        reference_logp=leaf.reference.reshape(-1) if objective.kl_coef > 0 else None,
        age=None if age is None else age.reshape(-1),
        threshold=threshold,
    )
    return output.loss.detach(), torch.autograd.grad(output.loss, leaf.logp)[0]


def threshold_of(table: Mapping[str, Any], batch: Padded) -> Tensor | None:
    objective = ObjectiveConfig.model_validate(table)
    flat = [values.reshape(-1) for values in (batch.logp, batch.behavior, batch.old)]
    anchor = anchor_of(objective, *flat, None)
    return batch_threshold(objective, trust_region_score(objective, flat[0], anchor, batch.layout), batch.layout)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected entry."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def stand_in(monkeypatch: Any, name: str, **attributes: Any) -> ModuleType:
    """A module of this dotted name, and packages above it, for the time of a test."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
            if depth > 1:
                monkeypatch.setattr(
                    sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path], raising=False
                )
    for key, value in attributes.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    return sys.modules[name]
