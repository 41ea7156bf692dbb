"""The engine in a process of its own.

    trainer process                                    engine process
    broadcast: weights -> shared memory, ("load", ..)  -> copies them into its model, ("loaded", checksum)
    submit:    ("generate", request)                   -> samples,                     ("generated", rollouts)
    collect:   reads answers, oldest first             <-
    admit:     ("admit", groups)                       -> samples between commands,    ("arrived", groups)

The engine waits for commands and for nothing else. The trainer waits in `collect`, and in `broadcast`
only when both slots still hold weights that the engine has not taken. It never touches the pipe itself:
one thread writes what is queued for the engine, another queues what the engine says, and so each wait
is one for a queue, with a deadline, and notices when the engine has died. If the trainer dies, the
engine ends: its pipe closes, and on Linux the kernel kills it, even where it is stopped.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from steadyrl.engines.build import build_local_engine
from steadyrl.engines.local_engine import LocalEngine
from steadyrl.errors import EngineError
from steadyrl.pipeline.backend import EngineSpec, Generated, Loaded
from steadyrl.pipeline.group_stream import GroupStream
from steadyrl.pipeline.queued_backend import QueuedBackend
from steadyrl.pipeline.weights import NUM_SLOTS, WeightLayout, WeightSlot, create_slots, verify

POLL_S = 0.5  # how often a wait looks whether the engine is alive
CLOSE_TIMEOUT_S = 5.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1  # of prctl

Answer = tuple[Any, ...]


class ProcessBackend(QueuedBackend):
    """A `Backend` whose engine samples while the trainer works."""

    def __init__(self, spec: EngineSpec, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._spec = spec
        layout = WeightLayout.of(weights, getattr(torch, spec.dtype))
        self._slots = create_slots(layout)
        self._next_slot = 0
        self._sent: deque[tuple[int, str]] = deque()  # version and checksum of broadcasts without an answer
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: no more
        self._inbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # None: the pipe has ended
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        names = [slot.name for slot in self._slots]
        self._process = context.Process(
            target=_engine_process, args=(remote, spec, layout, names), name="steadyrl-engine", daemon=True
        )
        self._writer = threading.Thread(
            target=_write, args=(self._connection, self._outbox), name="steadyrl-writer", daemon=True
        )
        self._reader = threading.Thread(
            target=_read, args=(self._connection, self._inbox), name="steadyrl-reader", daemon=True
        )
        try:
            self._start(remote)
            self._await("the engine process to start", spec.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, remote: Connection) -> None:
        """Start the engine and the threads with blocked signals, which they inherit.

        Ctrl-C reaches the whole process group: it must not end an engine that has yet to ignore it, and
        in this process it must interrupt the main thread.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process.start()
            self._writer.start()
            self._reader.start()
        finally:
            remote.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def broadcast(self, weights: Mapping[str, Tensor], version: int) -> None:
        while len(self._sent) == NUM_SLOTS:
            self._receive(f"the engine to take over version {self._sent[0][0]}")
        slot = self._next_slot
        self._next_slot = (slot + 1) % NUM_SLOTS
        self._sent.append((version, self._slots[slot].write(weights)))
        self._send(("load", slot, version))

    def close(self) -> None:
        if self._process.pid is not None:
            self._process.kill()  # it holds nothing that must be kept, and may be stopped or in a generation
            self._process.join(CLOSE_TIMEOUT_S)
        self._outbox.put(None)
        threads = [thread for thread in (self._writer, self._reader) if thread.is_alive()]
        for thread in threads:  # the pipe has ended with the process
            thread.join(CLOSE_TIMEOUT_S)
        if not any(thread.is_alive() for thread in threads):
            self._connection.close()
        while self._slots:
            self._slots.pop().close()

    def _send(self, command: tuple[Any, ...]) -> None:
        self._outbox.put(bytes(ForkingPickler.dumps(command)))

    def _has_answer(self) -> bool:
        return not self._inbox.empty()

    def _receive(self, awaited: str) -> None:
        self._await(awaited, self._spec.generate_timeout_s)

    def _await(self, awaited: str, timeout_s: float) -> None:
        """Handle one answer of the engine."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                answer = self._inbox.get(timeout=max(0.0, min(POLL_S, left_s)))
                break
            except queue.Empty:
                if not self._process.is_alive():
                    self._reader.join(POLL_S)  # for its last words
                    if self._inbox.empty():
                        raise self._died(f"waiting for {awaited}") from None
                elif left_s <= 0:
                    raise EngineError(
                        f"gave up waiting for {awaited} after {timeout_s:.0f} s: raise engine.start_timeout_s or "
                        "engine.generate_timeout_s if the machine is slow, else look at the engine process"
                    ) from None
        if answer is None:
            raise self._died(f"waiting for {awaited}")
        self._handle(*answer)

    def _handle(self, kind: str, *content: Any) -> None:
        if kind in ("generated", "arrived"):
            self._note(content[0])
        elif kind == "loaded":
            received, loaded = content
            version, sent = self._sent.popleft()
            verify(version, sent, received)
            self._note(loaded)
        elif kind == "failed":
            raise EngineError(f"the engine process failed:\n{content[0]}")
        else:
            assert kind == "ready", kind

    def _died(self, during: str) -> EngineError:
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return EngineError(f"the engine process closed its pipe while {during}: look at what it printed")
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineError(
            f"the engine process died ({cause}) while {during}: if the run folder holds a checkpoint, --resume "
            "continues from it; SIGKILL often means that the machine ran out of memory"
        )


def _write(connection: Connection, outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Write what is queued for the engine, until there is no more or the pipe has ended (the reader says so)."""
    try:
        while (command := outbox.get()) is not None:
            connection.send_bytes(command)
    except OSError:
        pass


