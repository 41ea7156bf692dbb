"""The processes that train one model together, and what they tell each other.

Everything else is written for a rank that may be one of several: it hands its part in, and all get the same
answer. `OneRank` is the rank that is alone; its answers are what it handed in, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """All ranks have to make the same calls in the same order: one that is left out makes the others wait."""

    @property
    def index(self) -> int:
        """Which of the ranks this process is: 0 .. count - 1."""
        ...

    @property
    def count(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks, the same on each, of a tensor that has the same shape and dtype on each."""
        ...

    def gather(self, part: Tensor) -> list[Tensor]:
        """What each rank handed in, by rank. 1-d tensors of one dtype; their lengths may differ, 0 included."""
        ...


@dataclass(frozen=True)
class OneRank:
    """The rank that is alone."""

    index: int = 0
    count: int = 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> list[Tensor]:
        return [part]


ALONE = OneRank()


@dataclass(frozen=True)
class TorchRanks:
    """The ranks of the default process group of torch.distributed; `join` makes it."""

    index: int
    count: int

    def sum(self, part: Tensor) -> Tensor:
        total = part.detach().clone()
        dist.all_reduce(total)
        return total

    def gather(self, part: Tensor) -> list[Tensor]:
        lengths = [torch.zeros(1, dtype=torch.int64, device=part.device) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor([len(part)], device=part.device))
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.cat([part.detach(), part.new_zeros(longest - len(part))])
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded)
        return [found[: int(length)] for found, length in zip(parts, lengths, strict=True)]


def join(index: int, count: int, rendezvous: str, timeout_s: float = 1800.0) -> TorchRanks:
    """Become rank `index` of `count`; returns when all of them are there. `leave` ends it.

    CPU tensors go over gloo, CUDA tensors over NCCL.

    Args:
        rendezvous: where the ranks find each other, "tcp://HOST:PORT" (rank 0 listens there) or "file:///PATH" on a
            file system that all of them see; the file must not exist yet.
        timeout_s: for this, and for every wait of one rank for another, in seconds.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=rendezvous, rank=index, world_size=count, timeout=timeout)
    return TorchRanks(index, count)


def leave() -> None:
    """End what `join` began."""
    dist.destroy_process_group()


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """What each rank says, by rank; without those that say nothing. So that all ranks fail alike, in the same words."""
    texts = ranks.gather(torch.tensor(list(text.encode()), dtype=torch.uint8))
    return [bytes(found.tolist()).decode() for found in texts if len(found)]
