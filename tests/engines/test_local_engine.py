"""The embedded engine: what it reports is what it did."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steadyrl.config import ArithmeticTask
from steadyrl.engines.base import weights_checksum
from steadyrl.engines.build import build_local_engine
from steadyrl.engines.local_engine import draw
from steadyrl.errors import EngineError
from steadyrl.models.load import load_model
from steadyrl.models.logprobs import token_logp
from steadyrl.models.routing import record_routing
from steadyrl.tasks.arithmetic import Arithmetic
from steadyrl.types import GenerationRequest

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


def test_draws_follow_the_distribution():
    logp = torch.log_softmax(torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]), dim=-1).expand(200_000, 4)
    noise = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = torch.bincount(draw(logp, noise), minlength=4) / 200_000
    torch.testing.assert_close(shares, logp[0].exp(), atol=5e-3, rtol=0)
    assert shares[2] == 0


def test_draws_at_the_edges_stay_inside():
    logp = torch.log_softmax(torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2), dim=-1)
    edge = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert draw(logp, edge).tolist() == [1, 2]


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
    with pytest.raises(EngineError, match="shape"):
        built.load_weights({**weights, "lm_head.weight": torch.zeros(3, 3)}, version=6)
    assert built.version == 5


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
