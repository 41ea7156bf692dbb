"""The example for reading runs, and its rendering of the loss agrees with the library's."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from steadyrl.method import ObjectiveConfig
from steadyrl.objective.advantage import group_advantage
from steadyrl.objective.loss import policy_loss
from steadyrl.objective.rule import Layout
from steadyrl.types import BatchCounts, pooled

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_loop.py"
TOLERANCE = {torch.float64: {"rtol": 1e-10, "atol": 1e-13}, torch.float32: {"rtol": 1e-4, "atol": 1e-7}}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("one_file_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_batch(
    seed: int, dtype: torch.dtype, size: int = 200, width: int = 13
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, behavior_logp [B, n], advantage [B], mask [B, n]; the drift is wide enough for every case of the loss."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (size, 1), generator=generator)
    mask = torch.arange(width) < lengths
    behavior_logp = -3 * torch.rand(size, width, generator=generator, dtype=torch.float64)
    drift = 0.1 * torch.randn(size, 1, generator=generator, dtype=torch.float64)
    noise = 0.05 * torch.randn(size, width, generator=generator, dtype=torch.float64)
    advantage = torch.randn(size, generator=generator, dtype=torch.float64)
    logp = (behavior_logp + drift + noise).to(dtype).requires_grad_()
    return logp, behavior_logp.to(dtype), advantage.to(dtype), mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(8))
def test_its_loss_is_the_library_s(example, seed, dtype):
    logp, behavior_logp, advantage, mask = random_batch(seed, dtype)
    size, width = mask.shape
    loss, seen = example.sat_gspo_loss(logp, behavior_logp, advantage, mask)
    sequence = torch.arange(size).repeat_interleave(width)
    expected = policy_loss(
        ObjectiveConfig.model_validate({"preset": "sat-gspo", "kl_coef": 0}),
        logp=logp.flatten(),
        behavior_logp=behavior_logp.flatten(),
        advantage=advantage[sequence],
        layout=Layout(mask.flatten(), sequence, size),
        counts=BatchCounts(num_tokens=int(mask.sum()), num_sequences=size),
    )
    torch.testing.assert_close(loss, expected.loss, **TOLERANCE[dtype])
    gradient, expected_gradient = (torch.autograd.grad(value, logp)[0] for value in (loss, expected.loss))
    torch.testing.assert_close(gradient, expected_gradient, **TOLERANCE[dtype])

    means = pooled(expected.sums)
    assert seen["q"] == pytest.approx(means["sat/q"], rel=1e-5)
    assert seen["gated"] == pytest.approx(means["sat/gate_rate"], rel=1e-6)
    assert seen["removed"] == pytest.approx(means["objective/clip_low"] + means["objective/clip_high"], rel=1e-6)
    # the batch must reach what is compared: gradients that SAT alone removes, and ones that pull back and are kept
    assert 0 < seen["gated"] <= 0.1
    assert 0 < means["sat/intervention_rate"] <= seen["removed"]
    assert seen["removed"] < means["objective/outside_band"]


def test_equal_policies_turn_the_gate_off(example):
    logp, _, advantage, mask = random_batch(0, torch.float32)
    loss, seen = example.sat_gspo_loss(logp, logp.detach(), advantage, mask)
    assert seen == {"d_bar": 0, "q": 0, "gated": 0, "removed": 0}
    gradient = torch.autograd.grad(loss, logp)[0]
    torch.testing.assert_close(gradient, -(advantage / mask.sum(1) / len(mask)).unsqueeze(1) * mask)


def test_its_advantages_are_the_library_s(example):
    rewards = torch.randint(0, 2, (6, 8), generator=torch.Generator().manual_seed(0)).float()
    rewards[0], rewards[1] = 0, 1  # groups without a contrast
    torch.testing.assert_close(
        example.group_advantage(rewards), group_advantage(rewards, "group_standardized").flatten()
    )


@pytest.mark.parametrize(
    ("response", "finished", "reward"),
    [("11,13", True, 1), ("13", True, 1), ("13", False, 0), ("11,12", True, 0), ("11,", True, 0), ("", True, 0)],
)
def test_grade(example, response, finished, reward):
    assert example.grade([3, 8, 2], response, finished) == reward


def test_it_runs():
    command = [sys.executable, str(EXAMPLE), "--steps", "3", "--stale", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    number = r"(\d+(?:\.\d+)?)"
    pattern = rf"step +(\d+)  age (\d+)  reward {number}  d_bar {number}  q {number}  gated {number}  removed {number}"
    found = [re.fullmatch(pattern, line) for line in lines]
    assert all(found), done.stdout
    rows = [[float(value) for value in match.groups()] for match in found if match]
    assert [row[0] for row in rows] == [1, 3]
    for _, _, reward, d_bar, q, gated, removed in rows:
        assert d_bar > 0
        assert q > 0
        assert all(0 <= rate <= 1 for rate in (reward, gated, removed))
    summary = re.fullmatch(rf"held-out accuracy {number} -> {number} after 3 steps, (\d+) s", last)
    assert summary, last
    assert 0 < float(summary[1]) < 1


def test_it_stays_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 250
