"""What the pipeline asks of a rollout engine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from steadyrl.types import GenerationRequest, Rollout


class Engine(Protocol):
    """Token ids in, token ids and the log-probabilities they were sampled with out."""

    version: int  # of the weights it generates with

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Take over the weights and return `weights_checksum` of what is now in the model."""
        ...

    def generate(self, request: GenerationRequest) -> list[Rollout]:
        """Responses in the order of the request: prompt 0's samples, then prompt 1's, ..."""
        ...

    def close(self) -> None: ...


def weights_checksum(weights: Mapping[str, Tensor]) -> str:
    """CRC-32 over names, dtypes, shapes and bytes: equal weights, equal checksum, whatever the order."""
    crc = 0
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
