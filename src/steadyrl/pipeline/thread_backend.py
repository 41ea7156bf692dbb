"""An engine that is elsewhere already (rollout servers), driven by a thread of the trainer's process.

    trainer's thread                                     engine's thread
    broadcast: weights -> a copy, ("load", ...)     ->   brings them into the servers, Loaded
    submit:    ("generate", request)                ->   waits for the responses,      Generated
    admit:     ("admit", groups)                    ->   between commands,             the groups that arrived

Commands are carried out in the order in which they are given. What fails in the engine's thread is raised by the next
wait of the trainer's.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadyrl.engines.base import ServedEngine, weights_checksum
from steadyrl.errors import EngineError, SteadyRLError
from steadyrl.pipeline.backend import Generated, Loaded
from steadyrl.pipeline.group_stream import Arrival, GroupStream, Stragglers
from steadyrl.pipeline.queued_backend import QueuedBackend
from steadyrl.pipeline.weights import NUM_SLOTS, verify

CLOSE_TIMEOUT_S = 5.0

Command = tuple[Any, ...]
Answer = Generated | list[Arrival] | Loaded | SteadyRLError


class ThreadBackend(QueuedBackend):
    """A `Backend` whose engine waits for servers while the trainer works.

    Args:
        engine: used by the engine's thread alone, but for `close`, which must end what runs in it.
        dtype: of the engine's weights.
        stragglers: streaming: what becomes of slow groups.
        timeout_s: for each wait.
    """

    engine_name = "the rollout servers"

    def __init__(self, engine: ServedEngine, dtype: torch.dtype, stragglers: Stragglers, timeout_s: float) -> None:
        super().__init__()
        self._engine = engine
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._stream = GroupStream(engine, stragglers)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._loading = 0  # broadcasts without an answer
        self._thread = threading.Thread(target=self._work, name="steadyrl-engine", daemon=True)
        self._thread.start()

    # ---- the trainer's thread ----

    def broadcast(self, weights: Mapping[str, Tensor], version: int) -> None:
        while self._loading == NUM_SLOTS:
            self._receive("the rollout servers to take over the weights")
        copies = {name: tensor.to(self._dtype, copy=True) for name, tensor in weights.items()}
        self._loading += 1
        self._commands.put(("load", copies, version))

    def close(self) -> None:
        self._commands.put(("close",))
        self._engine.close()  # ends what the thread waits for
        self._thread.join(CLOSE_TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        return self._engine.metrics()

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    def _has_answer(self) -> bool:
        return not self._inbox.empty()

    def _receive(self, awaited: str) -> None:
        try:
            answer = self._inbox.get(timeout=self._timeout_s)
        except queue.Empty:
            raise EngineError(
                f"gave up waiting for {awaited} after {self._timeout_s:.0f} s: raise engine.generate_timeout_s if they "
                "are slow, else look at what the servers print"
            ) from None
        if isinstance(answer, SteadyRLError):
            self._inbox.put(answer)  # for the next wait too: the thread has ended
            raise answer
        if isinstance(answer, Loaded):
            self._loading -= 1
        self._note(answer)

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
                    self._inbox.put(arrived)
        except SteadyRLError as error:
            self._inbox.put(error)
        except BaseException:
            self._inbox.put(EngineError(f"the engine's thread failed:\n{traceback.format_exc()}"))

    def _obey(self, kind: str, *content: Any) -> None:
        start = time.monotonic()
        if kind == "load":
            weights, version = content
            verify(version, weights_checksum(weights), self._engine.load_weights(weights, version))
            self._inbox.put(Loaded(version, start, time.monotonic()))
        elif kind == "generate":
            rollouts = self._engine.generate(content[0])
            self._inbox.put(Generated(rollouts, start, time.monotonic()))
        else:
            for number, request in content[0]:
                self._stream.admit(number, request)
            return
        self._stream.begin_work()
