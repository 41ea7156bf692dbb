"""SGLang servers as one engine: the tests of vLLM's that do not depend on the server's API, and those that do."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from engines import test_remote_engine as common
from engines.sglang_double import SglangDouble
from engines.test_remote_engine import WAITS, agrees, all_steps, prompts, request, wait_until, weights_of, within
from engines.vllm_double import TINY, hang, status_500

from steadyrl.config import EngineConfig
from steadyrl.engines.remote_engine import RemoteEngine
from steadyrl.engines.server import Patience
from steadyrl.engines.sglang_engine import SglangDialect
from steadyrl.errors import EngineError
from steadyrl.models.load import load_model

__all__ = ["prompts"]  # a fixture

GENERATE = "/generate"
UPDATE = "/update_weights_from_disk"
for _test in (
    common.test_rollouts_carry_tokens_and_logprobs_of_the_weights_that_were_sent,
    common.test_submitted_responses_arrive_one_by_one_and_the_ids_keep_the_order,
    common.test_a_prompt_without_room_is_refused_or_answered_with_nothing,
    common.test_weights_may_change_in_flight_and_each_token_names_its_own,
    common.test_wait_lets_running_responses_end_under_their_own_weights,
    common.test_an_update_that_changes_nothing_is_noticed,
    common.test_scrambled_experts_are_noticed,
    common.test_a_killed_server_is_survived_by_a_second_one,
    common.test_with_no_server_left_the_engine_ends_with_the_cause,
    common.test_a_restarted_server_gets_the_present_weights_before_a_request,
    common.test_a_canceled_response_keeps_the_tokens_that_its_server_gives,
    common.test_a_canceled_response_of_a_dead_server_has_no_tokens,
    common.test_another_tokenizer_is_named,
    common.test_weights_of_another_run_with_the_same_number_are_told_apart,
):
    globals()[_test.__name__] = _test  # collected here, with the fixtures of this module


@pytest.fixture
def double() -> Iterator[SglangDouble]:
    made = SglangDouble()
    yield made
    made.kill()


@pytest.fixture
def second() -> Iterator[SglangDouble]:
    made = SglangDouble()
    yield made
    made.kill()


@pytest.fixture
def connect(tokenizer, prompts) -> Iterator[Callable[..., RemoteEngine]]:
    """Makes an engine on doubles, closed at the end."""
    made = []

    def make(*doubles: SglangDouble, waits: Patience = WAITS, **sampling) -> RemoteEngine:
        given = {key: sampling.pop(key) for key in ("pause", "probe_tolerance") if key in sampling}
        urls = tuple(double.url for double in doubles)
        config = EngineConfig(kind="sglang", urls=urls, **{"dtype": "float32", "probe_tolerance": 0.001, **given})
        probe = request(prompts[:2], samples=8, tokens=16, **sampling)
        mirror = load_model(TINY, torch.float32)
        dialect = SglangDialect(common.EOS)
        engine = RemoteEngine(config, dialect, mirror, tokenizer, probe, records_routing=False, waits=waits)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def test_no_prefix_of_other_weights_and_no_name_that_another_begins_with(double, connect, prompts):
    engine = connect(double)
    for version in range(2):
        engine.load_weights(weights_of(0.01 * version), version)
        engine.generate(request(prompts, samples=11))
    bodies = [body for body in double.bodies if "probe" not in body["rid"]]
    names = sorted(body["rid"] for body in bodies)
    assert len(names) == 2 * 4 * 11
    assert not any(later.startswith(name) for name, later in itertools.pairwise(names))
    keys = {body["extra_key"].rpartition(".")[2] for body in bodies}
    assert keys == {"0", "1"}


def test_three_broadcasts_in_a_row_under_load(double, second, connect, prompts):
    engine = connect(double, second)
    engine.load_weights(weights_of(), 0)
    double.token_s = second.token_s = 0.005
    ids = engine.submit(request(prompts * 2, samples=4, tokens=40))
    for version in (1, 2, 3):
        engine.load_weights(weights_of(0.01 * version), version)
    engine.load_weights(weights_of(0.03), 3)  # the same again is not sent again
    assert len(all_steps(engine, ids)) == 32
    assert all(agrees(rollout, weights_of(0.03)) for rollout in engine.generate(request(prompts[:2], samples=1)))
    assert double.asked[UPDATE] == second.asked[UPDATE] == 4


@pytest.mark.parametrize("path", ["/pause_generation", UPDATE, "/continue_generation"])
def test_a_broadcast_that_fails_once_is_tried_again(double, connect, prompts, path):
    engine = connect(double)
    double.faults[path] = [status_500]
    engine.load_weights(weights_of(0.01), 3)
    (rollout,) = engine.generate(request(prompts[:1], samples=1))
    assert agrees(rollout, weights_of(0.01))


@pytest.mark.parametrize(
    ("fault", "why"),
    [(status_500, "status 500"), (lambda answer, body: {"success": False, "message": "no such file"}, "no such file")],
)
def test_a_broadcast_that_fails_for_good_ends_with_the_cause(double, connect, fault, why):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.always[UPDATE] = fault
    error = within(30, lambda: engine.load_weights(weights_of(0.01), 1))
    assert isinstance(error, EngineError)
    assert UPDATE in str(error)
    assert why in str(error)
    assert engine.version == 0


def null_logp(answer, _body):
    answer["meta_info"]["output_token_logprobs"][0][0] = None
    return answer


def fewer_tokens(answer, _body):
    answer["output_ids"].pop()
    return answer


def foreign_weights(answer, _body):
    answer["meta_info"]["weight_versions"][0]["version"] = "default"
    return answer


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (null_logp, "log-probabilities are no numbers up to 0"),
        (fewer_tokens, "tokens with"),
        (foreign_weights, "'default', which were not brought to it"),
        (lambda answer, body: "no json", "cannot be read"),
        (status_500, "status 500"),
    ],
)
def test_a_bad_answer_is_asked_for_again(double, connect, prompts, caplog, fault, why):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.faults[GENERATE] = [fault]
    with caplog.at_level(logging.WARNING):
        rollouts = engine.generate(request(prompts[:1]))
    assert why in caplog.text
    assert len(rollouts) == 3
    assert all(rollout.is_trainable for rollout in rollouts)


def test_a_hanging_answer_is_asked_for_elsewhere(double, second, connect, prompts):
    engine = connect(double, second, waits=dataclasses.replace(WAITS, request_s=3.0))
    engine.load_weights(weights_of(), 0)
    double.always[GENERATE] = hang
    rollouts = within(30, lambda: engine.generate(request(prompts, samples=2)))
    assert isinstance(rollouts, list)
    assert all(rollout.is_trainable for rollout in rollouts)


def test_a_server_that_stays_silent_about_itself_is_out(double, second, connect):
    engine = connect(double, second, waits=dataclasses.replace(WAITS, health_s=0.5))
    engine.load_weights(weights_of(), 0)
    double.always["/model_info"] = hang
    wait_until(lambda: engine._pool.servers[0].state == "out")
    assert engine._pool.servers[1].state == "ready"


def test_a_restricted_draw_comes_with_its_mask_and_its_own_logprobs(double, connect, prompts):
    engine = connect(double, temperature=0.6, top_p=0.9, top_k=20)
    engine.load_weights(weights_of(0.02), 0)  # verified against what top-p leaves, to 0.001 nats
    (rollout,) = engine.generate(request(prompts[:1], samples=1, temperature=0.6, top_p=0.9, top_k=20))
    lengths = rollout.support_lengths[rollout.loss_mask]
    assert rollout.support_lengths[~rollout.loss_mask].sum() == 0
    assert (lengths >= 1).all()
    assert (lengths <= 20).all()
    assert lengths.sum() == len(rollout.support_ids)


def test_the_default_logprobs_of_a_restricted_draw_are_found_out(double, connect):
    def default(answer, body):
        meta, tokens = answer["meta_info"], answer["output_ids"]
        tempered = common.score(double.model, [(body["input_ids"], tokens)], temperature=0.6).tempered
        meta["output_token_sampling_logprobs"] = tempered.tolist()
        return answer

    engine = connect(double, temperature=0.6, top_p=0.5, top_k=20)
    double.always[GENERATE] = default
    with pytest.raises(EngineError, match="taken before top-p and top-k"):
        engine.load_weights(weights_of(), 0)
