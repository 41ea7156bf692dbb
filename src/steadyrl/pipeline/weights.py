"""Weights on their way to the engine: cast to its dtype, laid into shared memory, verified by checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from steadyrl.engines.base import weights_checksum
from steadyrl.errors import EngineError


@dataclass(frozen=True)
class WeightLayout:
    """Where each tensor lies in a block of memory. It travels once, at the start."""

    entries: tuple[tuple[str, tuple[int, ...], int], ...]  # name, shape, first byte
    dtype: torch.dtype
    num_bytes: int

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], dtype: torch.dtype) -> WeightLayout:
        entries, offset = [], 0
        for name, tensor in weights.items():
            entries.append((name, tuple(tensor.shape), offset))
            offset += tensor.numel() * dtype.itemsize
        return cls(tuple(entries), dtype, offset)


class WeightSlot:
    """A block of shared memory that holds one set of weights. The process that creates it removes it."""

    def __init__(self, layout: WeightLayout, name: str | None = None) -> None:
        self._owner = name is None
        self._memory = SharedMemory(name=name, create=self._owner, size=layout.num_bytes if self._owner else 0)
        self.name = self._memory.name
        self.tensors = {
            entry: torch.frombuffer(
                self._memory.buf, dtype=layout.dtype, count=torch.Size(shape).numel(), offset=offset
            ).view(shape)
            for entry, shape, offset in layout.entries
        }

    def write(self, weights: Mapping[str, Tensor]) -> str:
        """Copy the weights in and return the checksum that the engine must answer with."""
        for name, tensor in self.tensors.items():
            tensor.copy_(weights[name])
        return weights_checksum(self.tensors)

    def close(self) -> None:
        self.tensors = {}  # the views must go before the memory can
        self._memory.close()
        if self._owner:
            self._memory.unlink()


def verify(version: int, sent: str, received: str) -> None:
    """Raises EngineError unless the engine holds what was sent."""
    if sent != received:
        raise EngineError(
            f"after the broadcast of version {version} the engine's weights have checksum {received}, "
            f"but {sent} was sent: the engine does not hold the trainer's weights, so the run stops"
        )
