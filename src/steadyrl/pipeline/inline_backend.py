"""The engine in the trainer's own process: every command is carried out at once. For tests and sweeps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from steadyrl.engines.base import StreamingEngine, weights_checksum
from steadyrl.pipeline.backend import Generated, Loaded
from steadyrl.pipeline.group_stream import Arrival, GroupStream, Stragglers
from steadyrl.pipeline.splitting import join, split
from steadyrl.pipeline.weights import verify
from steadyrl.types import GenerationRequest


class InlineBackend:
    """A `Backend` without parallelism, and with the same numbers as every other one.

    Args:
        replicas: answer as so many engines do that share a request.
    """

    def __init__(self, engine: StreamingEngine, dtype: torch.dtype, stragglers: Stragglers, replicas: int = 1) -> None:
        self._engine = engine
        self._replicas = replicas
        self._stream = GroupStream(engine, stragglers)
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
        shares = split(request, self._replicas)
        rollouts = join(shares, [self._engine.generate(share) for share in shares])
        self._finished.append(Generated(rollouts, start, time.monotonic()))
        self._stream.begin_work()

    def collect(self) -> Generated:
        return self._finished.popleft()

    def admit(self, groups: Sequence[tuple[int, GenerationRequest]]) -> None:
        for number, request in groups:
            self._stream.admit(number, request)

    def arrivals(self, *, wait: bool) -> list[Arrival]:
        """The engine works only while somebody waits for it: time stands still while the trainer works."""
        self._stream.begin_work()
        arrived: list[Arrival] = []
        while wait and not arrived:
            assert not self._stream.is_idle, "nothing was admitted"
            arrived = self._stream.step()
        return arrived

    def loads(self) -> list[Loaded]:
        loads, self._loads = self._loads, []
        return loads

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._engine.close()
