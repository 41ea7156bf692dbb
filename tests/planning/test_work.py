"""What an optimizer step sends, against counting it out."""

from __future__ import annotations

import dataclasses

import pytest
from planning.workload import SHAPE

from steadyrl.pipeline.schedule import generation_version
from steadyrl.planning.lengths import MeanLengths
from steadyrl.planning.placement import Placement
from steadyrl.planning.work import broadcasts_per_step, micro_batches, traffic
from steadyrl.recipe import build_config

LENGTHS = MeanLengths(prompt=20, response=30, context=35)


@pytest.mark.parametrize(("steps_per_batch", "lag"), [(1, 1), (1, 8), (2, 3), (4, 4), (4, 6), (3, 1)])
def test_broadcasts_of_a_long_run(steps_per_batch, lag):
    sizes = [f"pipeline.steps_per_batch={steps_per_batch}", f"pipeline.lag={lag}", "pipeline.prompts_per_batch=12"]
    config = build_config({}, [*sizes, "trainer.steps=1200"])
    versions = {generation_version(config.pipeline, batch) for batch in range(1200 // steps_per_batch)}
    assert broadcasts_per_step(config) == pytest.approx(len(versions) / 1200, rel=0.01)


def test_broadcasts_of_the_other_regimes():
    sync = build_config({}, ["pipeline.regime=sync", "pipeline.lag=0", "pipeline.steps_per_batch=2"])
    assert broadcasts_per_step(sync) == 1 / 2
    assert broadcasts_per_step(build_config({}, ["pipeline.regime=streaming", "pipeline.lag=3"])) == 1 / 3


def test_traffic_of_a_step():
    # 256 responses of 50 tokens on 2 ranks, 2,000 tokens at a time: 6,400 tokens a rank, 4 micro-batches
    words = ["trainer.kind=fsdp", "trainer.ranks=2", "pipeline.backend=ray", "engine.replicas=3", "pipeline.lag=4"]
    config = build_config({}, [*words, "trainer.tokens_per_micro_batch=2000", "model.dtype=bfloat16"])
    assert micro_batches(config, LENGTHS, 2) == 4
    sent = {item.name: item.bytes_per_step for item in traffic(SHAPE, config, Placement(2, 3, 1), LENGTHS)}
    assert sent == {
        "weights to the engines": 3 * 1_000 * 2 / 4,
        "rollouts to the trainer": 256 * 50 * 13,
        # forward, backward and the reference model, in each micro-batch; the other rank's half to each of 2
        "layers put together": 4 * 3 * 1 * 1_000 * 2,
        "gradients summed": 4 * 1 * 1_000 * 4,
    }


def test_recorded_experts_travel_with_the_tokens():
    mixture = dataclasses.replace(SHAPE, moe_layers=2, experts=8, experts_per_token=3)
    config = build_config({}, ["model.routing_replay=true"])
    items = traffic(mixture, config, Placement(1, 1, 1), LENGTHS)
    assert items[1].bytes_per_step == 256 * 50 * (13 + 2 * 3)
    assert [item.name for item in items] == ["weights to the engines", "rollouts to the trainer"]
