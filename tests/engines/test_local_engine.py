"""The embedded engine: what it reports is what it did."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from steadyrl.engines.base import weights_checksum
from steadyrl.engines.build import build_local_engine
from steadyrl.engines.local_engine import LocalEngine
from steadyrl.errors import EngineError
from steadyrl.models.load import eos_token_ids, load_model
from steadyrl.models.logprobs import token_logp
from steadyrl.models.routing import record_routing
from steadyrl.task_config import ArithmeticTask
from steadyrl.tasks.arithmetic import Arithmetic
from steadyrl.types import GenerationRequest, Prompt, Rollout

TINY = "bundled:tiny_moe"


def engine(dtype: str = "float32", max_sequences: int = 64):
    built = build_local_engine(TINY, dtype, max_sequences, records_routing=True)
    built.load_weights(dict(load_model(TINY, torch.float32).named_parameters()), version=5)
    return built


def request(
    tokenizer, temperature: float = 1.0, terms: int = 5, prompts: int = 6, limit: int = 32
) -> GenerationRequest:
    task = Arithmetic(ArithmeticTask(terms=terms), tokenizer, 0)
    mixed = [
        *task.prompts("train", 0, prompts - 2),
        *Arithmetic(ArithmeticTask(terms=3), tokenizer, 0).prompts("train", 0, 2),
    ]
    return GenerationRequest(mixed, samples_per_prompt=4, max_response_tokens=limit, temperature=temperature, seed=11)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reported_logp_is_that_of_the_sampled_distribution(tokenizer, model, temperature):
    """Without the engine's own numerics (float32 here) the ratio of an unchanged policy is 1, at any temperature."""
    for rollout in engine().generate(request(tokenizer, temperature)):
        ids = torch.tensor(rollout.token_ids).long().unsqueeze(0)
        with torch.no_grad():
            logp = token_logp(model(ids[:, :-1]).logits, ids[:, 1:], temperature)[0]
        mask = torch.tensor(rollout.loss_mask[1:])
        reported = torch.tensor(rollout.behavior_logp[1:])
        torch.testing.assert_close(logp[mask], reported[mask], atol=2e-4, rtol=0)


def test_recorded_experts_are_those_of_a_plain_forward_pass(tokenizer, model):
    for rollout in engine().generate(request(tokenizer))[::5]:
        ids = torch.tensor(rollout.token_ids).long().unsqueeze(0)
        with torch.no_grad(), record_routing(model) as chosen:
            model(ids[:, :-1])
        expected = torch.stack(chosen, dim=1).sort(-1).values
        assert rollout.routed_experts is not None
        recorded = torch.tensor(rollout.routed_experts.astype(np.int64)).sort(-1).values
        assert recorded.shape == expected.shape
        assert (recorded == expected).all(dim=-1).float().mean() > 0.99  # a tie may fall either way


def test_rollouts_are_complete_and_in_order(tokenizer):
    wanted = request(tokenizer)
    rollouts = engine().generate(wanted)
    assert [r.prompt_id for r in rollouts] == [p.prompt_id for p in wanted.prompts for _ in range(4)]
    assert [r.group for r in rollouts] == [i for i in range(len(wanted.prompts)) for _ in range(4)]
    for rollout in rollouts:
        prompt = wanted.prompts[rollout.group]
        assert rollout.token_ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
        assert set(rollout.versions[rollout.loss_mask]) == {5}
        assert set(rollout.versions[~rollout.loss_mask]) == {-1}
        assert rollout.is_trainable
        ended = rollout.token_ids[-1] == tokenizer.eos_token_id
        assert rollout.finish == ("stop" if ended else "length")


def test_a_response_that_meets_its_limit_says_so(tokenizer):
    rollouts = engine().generate(request(tokenizer, limit=3))
    assert {rollout.finish for rollout in rollouts} == {"length"}
    assert {rollout.num_sampled for rollout in rollouts} == {3}
    assert engine().generate(request(tokenizer, limit=1))[0].num_sampled == 1


