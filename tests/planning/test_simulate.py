"""The simulation against closed forms, the schedule, and the bound on the lag."""

from __future__ import annotations

import numpy as np
import pytest
from planning.workload import FIXED, SHAPE, VARIED, speed

from steadyrl.errors import ConfigError
from steadyrl.pipeline.schedule import generation_version
from steadyrl.planning.lengths import mean_lengths
from steadyrl.planning.rates import Hardware
from steadyrl.planning.simulate import _Scheduled, simulate
from steadyrl.recipe import build_config

# 4 prompts x 3 responses = 12 responses of 10 tokens to prompts of 5
SIZES = [
    "pipeline.prompts_per_batch=4",
    "pipeline.responses_per_prompt=3",
    "evaluation.every_steps=0",
    "evaluation.prompts=1",
    "evaluation.samples_per_prompt=1",
    "record.rollouts_every_batches=0",
    "trainer.steps=60",
    "model.routing_replay=false",
]
SYNC = ["pipeline.regime=sync", "pipeline.lag=0"]
BROADCAST_S, LOAD_S = 2_000 / 50_000, 2_000 / 20_000
GENERATE_S = 10 * (0.01 + 12 * 0.001)
TRANSFER_S, GRADE_S, OTHER_S = 12 * 0.0005, 12 * 0.002, 0.03
TRAIN_S = 0.2 + 12 * 15 / 1_000


def recipe(*overrides):
    return build_config({}, [*SIZES, *overrides])


def streaming(lag, max_lag):
    return ["pipeline.regime=streaming", f"pipeline.lag={lag}", f"pipeline.max_lag={max_lag}"]


def test_a_synchronous_step_is_the_sum_of_its_parts():
    found = simulate(recipe(*SYNC), SHAPE, speed(), steps=60)
    parts = BROADCAST_S + LOAD_S + GENERATE_S + TRANSFER_S + GRADE_S + TRAIN_S + OTHER_S
    # the evaluation of the base model, one response, runs beside the first training and is shorter
    assert found.step_s == pytest.approx(parts)
    assert found.tokens_per_s == pytest.approx(120 / parts)
    assert found.trainer_waits_s == pytest.approx(LOAD_S + GENERATE_S + TRANSFER_S, rel=1e-3)
    assert found.run_s == pytest.approx(60 * parts, rel=0.01)


@pytest.mark.parametrize("train_step_s", [0.0, 0.5], ids=["the engine is slower", "the trainer is slower"])
@pytest.mark.parametrize("lag", [1, 4])
def test_a_batch_wise_step_is_the_longer_of_generation_and_training(train_step_s, lag):
    found = simulate(
        recipe("pipeline.regime=batch", f"pipeline.lag={lag}"), SHAPE, speed(train_step_s=train_step_s), steps=60
    )
    train = train_step_s + 12 * 15 / 1_000 + OTHER_S
    # grading, then weights now and then, then both at once; the engine takes weights over before it generates
    with_weights = GRADE_S + BROADCAST_S + max(train, LOAD_S + GENERATE_S + TRANSFER_S)
    without = GRADE_S + max(train, GENERATE_S + TRANSFER_S)
    assert found.step_s == pytest.approx((with_weights + (lag - 1) * without) / lag, rel=0.02)


