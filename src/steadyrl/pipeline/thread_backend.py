"""An engine that is elsewhere already (rollout servers), driven by a thread of the trainer's process.

    trainer's thread                                     engine's thread
    broadcast: weights -> a copy, ("load", ...)     ->   brings them into the servers, ("loaded", checksum)
    submit:    ("generate", request)                ->   waits for the responses,      ("generated", rollouts)
    admit:     ("admit", groups)                    ->   between commands,             ("arrived", groups)

Commands are carried out in the order in which they are given. What fails in the engine's thread is raised by the next
wait of the trainer's.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadyrl.engines.base import StreamingEngine, weights_checksum
from steadyrl.errors import EngineError, SteadyRLError
from steadyrl.pipeline.backend import Generated, Loaded
from steadyrl.pipeline.group_stream import Arrival, GroupStream, Stragglers
from steadyrl.pipeline.weights import verify
from steadyrl.types import GenerationRequest

MOST_WEIGHTS = 2  # copies of the weights that may wait: one for rollouts, one for an evaluation
CLOSE_TIMEOUT_S = 5.0

Message = tuple[Any, ...]


class ThreadBackend:
    """A `Backend` whose engine waits for servers while the trainer works.

    Args:
        engine: used by the engine's thread alone, but for `close`, which must end what runs in it.
        dtype: of the engine's weights.
        stragglers: streaming: what becomes of slow groups.
        timeout_s: for each wait.
    """

    def __init__(self, engine: StreamingEngine, dtype: torch.dtype, stragglers: Stragglers, timeout_s: float) -> None:
        self._engine = engine
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._stream = GroupStream(engine, stragglers)
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._finished: deque[Generated] = deque()
        self._arrivals: list[Arrival] = []
        self._loads: list[Loaded] = []
        self._loading = self._waiting = self._admitted = 0  # without an answer
        self._thread = threading.Thread(target=self._work, name="steadyrl-engine", daemon=True)
        self._thread.start()

    # ---- the trainer's thread ----

    def broadcast(self, weights: Mapping[str, Tensor], version: int) -> None:
        while self._loading == MOST_WEIGHTS:
            self._receive("the rollout servers to take over the weights")
        copies = {name: tensor.to(self._dtype, copy=True) for name, tensor in weights.items()}
        self._loading += 1
        self._commands.put(("load", copies, version))

    def submit(self, request: GenerationRequest) -> None:
        self._waiting += 1
        self._commands.put(("generate", request))

    def collect(self) -> Generated:
        assert self._finished or self._waiting, "nothing was submitted"
        while not self._finished:
            self._receive("the rollout servers to finish a generation")
        return self._finished.popleft()

    def admit(self, groups: Sequence[tuple[int, GenerationRequest]]) -> None:
        self._admitted += len(groups)
        self._commands.put(("admit", list(groups)))

    def arrivals(self, *, wait: bool) -> list[Arrival]:
        while not self._inbox.empty():
            self._receive("the rollout servers")
        while wait and not self._arrivals:
            assert self._admitted, "nothing was admitted"
            self._receive("the rollout servers to finish a group")
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def loads(self) -> list[Loaded]:
        loads, self._loads = self._loads, []
        return loads

    def close(self) -> None:
        self._commands.put(("close",))
        self._engine.close()  # ends what the thread waits for
        self._thread.join(CLOSE_TIMEOUT_S)

    def _receive(self, awaited: str) -> None:
        """Handle one message of the engine's thread."""
        try:
            kind, *content = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise EngineError(
                f"gave up waiting for {awaited} after {self._timeout_s:.0f} s: raise engine.generate_timeout_s if they "
                "are slow, else look at what the servers print"
            ) from None
        if kind == "generated":
            self._waiting -= 1
            self._finished.append(content[0])
        elif kind == "arrived":
            self._admitted -= len(content[0])
            self._arrivals += content[0]
        elif kind == "loaded":
            self._loading -= 1
            self._loads.append(content[0])
        else:
            self._inbox.put((kind, *content))  # for the next wait too: the thread has ended
            raise content[0]

    # ---- the engine's thread ----

    def _work(self) -> None:
        try:
            while True:
                while self._stream.is_idle or not self._commands.empty():
                    command = self._commands.get()
                    if command[0] == "close":
                        return
                    self._obey(*command)
                if arrived := self._stream.step():
                    self._inbox.put(("arrived", arrived))
        except SteadyRLError as error:
            self._inbox.put(("failed", error))
        except BaseException:
            self._inbox.put(("failed", EngineError(f"the engine's thread failed:\n{traceback.format_exc()}")))

    def _obey(self, kind: str, *content: Any) -> None:
        start = time.monotonic()
        if kind == "load":
            weights, version = content
            verify(version, weights_checksum(weights), self._engine.load_weights(weights, version))
            self._inbox.put(("loaded", Loaded(version, start, time.monotonic())))
        elif kind == "generate":
            rollouts = self._engine.generate(content[0])
            self._inbox.put(("generated", Generated(rollouts, start, time.monotonic())))
        else:
            for number, request in content[0]:
                self._stream.admit(number, request)
            return
        self._stream.begin_work()
