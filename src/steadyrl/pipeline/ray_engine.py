"""The engine's side of the Ray backend: an actor with the embedded engine on a thread of its own.

    send(number, command)    from the driver; commands are obeyed in the order of their numbers
    receive()                waits until the engine has something to say; the driver always has one such call waiting

Ray may start the calls of an actor with several threads in another order than they were made in: hence the numbers.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from dataclasses import dataclass

import torch

from steadyrl.engines.build import build_local_engine
from steadyrl.pipeline.backend import EngineSpec
from steadyrl.pipeline.group_stream import GroupStream
from steadyrl.pipeline.ray_transport import PackedRollouts, PackedWeights, pack_rollouts, unpack_weights
from steadyrl.types import GenerationRequest


@dataclass(frozen=True)
class Load:
    """Take over the weights that come with the command."""

    version: int


@dataclass(frozen=True)
class Generate:
    request: GenerationRequest


@dataclass(frozen=True)
class Admit:
    """Groups by number, to be started together."""

    groups: dict[int, GenerationRequest]


Command = Load | Generate | Admit


@dataclass(frozen=True)
class Answer:
    """To a command, or about one group of it; times are of this machine's `time.monotonic`."""

    number: int  # of the command; of the group where the answer is a group
    start_s: float
    end_s: float


@dataclass(frozen=True)
class HasLoaded(Answer):
    checksum: str


@dataclass(frozen=True)
class HasGenerated(Answer):
    rollouts: PackedRollouts


@dataclass(frozen=True)
class HasArrived(Answer):
    rollouts: PackedRollouts  # none where the group was given up


@dataclass(frozen=True)
class HasFailed:
    """The engine raised an exception, and does nothing any more."""

    trace: str


class EngineActor:
    """Lives in a worker process of Ray. Needs two threads: one waits in `receive`."""

    def __init__(self, spec: EngineSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._engine = build_local_engine(
            spec.model_path, spec.dtype, spec.max_sequences, spec.records_routing, spec.cache_on_update
        )
        self._stream = GroupStream(self._engine, spec.stragglers)
        self._commands: queue.SimpleQueue[tuple[int, Command, PackedWeights | None]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | HasFailed] = queue.SimpleQueue()
        self._early: dict[int, tuple[Command, PackedWeights | None]] = {}
        self._next = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name="steadyrl-engine", daemon=True).start()

    def clock(self) -> float:
        return time.monotonic()

    def send(self, number: int, command: Command, weights: PackedWeights | None) -> None:
        with self._lock:
            self._early[number] = command, weights
            while self._next in self._early:
                self._commands.put((self._next, *self._early.pop(self._next)))
                self._next += 1

    def receive(self) -> list[Answer | HasFailed]:
        """What the engine has said since the last call, at least one answer."""
        answers = [self._answers.get()]
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    def _work(self) -> None:
        torch.set_num_threads(self._spec.threads)  # a thread has a number of its own
        try:
            while True:
                while self._stream.is_idle or not self._commands.empty():
                    self._obey(*self._commands.get())
                for arrival in self._stream.step():
                    packed = pack_rollouts(arrival.rollouts)
                    self._answers.put(HasArrived(arrival.number, arrival.start_s, arrival.end_s, packed))
        except BaseException:
            self._answers.put(HasFailed(traceback.format_exc()))

    def _obey(self, number: int, command: Command, weights: PackedWeights | None) -> None:
        """Carry out one command; running groups pause meanwhile, between two tokens."""
        start = time.monotonic()
        if isinstance(command, Load):
            assert weights is not None
            checksum = self._engine.load_weights(unpack_weights(weights), command.version)
            self._answers.put(HasLoaded(number, start, time.monotonic(), checksum))
        elif isinstance(command, Generate):
            rollouts = self._engine.generate(command.request)
            self._answers.put(HasGenerated(number, start, time.monotonic(), pack_rollouts(rollouts)))
        else:
            for group, request in command.groups.items():
                self._stream.admit(group, request)
            return
        self._stream.begin_work()
