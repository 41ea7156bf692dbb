"""Groups come out whole, and stragglers are kept or given up, counted either way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steadyrl.pipeline.group_stream import GroupStream, Stragglers
from steadyrl.types import GenerationRequest, Prompt, Rollout


class StubEngine:
    """Finishes the responses that it is told to; `late` are overdue."""

    def __init__(self) -> None:
        self.version = 3
        self.live: dict[int, Prompt] = {}
        self.due: list[int] = []
        self.late: list[int] = []

    def submit(self, request: GenerationRequest) -> list[int]:
        ids = [len(self.live) + 10 + i for i in range(request.samples_per_prompt)]
        self.live |= dict.fromkeys(ids, request.prompts[0])
        return ids

    def step(self) -> dict[int, Rollout]:
        done, self.due = self.due, []
        return {response: make_rollout(self.live.pop(response), response, "stop") for response in done}

    def cancel(self, response: int) -> Rollout:
        return make_rollout(self.live.pop(response), response, "canceled")

    def overdue(self, *, tokens: int | None = None, seconds: float | None = None) -> list[int]:
        assert seconds == 5.0
        return [response for response in self.late if response in self.live]


def make_rollout(prompt: Prompt, response: int, finish: Any) -> Rollout:
    mask = np.array([False, True])
    return Rollout(
        prompt_id=prompt.prompt_id,
        group=0,
        token_ids=np.array([1, 2], np.int32),
        loss_mask=mask,
        behavior_logp=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        routed_experts=None,
        finish=finish,
        text=str(response),
    )


def request(name: str, samples: int = 2) -> GenerationRequest:
    return GenerationRequest([Prompt(name, np.array([1], np.int32), "", "")], samples, 4, 1.0, 0)


@pytest.fixture
def engine() -> StubEngine:
    return StubEngine()


def make_stream(engine: StubEngine, *, are_kept: bool = False, timeout_s: float = 0.0) -> GroupStream:
    stream = GroupStream(engine, Stragglers(timeout_s, are_kept=are_kept))  # type: ignore[arg-type]
    stream.admit(0, request("a"))  # responses 10 and 11
    stream.admit(1, request("b"))  # 12 and 13
    return stream


def test_a_group_arrives_when_all_of_it_is_finished_in_the_order_of_the_request(engine):
    stream = make_stream(engine)
    engine.due = [13, 11]
    assert stream.step() == []
    engine.due = [10]
    (arrival,) = stream.step()
    assert (arrival.number, [rollout.text for rollout in arrival.rollouts]) == (0, ["10", "11"])
    assert arrival.start_s <= arrival.end_s
    assert not stream.is_idle
    engine.due = [12]
    (arrival,) = stream.step()
    assert (arrival.number, [rollout.text for rollout in arrival.rollouts]) == (1, ["12", "13"])
    assert stream.is_idle


def test_a_straggler_is_given_up_with_its_whole_group(engine):
    stream = make_stream(engine, timeout_s=5.0)
    engine.due, engine.late = [10], [11]
    (arrival,) = stream.step()
    assert (arrival.number, arrival.rollouts) == (0, [])
    assert sorted(engine.live) == [12, 13]
    engine.due = [12, 13]
    assert [arrival.number for arrival in stream.step()] == [1]


def test_or_is_kept_with_the_tokens_it_has(engine):
    stream = make_stream(engine, timeout_s=5.0, are_kept=True)
    engine.due, engine.late = [10], [11]
    (arrival,) = stream.step()
    assert [(rollout.text, rollout.finish) for rollout in arrival.rollouts] == [("10", "stop"), ("11", "canceled")]


def test_two_stragglers_of_one_group_give_it_up_once(engine):
    stream = make_stream(engine, timeout_s=5.0)
    engine.late = [10, 11]
    assert [(arrival.number, arrival.rollouts) for arrival in stream.step()] == [(0, [])]


def test_without_a_deadline_nobody_is_late(engine):
    stream = make_stream(engine)
    engine.late = [10]
    assert stream.step() == []
    assert len(engine.live) == 4
