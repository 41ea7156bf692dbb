"""Rollout servers as one engine, against doubles that sample with the embedded engine and fail when told to."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from engines.vllm_double import TINY, VllmDouble, hang, status_500

from steadyrl.config import EngineConfig
from steadyrl.engines.base import weights_checksum
from steadyrl.engines.contract import score
from steadyrl.engines.remote_engine import RemoteEngine
from steadyrl.engines.server import Patience
from steadyrl.engines.vllm_engine import VllmDialect
from steadyrl.errors import EngineError
from steadyrl.models.load import load_model
from steadyrl.types import GenerationRequest, Prompt, Rollout

GENERATE = "/inference/v1/generate"
# no test waits for these on a machine that is not busy; those that are about deadlines set their own
WAITS = Patience(
    request_s=30.0, weights_s=30.0, start_s=20.0, stall_s=30.0, recovery_s=20.0, health_s=20.0, poll_s=0.02
)
EOS = [2]


@pytest.fixture
def double() -> Iterator[VllmDouble]:
    made = VllmDouble()
    yield made
    made.kill()


@pytest.fixture
def second() -> Iterator[VllmDouble]:
    made = VllmDouble()
    yield made
    made.kill()


@pytest.fixture
def prompts(tokenizer) -> list[Prompt]:
    texts = ["1+2+3=", "9+4+5+1=", "7+7=", "2+8+6+3+1="]
    return [
        Prompt(f"p{i}", np.asarray(tokenizer(text)["input_ids"], np.int32), text, "") for i, text in enumerate(texts)
    ]


@pytest.fixture
def connect(tokenizer, prompts) -> Iterator[Callable[..., RemoteEngine]]:
    """Makes an engine on doubles, closed at the end."""
    made = []

    def make(*doubles: VllmDouble, waits: Patience = WAITS, **sampling) -> RemoteEngine:
        given = {
            key: sampling.pop(key) for key in ("pause", "dtype", "weights_dir", "probe_tolerance") if key in sampling
        }
        config = EngineConfig(
            kind="vllm",
            urls=tuple(double.url for double in doubles),
            **{"dtype": "float32", "probe_tolerance": 0.001, **given},
        )
        probe = request(prompts[:2], samples=8, tokens=16, **sampling)
        mirror = load_model(TINY, torch.float32)
        engine = RemoteEngine(config, VllmDialect(EOS), mirror, tokenizer, probe, records_routing=False, waits=waits)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def request(
    prompts: list[Prompt], samples: int = 3, tokens: int = 12, temperature: float = 1.0, **more
) -> GenerationRequest:
    return GenerationRequest(prompts, samples, tokens, temperature, seed=0, **more)


def weights_of(change: float = 0.0) -> dict[str, torch.Tensor]:
    """Of the bundled model, moved by `change` times their own spread."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: parameter.detach() + change * parameter.std() * torch.randn(parameter.shape, generator=generator)
        for name, parameter in load_model(TINY, torch.float32).named_parameters()
    }


def agrees(rollout: Rollout, weights: dict[str, torch.Tensor], temperature: float = 1.0) -> bool:
    """Whether its log-probabilities are those of the weights, as the trainer computes them."""
    model = load_model(TINY, torch.float32)
    model.load_state_dict(weights)
    prompt, response = rollout.token_ids[~rollout.loss_mask], rollout.token_ids[rollout.loss_mask]
    expected = score(model, [(prompt.tolist(), response.tolist())], temperature=temperature)
    return bool(np.abs(rollout.behavior_logp[rollout.loss_mask] - expected.processed).max() < 1e-3)


def within(seconds: float, action: Callable[[], object]) -> object:
    """What the action returns, or the exception that it raises; fails if it is not done by then."""
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


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_steps(engine: RemoteEngine, ids: list[int]) -> dict[int, Rollout]:
    """Step until all of them have arrived."""
    arrived: dict[int, Rollout] = {}
    deadline = time.monotonic() + 60
    while set(ids) - arrived.keys():
        assert time.monotonic() < deadline
        arrived |= engine.step()
    return arrived


# ---- tokens in, tokens out ----


