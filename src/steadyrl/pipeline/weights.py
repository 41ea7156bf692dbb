"""Weights on their way to the engine: cast to its dtype, laid into shared memory, verified by checksum."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from steadyrl.engines.base import weights_checksum
from steadyrl.errors import EngineError

NUM_SLOTS = 2  # one for rollouts and one for an evaluation may wait at the same time


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
        self._memory = _create(layout.num_bytes) if name is None else SharedMemory(name=name)
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


def create_slots(layout: WeightLayout) -> list[WeightSlot]:
    """All the slots, or none.

    Raises:
        EngineError: there is too little shared memory.
    """
    slots: list[WeightSlot] = []
    try:
        for _ in range(NUM_SLOTS):
            slots.append(WeightSlot(layout))
    except BaseException:
        for slot in slots:
            slot.close()
        raise
    return slots


def _create(num_bytes: int) -> SharedMemory:
    """A block whose pages are there: the first write to a page that cannot be had would be a SIGBUS."""
    memory = None
    try:
        memory = SharedMemory(create=True, size=num_bytes)
        if sys.platform == "linux":
            fd = os.open(f"/dev/shm/{memory.name}", os.O_RDWR)
            try:
                os.posix_fallocate(fd, 0, num_bytes)
            finally:
                os.close(fd)
    except BaseException as error:
        if memory is not None:
            memory.close()
            memory.unlink()
        if isinstance(error, OSError):
            raise EngineError(
                f"no room for the weights in the shared memory of /dev/shm ({error.strerror}): "
                f"{NUM_SLOTS * num_bytes:,} bytes are needed; make it larger (in a container with --shm-size), or set "
                "pipeline.backend=inline, which needs none"
            ) from None
        raise
    return memory


def verify(version: int, sent: str, received: str) -> None:
    """Raises EngineError unless the engine holds what was sent."""
    if sent != received:
        raise EngineError(
            f"after the broadcast of version {version} the engine's weights have checksum {received}, "
            f"but {sent} was sent: the engine does not hold the trainer's weights, so the run stops"
        )
