"""What goes into the object store comes out again, to the last bit, and is as small as it is said to be."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from steadyrl.engines.base import weights_checksum
from steadyrl.pipeline.packing import pad
from steadyrl.pipeline.ray_transport import (
    narrowed,
    num_bytes,
    pack_batch,
    pack_rollouts,
    pack_weights,
    unpack_batch,
    unpack_rollouts,
    unpack_weights,
)
from steadyrl.types import Rollout, TrainBatch


def rollout(seed: int, *, sampled: int, experts: int = 200, recorded: bool = True) -> Rollout:
    """A rollout with every field that an engine can fill; 3 prompt tokens."""
    random, n = np.random.default_rng(seed), 3 + sampled
    mask = np.arange(n) >= 3
    lengths = np.where(mask, random.integers(1, 4, n), 0).astype(np.int32)
    return Rollout(
        prompt_id=f"train/{seed}",
        group=seed // 2,
        token_ids=random.integers(0, 150_000, n).astype(np.int32),
        loss_mask=mask,
        behavior_logp=np.where(mask, -random.random(n), 0).astype(np.float32),
        versions=np.where(mask, 300 + seed, -1).astype(np.int32),
        routed_experts=random.integers(0, experts, (n - 1, 2, 4)).astype(np.uint8 if experts <= 256 else np.uint16)
        if recorded
        else None,
        finish="stop",
        text=f"réponse {seed}",
        prompt_text="question",
        top_ids=random.integers(0, 9, (n, 2)).astype(np.int32) if recorded else None,
        top_logp=-random.random((n, 2)).astype(np.float32) if recorded else None,
        support_ids=random.integers(0, 9, int(lengths.sum())).astype(np.uint16),
        support_lengths=lengths,
        finished_version=300 + seed,
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)  # the reward is NaN


def assert_same_fields(one: object, other: object) -> None:
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        assert same(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize(
    "rollouts",
    [
        [rollout(0, sampled=4), rollout(1, sampled=0), rollout(2, sampled=9)],
        [rollout(0, sampled=4), rollout(1, sampled=2, recorded=False)],
        [rollout(0, sampled=4, experts=100), rollout(1, sampled=3, experts=300)],
        [rollout(3, sampled=2, recorded=False)],
        [],
    ],
    ids=["lengths", "some without experts", "experts of two types", "none with experts", "none"],
)
def test_rollouts_come_back_to_the_last_bit(rollouts):
    packed = pickle.loads(pickle.dumps(pack_rollouts(rollouts)))
    back = unpack_rollouts(packed)
    assert len(back) == len(rollouts)
    for one, other in zip(rollouts, back, strict=True):
        assert_same_fields(one, other)
        assert all(array.flags.writeable for array in vars(other).values() if isinstance(array, np.ndarray))


def test_rollouts_take_the_bytes_that_their_numbers_need():
    rollouts = [dataclasses.replace(rollout(seed, sampled=997), top_ids=None, top_logp=None) for seed in range(4)]
    for one in rollouts:
        one.support_ids = one.support_lengths = None
        one.token_ids %= 60_000
    packed = pack_rollouts(rollouts)
    # token 2, mask 1, log-probability 4, version 2, experts 2 layers * 4, and 8 for rows - 1
    arrays = 4 * (1000 * (2 + 1 + 4 + 2) + 999 * 8)
    said = packed.num_bytes
    assert arrays <= said <= arrays + 4 * 60
    assert said <= len(pickle.dumps(packed, protocol=5)) <= said + 2000  # what really goes over the wire


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (0, 255, np.uint8),
        (0, 256, np.uint16),
        (-1, 127, np.int8),
        (-1, 128, np.int16),
        (-1, 40_000, np.int32),
        (0, 2**32 - 1, np.uint32),
        (-1, 2**31, np.int64),
    ],
)
def test_integers_are_narrowed_as_far_as_they_fit(low, high, dtype):
    array = np.array([[low, high]], np.int64)
    assert narrowed(array).dtype == dtype
    assert np.array_equal(narrowed(array), array)


def test_other_numbers_are_left_alone():
    for array in (np.array([1.0], np.float32), np.array([True]), np.zeros(0, np.int64)):
        assert narrowed(array) is array


def micro_batch() -> TrainBatch:
    return pad([rollout(seed, sampled=5 + seed) for seed in range(3)], torch.tensor([0.5, -1.0, 0.0]), [2, 0, 1])


def test_a_micro_batch_comes_back_to_the_last_bit():
    batch = micro_batch()
    assert_same_fields(batch, unpack_batch(pickle.loads(pickle.dumps(pack_batch(batch)))))
    assert batch.routed_experts is not None
    assert batch.routed_experts.min() == -1  # there is padding


def test_a_micro_batch_is_said_to_have_the_bytes_that_it_has():
    packed = pack_batch(micro_batch())
    width, tokens = 9, 27
    # per position: input 4, attention 1, target 4, mask 1, logp 4, versions 2, experts 2 * 4 * 2, top ids 2 * 1,
    # top logp 2 * 4, support lengths 1
    positions = tokens * (4 + 1 + 4 + 1 + 4 + 2 + 16 + 2 + 8 + 1)
    assert micro_batch().input_ids.shape == (3, width)
    support = sum(len(one) for one in micro_batch().support_ids or [])
    assert num_bytes([packed, packed]) == 2 * (positions + 3 * 4 + support)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_with_their_checksum(dtype):
    generator = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}
    packed = pickle.loads(pickle.dumps(pack_weights(weights, dtype)))
    expected = {name: tensor.to(dtype) for name, tensor in weights.items()}
    assert weights_checksum(unpack_weights(packed)) == weights_checksum(expected)
    assert packed.num_bytes == 17 * dtype.itemsize
