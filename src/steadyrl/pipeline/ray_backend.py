"""Engines as Ray actors.

    driver                                              each engine's actor
    broadcast: weights -> object store, once; Load -->  copies them into its model           --> checksum
    submit:    its share of the prompts, Generate  -->  samples                              --> rollouts, by the store
    admit:     the engine with the fewest groups   -->  samples between commands             --> groups as they finish
    collect:   waits until all shares are there    <--

An engine whose process or machine dies is started again, gets the weights it had, and then, in their order, all
commands that it has not answered. What the engines draw is a function of request and weights, so that in the batch-wise
regime the numbers are those of a run in which nothing died.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steadyrl.engines.base import weights_checksum
from steadyrl.errors import EngineError
from steadyrl.pipeline.backend import EngineSpec, Generated, Loaded
from steadyrl.pipeline.group_stream import Arrival
from steadyrl.pipeline.ray_cluster import Place, RayCluster, absolute, cause, load_ray, lost
from steadyrl.pipeline.ray_engine import (
    Admit,
    Answer,
    Command,
    EngineActor,
    Generate,
    HasArrived,
    HasFailed,
    HasGenerated,
    HasLoaded,
    Load,
)
from steadyrl.pipeline.ray_transport import PackedRollouts, pack_weights, unpack_rollouts, unpack_weights
from steadyrl.pipeline.splitting import join, split
from steadyrl.pipeline.weights import NUM_SLOTS, verify
from steadyrl.types import GenerationRequest, Rollout

MAX_DEATHS = 3  # of an engine, without an answer in between


@dataclass
class _Broadcast:
    version: int
    weights: Any  # ObjectRef
    checksum: str
    waiting: set[int]  # engines
    start_s: float = float("inf")
    end_s: float = 0.0


@dataclass
class _Request:
    shares: list[GenerationRequest]
    answers: dict[int, list[Rollout]] = field(default_factory=dict)  # by share
    start_s: float = float("inf")
    end_s: float = 0.0


@dataclass
class _Work:
    """A command with what it is part of."""

    command: Command
    part_of: _Broadcast | _Request | None = None


@dataclass
class _Engine:
    """An engine, and what it has been told."""

    index: int
    place: Place
    actor: Any = None
    heard: Any = None  # the call of `receive` that waits for what it says
    ahead_s: float = 0.0  # of the driver's clock
    sent: int = 0  # commands
    holds: _Broadcast | None = None
    unanswered: dict[int, _Work] = field(default_factory=dict)  # by the number of the command
    deaths: int = 0  # since its last answer

    def groups(self) -> int:
        commands = (work.command for work in self.unanswered.values())
        return sum(len(command.groups) for command in commands if isinstance(command, Admit))


@dataclass
class Traffic:
    """What went through the object store, and what died on the way."""

    rollout_bytes: int = 0
    rollout_tokens: int = 0  # sampled
    weight_bytes: int = 0
    engine_restarts: int = 0  # since the start of the run

    def take(self) -> dict[str, float]:
        """Metrics of an optimizer step; sums start again."""
        metrics = {"transport/weight_bytes": float(self.weight_bytes), "engine/restarts": float(self.engine_restarts)}
        if self.rollout_tokens:
            metrics["transport/rollout_bytes_per_token"] = self.rollout_bytes / self.rollout_tokens
        self.rollout_bytes = self.rollout_tokens = self.weight_bytes = 0
        return metrics


class RayBackend:
    """A `Backend` over the engines of a cluster.

    Args:
        tell: gets a sentence when an engine died and is started again.

    Raises:
        EngineError: an engine did not start.
    """

    def __init__(self, spec: EngineSpec, cluster: RayCluster, tell: Callable[[str], None]) -> None:
        self._ray = load_ray()
        self._spec = dataclasses.replace(spec, model_path=absolute(spec.model_path))
        self._traffic = Traffic()
        self._tell = tell
        self._broadcasts: deque[_Broadcast] = deque()  # not taken by all engines
        self._requests: deque[_Request] = deque()  # not collected
        self._arrivals: list[Arrival] = []
        self._loads: list[Loaded] = []
        self._busy_until_s = 0.0
        self._engines = [_Engine(index, place) for index, place in enumerate(cluster.engines)]
        try:
            for engine in self._engines:
                self._launch(engine)
            for engine in self._engines:
                self._await_start(engine)
        except lost(self._ray) as error:
            self.close()
            raise EngineError(f"an engine did not start: {cause(error)}") from None
        except BaseException:
            self.close()
            raise

    def broadcast(self, weights: Mapping[str, Tensor], version: int) -> None:
        while len(self._broadcasts) == NUM_SLOTS:
            oldest = self._broadcasts[0]
            self._receive(f"engine {min(oldest.waiting)} to take over version {oldest.version}")
        packed = pack_weights(weights, getattr(torch, self._spec.dtype))
        checksum = weights_checksum(unpack_weights(packed))
        self._traffic.weight_bytes += packed.num_bytes
        everyone = {engine.index for engine in self._engines}
        broadcast = _Broadcast(version, self._ray.put(packed), checksum, everyone)
        self._broadcasts.append(broadcast)
        for engine in self._engines:
            self._send(engine, _Work(Load(version), broadcast))

    def submit(self, request: GenerationRequest) -> None:
        parts = _Request(split(request, len(self._engines)))
        self._requests.append(parts)
        for engine, share in zip(self._engines, parts.shares, strict=False):
            self._send(engine, _Work(Generate(share), parts))

    def collect(self) -> Generated:
        assert self._requests, "nothing was submitted"
        request = self._requests[0]
        while len(request.answers) < len(request.shares):
            self._receive("the engines to finish a generation")
        self._requests.popleft()
        answers = [request.answers[share] for share in range(len(request.shares))]
        return Generated(join(request.shares, answers), request.start_s, request.end_s)

    def admit(self, groups: Sequence[tuple[int, GenerationRequest]]) -> None:
        shares: list[dict[int, GenerationRequest]] = [{} for _ in self._engines]
        running = [engine.groups() for engine in self._engines]
        for number, request in groups:
            fewest = min(range(len(running)), key=lambda index: running[index])
            shares[fewest][number] = request
            running[fewest] += 1
        for engine, share in zip(self._engines, shares, strict=True):
            if share:
                self._send(engine, _Work(Admit(share)))

    def arrivals(self, *, wait: bool) -> list[Arrival]:
        while self._hear(0.0):
            pass
        while wait and not self._arrivals:
            assert any(engine.groups() for engine in self._engines), "nothing was admitted"
            self._receive("the engines to finish a group")
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def loads(self) -> list[Loaded]:
        loads, self._loads = self._loads, []
        return loads

    def metrics(self) -> dict[str, float]:
        return self._traffic.take()

    def close(self) -> None:
        for engine in self._engines:
            if engine.actor is not None:
                self._ray.kill(engine.actor)  # it holds nothing that must be kept

    # ---- engines that start, and start again ----

    def _launch(self, engine: _Engine) -> None:
        options = {**engine.place.options(), "max_concurrency": 2, "max_restarts": 0}
        engine.actor = self._ray.remote(EngineActor).options(**options).remote(self._spec)

    def _await_start(self, engine: _Engine) -> None:
        timeout_s = self._spec.start_timeout_s
        try:
            self._ray.get(engine.actor.clock.remote(), timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise EngineError(
                f"gave up waiting for engine {engine.index} to start after {timeout_s:.0f} s: raise "
                "engine.start_timeout_s if the cluster is slow, else look at its free resources with ray status"
            ) from None
        before = time.monotonic()
        there = self._ray.get(engine.actor.clock.remote())
        after = time.monotonic()
        ahead_s = (before + after) / 2 - there
        engine.ahead_s = ahead_s if abs(ahead_s) > after - before else 0.0  # the same clock
        engine.heard = engine.actor.receive.remote()

    def _revive(self, engine: _Engine, error: BaseException) -> None:
        """Start an engine that died again, and have it do what it had not done."""
        while True:
            engine.deaths += 1
            if engine.deaths > MAX_DEATHS:
                raise EngineError(
                    f"engine {engine.index} died {engine.deaths} times without an answer in between, the last time: "
                    f"{cause(error)}. If the run folder holds a checkpoint, --resume continues from it"
                )
            self._traffic.engine_restarts += 1
            self._tell(f"engine {engine.index} died and is started again: {cause(error)}")
            self._ray.kill(engine.actor)  # should only its connection be lost
            self._launch(engine)
            try:
                self._await_start(engine)
                break
            except lost(self._ray) as again:
                error = again
        work = list(engine.unanswered.values())
        if engine.holds is not None:
            work.insert(0, _Work(Load(engine.holds.version), engine.holds))
        engine.unanswered, engine.sent = {}, 0
        for one in work:
            self._send(engine, one)

    # ---- what goes to an engine, and what it says ----

    def _send(self, engine: _Engine, work: _Work) -> None:
        number = engine.sent
        engine.sent += 1
        engine.unanswered[number] = work
        weights = work.part_of.weights if isinstance(work.part_of, _Broadcast) else None
        engine.actor.send.remote(number, work.command, weights)

    def _receive(self, awaited: str) -> None:
        """Wait for something that an engine says."""
        timeout_s = self._spec.generate_timeout_s
        if not self._hear(timeout_s):
            raise EngineError(
                f"gave up waiting for {awaited} after {timeout_s:.0f} s: raise engine.generate_timeout_s if the "
                "machines are slow, else look at the engines with ray list actors"
            )

    def _hear(self, timeout_s: float) -> bool:
        """Handle what one engine says or that it died; false if no engine did anything in this time."""
        calls = {engine.heard: engine for engine in self._engines}
        heard, _ = self._ray.wait(list(calls), timeout=timeout_s)
        for call in heard:
            engine = calls[call]
            try:
                answers = self._ray.get(call)
            except lost(self._ray) as error:
                self._revive(engine, error)
                continue
            engine.heard = engine.actor.receive.remote()
            for answer in answers:
                self._handle(engine, answer)
        return bool(heard)

    def _handle(self, engine: _Engine, answer: Answer | HasFailed) -> None:
        if isinstance(answer, HasFailed):
            raise EngineError(f"engine {engine.index} failed:\n{answer.trace}")
        start_s, end_s = answer.start_s + engine.ahead_s, answer.end_s + engine.ahead_s
        if isinstance(answer, HasLoaded):
            broadcast = engine.unanswered.pop(answer.number).part_of
            assert isinstance(broadcast, _Broadcast)
            verify(broadcast.version, broadcast.checksum, answer.checksum)
            engine.holds = broadcast
            self._has_loaded(broadcast, engine.index, start_s, end_s)
            return
        engine.deaths = 0
        if isinstance(answer, HasGenerated):
            work = engine.unanswered.pop(answer.number)
            assert isinstance(work.part_of, _Request)
            self._has_generated(work.part_of, engine.index, self._unpack(answer.rollouts), start_s, end_s)
        elif isinstance(answer, HasArrived):
            rollouts = self._unpack(answer.rollouts)
            self._arrivals.append(Arrival(answer.number, rollouts, *self._busy(start_s, end_s)))
            _forget(engine, answer.number)

    def _has_loaded(self, broadcast: _Broadcast, engine: int, start_s: float, end_s: float) -> None:
        if engine not in broadcast.waiting:
            return  # had it before it died
        broadcast.waiting.discard(engine)
        broadcast.start_s, broadcast.end_s = min(broadcast.start_s, start_s), max(broadcast.end_s, end_s)
        if not broadcast.waiting:
            self._broadcasts.remove(broadcast)
            self._loads.append(Loaded(broadcast.version, *self._busy(broadcast.start_s, broadcast.end_s)))

    def _has_generated(
        self, request: _Request, share: int, rollouts: list[Rollout], start_s: float, end_s: float
    ) -> None:
        request.answers[share] = rollouts
        request.start_s, request.end_s = min(request.start_s, start_s), max(request.end_s, end_s)
        if len(request.answers) == len(request.shares):
            request.start_s, request.end_s = self._busy(request.start_s, request.end_s)

    def _busy(self, start_s: float, end_s: float) -> tuple[float, float]:
        """A stretch of work, less what was reported already: several engines at once are busy once."""
        end_s = max(end_s, self._busy_until_s)
        start_s = min(max(start_s, self._busy_until_s), end_s)
        self._busy_until_s = end_s
        return start_s, end_s

    def _unpack(self, packed: PackedRollouts) -> list[Rollout]:
        rollouts = unpack_rollouts(packed)
        self._traffic.rollout_bytes += packed.num_bytes
        self._traffic.rollout_tokens += sum(rollout.num_sampled for rollout in rollouts)
        return rollouts


def _forget(engine: _Engine, group: int) -> None:
    """A group has arrived: it needs not be admitted again."""
    for number, work in engine.unanswered.items():
        if isinstance(work.command, Admit) and work.command.groups.pop(group, None) is not None:
            if not work.command.groups:
                del engine.unanswered[number]
            return
