"""Runs that never happened, written the way a training loop writes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from steadyrl.config import RunConfig
from steadyrl.recipe import build_config
from steadyrl.reports.recorder import RunFolder
from steadyrl.types import Rollout, RolloutBatch, StepReport


def make_config(preset: str = "sat-grpo", steps: int = 40, lag: int = 4) -> RunConfig:
    return build_config({"objective": preset, "trainer": {"steps": steps}, "pipeline": {"lag": lag}})


def make_report(step: int, steps: int = 40, lag: int = 4, is_sat: bool = True, seed: int = 0) -> StepReport:
    rng = np.random.default_rng([seed, step])
    learned = 1 / (1 + math.exp(-8 * (step / steps - 0.4)))
    drift = 0.004 * (1 + 0.1 * lag) * float(rng.lognormal(0, 0.3))
    lags = [0.0] * (lag + 1)
    for index in range(min(step, lag + 1)):
        lags[index] = float(rng.integers(800, 1200))
    metrics = {
        "reward/mean": 0.15 + 0.6 * learned + float(rng.normal(0, 0.04)),
        "response/tokens": 24 + 4 * learned + float(rng.normal(0, 0.5)),
        "objective/clip_low": 0.002 * float(rng.random()),
        "objective/clip_high": 0.003 * float(rng.random()),
        "mismatch/d_bar": drift,
        "mismatch/k3": drift**2 * 4,
        "staleness/lag": float(lag) / 2,
        "staleness/lag_max": float(min(step - 1, lag)),
        "optim/grad_norm": float(rng.lognormal(-0.5, 0.5)),
        "counts/generated": 256.0 * (step + 1),
        "counts/trained": 256.0 * step,
        "counts/dropped": 0.0,
        "counts/buffered": 256.0,
        "sampled_tokens": sum(lags),
    }
    if is_sat:
        metrics |= {
            "sat/radius_low": 0.2 - drift,
            "sat/radius_high": 0.2 - 1.3 * drift,
            "sat/gate_rate": 0.0999 + 0.0001 * float(rng.random()),
            "sat/intervention_rate": 0.004 * float(rng.lognormal(0, 0.5)),
            "sat/q": drift * 3,
        }
    seconds = {"step": 1.0, "wait": 0.3, "train": 0.6, "grade": 0.02, "broadcast": 0.08}
    seconds |= {"generate": 0.8, "engine_idle": 0.2}
    return StepReport(step, step - 1, metrics, seconds, {"lag": lags})


def make_batch(batch_id: int = 0, text: str = "3+4=7\n7+2=9\n= 9", reward: float = 1.0) -> RolloutBatch:
    def rollout(group: int, sample: int) -> Rollout:
        is_sampled = np.array([False, False, True, True, True])
        return Rollout(
            prompt_id=f"sum-{batch_id}-{group}",
            group=group,
            token_ids=np.arange(5, dtype=np.int32),
            loss_mask=is_sampled,
            behavior_logp=np.where(is_sampled, -0.25, 0).astype(np.float32),
            versions=np.where(is_sampled, batch_id, -1).astype(np.int32),
            routed_experts=None,
            finish="stop",
            text=text,
            reward=reward if sample == 0 else float("nan"),
            status="right" if sample == 0 else "unparsable",
        )

    return RolloutBatch(batch_id, 2, [rollout(group, sample) for group in range(3) for sample in range(2)])


def make_evaluation(step: int, score: float) -> dict[str, object]:
    return {
        "step": step,
        "version": step,
        "avg_at_k": score,
        "avg_at_k_se": 0.03,
        "pass_at_k": min(1.0, score + 0.2),
        "pass_at_k_se": 0.03,
        "k": 8,
        "prompts": 128,
        "samples": 1024,
        "truncated": 0.01,
        "temperature": 1.0,
        "max_response_tokens": 32,
        "seed": 0,
        "statuses": {"right": 300, "wrong": 700, "unparsable": 24},
    }


def write_run(
    path: Path, preset: str = "sat-grpo", steps: int = 40, lag: int = 4, seed: int = 0, text: str = "3+4=7\n= 7"
) -> RunFolder:
    """A whole plausible run: the trainer waits a little for rollouts, the engine a little for weights."""
    folder = RunFolder.create(path, make_config(preset, steps, lag))
    folder.status("running")
    folder.evaluation(make_evaluation(0, 0.12))
    folder.rollouts(make_batch(0, text), str)
    rng = np.random.default_rng(seed)
    clock = 0.0
    for step in range(1, steps + 1):
        wait, train = 0.1 + 0.3 * float(rng.random()), 0.6 + 0.1 * float(rng.random())
        ends = np.cumsum([clock, wait, 0.02, train, 0.08]).tolist()
        for phase, start, end in zip(("wait", "grade", "train", "broadcast"), ends, ends[1:], strict=False):
            folder.event("trainer", phase, start, end, step)
        folder.event("engine", "load", clock, clock + 0.03, step)
        folder.event("engine", "generate", clock + 0.03, clock + 0.8, step)
        clock = ends[-1]
        folder.step(make_report(step, steps, lag, preset.startswith("sat"), seed))
        if step % 10 == 0:
            folder.evaluation(make_evaluation(step, 0.12 + 0.5 * step / steps))
    folder.rollouts(make_batch(steps - 1, text), str)
    folder.status("finished")
    return folder
