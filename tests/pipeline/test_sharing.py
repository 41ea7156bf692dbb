"""An optimizer batch shared out to ranks: all of it, once, evenly, as many micro-batches for each."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.pipeline.packing import balanced, pack, pad, share
from steadyrl.types import Rollout, TrainBatch


def rollout(n: int, prompt: int = 2, **more: Any) -> Rollout:
    loss_mask = np.arange(n) >= prompt
    return Rollout(
        prompt_id=f"p{n}",
        group=0,
        token_ids=np.arange(n, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logp=np.where(loss_mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(loss_mask, 3, -1).astype(np.int32),
        routed_experts=np.tile(np.array([0, 1], np.uint8), (n - 1, 2, 1)),
        finish="stop",
        text="",
        **more,
    )


LENGTHS = [9, 4, 30, 5, 5, 12, 7, 7, 3, 21]


def packed(ranks: int, lengths: list[int] = LENGTHS, tokens: int = 40) -> list[TrainBatch]:
    return pack([rollout(n) for n in lengths], torch.arange(float(len(lengths))), tokens, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_every_rollout_is_on_one_rank_and_all_have_as_many_micro_batches(ranks):
    batches = packed(ranks)
    parts = [share(batches, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert [batch for part in parts for batch in part] == batches
    assert sorted(source for batch in batches for source in batch.sources) == list(range(len(LENGTHS)))
    for batch in batches:
        assert [int(row) for row in batch.advantage[: len(batch.sources)]] == batch.sources
        assert batch.input_ids.numel() <= max(40, batch.input_ids.shape[1])
        if not batch.sources:
            assert not batch.loss_mask.any()


def test_one_rank_has_what_it_had():
    order = sorted(range(len(LENGTHS)), key=lambda index: -LENGTHS[index])
    found = [source for batch in packed(1) for source in batch.sources]
    assert found == order


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_has_at_most_a_third_more_than_the_best_possible(lengths, ranks):
    shares = balanced(lengths, ranks)
    assert sorted(index for part in shares for index in part) == list(range(len(lengths)))
    fullest = max(sum(lengths[index] for index in part) for part in shares)
    ways = product(range(ranks), repeat=len(lengths))
    best = min(
        max(sum(n for n, r in zip(lengths, way, strict=True) if r == rank) for rank in range(ranks)) for way in ways
    )
    assert fullest <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_a_blank_has_the_fields_of_what_it_stands_beside():
    more = {
        "top_ids": np.zeros((9, 3), np.int32),
        "top_logp": np.full((9, 3), -1.0, np.float32),
        "support_ids": np.arange(14, dtype=np.int32),
        "support_lengths": np.where(np.arange(9) >= 2, 2, 0).astype(np.int32),
    }
    batch = pad([rollout(9, **more), rollout(9, **more)], torch.ones(2), [4, 7])
    blank = batch.blank()
    for field in fields(TrainBatch):
        value, other = getattr(batch, field.name), getattr(blank, field.name)
        if isinstance(value, torch.Tensor):
            assert other.dtype == value.dtype, field.name
            assert other.shape == (1, *[1] * (value.dim() > 1), *value.shape[2:]), field.name
    assert not blank.loss_mask.any()
    assert blank.attention_mask.all(), "the model is to see a token"
    assert (blank.versions == -1).all()
    assert blank.routed_experts is not None
    assert (blank.routed_experts == -1).all(), "nothing is replayed, or counted as replayed"
    assert blank.rollout_ids == blank.sources == []
    assert blank.support_ids is not None
    assert blank.support_lengths is not None
    assert [len(ids) for ids in blank.support_ids] == [int(blank.support_lengths.sum())] == [0]
    assert replace(batch, support_ids=None, support_lengths=None, top_ids=None).blank().top_ids is None


def test_a_micro_batch_goes_to_a_device_with_all_it_has():
    batch = pad([rollout(5, support_ids=np.arange(3), support_lengths=np.array([0, 0, 1, 1, 1]))], torch.ones(1), [0])
    there = batch.to(torch.device("meta"))
    for field in fields(TrainBatch):
        value = getattr(there, field.name)
        tensors = value if field.name == "support_ids" else [value] if isinstance(value, torch.Tensor) else []
        assert all(tensor.device.type == "meta" for tensor in tensors), field.name
    assert there.rollout_ids == batch.rollout_ids