def test_the_same_request_gives_the_same_rollouts(tokenizer):
    first, second = (engine("bfloat16").generate(request(tokenizer)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.to_json().items() >= {k: v for k, v in other.to_json().items() if k != "reward"}.items()


def test_sampling_in_turns_draws_the_same_numbers(tokenizer):
    together = engine(max_sequences=64).generate(request(tokenizer))
    in_turns = engine(max_sequences=5).generate(request(tokenizer))
    same = [one.text == other.text for one, other in zip(together, in_turns, strict=True)]
    assert np.mean(same) > 0.9  # a rounding difference may turn a draw at the edge of two tokens


def test_bfloat16_differs_a_little_from_float32(tokenizer, model):
    gaps = []
    for rollout in engine("bfloat16").generate(request(tokenizer)):
        ids = torch.tensor(rollout.token_ids).long().unsqueeze(0)
        with torch.no_grad():
            logp = token_logp(model(ids[:, :-1]).logits, ids[:, 1:], 1.0)[0].numpy()
        gaps.extend(np.abs(logp - rollout.behavior_logp[1:])[rollout.loss_mask[1:]])
    assert 1e-5 < np.mean(gaps) < 0.05


def test_weights_arrive_in_the_engine_s_dtype():
    built = build_local_engine(TINY, "bfloat16", 8, records_routing=False)
    weights = {name: p.detach() + 0.01 for name, p in load_model(TINY, torch.float32).named_parameters()}
    received = built.load_weights(weights, version=3)
    assert built.version == 3
    assert received == weights_checksum({name: w.bfloat16() for name, w in weights.items()})
    weights["lm_head.weight"] = weights["lm_head.weight"] + 0.1
    assert built.load_weights(weights, version=4) != received


def test_weights_that_do_not_map_are_refused():
    built = engine()
    weights = dict(load_model(TINY, torch.float32).named_parameters())
    lost = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    with pytest.raises(EngineError, match=r"lm_head\.weight"):
        built.load_weights(lost, version=6)
    before = weights_checksum(dict(built._model.named_parameters()))
    with pytest.raises(EngineError, match="shape"):
        built.load_weights({**{n: w + 1 for n, w in weights.items()}, "lm_head.weight": torch.zeros(3, 3)}, version=6)
    assert built.version == 5
    assert weights_checksum(dict(built._model.named_parameters())) == before, "part of the weights arrived"


def test_logits_that_are_not_numbers_fail_the_response_and_no_other(tokenizer):
    built = engine()
    weights = dict(load_model(TINY, torch.float32).named_parameters())
    poisoned = weights["model.embed_tokens.weight"].detach().clone()
    poisoned[tokenizer.convert_tokens_to_ids("9")] = torch.nan
    built.load_weights({**weights, "model.embed_tokens.weight": poisoned}, version=6)
    rollouts = built.generate(request(tokenizer))
    failed = [rollout.finish == "error" for rollout in rollouts]
    assert any(failed)
    for rollout in rollouts:
        saw_nine = tokenizer.convert_tokens_to_ids("9") in rollout.token_ids
        assert (rollout.finish == "error") == saw_nine
        assert rollout.is_trainable == (not saw_nine)


def test_the_likeliest_tokens_are_reported_when_asked_for(tokenizer, model):
    wanted = request(tokenizer)
    wanted = GenerationRequest(wanted.prompts, 4, 32, 1.0, seed=11, top_logprobs=1000)
    rollout = engine().generate(wanted)[0]
    ids = torch.tensor(rollout.token_ids).long().unsqueeze(0)
    with torch.no_grad():
        expected = torch.log_softmax(model(ids[:, :-1]).logits[0], dim=-1)
    assert rollout.top_logp is not None
    assert rollout.top_ids is not None
    assert rollout.top_logp.shape == (len(rollout.token_ids), model.config.vocab_size)
    for position in np.flatnonzero(rollout.loss_mask):
        row = expected[position - 1][torch.tensor(rollout.top_ids[position]).long()]
        torch.testing.assert_close(row, torch.tensor(rollout.top_logp[position]), atol=2e-4, rtol=0)
    assert engine().generate(request(tokenizer))[0].top_ids is None


# ---- top-p, top-k, stops and limits ----


def restricted(wanted: GenerationRequest, **settings) -> GenerationRequest:
    return dataclasses.replace(wanted, **settings)


@pytest.mark.parametrize("settings", [{"top_p": 0.8}, {"top_k": 2}, {"top_p": 0.9, "top_k": 5}])
def test_the_support_of_every_sampled_token_is_recorded(tokenizer, model, settings):
    """Renormalized over it, a plain forward pass gives the reported log-probability."""
    for rollout in engine().generate(restricted(request(tokenizer, temperature=1.3), **settings))[::3]:
        assert rollout.support_ids is not None
        assert rollout.support_lengths is not None
        assert rollout.support_ids.dtype == np.uint16
        assert not rollout.support_lengths[~rollout.loss_mask].any()
        with torch.no_grad():
            logits = model(torch.tensor(rollout.token_ids).long().unsqueeze(0)).logits[0] / 1.3
        end = np.cumsum(rollout.support_lengths)
        for position in np.flatnonzero(rollout.loss_mask):
            allowed = rollout.support_ids[end[position] - rollout.support_lengths[position] : end[position]]
            assert rollout.token_ids[position] in allowed
            assert len(allowed) <= settings.get("top_k", 128)
            row = logits[position - 1]
            logp = row[rollout.token_ids[position]] - torch.logsumexp(row[torch.tensor(allowed.astype(int))], 0)
            assert float(logp) == pytest.approx(rollout.behavior_logp[position], abs=2e-4)
    assert engine().generate(request(tokenizer))[0].support_ids is None


def test_a_rollout_with_its_support_survives_json(tokenizer):
    rollout = engine().generate(restricted(request(tokenizer), top_p=0.9))[0]
    again = Rollout.from_json(json.loads(json.dumps(rollout.to_json())))
    assert again.support_ids is not None
    assert rollout.support_ids is not None
    assert again.support_ids.dtype == rollout.support_ids.dtype
    assert again.support_ids.tolist() == rollout.support_ids.tolist()
    assert again.support_lengths is not None
    assert rollout.support_lengths is not None
    assert again.support_lengths.tolist() == rollout.support_lengths.tolist()


def test_one_token_left_is_greedy_and_certain(tokenizer):
    first, second = (engine().generate(restricted(request(tokenizer), top_k=1, seed=seed)) for seed in (1, 2))
    assert [rollout.text for rollout in first] == [rollout.text for rollout in second]
    assert not any(rollout.behavior_logp.any() for rollout in first)


def test_a_stop_string_ends_a_response_and_nothing_is_appended(tokenizer):
    plain = engine().generate(request(tokenizer))
    for rollout, free in zip(engine().generate(restricted(request(tokenizer), stop=(",",))), plain, strict=True):
        prompt_length = int((~rollout.loss_mask).sum())
        assert rollout.token_ids.tolist() == free.token_ids.tolist()[: len(rollout.token_ids)]
        assert rollout.finish == "stop"
        assert rollout.text == (free.text.split(",")[0] + "," if "," in free.text else free.text)
        assert tokenizer.decode(rollout.token_ids[prompt_length:], skip_special_tokens=True) == rollout.text
        assert rollout.loss_mask[prompt_length:].all()
        assert (rollout.behavior_logp[prompt_length:] < 0).all()


def test_every_end_token_ends_a_response(tokenizer, model):
    """Those of the generation config too, which may be a list."""
    two = tokenizer.convert_tokens_to_ids("2")
    model.generation_config.eos_token_id = [two, tokenizer.eos_token_id]
    built = LocalEngine(
        model, tokenizer, eos_token_ids=eos_token_ids(model, tokenizer), max_sequences=64, records_routing=False
    )
    rollouts = built.generate(request(tokenizer))
    assert {rollout.token_ids[-1] for rollout in rollouts} == {two, tokenizer.eos_token_id}
    assert all(two not in rollout.token_ids[rollout.loss_mask][:-1] for rollout in rollouts)
    assert {rollout.finish for rollout in rollouts} == {"stop"}


def test_no_response_ends_before_its_least_number_of_tokens(tokenizer):
    for rollout in engine().generate(restricted(request(tokenizer), min_response_tokens=20, max_response_tokens=24)):
        assert 20 < rollout.num_sampled <= 24
        assert tokenizer.eos_token_id not in rollout.token_ids[rollout.loss_mask][:20]


def too_long(tokenizer, **settings) -> GenerationRequest:
    wanted = request(tokenizer, prompts=3)
    prompts = [wanted.prompts[0], Prompt("long", np.full(490, 5, np.int32), "", ""), wanted.prompts[1]]
    return restricted(wanted, prompts=prompts, max_response_tokens=23, **settings)


def test_a_prompt_that_leaves_no_room_is_refused(tokenizer):
    built = engine()
    with pytest.raises(EngineError, match=r"long has 490 tokens.*512 positions.*long_prompts"):
        built.generate(too_long(tokenizer))
    assert built.num_waiting == 0


def test_or_dropped_and_no_other_changes(tokenizer):
    rollouts = engine().generate(too_long(tokenizer, long_prompts="drop"))
    assert [rollout.finish == "too_long" for rollout in rollouts] == [False] * 4 + [True] * 4 + [False] * 4
    for rollout in rollouts[4:8]:
        assert (rollout.prompt_id, rollout.num_sampled, rollout.is_trainable) == ("long", 0, False)
    fitting = too_long(tokenizer)
    alone = engine().generate(restricted(fitting, prompts=fitting.prompts[:1]))
    assert [rollout.text for rollout in rollouts[:4]] == [rollout.text for rollout in alone]
    assert len(engine().generate(restricted(too_long(tokenizer), max_response_tokens=22))) == 12  # 490 + 22 = 512


# ---- response by response ----


def test_responses_come_as_they_finish_and_are_those_of_generate(tokenizer):
    wanted = request(tokenizer)
    built = engine(max_sequences=7)
    ids = built.submit(wanted)
    arrived: dict[int, Rollout] = {}
    steps = 0
    while built.num_running or built.num_waiting:
        finished = built.step()
        assert not finished.keys() & arrived.keys()
        arrived |= finished
        steps += 1
    assert steps > 10
    expected = engine(max_sequences=7).generate(wanted)
    for sequence_id, rollout in zip(ids, expected, strict=True):
        assert arrived[sequence_id].token_ids.tolist() == rollout.token_ids.tolist()
        assert arrived[sequence_id].behavior_logp.tolist() == rollout.behavior_logp.tolist()


def test_generate_in_between_loses_none_of_the_others(tokenizer):
    built = engine(max_sequences=8)
    ids = built.submit(request(tokenizer))
    built.step()
    between = built.generate(request(tokenizer, prompts=3))
    assert len(between) == 12
    arrived = built.step()
    while built.num_running or built.num_waiting:
        arrived |= built.step()
    assert arrived.keys() == set(ids)


def test_an_update_in_the_middle_of_a_response(tokenizer):
    """Three tokens of version 5, the rest of version 6, and each token says which."""
    built = engine()
    ids = built.submit(request(tokenizer, prompts=3))
    arrived = {}
    for _ in range(3):
        arrived |= built.step()
    weights = {name: p + 0.01 for name, p in load_model(TINY, torch.float32).named_parameters()}
    built.load_weights(weights, version=6)
    while built.num_running:
        arrived |= built.step()
    versions = [arrived[sequence_id].versions[arrived[sequence_id].loss_mask].tolist() for sequence_id in ids]
    assert any(len(of_tokens) > 3 for of_tokens in versions)
    for of_tokens in versions:
        assert of_tokens == ([5] * 3 + [6] * len(of_tokens))[: len(of_tokens)]


def test_overdue_responses_are_canceled_with_what_they_have(tokenizer):
    built = engine(max_sequences=4)
    ids = built.submit(restricted(request(tokenizer), min_response_tokens=32))
    assert built.overdue(tokens=0, seconds=0.0) == []  # none has a place yet
    for _ in range(5):
        built.step()
    assert built.overdue(tokens=6) == built.overdue(seconds=1e6) == []
    assert built.overdue(tokens=5) == built.overdue(seconds=0.0) == ids[:4]
    rollout = built.cancel(ids[0])
    assert (rollout.finish, rollout.num_sampled) == ("canceled", 5)
    assert rollout.is_trainable
    assert rollout.routed_experts is not None
    assert len(rollout.routed_experts) == len(rollout.token_ids) - 1
    assert not built.cancel(ids[-1]).is_trainable  # it never ran
    assert (built.num_running, built.num_waiting) == (3, len(ids) - 5)
    arrived = {}
    while built.num_running or built.num_waiting:
        arrived |= built.step()
    assert arrived.keys() == set(ids) - {ids[0], ids[-1]}