@pytest.mark.parametrize(("steps_per_batch", "lag"), [(1, 1), (1, 8), (2, 3), (4, 4), (4, 1), (2, 4), (3, 2)])
def test_batch_wise_lags_are_those_of_the_schedule(steps_per_batch, lag):
    config = recipe(
        f"pipeline.steps_per_batch={steps_per_batch}", f"pipeline.lag={lag}", "pipeline.prompts_per_batch=12"
    )
    found = simulate(config, SHAPE, speed(), steps=60)
    lags = np.zeros(config.pipeline.largest_lag + 1)
    for step in range(60):
        lags[step - generation_version(config.pipeline, step // steps_per_batch)] += 1
    assert found.lag_max == config.pipeline.largest_lag
    assert found.lag_shares == pytest.approx((lags / 60).tolist())
    assert found.lag_mean == pytest.approx(float(lags @ np.arange(len(lags))) / 60)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("lag", "max_lag"), [(1, 0), (1, 1), (1, 4), (3, 4), (5, 4), (2, 9)])
def test_no_token_of_a_stream_is_older_than_the_bound(lag, max_lag, seed):
    rng = np.random.default_rng(seed)
    paces = {"decode_step_s": float(rng.uniform(0.001, 0.1)), "train_step_s": float(rng.uniform(0, 1))}
    config = recipe(*streaming(lag, max_lag), "pipeline.groups_in_flight=24", "pipeline.queue_groups=40")
    found = simulate(config, SHAPE, speed(VARIED, **paces), steps=60, seed=seed)
    assert found.lag_max <= max_lag
    assert sum(found.lag_shares) == pytest.approx(1)


def test_a_fast_engine_with_a_long_queue_reaches_the_bound():
    config = recipe(*streaming(1, 4), "pipeline.groups_in_flight=24", "pipeline.queue_groups=40")
    assert simulate(config, SHAPE, speed(VARIED, decode_step_s=0.001), steps=60).lag_max == 4


def test_a_stream_without_any_lag_is_the_synchronous_regime():
    paces = {"transfer_response_s": 0.0}  # a batch comes at once, a stream group by group
    stream = simulate(recipe(*streaming(1, 0)), SHAPE, speed(VARIED, **paces), steps=40)
    sync = simulate(recipe(*SYNC), SHAPE, speed(VARIED, **paces), steps=40)
    assert stream.step_s == pytest.approx(sync.step_s)
    assert (stream.lag_mean, stream.lag_max) == (0, 0)


def test_a_slow_trainer_sets_the_pace_of_a_stream():
    found = simulate(recipe(*streaming(1, 8)), SHAPE, speed(train_step_s=2.0), steps=60)
    assert found.step_s == pytest.approx(2.0 + 0.18 + OTHER_S + GRADE_S + BROADCAST_S, rel=0.01)
    assert found.trainer_waits_s < 0.05


def test_a_slow_engine_sets_the_pace_of_a_stream():
    rates = {"decode_step_s": 0.3, "train_step_s": 0.0}
    config = recipe(*streaming(1, 8), "pipeline.groups_in_flight=4")
    found = simulate(config, SHAPE, speed(**rates), steps=60)
    # always 12 sequences: 12 tokens in 0.312 s, 120 tokens a step; weights are taken over once a step
    assert found.tokens_per_s == pytest.approx(12 / 0.312, rel=0.07)
    assert found.tokens_per_s < 12 / 0.312
    assert found.engine_working > 0.9


def test_evaluations_delay_the_batch_behind_them():
    often = ["evaluation.every_steps=1", "evaluation.prompts=30", "evaluation.samples_per_prompt=2"]
    found = simulate(recipe(*SYNC, *often), SHAPE, speed(), steps=60)
    evaluate = 10 * (0.01 + 60 * 0.001)
    assert evaluate > TRAIN_S + OTHER_S + BROADCAST_S  # so the engine never waits for the trainer to train
    # its weights are those of the batch before; it is scored while the next batch is generated
    assert found.step_s == pytest.approx(evaluate + LOAD_S + GENERATE_S + TRANSFER_S + GRADE_S)


def test_the_trainer_scores_evaluations():
    often = ["evaluation.every_steps=1", "evaluation.prompts=5", "evaluation.samples_per_prompt=2"]
    found = simulate(recipe("pipeline.lag=1", *often), SHAPE, speed(train_step_s=5.0), steps=60)
    train = 5.0 + 12 * 15 / 1_000 + OTHER_S  # longer than all that the engine has to do
    assert found.step_s == pytest.approx(10 * 0.002 + GRADE_S + BROADCAST_S + train)


def test_a_broadcast_waits_for_one_of_two_slots():
    clock = _Scheduled(recipe("pipeline.lag=1"), SHAPE, speed(), 10, 0)
    ends = []
    for version in range(3):
        clock.broadcast(version)
        ends.append(clock.now_s)
    # each takes 0.04 s to write and 0.1 s to take over; the third has to wait for the end of the first, at 0.14 s
    assert ends == pytest.approx([0.04, 0.08, 0.18])
    clock.broadcast(2)
    assert clock.now_s == ends[-1], "the engine has these weights already"


def test_lags_are_counted_by_tokens():
    config = recipe("pipeline.lag=3")
    run = _Scheduled(config, SHAPE, speed(VARIED), 30, 0)
    found = run.run()
    lags = np.zeros(4)
    for step, tokens in enumerate(run._tokens):
        lags[step - generation_version(config.pipeline, step)] += tokens
    assert found.lag_shares == pytest.approx((lags / lags.sum()).tolist())


def test_checkpoints_take_time():
    without = simulate(recipe(*SYNC), SHAPE, speed(), steps=60)
    found = simulate(recipe(*SYNC, "checkpoint.every_steps=2"), SHAPE, speed(), steps=60)
    size = 4 * 1_000 + 8 * 1_000 + 4 * 10  # weights, moments, step counters
    assert found.step_s - without.step_s == pytest.approx(size / 1e6 * 29 / 59)


def test_the_same_seed_gives_the_same_numbers():
    config = recipe(*streaming(1, 4))
    first, again, other = (simulate(config, SHAPE, speed(VARIED), steps=30, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.step_s != other.step_s


def test_memory_bounds_the_sequences_that_run_together():
    made = speed(FIXED)
    per_token = 2 * 2 * 1 * 4 * 2  # keys and values, layers, heads, size, bfloat16
    context = mean_lengths(FIXED, 3, 32).context
    gib = (2_000 + 2.5 * context * per_token) / 2**30
    bounded = type(made)(**{**vars(made), "hardware": Hardware(gpu_memory_gib=gib, cache_share=0.999)})
    found = simulate(recipe(*SYNC), SHAPE, bounded, steps=20)
    assert found.places == 2
    # 12 responses, two at a time
    slower = GENERATE_S - 60 * (0.01 + 2 * 0.001)
    assert found.step_s == pytest.approx(simulate(recipe(*SYNC), SHAPE, made, steps=20).step_s - slower)


def test_weights_that_leave_no_room_are_refused():
    made = speed(FIXED)
    tight = type(made)(**{**vars(made), "hardware": Hardware(gpu_memory_gib=1e-7)})
    with pytest.raises(ConfigError, match="no room for keys and values"):
        simulate(recipe(*SYNC), SHAPE, tight, steps=20)


def test_more_engines_share_the_sequences():
    more = ["engine.replicas=3", "pipeline.backend=ray"]
    one, three = (simulate(recipe(*SYNC, *extra), SHAPE, speed(), steps=20) for extra in ([], more))
    assert one.step_s - three.step_s == pytest.approx(10 * 12 * 0.001 * (1 - 1 / 3))
