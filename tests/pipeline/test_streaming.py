"""The streaming source with a stub engine: any order of arrival, given-up groups, and what a checkpoint keeps."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from steadyrl.config import RunConfig
from steadyrl.errors import EngineError
from steadyrl.pipeline.accounts import lag_parts
from steadyrl.pipeline.group_stream import Arrival
from steadyrl.pipeline.streaming import StreamingSource
from steadyrl.types import GenerationRequest, Prompt, Rollout


class StubBackend:
    """Hands over admitted groups in any order; `gives_up` are the numbers that never arrive."""

    def __init__(self, order: random.Random) -> None:
        self.order = order
        self.running: dict[int, tuple[GenerationRequest, int]] = {}  # number -> request, version
        self.version = -1
        self.gives_up: set[int] = set()
        self.change: dict[int, Any] = {}

    def admit(self, groups) -> None:
        for number, request in groups:
            assert number not in self.running, "admitted twice"
            self.running[number] = (request, self.version)

    def arrivals(self, *, wait: bool) -> list[Arrival]:
        if not wait:
            return []
        number = self.order.choice(list(self.running))
        request, version = self.running.pop(number)
        if number in self.gives_up:
            return [Arrival(number, [], 0.0, 0.0)]
        rollouts = [make_rollout(request.prompts[0], version, self.version) for _ in range(request.samples_per_prompt)]
        return [self.change.get(number, lambda arrival: arrival)(Arrival(number, rollouts, 0.0, 0.0))]


class StubLink:
    """As `EngineLink`, without a clock."""

    def __init__(self, backend: StubBackend) -> None:
        self.backend, self.version, self.clock = backend, -1, self

    def broadcast(self, version: int) -> None:
        self.version = self.backend.version = version

    def engine(self, *_event) -> None: ...
    def note_wait(self, start_s: float) -> None: ...


class StubTask:
    def prompts(self, split, start: int, count: int) -> list[Prompt]:
        return [Prompt(f"{split}/{i}", np.array([1], np.int32), "", "") for i in range(start, start + count)]


def make_rollout(prompt: Prompt, first: int, last: int) -> Rollout:
    """One token from each of two versions."""
    return Rollout(
        prompt_id=prompt.prompt_id,
        group=0,
        token_ids=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([False, True, True]),
        behavior_logp=np.array([0, -1, -1], np.float32),
        versions=np.array([-1, first, last], np.int32),
        routed_experts=None,
        finish="stop",
        text="",
        finished_version=last,
        top_ids=np.array([[0], [5], [6]], np.int32),
        top_logp=np.array([[-np.inf], [-0.5], [-0.25]], np.float32),
    )


def make_source(seed: int = 0, **pipeline: Any) -> tuple[StreamingSource, StubBackend, StubLink]:
    table = {"regime": "streaming", "lag": 1, "prompts_per_batch": 3, "responses_per_prompt": 2} | pipeline
    config = RunConfig.model_validate({"trainer": {"steps": 30}, "pipeline": table})
    backend = StubBackend(random.Random(seed))
    link = StubLink(backend)
    return StreamingSource(config, StubTask(), link), backend, link  # type: ignore[arg-type]


def run(source: StreamingSource, steps: range) -> list[list[Rollout]]:
    batches = []
    for step in steps:
        source.prepare(step)
        groups = source.collect(step)
        source.prepare_ahead(step + 1)
        source.release()
        batches.append([rollout for group in groups for rollout in group.rollouts])
    return batches


@pytest.mark.parametrize("max_lag", [0, 1, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_arrival_keeps_the_bound_and_trains_on_every_prompt_once(max_lag, seed):
    source, _, _ = make_source(seed, max_lag=max_lag, groups_in_flight=3 * (max_lag + 1))
    batches = run(source, range(30))
    lags = [step - rollout.version for step, batch in enumerate(batches) for rollout in batch]
    assert max(lags) == max_lag
    prompts = [rollout.prompt_id for batch in batches for rollout in batch][::2]
    assert sorted(prompts) == sorted(f"train/{i}" for i in range(90))
    assert source.tally() == (180, 0)
    assert source.buffered == 0


def test_no_more_groups_run_than_the_limit_says():
    source, backend, _ = make_source(max_lag=8, groups_in_flight=4)
    source.prepare(0)
    assert list(backend.running) == [0, 1, 2, 3]
    source.collect(0)
    source.prepare_ahead(1)
    assert len(backend.running) == 4


def test_a_fast_engine_does_not_fill_the_queue_up_to_the_bound():
    source, backend, _ = make_source(max_lag=8, groups_in_flight=4, queue_groups=2)
    source.prepare(0)
    while backend.running:
        source._receive(wait=True)
        source._admit(0)
    assert source.buffered == (4 + 2) * 2


def test_groups_that_are_given_up_are_counted_and_replaced():
    source, backend, _ = make_source(max_lag=2)
    backend.gives_up = {1, 4}
    batches = run(source, range(5))
    prompts = {rollout.prompt_id for batch in batches for rollout in batch}
    assert len(prompts) == 15
    assert not prompts & {"train/1", "train/4"}
    generated, given_up = source.tally()
    assert given_up == 4
    assert generated == 15 * 2 + given_up + source.buffered
    assert source.metrics()["stream/groups_given_up"] == 2
    assert source.metrics()["stream/groups_given_up"] == 0


def test_a_run_that_only_gives_up_ends_and_says_why():
    source, backend, _ = make_source(max_lag=2)
    backend.gives_up = set(range(1000))
    with pytest.raises(EngineError, match=r"100 groups in a row .* pipeline\.rollout_timeout_s"):
        run(source, range(5))


def test_a_checkpoint_keeps_what_is_finished_and_begins_again_what_is_not(tmp_path):
    source, backend, _ = make_source(max_lag=4, groups_in_flight=12)
    trained = run(source, range(4))
    source.prepare(4)
    source.collect(4)  # a batch that is not trained on yet is kept too
    state = json.loads(json.dumps(source.save(tmp_path)))
    assert state["begun"] == sorted(backend.running)
    again, new_backend, _ = make_source(seed=9, max_lag=4, groups_in_flight=12)
    again.resume(tmp_path, state)
    assert again.buffered == state["held"] > 6
    more = run(again, range(4, 30))
    prompts = [rollout.prompt_id for batch in trained + more for rollout in batch][::2]
    assert sorted(prompts) == sorted(f"train/{i}" for i in range(90))
    lags = [step - rollout.version for step, batch in enumerate(more, start=4) for rollout in batch]
    assert max(lags) <= 4
    assert not new_backend.running
    kept = next(rollout for batch in more for rollout in batch if rollout.version < 4)
    assert kept.top_logp.tolist() == [[-np.inf], [-0.5], [-0.25]]
    assert kept.finished_version >= kept.version


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrival: Arrival(99, arrival.rollouts, 0.0, 0.0), "group 99, which nobody waits for"),
        (lambda arrival: Arrival(0, arrival.rollouts[:1], 0.0, 0.0), "group 0 with 1 rollouts of train/0 instead of 2"),
    ],
)
def test_an_answer_to_another_question_is_refused(change, message):
    source, backend, _ = make_source(max_lag=0)
    backend.change[0] = change
    source.prepare(0)
    with pytest.raises(EngineError, match=message):
        source.collect(0)


def test_the_parts_of_the_lag():
    prompt = StubTask().prompts("train", 0, 1)[0]
    parts = lag_parts([[make_rollout(prompt, 2, 4), make_rollout(prompt, 5, 5)]], version=6, largest_lag=4)
    assert parts.histograms == {"lag_generating": [3, 0, 1, 0, 0], "lag_queued": [0, 2, 2, 0, 0]}
    assert parts.means == {"staleness/lag_generating_mean": 0.5, "staleness/lag_queued_mean": 1.5}
