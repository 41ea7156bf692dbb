"""The thread backend gives what the inline backend gives, and no wait of it is for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from steadyrl.engines.build import build_local_engine
from steadyrl.errors import EngineError
from steadyrl.models.load import load_model
from steadyrl.pipeline.group_stream import Stragglers
from steadyrl.pipeline.inline_backend import InlineBackend
from steadyrl.pipeline.thread_backend import ThreadBackend
from steadyrl.types import GenerationRequest, Prompt

TINY = "bundled:tiny_moe"
NEVER = Stragglers(0.0, are_kept=False)


def engine():
    return build_local_engine(TINY, "float32", 64, records_routing=False)


def weights(change: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: p.detach() + change for name, p in load_model(TINY, torch.float32).named_parameters()}


def request(first: int = 0, prompts: int = 2) -> GenerationRequest:
    made = [Prompt(f"train/{i}", np.array([5, 6, 7 + i], np.int32), "", "") for i in range(first, first + prompts)]
    return GenerationRequest(made, 3, max_response_tokens=6, temperature=1.0, seed=1, first=first)


def within(seconds: float, action: Callable[[], object]) -> object:
    """What the action returns or raises; fails if it is not done by then."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"still waiting after {seconds} s"
    return results[0]


class StubEngine:
    """Does nothing, slowly, until it is closed."""

    version = -1

    def __init__(self, *, error: BaseException | None = None) -> None:
        self.closed = threading.Event()
        self.error = error

    def load_weights(self, weights, version):
        return "not the checksum"

    def generate(self, request):
        if self.error is not None:
            raise self.error
        self.closed.wait(30)
        return []

    def submit(self, request):
        return [0]

    def step(self):
        if self.error is not None:
            raise self.error
        time.sleep(0.01)
        return {}

    def overdue(self, *, tokens=None, seconds=None):
        return []

    def metrics(self):
        return {}

    def close(self) -> None:
        self.closed.set()


def test_commands_are_carried_out_in_order_as_by_the_inline_backend():
    answers = []
    inline = InlineBackend(engine(), torch.float32, NEVER)
    thread = ThreadBackend(engine(), torch.float32, NEVER, timeout_s=30)
    try:
        for backend in (inline, thread):
            backend.broadcast(weights(), 0)
            backend.submit(request())
            backend.broadcast(weights(0.01), 4)
            backend.submit(request(first=2))
            answers.append([backend.collect().rollouts for _ in range(2)])
            assert [loaded.version for loaded in backend.loads()] == [0, 4]
    finally:
        thread.close()
    for one, other in zip(*answers, strict=True):
        assert [r.to_json() for r in one] == [r.to_json() for r in other]
    assert {rollout.version for rollout in answers[1][1]} == {4}


def test_weights_may_change_after_they_were_handed_over():
    held = threading.Event()

    class Waiting(StubEngine):
        def load_weights(self, weights, version):
            held.wait(10)
            self.first = weights["w"].clone()
            return super().load_weights(weights, version)

    stub = Waiting()
    backend = ThreadBackend(stub, torch.float32, NEVER, timeout_s=5)
    mine = {"w": torch.zeros(3)}
    backend.broadcast(mine, 0)
    mine["w"].fill_(9.0)
    held.set()
    deadline = time.monotonic() + 5
    while not hasattr(stub, "first"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stub.first.tolist() == [0.0, 0.0, 0.0]
    backend.close()


def test_streamed_groups_arrive_whole_while_the_trainer_does_something_else():
    backend = ThreadBackend(engine(), torch.float32, NEVER, timeout_s=30)
    try:
        backend.broadcast(weights(), 0)
        backend.admit([(number, request(first=number, prompts=1)) for number in (3, 4, 5)])
        arrived = []
        while len(arrived) < 3:
            arrived += backend.arrivals(wait=True)
        assert sorted(arrival.number for arrival in arrived) == [3, 4, 5]
        for arrival in arrived:
            assert {rollout.prompt_id for rollout in arrival.rollouts} == {f"train/{arrival.number}"}
            assert len(arrival.rollouts) == 3
        assert backend.arrivals(wait=False) == []
    finally:
        backend.close()


def test_weights_that_did_not_arrive_are_an_error():
    backend = ThreadBackend(StubEngine(), torch.float32, NEVER, timeout_s=5)
    backend.broadcast({"w": torch.zeros(3)}, 2)
    backend.submit(request())
    error = within(5, backend.collect)
    assert isinstance(error, EngineError)
    assert "after the broadcast of version 2" in str(error)
    backend.close()


@pytest.mark.parametrize(
    ("raised", "told"),
    [(EngineError("no rollout server was ready"), "no rollout server was ready"), (KeyError("x"), "KeyError: 'x'")],
)
def test_an_error_of_the_engine_is_raised_by_every_later_wait(raised, told):
    for wait in ("collect", "arrivals"):
        backend = ThreadBackend(StubEngine(error=raised), torch.float32, NEVER, timeout_s=5)
        if wait == "collect":
            backend.submit(request())
            waits = backend.collect
        else:
            backend.admit([(0, request(prompts=1))])
            waits = lambda backend=backend: backend.arrivals(wait=True)  # noqa: E731
        for _ in range(2):
            error = within(5, waits)
            assert isinstance(error, EngineError)
            assert told in str(error)
        backend.close()


def test_a_wait_ends_at_its_deadline_and_close_ends_the_thread():
    backend = ThreadBackend(StubEngine(), torch.float32, NEVER, timeout_s=0.3)
    backend.submit(request())
    error = within(3, backend.collect)
    assert isinstance(error, EngineError)
    assert "gave up waiting for the rollout servers to finish a generation after 0 s" in str(error)
    within(3, backend.close)
    assert not backend._thread.is_alive()


def test_no_more_than_two_copies_of_the_weights_wait():
    backend = ThreadBackend(StubEngine(), torch.float32, NEVER, timeout_s=0.3)
    backend.submit(request())  # keeps the engine busy
    backend.broadcast({"w": torch.zeros(3)}, 0)
    backend.broadcast({"w": torch.zeros(3)}, 1)
    error = within(3, lambda: backend.broadcast({"w": torch.zeros(3)}, 2))
    assert "to take over the weights" in str(error)
    backend.close()
