"""The schedule, played step by step, against its closed forms."""

from __future__ import annotations

import pytest

from steadyrl.config import PipelineConfig
from steadyrl.pipeline.schedule import batches_ahead, generation_version, is_broadcast_version, snapshots_needed

CASES = [("sync", 0, steps) for steps in (1, 2, 4)] + [
    ("batch", lag, steps) for lag in (1, 2, 3, 4, 5, 8, 12) for steps in (1, 2, 3, 4, 6)
]


def pipeline(regime: str, lag: int, steps: int) -> PipelineConfig:
    return PipelineConfig(regime=regime, lag=lag, steps_per_batch=steps, prompts_per_batch=12)


def play(config: PipelineConfig, num_batches: int) -> list[tuple[int, int, int]]:
    """(batch, version that generated it, version that trains on it), by simulation of who does what when."""
    trained = []
    version = newest_broadcast = 0
    generated_from = {}
    for batch in range(num_batches):
        for wanted in (batch, batch + 1) if config.regime == "batch" else (batch,):
            if wanted not in generated_from:
                generated_from[wanted] = newest_broadcast if config.regime == "batch" else version
        for _ in range(config.steps_per_batch):
            trained.append((batch, generated_from[batch], version))
            version += 1
            if config.lag and version % config.lag == 0:
                newest_broadcast = version
    return trained


@pytest.mark.parametrize(("regime", "lag", "steps"), CASES)
def test_versions_are_those_of_the_simulation(regime, lag, steps):
    config = pipeline(regime, lag, steps)
    for batch, generated, _ in play(config, 40):
        assert generation_version(config, batch) == generated


@pytest.mark.parametrize(("regime", "lag", "steps"), CASES)
def test_the_largest_lag_is_never_exceeded_and_is_reached(regime, lag, steps):
    config = pipeline(regime, lag, steps)
    lags = [version - generated for _, generated, version in play(config, 60)]
    assert min(lags) >= 0
    assert max(lags) == config.largest_lag


@pytest.mark.parametrize(("regime", "lag", "steps"), CASES)
def test_exactly_the_versions_that_generate_are_kept(regime, lag, steps):
    config = pipeline(regime, lag, steps)
    used = {generation_version(config, batch) for batch in range(60)}
    horizon = 40 * steps
    assert {v for v in range(horizon) if is_broadcast_version(config, v)} == {v for v in used if v < horizon}


@pytest.mark.parametrize(("regime", "lag", "steps"), CASES)
def test_keeping_and_forgetting_leaves_every_version_that_is_asked_for(regime, lag, steps):
    """The loop keeps a version when it is broadcast and forgets it when it is not needed; none may be missing."""
    config = pipeline(regime, lag, steps)
    kept: set[int] = set()
    most = 0
    for step in range(60 * steps):
        kept &= snapshots_needed(config, step)
        if is_broadcast_version(config, step):
            kept.add(step)
        most = max(most, len(kept))
        for ahead in range(batches_ahead(config) + 1):
            if step % steps == 0 or ahead == 0:  # the next batch is asked for when the current one begins
                assert generation_version(config, step // steps + ahead) in kept
    assert most <= 3


def test_the_paper_s_numbering():
    """Batches 1 and 2 come from version 0, batch 3 from n, batch 4 from 2n (n steps per batch)."""
    config = pipeline("batch", 4, 4)
    assert [generation_version(config, batch) for batch in range(4)] == [0, 0, 4, 8]