def test_rollouts_carry_tokens_and_logprobs_of_the_weights_that_were_sent(double, connect, prompts):
    engine = connect(double)
    weights = weights_of(0.02)
    assert engine.load_weights(weights, 7) == weights_checksum(weights)
    rollouts = engine.generate(request(prompts, samples=3))
    assert [rollout.prompt_id for rollout in rollouts] == [p.prompt_id for p in prompts for _ in range(3)]
    assert [rollout.group for rollout in rollouts] == [g for g in range(4) for _ in range(3)]
    for rollout in rollouts:
        assert set(rollout.versions[rollout.loss_mask].tolist()) == {7}
        assert (rollout.versions[~rollout.loss_mask] == -1).all()
        assert rollout.is_trainable
        assert rollout.finish in ("stop", "length")
    assert all(agrees(rollout, weights) for rollout in rollouts[::4])
    assert not agrees(rollouts[0], weights_of(0.0))


def test_submitted_responses_arrive_one_by_one_and_the_ids_keep_the_order(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    ids = engine.submit(request(prompts, samples=2))
    assert engine.num_running + engine.num_waiting == len(ids) == 8
    arrived = all_steps(engine, ids)
    assert [arrived[i].prompt_id for i in ids] == [p.prompt_id for p in prompts for _ in range(2)]
    assert engine.num_running + engine.num_waiting == 0


def test_a_prompt_without_room_is_refused_or_answered_with_nothing(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    long = Prompt("long", np.ones(505, np.int32), "", "")
    with pytest.raises(EngineError, match=r"long has 505 tokens.*512 positions"):
        engine.generate(request([long]))
    short, *too_long = engine.generate(request([prompts[0], long], samples=1, long_prompts="drop"))
    assert short.is_trainable
    assert [rollout.finish for rollout in too_long] == ["too_long"]


def test_no_seed_and_no_prefix_of_other_weights(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    engine.generate(request(prompts[:1]))
    engine.load_weights(weights_of(0.01), 1)
    engine.generate(request(prompts[:1]))
    salts = [body["cache_salt"] for body in double.bodies if "probe" not in body["request_id"]]
    assert len(set(salts)) == 2
    assert [salt.rpartition(".")[2] for salt in salts] == ["0", "1"]


# ---- weights ----


def test_weights_may_change_in_flight_and_each_token_names_its_own(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.token_s = 0.1  # slow, until the new weights are there
    ids = engine.submit(request(prompts[:2], samples=4, tokens=200, min_response_tokens=190))
    wait_until(lambda: double.tokens_of_running() > 2)
    engine.load_weights(weights_of(0.02), 1)
    double.token_s = 0.0
    for rollout in all_steps(engine, ids).values():
        versions = rollout.versions[rollout.loss_mask]
        assert set(versions.tolist()) == {0, 1}
        assert (np.diff(versions) >= 0).all()


def test_wait_lets_running_responses_end_under_their_own_weights(double, connect, prompts):
    engine = connect(double, pause="wait")
    engine.load_weights(weights_of(), 0)
    double.token_s = 0.02
    ids = engine.submit(request(prompts, samples=4, tokens=40, min_response_tokens=35))
    wait_until(lambda: double.tokens_of_running() > 2)
    engine.load_weights(weights_of(0.02), 1)
    rollouts = all_steps(engine, ids).values()
    assert {tuple(set(r.versions[r.loss_mask].tolist())) for r in rollouts} == {(0,)}
    assert set(engine.generate(request(prompts[:1]))[0].versions.tolist()) == {-1, 1}


def test_three_broadcasts_in_a_row_under_load(double, second, connect, prompts):
    engine = connect(double, second)
    engine.load_weights(weights_of(), 0)
    double.token_s = second.token_s = 0.005
    ids = engine.submit(request(prompts * 4, samples=4, tokens=40))
    for version in (1, 2, 3):
        sent = weights_of(0.01 * version)
        assert engine.load_weights(sent, version) == weights_checksum(sent)
    assert len(all_steps(engine, ids)) == 64
    assert all(agrees(rollout, weights_of(0.03)) for rollout in engine.generate(request(prompts[:2], samples=1)))
    assert double.asked["/finish_weight_update"] == second.asked["/finish_weight_update"] == 4


def test_an_update_that_changes_nothing_is_noticed(double, connect):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.keeps_weights = True
    with pytest.raises(EngineError, match=r"no rollout server took over.*log-probabilities differ"):
        engine.load_weights(weights_of(0.02), 1)
    assert engine.version == 0


def test_scrambled_experts_are_noticed(double, connect):
    """What vLLM does on a CPU without the plugin: everything arrives, but the experts' weights lie in another order."""

    def scramble(weights):
        for name, tensor in weights.items():
            if "experts" in name:
                weights[name] = tensor.flip(-1)

    engine = connect(double, probe_tolerance=0.05)  # the tolerance for a server in bfloat16
    double.spoils = scramble
    with pytest.raises(EngineError, match=r"the weights did not arrive whole"):
        engine.load_weights(weights_of(), 0)
    assert engine.version == -1


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/finish_weight_update"])
def test_a_broadcast_that_fails_once_is_tried_again(double, connect, prompts, path):
    engine = connect(double)
    double.faults[path] = [status_500]
    engine.load_weights(weights_of(0.01), 3)
    (rollout,) = engine.generate(request(prompts[:1], samples=1))
    assert agrees(rollout, weights_of(0.01))


@pytest.mark.parametrize("path", ["/pause", "/update_weights"])
def test_a_broadcast_that_fails_for_good_ends_with_the_cause(double, connect, path):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.always[path] = status_500
    error = within(20, lambda: engine.load_weights(weights_of(0.01), 1))
    assert isinstance(error, EngineError)
    assert path in str(error)
    assert "status 500" in str(error)
    assert engine.version == 0


def test_names_and_shapes_that_do_not_map_are_errors(double, connect):
    engine = connect(double)
    weights = weights_of()
    first = next(iter(weights))
    with pytest.raises(EngineError, match="disagree about 1 weights"):
        engine.load_weights({name: tensor for name, tensor in weights.items() if name != first}, 0)
    with pytest.raises(EngineError, match="arrives with shape"):
        engine.load_weights({**weights, first: weights[first][:-1]}, 0)
    assert double.asked["/start_weight_update"] == 0


def test_the_same_weights_again_are_not_sent_again(double, connect):
    engine = connect(double)
    sums = [engine.load_weights(weights_of(), 0) for _ in range(2)]
    assert sums[0] == sums[1]
    assert double.asked["/update_weights"] == 1


def test_the_folder_of_the_weights_goes_with_the_engine(double, connect, tmp_path):
    engine = connect(double, weights_dir=str(tmp_path))
    for version in range(3):
        engine.load_weights(weights_of(0.01 * version), version)
    (folder,) = tmp_path.iterdir()
    assert [path.name.rpartition(".")[2] for path in folder.iterdir()] == ["2"]
    engine.close()
    assert not list(tmp_path.iterdir())
    private = connect(double)._folder.path
    assert private.stat().st_mode & 0o077 == 0


# ---- servers that fail ----


def nan_logp(answer, _body):
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = math.nan
    return answer


def null_logp(answer, _body):
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = None
    return answer


def clamped_logp(answer, _body):
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    return answer


def positive_logp(answer, _body):
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = 0.5
    return answer


def fewer_tokens(answer, _body):
    answer["choices"][0]["token_ids"].pop()
    return answer


def fewer_responses(answer, _body):
    answer["choices"].pop()
    return answer


def no_logprobs(answer, _body):
    answer["choices"][0]["logprobs"] = None
    return answer


def uncovered(answer, _body):
    answer["choices"][0]["weight_versions"][-1]["end"] -= 1
    return answer


def foreign_weights(answer, _body):
    answer["choices"][0]["weight_versions"][0]["version"] = "default"
    return answer


BAD_ANSWERS = [
    (nan_logp, "log-probabilities are no numbers up to 0"),
    (null_logp, "log-probabilities are no numbers up to 0"),
    (clamped_logp, "log-probabilities are no numbers up to 0"),
    (positive_logp, "the first is 0.5"),
    (fewer_tokens, "log-probabilities"),
    (fewer_responses, "2 responses instead of 3"),
    (no_logprobs, "with 0 log-probabilities"),
    (uncovered, "weight versions cover"),
    (foreign_weights, "'default', which were not brought to it"),
    (lambda answer, body: {"choices": 3}, "no choices"),
    (lambda answer, body: {"choices": [{}]}, "cannot be read"),
    (lambda answer, body: "no json", "no choices"),
    (status_500, "status 500"),
]


@pytest.mark.parametrize(("fault", "why"), BAD_ANSWERS)
def test_a_bad_answer_is_asked_for_again(double, connect, prompts, caplog, fault, why):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.faults[GENERATE] = [fault]
    with caplog.at_level(logging.WARNING):
        rollouts = engine.generate(request(prompts[:1]))
    assert why in caplog.text
    assert engine.metrics() == {"engine/retries": 1.0, "engine/outages": 1.0}
    assert len(rollouts) == 3
    assert all(rollout.is_trainable for rollout in rollouts)


def test_where_every_answer_is_bad_the_group_fails_and_others_do_not(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    ill = prompts[1].token_ids.tolist()

    def nan_for_one(answer, body):
        return nan_logp(answer, body) if body["token_ids"] == ill and "probe" not in body["request_id"] else answer

    double.always[GENERATE] = nan_for_one
    healthy = engine.generate(request([prompts[0]], samples=2))
    failed = engine.generate(request([prompts[1]], samples=2))
    assert [rollout.finish for rollout in failed] == ["error", "error"]
    assert not any(rollout.is_trainable for rollout in failed)
    assert failed[0].num_sampled == 0
    assert all(rollout.is_trainable for rollout in healthy)


def test_a_hanging_answer_is_asked_for_elsewhere(double, second, connect, prompts):
    engine = connect(double, second, waits=dataclasses.replace(WAITS, request_s=2.0))
    engine.load_weights(weights_of(), 0)
    double.always[GENERATE] = hang
    rollouts = within(20, lambda: engine.generate(request(prompts, samples=2)))
    assert isinstance(rollouts, list)
    assert all(rollout.is_trainable for rollout in rollouts)


def test_a_killed_server_is_survived_by_a_second_one(double, second, connect, prompts):
    engine = connect(double, second)
    engine.load_weights(weights_of(), 0)
    double.token_s = second.token_s = 0.2
    ids = engine.submit(request(prompts * 2, samples=2, tokens=40, min_response_tokens=35))
    wait_until(lambda: double.tokens_of_running() > 2)
    double.kill()
    second.token_s = 0.0
    assert all(rollout.is_trainable for rollout in all_steps(engine, ids).values())
    assert engine.metrics()["engine/outages"] == 1
    assert engine.metrics()["engine/retries"] >= 1
    engine.load_weights(weights_of(0.01), 1)
    assert all(agrees(rollout, weights_of(0.01)) for rollout in engine.generate(request(prompts[:2], samples=1)))


def test_with_no_server_left_the_engine_ends_with_the_cause(double, connect, prompts):
    engine = connect(double, waits=dataclasses.replace(WAITS, recovery_s=1.0))
    engine.load_weights(weights_of(), 0)
    double.kill()
    error = within(10, lambda: engine.generate(request(prompts)))
    assert isinstance(error, EngineError)
    assert "no rollout server was ready for 1 s" in str(error)
    assert double.url in str(error)


def test_a_restarted_server_gets_the_present_weights_before_a_request(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(0.01), 5)
    double.restart()
    assert double.weight_version == "default"
    rollouts = engine.generate(request(prompts, samples=2))
    assert all(rollout.is_trainable and rollout.version == 5 for rollout in rollouts)
    assert all(agrees(rollout, weights_of(0.01)) for rollout in rollouts[::2])


def test_a_server_that_stays_silent_about_its_health_is_out(double, second, connect, prompts):
    engine = connect(double, second, waits=dataclasses.replace(WAITS, health_s=0.5))
    engine.load_weights(weights_of(), 0)
    double.always["/health"] = hang
    wait_until(lambda: engine._pool.servers[0].state == "out")
    before = (double.asked[GENERATE], second.asked[GENERATE])
    assert all(rollout.is_trainable for rollout in engine.generate(request(prompts)))
    assert (double.asked[GENERATE], second.asked[GENERATE]) == (before[0], before[1] + len(prompts))


def test_work_goes_where_there_is_least(double, second, connect, prompts):
    engine = connect(double, second)
    engine.load_weights(weights_of(), 0)
    before = (double.asked[GENERATE], second.asked[GENERATE])
    engine.generate(request(prompts * 2))
    assert (double.asked[GENERATE] - before[0], second.asked[GENERATE] - before[1]) == (4, 4)


# ---- cancellation ----


def test_a_canceled_response_keeps_the_tokens_that_its_server_gives(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.token_s = 0.2
    ids = engine.submit(request(prompts[:1], samples=2, tokens=200, min_response_tokens=190))
    wait_until(lambda: double.tokens_of_running() > 2)
    assert engine.overdue(seconds=0.2) == ids
    assert engine.overdue(seconds=600) == []
    rollouts = [engine.cancel(response) for response in ids]
    assert [rollout.finish for rollout in rollouts] == ["canceled", "canceled"]
    assert all(0 < rollout.num_sampled < 190 for rollout in rollouts)
    assert engine.step() == {}
    assert engine.num_running == engine.num_waiting == 0


def test_a_canceled_response_of_a_dead_server_has_no_tokens(double, connect, prompts):
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    double.token_s = 0.2
    ids = engine.submit(request(prompts[:1], samples=2, tokens=200, min_response_tokens=190))
    wait_until(lambda: double.tokens_of_running() > 2)
    double.kill()
    rollouts = [within(20, lambda response=response: engine.cancel(response)) for response in ids]
    assert [rollout.num_sampled for rollout in rollouts] == [0, 0]


def test_close_ends_a_wait_in_another_thread(double, connect, prompts):
    engine = connect(double, waits=Patience(60, 60, 1, 60, 60))
    engine.load_weights(weights_of(), 0)
    double.always[GENERATE] = hang
    threading.Timer(0.3, engine.close).start()
    outcome = within(5, lambda: engine.generate(request(prompts)))
    assert isinstance(outcome, BaseException)


# ---- the contract ----


@pytest.mark.parametrize(
    ("told", "sampling", "why"),
    [
        ({"dtype": "torch.bfloat16"}, {}, "start it with --dtype float32"),
        ({"logprobs_mode": "raw_logprobs"}, {"temperature": 0.6}, "--logprobs-mode processed_logprobs"),
        ({"logprobs_mode": "raw_logits"}, {"top_k": 5}, "does not say which tokens top-p or top-k leave"),
    ],
)
def test_a_server_that_says_that_it_is_another_is_refused(double, connect, told, sampling, why):
    double.model_config = told
    with pytest.raises(EngineError, match=why):
        connect(double, **sampling)


def test_raw_logprobs_are_the_same_thing_at_temperature_1(double, connect):
    double.model_config = {"logprobs_mode": "raw_logprobs"}
    engine = connect(double)
    engine.load_weights(weights_of(), 0)
    assert engine.version == 0


def test_a_server_that_is_not_there_is_named(connect, double):
    double.kill()
    with pytest.raises(EngineError, match=rf"{double.url} did not answer within 0 s .*engine\.urls"):
        connect(double, waits=dataclasses.replace(WAITS, start_s=0.2))


def test_another_tokenizer_is_named(double, connect):
    double.always["/tokenize"] = lambda answer, body: {"tokens": [5, *answer["tokens"]]}
    with pytest.raises(EngineError, match="its tokenizer makes"):
        connect(double).load_weights(weights_of(), 0)


def test_logprobs_before_the_temperature_are_found_out(double, connect):
    def raw(answer, body):
        for choice in answer["choices"]:
            logp = score(double.model, [(body["token_ids"], choice["token_ids"])], temperature=1.0).raw
            for entry, value in zip(choice["logprobs"]["content"], logp, strict=True):
                entry["logprob"] = float(value)
        return answer

    engine = connect(double, temperature=0.6)
    double.always[GENERATE] = raw
    with pytest.raises(EngineError, match="taken before the temperature"):
        engine.load_weights(weights_of(), 0)


def test_weights_of_another_run_with_the_same_number_are_told_apart(double, connect, prompts):
    first = connect(double)
    first.load_weights(weights_of(), 0)
    other = connect(double)
    other.load_weights(weights_of(0.02), 0)
    rollouts = first.generate(request(prompts[:1], samples=1))  # finds foreign weights, and brings its own
    assert agrees(rollouts[0], weights_of())
