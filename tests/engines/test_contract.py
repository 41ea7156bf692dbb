"""What trainer and engine compare before the first step: against softmax written out, and the embedded engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steadyrl.engines.contract import Reference, difference, gap, sampling_difference, score
from steadyrl.engines.local_engine import LocalEngine
from steadyrl.types import GenerationRequest, Prompt

PROMPT = [5, 9, 4, 7]
RESPONSES = [[6, 3, 8, 2], [11, 2], [20, 21, 22, 23, 24, 25]]


def generate(model, tokenizer, samples: int = 16, tokens: int = 24, **sampling) -> list:
    engine = LocalEngine(model, tokenizer, eos_token_ids=frozenset({2}), max_sequences=64, records_routing=False)
    prompts = [
        Prompt(str(i), np.asarray(tokenizer(text)["input_ids"], np.int32), text, "")
        for i, text in enumerate(["1+2+3=", "9+4+5+1="])
    ]
    return engine.generate(GenerationRequest(prompts, samples, tokens, seed=3, **{"temperature": 1.0, **sampling}))


def sequences_of(rollouts) -> list[tuple[list[int], list[int]]]:
    return [(r.token_ids[~r.loss_mask].tolist(), r.token_ids[r.loss_mask].tolist()) for r in rollouts]


def reported_by(rollouts) -> np.ndarray:
    return np.concatenate([r.behavior_logp[r.loss_mask] for r in rollouts]).astype(np.float64)


def test_padded_rows_score_as_single_ones_by_a_softmax_written_out(model):
    reference = score(model, [(PROMPT, response) for response in RESPONSES], temperature=0.7, top_p=0.8, top_k=30)
    raw, tempered, processed, mean, variance = [], [], [], [], []
    for response in RESPONSES:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*PROMPT, *response]])).logits[0].double().numpy()
        for position, token in enumerate(response):
            z = logits[len(PROMPT) - 1 + position]
            p_raw, p = np.exp(z) / np.exp(z).sum(), np.exp(z / 0.7) / np.exp(z / 0.7).sum()
            order = np.argsort(-p, kind="stable")[:30]
            q = p[order] / p[order].sum()
            kept = order[np.concatenate([[True], np.cumsum(q)[:-1] < 0.8])]
            share = p[kept] / p[kept].sum()
            raw.append(np.log(p_raw[token]))
            tempered.append(np.log(p[token]))
            processed.append(np.log(share[kept == token][0]) if token in kept else np.log(share.min()))
            mean.append((share * np.log(share)).sum())
            variance.append((share * np.log(share) ** 2).sum() - mean[-1] ** 2)
    expected = {"raw": raw, "tempered": tempered, "processed": processed, "mean": mean, "variance": variance}
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(reference, name), values, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 5}])
def test_the_embedded_engine_keeps_the_contract(model, tokenizer, sampling):
    rollouts = generate(model, tokenizer, **sampling)
    reference = score(model, sequences_of(rollouts), **{"temperature": 1.0, **sampling})
    assert gap(reported_by(rollouts), reference.processed) < 1e-3
    assert difference(reported_by(rollouts), reference, 1e-3) is None
    assert sampling_difference(reference, 1e-3) is None


def test_the_message_says_which_distribution_is_reported(model, tokenizer):
    sampling = {"temperature": 0.6, "top_p": 0.9}
    reference = score(model, sequences_of(generate(model, tokenizer, **sampling)), **sampling)
    assert "taken before the temperature" in str(difference(reference.raw, reference, 1e-3))
    assert "taken before top-p and top-k" in str(difference(reference.tempered, reference, 1e-3))
    other = difference(reference.processed - 0.5, reference, 1e-3)
    assert "differ from those of the trainer's weights by 0.500 nats a token" in str(other)
    assert "weights did not arrive whole" in str(other)


@pytest.mark.parametrize(("really", "told"), [(0.3, "likelier"), (2.0, "less likely")])
def test_a_server_that_samples_at_another_temperature_than_it_reports(model, tokenizer, really, told):
    rollouts = generate(model, tokenizer, samples=32, temperature=really)
    reference = score(model, sequences_of(rollouts), temperature=1.0)
    assert difference(reference.processed, reference, 1e-3) is None  # its numbers are right
    assert f"are {told} than temperature" in str(sampling_difference(reference, 1e-3))


def test_draws_of_a_known_distribution_are_within_the_limit_and_its_likeliest_tokens_are_not():
    generator = np.random.default_rng(0)
    p = np.array([0.5, 0.3, 0.2])
    logp = np.log(p)
    mean, variance = (p * logp).sum(), (p * logp**2).sum() - (p * logp).sum() ** 2

    def reference(tokens: np.ndarray) -> Reference:
        chosen = logp[tokens]
        constant = np.full(len(tokens), 1.0)
        return Reference(chosen, chosen, chosen, mean * constant, variance * constant)

    assert all(sampling_difference(reference(generator.choice(3, 400, p=p)), 0.0) is None for _ in range(200))
    assert sampling_difference(reference(np.zeros(400, int)), 0.0) is not None
