"""The engine in the trainer's own process: every command is carried out at once. For tests and sweeps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from steadyrl.engines.base import Engine, weights_checksum
from steadyrl.pipeline.backend import Generated, Loaded
from steadyrl.pipeline.weights import verify
from steadyrl.types import GenerationRequest


class InlineBackend:
    """A `Backend` without parallelism, and with the same numbers as every other one."""

    def __init__(self, engine: Engine, dtype: torch.dtype) -> None:
        self._engine = engine
        self._dtype = dtype
        self._finished: deque[Generated] = deque()
        self._loads: list[Loaded] = []

    def broadcast(self, weights: Mapping[str, Tensor], version: int) -> None:
        start = time.monotonic()
        cast = {name: tensor.to(self._dtype) for name, tensor in weights.items()}
        verify(version, weights_checksum(cast), self._engine.load_weights(cast, version))
        self._loads.append(Loaded(version, start, time.monotonic()))

    def submit(self, request: GenerationRequest) -> None:
        start = time.monotonic()
        rollouts = self._engine.generate(request)
        self._finished.append(Generated(rollouts, start, time.monotonic()))

    def collect(self) -> Generated:
        return self._finished.popleft()

    def loads(self) -> list[Loaded]:
        loads, self._loads = self._loads, []
        return loads

    def close(self) -> None:
        self._engine.close()
