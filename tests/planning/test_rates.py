"""Rates from a data sheet against textbook arithmetic, and files of rates."""

from __future__ import annotations

import dataclasses

import pytest
from planning.workload import SHAPE

from steadyrl.errors import ConfigError
from steadyrl.planning.lengths import StatedLengths, mean_lengths
from steadyrl.planning.placement import Placement
from steadyrl.planning.rates import Hardware, Rates, assume, cache_room, forward_flops, stated_speed
from steadyrl.recipe import build_config

SIZES = ["sampling.max_response_tokens=100", "model.path=some/model", "objective.kl_coef=0"]
CONFIG = build_config({}, SIZES)


def test_without_a_file_everything_is_assumed_and_said_to_be():
    speed = stated_speed(None, SHAPE, CONFIG)
    assert speed.assumed == Rates.model_fields.keys()
    assert "assumed" in speed.source
    assert "not measured" in speed.source


def test_a_file_replaces_assumptions(tmp_path):
    file = tmp_path / "rates.toml"
    file.write_text('train_tokens_per_s = 123\nevaluation_prompts = 7\n[lengths]\nshape = "fixed"\nmean = 50\n')
    speed = stated_speed(file, SHAPE, CONFIG)
    assert speed.rates.train_tokens_per_s == 123
    assert Rates.model_fields.keys() - speed.assumed == {"train_tokens_per_s"}
    assert speed.evaluation_prompts == 7
    assert speed.lengths == StatedLengths(shape="fixed", mean=50)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train_token_per_s = 3", "unknown key 'train_token_per_s'; did you mean 'train_tokens_per_s'"),
        ("decode_step_s = -1", "decode_step_s: .*greater than or equal to 0 .*-1"),
        ("decode_step_s = 1e308", "decode_step_s: .*less than or equal to 1000000000"),
        ("train_tokens_per_s = 1e-320", "train_tokens_per_s: "),
        ('[lengths]\nshape = "flat"', "lengths.shape: .*lognormal"),
        ("[hardware]\ngpus = 3", "hardware.gpus: "),
        ("evaluation_prompts = 0", "evaluation_prompts: "),
        ("lengths = 3", "lengths: "),
    ],
)
def test_what_a_file_may_not_hold(tmp_path, text, message):
    file = tmp_path / "rates.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        stated_speed(file, SHAPE, CONFIG)


def test_decoding_reads_the_weights_and_the_keys_and_values_once_a_step():
    hardware = Hardware(gpu_bytes_per_s=1e6, decode_efficiency=0.5, kernel_s=0.001)
    lengths = StatedLengths(shape="fixed", mean=11, prompt=20)
    rates = assume(SHAPE, CONFIG, Placement(1, 1, 2), hardware, lengths)
    read = 1e6 * 0.5 * 2
    assert rates.decode_step_s == pytest.approx(0.001 + 1_000 * 2 / read)
    # 2 layers, 1 head of 4 numbers, keys and values, 2 bytes; a token in the middle has 20 + 5 before it
    assert rates.decode_sequence_s == pytest.approx(25 * 2 * 2 * 4 * 2 / read)


def test_training_is_six_operations_for_each_active_parameter_and_token():
    hardware = Hardware(gpu_flops=1e9, train_efficiency=0.5)
    lengths = StatedLengths(shape="fixed", mean=11, prompt=20)
    dense = assume(SHAPE, CONFIG, Placement(4, 1, 1), hardware, lengths)
    attention = 3 * 4 * 2 * 8 * 25  # passes, operations, layers, numbers in the queries, tokens attended to
    assert dense.train_tokens_per_s == pytest.approx(4 * 1e9 * 0.5 / (6 * 1_000 + attention))
    mixture = dataclasses.replace(SHAPE, moe_layers=2, expert_parameters=800, experts=4, experts_per_token=1)
    sparse = assume(mixture, CONFIG, Placement(4, 1, 1), hardware, lengths)
    assert sparse.train_tokens_per_s == pytest.approx(4 * 1e9 * 0.5 / (6 * 400 + attention))


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([], 3),
        (["model.gradient_checkpointing=true"], 4),
        (["objective.kl_coef=0.001"], 4),
        (["objective.anchor=old_actor"], 4),
        # SAT finds the quantile of a batch of several micro-batches in a pass of its own
        (["objective.boundary={ rule = 'sat' }"], 3),
        (["objective.boundary={ rule = 'sat' }", "trainer.tokens_per_micro_batch=64"], 4),
    ],
)
def test_passes_over_a_token(overrides, passes):
    config = build_config({}, [*SIZES, *overrides])
    lengths = StatedLengths(shape="fixed", mean=11, prompt=20)
    rates = assume(SHAPE, config, Placement(1, 1, 1), Hardware(gpu_flops=1e9, train_efficiency=0.5), lengths)
    context = mean_lengths(lengths, 8, 100).context
    assert 0.5e9 / rates.train_tokens_per_s == pytest.approx(passes * forward_flops(SHAPE, context))


def test_room_for_keys_and_values_is_what_the_weights_leave():
    made = stated_speed(None, SHAPE, CONFIG)
    speed = dataclasses.replace(made, hardware=Hardware(gpu_memory_gib=1e4 / 2**30, cache_share=0.8))
    assert cache_room(SHAPE, CONFIG, Placement(1, 3, 2), speed) == pytest.approx(3 * 0.8 * (2e4 - 2_000) / 32)
    assert cache_room(SHAPE, CONFIG, Placement(1, 1, 1), dataclasses.replace(speed, hardware=None)) is None
