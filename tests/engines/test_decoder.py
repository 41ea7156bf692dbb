"""Continuous batching: whatever shares the batch, a sequence becomes what it becomes alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from engines.brute_force import (
    CONTEXT,
    EOS,
    FAMILIES,
    Expected,
    brute_force,
    check,
    plain_logits,
    random_model,
    random_sequence,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from steadyrl.engines import decoder as decoder_module
from steadyrl.engines.decoder import Decoder
from steadyrl.engines.kv_cache import check_cache
from steadyrl.engines.sequence import Sequence
from steadyrl.errors import ConfigError
from steadyrl.models.routing import record_routing

POOL = 12


def decoder(model, max_sequences: int, records_routing: bool = False) -> Decoder:
    return Decoder(
        model,
        eos_token_ids=EOS,
        max_sequences=max_sequences,
        records_routing=records_routing,
        decode=lambda ids: "".join(chr(ord("a") + token) for token in ids),
    )


def fresh(sequence: Sequence) -> Sequence:
    return Sequence(sequence.prompt, sequence.group, sequence.request, sequence.noise)


def with_prompt(sequence: Sequence, length: int) -> Sequence:
    prompt = dataclasses.replace(sequence.prompt, token_ids=np.arange(length, dtype=np.int32))
    return dataclasses.replace(sequence, prompt=prompt)


def run(tested: Decoder, version: int = 0) -> None:
    while tested.running or tested.waiting:
        tested.step(version)


@pytest.fixture(scope="module")
def llama():
    return random_model("llama")


@pytest.fixture(scope="module")
def pool(llama) -> list[tuple[Sequence, Expected]]:
    """Sequences of all kinds, each with what brute force makes of it. Some share a prompt."""
    kinds = [{}, {"top_p": 0.7}, {"top_k": 3}, {"top_p": 0.9, "top_k": 8}, {"min_response_tokens": 4}]
    sequences = [random_sequence(seed, **kinds[seed % len(kinds)]) for seed in range(POOL)]
    sequences += [
        dataclasses.replace(sequence, noise=np.random.default_rng(99 + seed).random(len(sequence.noise)))
        for seed, sequence in enumerate(sequences[:4])
    ]
    return [(sequence, brute_force(sequence, plain_logits(llama))) for sequence in sequences]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_as_without_cache_and_batch(family):
    model = random_model(family)
    sequences = [random_sequence(seed, max_response_tokens=10) for seed in range(6)]
    tested = decoder(model, max_sequences=4)
    tested.submit(sequences)
    run(tested)
    for sequence in sequences:
        check(sequence, brute_force(sequence, plain_logits(model)))


@settings(max_examples=20)
@given(
    order=st.lists(st.integers(0, POOL + 3), unique=True, min_size=1),
    arrivals=st.lists(st.integers(0, 4)),
    places=st.integers(1, 6),
)
def test_neither_order_nor_company_nor_places_change_a_sequence(llama, pool, order, arrivals, places):
    tested = decoder(llama, max_sequences=places)
    sequences = {index: fresh(pool[index][0]) for index in order}
    queue, arrivals = list(order), iter(arrivals)
    while queue or tested.running or tested.waiting:
        arriving = next(arrivals, len(queue))
        tested.submit(sequences[index] for index in queue[:arriving])
        queue = queue[arriving:]
        finished = tested.step(0)
        assert all(sequence.finish is not None for sequence in finished)
    for index, sequence in sequences.items():
        check(sequence, pool[index][1])


def test_a_free_place_is_taken_in_the_next_step_first_come_first_served(llama):
    sequences = [random_sequence(seed, max_response_tokens=limit) for seed, limit in enumerate([1, 3, 1, 1, 1])]
    tested = decoder(llama, max_sequences=2)
    tested.submit(sequences)
    assert set(tested.step(0)) == {sequences[0]}
    assert tested.waiting == sequences[2:]
    for step, sequence in enumerate(sequences[2:4], start=2):
        assert sequence in tested.step(0), step
    assert tested.waiting == sequences[4:]


def test_a_step_gives_every_running_sequence_one_token(llama):
    sequences = [random_sequence(seed, max_response_tokens=6, min_response_tokens=6) for seed in range(5)]
    tested = decoder(llama, max_sequences=3)
    tested.submit(sequences)
    for step in range(1, 7):
        tested.step(0)
        assert [len(sequence.tokens) for sequence in sequences] == [step] * 3 + [0] * 2


def test_the_padding_shrinks_when_the_longest_row_leaves(llama):
    long = with_prompt(random_sequence(0, max_response_tokens=2), 20)
    short = [random_sequence(seed, max_response_tokens=8, min_response_tokens=8) for seed in (1, 2)]
    tested = decoder(llama, max_sequences=2)
    tested.submit([long, *short])
    run(tested)
    batch = tested._batch
    assert batch is not None
    assert batch.attention_mask.shape[1] < 20
    assert batch.cache.get_seq_length() == batch.attention_mask.shape[1]
    for sequence in short:
        check(sequence, brute_force(sequence, plain_logits(llama)))


def test_a_response_may_fill_the_context_to_the_last_position():
    """Learned positions end there: a row that is done must not run on beyond them."""
    model = random_model("gpt2")
    full, *others = (
        with_prompt(random_sequence(seed, max_response_tokens=CONTEXT - length, min_response_tokens=CONTEXT), length)
        for seed, length in [(3, 20), (4, 1), (5, 2)]
    )
    tested = decoder(model, max_sequences=3)
    tested.submit([*others, full])
    run(tested)
    for sequence in (full, *others):
        assert len(sequence.prompt.token_ids) + len(sequence.tokens) == CONTEXT
        check(sequence, brute_force(sequence, plain_logits(model)))


def test_a_prompt_of_several_sequences_runs_once(llama):
    first = random_sequence(5, max_response_tokens=1)
    tested = decoder(llama, max_sequences=2)
    tested.submit(fresh(first) for _ in range(6))
    widths: list[tuple[int, ...]] = []
    handle = llama.register_forward_pre_hook(
        lambda _m, _a, inputs: widths.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    run(tested)
    handle.remove()
    assert widths == [(1, len(first.prompt.token_ids))]


def test_prompts_run_in_several_passes_where_one_would_be_too_large(llama, pool, monkeypatch):
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 12)
    tested = decoder(llama, max_sequences=POOL, records_routing=False)
    sequences = [fresh(sequence) for sequence, _ in pool]
    tested.submit(sequences)
    run(tested)
    for sequence, (_, expected) in zip(sequences, pool, strict=True):
        check(sequence, expected)


def test_the_padding_token_and_end_tokens_in_a_prompt_are_seen_like_any_other(llama):
    """pad = EOS is common; a mask made from ids would hide them."""
    sequence = random_sequence(0, max_response_tokens=6)
    ids = np.array([0, 2, 0, 5, 1, 0, 2], np.int32)
    sequence = dataclasses.replace(sequence, prompt=dataclasses.replace(sequence.prompt, token_ids=ids))
    tested = decoder(llama, max_sequences=2)
    tested.submit([sequence, random_sequence(1)])
    run(tested)
    check(sequence, brute_force(sequence, plain_logits(llama)))


def test_the_same_submissions_give_the_same_bits(llama, pool):
    logps = []
    for _ in range(2):
        sequences = [fresh(sequence) for sequence, _ in pool]
        tested = decoder(llama, max_sequences=5)
        tested.submit(sequences)
        run(tested)
        logps.append([sequence.logp.tobytes() for sequence in sequences])
    assert logps[0] == logps[1]


def test_cancel_returns_the_place_and_keeps_the_tokens(llama, pool):
    sequences = [random_sequence(seed, max_response_tokens=10, min_response_tokens=10) for seed in range(4)]
    tested = decoder(llama, max_sequences=2)
    tested.submit(sequences)
    for _ in range(3):
        tested.step(0)
    tested.cancel(sequences[0])
    tested.cancel(sequences[3])
    assert sequences[0].finish == sequences[3].finish == "canceled"
    assert (len(sequences[0].tokens), len(sequences[3].tokens)) == (3, 0)
    assert sequences[0].text == "".join(chr(ord("a") + token) for token in sequences[0].tokens)
    assert sequences[0] not in tested.step(0)
    assert tested.running == sequences[1:3]
    run(tested)
    whole = brute_force(sequences[0], plain_logits(llama))
    assert sequences[0].tokens.tolist() == whole.tokens[:3]
    for sequence in sequences[1:3]:
        check(sequence, brute_force(sequence, plain_logits(llama)))


# ---- new weights while sequences run ----

SWAPPED_AT = 3  # tokens


def swap(model, other) -> None:
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.copy_(new)


def decode_with_swap(family: str, *, rebuild_cache: bool, records_routing: bool = False) -> list[Sequence]:
    """Sequences of which two run when the weights change, and two are admitted afterwards."""
    model = random_model(family, seed=0)
    sequences = [random_sequence(seed, max_response_tokens=8, min_response_tokens=8) for seed in range(4)]
    tested = decoder(model, max_sequences=2, records_routing=records_routing)
    tested.submit(sequences)
    for _ in range(SWAPPED_AT):
        tested.step(7)
    swap(model, random_model(family, seed=1))
    tested.weights_changed(rebuild_cache=rebuild_cache)
    run(tested, version=8)
    return sequences


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_rebuilt_cache_is_that_of_the_new_weights(family):
    sequences = decode_with_swap(family, rebuild_cache=True)
    before, after = plain_logits(random_model(family, 0)), plain_logits(random_model(family, 1))
    for sequence in sequences[:2]:
        swapped_at = len(sequence.prompt.token_ids) + SWAPPED_AT
        check(
            sequence,
            brute_force(sequence, lambda ids, end=swapped_at: before(ids) if len(ids) < end else after(ids)),
        )
        assert sequence.versions.tolist() == [7] * 3 + [8] * 5
    for sequence in sequences[2:]:
        check(sequence, brute_force(sequence, after))
        assert sequence.versions.tolist() == [8] * 8


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_kept_cache_is_that_of_the_weights_that_computed_it(family):
    sequences = decode_with_swap(family, rebuild_cache=False)
    rebuilt = decode_with_swap(family, rebuild_cache=True)
    for sequence in sequences[:2]:
        check(sequence, brute_force(sequence, logits_with_cache(family, sequence)))
        assert sequence.versions.tolist() == [7] * 3 + [8] * 5
    assert any(one.logp != other.logp for one, other in zip(sequences[:2], rebuilt[:2], strict=True))
    for sequence in sequences[2:]:
        check(sequence, brute_force(sequence, plain_logits(random_model(family, 1))))


def logits_with_cache(family: str, sequence: Sequence):
    """One sequence with a cache of its own; the weights change under it."""
    model, cache = random_model(family, 0), DynamicCache()
    known = 0

    def next_logits(ids: list[int]) -> np.ndarray:
        nonlocal known
        if len(ids) - len(sequence.prompt.token_ids) == SWAPPED_AT:
            swap(model, random_model(family, 1))
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids[known:]]), cache=cache, use_cache=True)
        known = len(ids)
        return output.logits[0, -1].double().numpy()

    return next_logits


def test_a_prompt_that_waited_through_an_update_runs_under_the_new_weights(llama):
    """Prompts next in line run ahead of their turn; what they gave is worth nothing under other weights."""
    model = random_model("llama", 0)
    sequences = [random_sequence(seed, max_response_tokens=1) for seed in range(3)]
    tested = decoder(model, max_sequences=1)
    tested.submit(sequences)
    tested.step(0)
    assert tested._prefilled is not None
    swap(model, random_model("llama", 1))
    tested.weights_changed(rebuild_cache=False)
    run(tested, version=1)
    for sequence in sequences[1:]:
        check(sequence, brute_force(sequence, plain_logits(random_model("llama", 1))))


@pytest.mark.parametrize("rebuild_cache", [False, True])
def test_experts_are_those_that_each_token_went_through_when_its_successor_was_sampled(rebuild_cache):
    sequences = decode_with_swap("qwen3_moe", rebuild_cache=rebuild_cache, records_routing=True)
    for sequence in sequences:
        rollout = dataclasses.replace(sequence).rollout()
        assert rollout.routed_experts is not None
        assert rollout.routed_experts.shape == (len(rollout.token_ids) - 1, 2, 2)
    for sequence in sequences[:2]:
        old = routing("qwen3_moe", 0, sequence, len(sequence.prompt.token_ids) + SWAPPED_AT - 1)
        recorded = sequence.rollout().routed_experts
        assert recorded is not None
        assert (np.sort(recorded[: len(old)]) == old).all()
    for sequence in sequences[2:]:
        new = routing("qwen3_moe", 1, sequence, len(sequence.prompt.token_ids) + 7)
        assert (np.sort(sequence.rollout().routed_experts) == new).all()


def routing(family: str, seed: int, sequence: Sequence, length: int) -> np.ndarray:
    """The experts [length, L, K] of the first tokens, in rising order."""
    model = random_model(family, seed)
    ids = torch.tensor([[*sequence.prompt.token_ids.tolist(), *sequence.tokens][:length]])
    with torch.no_grad(), record_routing(model) as chosen:
        model(input_ids=ids, use_cache=False)
    return torch.stack(chosen, dim=1).sort(dim=-1).values.numpy()


def test_a_model_with_another_state_than_keys_and_values_is_refused():
    from transformers import Qwen3NextConfig

    model = random_model("llama")
    model.config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ConfigError, match="keys and values"):
        check_cache(model)
