"""The engine in a process of its own.

    trainer process                                    engine process
    broadcast: weights -> shared memory, ("load", ..)  -> copies them into its model, ("loaded", checksum)
    submit:    ("generate", request)                   -> samples,                     ("generated", rollouts)
    collect:   reads answers, oldest first             <-

The engine waits for commands and for nothing else. The trainer waits in `collect`, and in `broadcast`
only when both slots still hold weights that the engine has not taken; each wait has a deadline and
notices when the engine has died. If the trainer dies, the pipe closes and the engine ends.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from steadyrl.engines.build import build_local_engine
from steadyrl.errors import EngineError
from steadyrl.pipeline.backend import EngineSpec, Generated, Loaded
from steadyrl.pipeline.weights import WeightLayout, WeightSlot, verify
from steadyrl.types import GenerationRequest

NUM_SLOTS = 2  # one for rollouts and one for an evaluation may wait at the same time
POLL_S = 0.5  # how often a wait looks whether the engine is alive
CLOSE_TIMEOUT_S = 5.0


class ProcessBackend:
    """A `Backend` whose engine samples while the trainer works."""

    def __init__(self, spec: EngineSpec, weights: Mapping[str, Tensor]) -> None:
        self._spec = spec
        layout = WeightLayout.of(weights, getattr(torch, spec.dtype))
        self._slots = [WeightSlot(layout) for _ in range(NUM_SLOTS)]
        self._next_slot = 0
        self._sent: deque[tuple[int, str]] = deque()  # version and checksum of broadcasts without an answer
        self._finished: deque[Generated] = deque()
        self._waiting = 0  # requests without an answer
        self._loads: list[Loaded] = []
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        names = [slot.name for slot in self._slots]
        self._process = context.Process(
            target=_engine_process, args=(remote, spec, layout, names), name="steadyrl-engine", daemon=True
        )
        self._process.start()
        remote.close()
        try:
            self._receive("the engine process to start", spec.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def broadcast(self, weights: Mapping[str, Tensor], version: int) -> None:
        while len(self._sent) == NUM_SLOTS:
            self._receive(f"the engine to take over version {self._sent[0][0]}", self._spec.generate_timeout_s)
        slot = self._next_slot
        self._next_slot = (slot + 1) % NUM_SLOTS
        self._sent.append((version, self._slots[slot].write(weights)))
        self._send(("load", slot, version))

    def submit(self, request: GenerationRequest) -> None:
        self._waiting += 1
        self._send(("generate", request))

    def collect(self) -> Generated:
        assert self._finished or self._waiting, "nothing was submitted"
        while not self._finished:
            self._receive("the engine to finish a generation", self._spec.generate_timeout_s)
        return self._finished.popleft()

    def loads(self) -> list[Loaded]:
        loads, self._loads = self._loads, []
        return loads

    def close(self) -> None:
        self._connection.close()  # the engine ends when its pipe does
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():  # in the middle of a generation that nobody waits for any more
            self._process.kill()
            self._process.join(CLOSE_TIMEOUT_S)
        for slot in self._slots:
            slot.close()

    def _send(self, command: tuple[Any, ...]) -> None:
        try:
            self._connection.send(command)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died("it was sent a command") from None

    def _receive(self, awaited: str, timeout_s: float) -> None:
        """Handle one answer of the engine."""
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(POLL_S):
            if not self._process.is_alive() and not self._connection.poll(0):
                raise self._died(f"waiting for {awaited}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"gave up waiting for {awaited} after {timeout_s:.0f} s: raise engine.start_timeout_s or "
                    "engine.generate_timeout_s if the machine is slow, else look at the engine process"
                )
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(f"waiting for {awaited}") from None
        self._handle(*answer)

    def _handle(self, kind: str, *content: Any) -> None:
        if kind == "generated":
            self._waiting -= 1
            self._finished.append(content[0])
        elif kind == "loaded":
            received, loaded = content
            version, sent = self._sent.popleft()
            verify(version, sent, received)
            self._loads.append(loaded)
        elif kind == "failed":
            raise EngineError(f"the engine process failed:\n{content[0]}")
        else:
            assert kind == "ready", kind

    def _died(self, during: str) -> EngineError:
        self._process.join(1.0)
        code = self._process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return EngineError(
            f"the engine process died ({cause}) while {during}: continue from the last checkpoint with --resume; "
            "SIGKILL often means that the machine ran out of memory"
        )


def _engine_process(connection: Connection, spec: EngineSpec, layout: WeightLayout, slot_names: list[str]) -> None:
    """The whole life of the engine process."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # they may reach both processes; the trainer decides when to end
    disable_progress_bar()
    torch.set_num_threads(spec.threads)
    commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True).start()
    try:
        slots = [WeightSlot(layout, name) for name in slot_names]
        engine = build_local_engine(spec.model_path, spec.dtype, spec.max_sequences, spec.records_routing)
        connection.send(("ready",))
        while True:
            kind, *content = commands.get()
            start = time.monotonic()
            if kind == "load":
                slot, version = content
                checksum = engine.load_weights(slots[slot].tensors, version)
                connection.send(("loaded", checksum, Loaded(version, start, time.monotonic())))
            else:
                rollouts = engine.generate(content[0])
                connection.send(("generated", Generated(rollouts, start, time.monotonic())))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        os._exit(1)


def _read_commands(connection: Connection, commands: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Empty the pipe while the engine samples: with both ends writing, a full pipe would stop both for ever."""
    while True:
        try:
            commands.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the trainer is done, or gone: nobody waits for what is being sampled
