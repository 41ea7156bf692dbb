"""The driver's side of the engines, over a Ray that lives in this process: what is asked, joined, and asked again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from pipeline.fake_ray import Died, FakeRay, Later, NoPlace
from pipeline.test_splitting import answer, request

from steadyrl.engines.base import weights_checksum
from steadyrl.errors import EngineError
from steadyrl.pipeline import ray_backend
from steadyrl.pipeline.backend import EngineSpec
from steadyrl.pipeline.group_stream import Stragglers
from steadyrl.pipeline.ray_backend import MAX_DEATHS, RayBackend
from steadyrl.pipeline.ray_cluster import RayCluster
from steadyrl.pipeline.ray_engine import Generate, HasArrived, HasFailed, HasGenerated, HasLoaded, Load
from steadyrl.pipeline.ray_transport import pack_rollouts, unpack_weights
from steadyrl.types import GenerationRequest, Rollout

SPEC = EngineSpec("", "bfloat16", 8, False, 1, 1.0, 1.0, "keep", Stragglers(0.0, are_kept=False))
WEIGHTS = {"w": torch.arange(5.0)}

Fate = Callable[[Any], None]


class StubEngine:
    """Answers a request with its random numbers, in rollouts of the version that it holds."""

    fates: ClassVar[dict[int, Fate]] = {}  # by launch: called with every command before it is obeyed
    launched: ClassVar[list[StubEngine]] = []
    is_slow = False  # groups that are admitted do not arrive
    behind_s = 0.0  # of its machine's clock

    def __init__(self, _spec: EngineSpec) -> None:
        self.fate = self.fates.get(len(self.launched), lambda command: None)
        self.commands: list[Any] = []
        self.answers: list[Any] = []
        self.version = -1
        self.launched.append(self)

    def clock(self) -> float:
        return time.monotonic() - self.behind_s

    def send(self, number: int, command: Any, weights: Any) -> None:
        assert number == len(self.commands)
        self.fate(command)
        self.commands.append(command)
        start, end = float(len(self.commands)), float(len(self.commands) + 1)
        if isinstance(command, Load):
            self.version = command.version
            self.answers.append(HasLoaded(number, start, end, weights_checksum(unpack_weights(weights))))
        elif isinstance(command, Generate):
            self.answers.append(HasGenerated(number, start, end, pack_rollouts(self.rollouts(command.request))))
        elif not self.is_slow:
            for group, one in command.groups.items():
                self.answers.append(HasArrived(group, start, end, pack_rollouts(self.rollouts(one))))

    def rollouts(self, one: GenerationRequest) -> list[Rollout]:
        rollouts = answer(one)
        for rollout in rollouts:
            rollout.finished_version = self.version
        return rollouts

    def receive(self) -> Later:
        def said() -> list[Any] | None:
            taken, self.answers = self.answers, []
            return taken or None

        return Later(said)


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(ray_backend, "load_ray", lambda: fake)
    monkeypatch.setattr(ray_backend, "EngineActor", StubEngine)
    monkeypatch.setattr(StubEngine, "launched", [])
    monkeypatch.setattr(StubEngine, "fates", {})
    monkeypatch.setattr(StubEngine, "is_slow", False)
    return fake


def backend(ray: FakeRay, engines: int, told: list[str] | None = None) -> RayBackend:
    cluster = RayCluster([], [NoPlace() for _ in range(engines)])  # type: ignore[misc]
    made = RayBackend(SPEC, cluster, (told if told is not None else []).append)
    for actor in ray.actors:
        assert not actor.death
    return made


def dies_at(kind: type, *, after: int = 0) -> Fate:
    """An engine that dies when it is told to do something of this kind for the n-th time."""
    seen = []

    def fate(command: Any) -> None:
        if isinstance(command, kind):
            seen.append(command)
            if len(seen) > after:
                raise Died("by a test")

    return fate


def numbers(rollouts: list[Rollout]) -> list[tuple[str, int, list[int], int]]:
    return [(one.prompt_id, one.group, one.token_ids.tolist(), one.finished_version) for one in rollouts]


def expected(whole: GenerationRequest, version: int) -> list[tuple[str, int, list[int], int]]:
    return [(*row[:3], version) for row in numbers(answer(whole))]


def test_a_request_is_shared_and_answered_in_its_order(ray):
    made = backend(ray, 3)
    made.broadcast(WEIGHTS, 4)
    made.submit(request(8))
    made.submit(request(2, first=20))
    assert numbers(made.collect().rollouts) == expected(request(8), 4)
    assert numbers(made.collect().rollouts) == expected(request(2, first=20), 4)
    assert [loaded.version for loaded in made.loads()] == [4]
    assert made._traffic.rollout_tokens == 30
    assert made._traffic.weight_bytes == 10  # in the engine's dtype, once


@pytest.mark.parametrize("launch", [0, 1])
def test_a_dead_engine_is_started_again_and_the_numbers_are_the_same(ray, launch):
    StubEngine.fates = {launch: dies_at(Generate)}
    told: list[str] = []
    made = backend(ray, 2, told)
    made.broadcast(WEIGHTS, 4)
    made.submit(request(5))
    assert numbers(made.collect().rollouts) == expected(request(5), 4)
    assert len(StubEngine.launched) == 3
    assert made._traffic.engine_restarts == 1
    assert told == [f"engine {launch} died and is started again: the actor died: by a test"]
    assert [loaded.version for loaded in made.loads()] == [4]


def test_an_engine_gets_the_weights_that_it_had_then_what_it_was_asked(ray):
    StubEngine.fates = {0: dies_at(Generate, after=1)}
    made = backend(ray, 1)
    made.broadcast(WEIGHTS, 0)
    made.submit(request(2))
    made.collect()
    made.submit(request(2, first=2))  # dies; it held version 0
    made.broadcast({"w": WEIGHTS["w"] + 1}, 1)
    made.submit(request(2, first=4))
    assert numbers(made.collect().rollouts) == expected(request(2, first=2), 0)
    assert numbers(made.collect().rollouts) == expected(request(2, first=4), 1)
    assert [getattr(one, "version", "generate") for one in StubEngine.launched[1].commands] == [
        0,
        "generate",
        1,
        "generate",
    ]
    assert [loaded.version for loaded in made.loads()] == [0, 1]


def test_an_engine_that_dies_of_what_it_is_asked_ends_the_run(ray):
    StubEngine.fates = {launch: dies_at(Generate) for launch in range(20)}
    made = backend(ray, 1)
    made.broadcast(WEIGHTS, 0)
    made.submit(request(2))
    with pytest.raises(EngineError, match=rf"engine 0 died {MAX_DEATHS + 1} times .*the actor died: by a test"):
        made.collect()


def test_deaths_with_answers_in_between_do_not_add_up(ray):
    StubEngine.fates = {launch: dies_at(Generate, after=1) for launch in range(20)}
    made = backend(ray, 1)
    made.broadcast(WEIGHTS, 0)
    for number in range(2 * MAX_DEATHS + 2):
        made.submit(request(2, first=2 * number))
        assert numbers(made.collect().rollouts) == expected(request(2, first=2 * number), 0)
    assert made._traffic.engine_restarts > MAX_DEATHS


def test_an_exception_in_an_engine_is_not_tried_again(ray):
    made = backend(ray, 2)
    StubEngine.launched[1].answers.append(HasFailed("Traceback ... ZeroDivisionError"))
    made.submit(request(4))
    with pytest.raises(EngineError, match=r"engine 1 failed:\nTraceback .* ZeroDivisionError"):
        made.collect()
    assert len(StubEngine.launched) == 2


def test_an_engine_with_other_weights_ends_the_run(ray):
    made = backend(ray, 2)
    StubEngine.launched[1].send = lambda number, *_: StubEngine.launched[1].answers.append(  # type: ignore[method-assign]
        HasLoaded(number, 0.0, 1.0, "00000000")
    )
    made.broadcast(WEIGHTS, 3)
    made._receive("the first")
    with pytest.raises(EngineError, match=r"version 3.*checksum 00000000"):
        made._receive("the second")


def test_an_engine_that_does_not_start_says_why(ray, monkeypatch):
    monkeypatch.setattr(StubEngine, "clock", lambda self: (_ for _ in ()).throw(Died("no such model")))
    with pytest.raises(EngineError, match="did not start: the actor died: no such model"):
        backend(ray, 1)


def test_engines_that_say_nothing_end_at_the_deadline(ray):
    StubEngine.is_slow = True
    made = backend(ray, 2)
    made.admit([(0, request(1))])
    with pytest.raises(EngineError, match="gave up waiting for the engines to finish a group after 1 s"):
        made.arrivals(wait=True)


def test_groups_go_to_the_engine_with_the_fewest_and_only_unfinished_ones_again(ray):
    StubEngine.is_slow = True
    made = backend(ray, 2)
    made.broadcast(WEIGHTS, 0)
    made.admit([(number, request(1, first=number)) for number in range(5)])
    made.admit([(5, request(1, first=5))])
    first, second = StubEngine.launched
    assert [list(command.groups) for command in first.commands[1:]] == [[0, 2, 4]]
    assert [list(command.groups) for command in second.commands[1:]] == [[1, 3], [5]]
    second.answers.append(HasArrived(3, 5.0, 7.0, pack_rollouts(second.rollouts(request(1, first=3)))))
    assert [arrival.number for arrival in made.arrivals(wait=True)] == [3]
    ray.actors[1].death = "gone"
    StubEngine.is_slow = False
    arrived = made.arrivals(wait=True)
    assert [list(command.groups) for command in StubEngine.launched[2].commands[1:]] == [[1], [5]]
    while len(arrived) < 2:
        arrived += made.arrivals(wait=True)
    assert {arrival.number: numbers(arrival.rollouts) for arrival in arrived} == {
        number: expected(request(1, first=number), 0) for number in (1, 5)
    }


def test_stretches_of_work_of_several_engines_do_not_overlap(ray):
    made = backend(ray, 2)
    StubEngine.is_slow = True
    made.admit([(0, request(1)), (1, request(1))])
    nothing = pack_rollouts([])
    StubEngine.launched[0].answers += [HasArrived(0, 1.0, 5.0, nothing)]
    StubEngine.launched[1].answers += [HasArrived(1, 2.0, 6.0, nothing)]
    spans = [(arrival.start_s, arrival.end_s) for arrival in made.arrivals(wait=False)]
    assert spans == [(1.0, 5.0), (5.0, 6.0)]


def test_times_of_another_machine_become_those_of_this_one(ray, monkeypatch):
    monkeypatch.setattr(StubEngine, "behind_s", 1000.0)
    made = backend(ray, 1)
    made.broadcast(WEIGHTS, 0)
    made._receive("it")
    (loaded,) = made.loads()
    assert (loaded.start_s, loaded.end_s) == pytest.approx((1001.0, 1002.0), abs=0.5)


def test_a_third_broadcast_waits_for_the_first(ray, monkeypatch):
    made = backend(ray, 1)
    silent = StubEngine.launched[0]
    monkeypatch.setattr(silent, "send", lambda *_: None)
    made.broadcast(WEIGHTS, 0)
    made.broadcast(WEIGHTS, 1)
    with pytest.raises(EngineError, match="engine 0 to take over version 0"):
        made.broadcast(WEIGHTS, 2)


def test_close_ends_every_engine(ray):
    made = backend(ray, 3)
    made.close()
    assert ray.killed == ray.actors