def _read(connection: Connection, inbox: queue.SimpleQueue[Answer | None]) -> None:
    """Queue what the engine says, until the pipe has ended, in the middle of a message or not."""
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            break
        except Exception:
            inbox.put(("failed", f"its answer could not be read:\n{traceback.format_exc()}"))
    inbox.put(None)


def _engine_process(connection: Connection, spec: EngineSpec, layout: WeightLayout, slot_names: list[str]) -> None:
    """The whole life of the engine process."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # they may reach both processes; the trainer decides when to end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _end_with_the_trainer()
    disable_progress_bar()
    tqdm.set_lock(threading.RLock())  # its own lock is a semaphore of the system, and would be reported as leaked
    torch.set_num_threads(spec.threads)
    commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True).start()
    try:
        slots = [WeightSlot(layout, name) for name in slot_names]
        engine = build_local_engine(
            spec.model_path, spec.dtype, spec.max_sequences, spec.records_routing, spec.cache_on_update
        )
        stream = GroupStream(engine, spec.stragglers)
        connection.send(("ready",))
        while True:
            while stream.is_idle or not commands.empty():
                _obey(commands.get(), engine, stream, slots, connection)
            if arrived := stream.step():
                connection.send(("arrived", arrived))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        os._exit(1)


def _obey(
    command: tuple[Any, ...], engine: LocalEngine, stream: GroupStream, slots: list[WeightSlot], connection: Connection
) -> None:
    """Carry out one command of the trainer; running groups pause meanwhile, between two tokens."""
    kind, *content = command
    start = time.monotonic()
    if kind == "load":
        slot, version = content
        checksum = engine.load_weights(slots[slot].tensors, version)
        connection.send(("loaded", checksum, Loaded(version, start, time.monotonic())))
    elif kind == "generate":
        rollouts = engine.generate(content[0])
        connection.send(("generated", Generated(rollouts, start, time.monotonic())))
    else:
        for number, request in content[0]:
            stream.admit(number, request)
        return
    stream.begin_work()


def _end_with_the_trainer() -> None:
    """Have the kernel kill this process with the thread that started it: a stopped one sees no pipe close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    trainer = multiprocessing.parent_process()
    if trainer is not None and os.getppid() != trainer.pid:  # it died before the kernel was asked
        os._exit(0)


def _read_commands(connection: Connection, commands: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Empty the pipe while the engine samples: with both ends writing, a full pipe would stop both for ever."""
    while True:
        try:
            commands.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # the trainer is done, or gone: nobody waits for what is being sampled
