"""What the diagnostics need to know about a micro-batch's responses."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Layout(Protocol):
    """Which tokens count, and which response each belongs to.

    `objective.rule.Layout` is one; a protocol, because no diagnostic depends on an objective.
    """

    @property
    def loss_mask(self) -> Tensor: ...  # [T] bool

    @property
    def sequence(self) -> Tensor: ...  # [T] int64, 0 .. S - 1

    @property
    def num_sequences(self) -> int: ...  # S
