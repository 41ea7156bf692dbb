"""Runs that never happened, written the way a training loop writes them."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np

from steadyrl.config import RunConfig
from steadyrl.recipe import build_config
from steadyrl.reports.recorder import RunFolder
from steadyrl.types import Consumed, Rollout, RolloutBatch, StepReport


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
        "staleness/lag_max": float(min(step - 1, lag)),
        "optim/grad_norm": float(rng.lognormal(-0.5, 0.5)),
        "counts/generated": 256.0 * (step + 1),
        "counts/trained": 256.0 * step,
        "counts/dropped": 0.0,
        "counts/buffered": 256.0,
        "sampled_tokens": sum(lags),
        "staleness/lag": float(lag) / 2,
        "mismatch/q50": drift / 3,
        "mismatch/q99": drift * 9,
        "penalty/kl_ref": 0.01 * step / steps,
        "routing/disagreement": 0.02 * float(rng.random()),
        "reward/right": 0.7 * learned,
        "reward/wrong": 0.9 - 0.7 * learned,
        "reward/unparsable": 0.07,
        "reward/truncated": 0.03,
        "reward/groups_without_signal": 0.2 * learned,
        "split/policy_d_bar": 0.8 * drift,
        "split/engine_d_bar": 0.004,
        "split/policy_variance": drift**2,
        "split/engine_variance": 4e-5,
    }
    for index, side in enumerate(("low_negative", "low_positive", "high_negative", "high_positive")):
        metrics[f"objective/outside_{side}"] = 0.01 * (index + 1)
        metrics[f"objective/removed_{side}"] = 0.01 * (index + 1) * (side in ("low_negative", "high_positive"))
    if is_sat:
        metrics |= {
            "sat/radius_low": 0.2 - drift,
            "sat/radius_high": 0.2 - 1.3 * drift,
            "sat/gate_rate": 0.0999 + 0.0001 * float(rng.random()),
            "sat/intervention_rate": 0.004 * float(rng.lognormal(0, 0.5)),
            "sat/q": drift * 3,
        }
    buckets = {"age": lag + 1, "position": 6, "probability": 6}
    names = ["d_bar", "outside", "removed", *(["gated", "intervened"] if is_sat else [])]
    breakdowns = {
        f"{name}_by_{kind}": [drift * (bucket + 1) for bucket in range(size)]
        for name in names
        for kind, size in buckets.items()
    }
    seconds = {"step": 1.0, "wait": 0.3, "train": 0.6, "grade": 0.02, "broadcast": 0.08}
    seconds |= {"generate": 0.8, "engine_idle": 0.2}
    return StepReport(step, step - 1, metrics, seconds, {"lag": lags, **breakdowns})


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


def make_scored_batch(batch_id: int = 0, seed: int = 0, groups: int = 3, text: str = "") -> RolloutBatch:
    """A batch that was trained on: 2 prompt tokens, 5 to 20 sampled ones, a drift that grows along the response."""
    rng = np.random.default_rng([seed, batch_id])
    rollouts = []
    for group in range(groups):
        for sample in range(4):
            size = int(rng.integers(5, 21))
            is_sampled = np.arange(size + 2) >= 2
            behavior_logp = np.where(is_sampled, -rng.exponential(0.5, size + 2), 0).astype(np.float32)
            drift = rng.normal(0, 0.15, size + 2) * np.linspace(0.2, 1.5, size + 2)
            reward = float(sample < 2)
            rollouts.append(
                Rollout(
                    prompt_id=f"sum-{batch_id}-{group}",
                    group=group,
                    token_ids=rng.integers(0, 30, size + 2).astype(np.int32),
                    loss_mask=is_sampled,
                    behavior_logp=behavior_logp,
                    versions=np.where(is_sampled, max(0, batch_id - sample), -1).astype(np.int32),
                    routed_experts=None,
                    finish="stop",
                    text=text,
                    reward=reward,
                    status="right" if reward else "wrong",
                    prompt_text="3+4=",
                    consumed=Consumed(
                        version=batch_id,
                        advantage=1.0 if reward else -1.0,
                        trainer_logp=np.where(is_sampled, behavior_logp + drift, 0).astype(np.float32),
                        old_logp=None,
                    ),
                )
            )
    return RolloutBatch(batch_id, 4, rollouts)


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


def write_sweep(root: Path, seeds: int = 3, steps: int = 12) -> Path:
    """Two methods, two lags: GRPO collapses at lag 8 with seed 0; of SAT-GRPO at lag 8 seed 1 stopped, 2 is missing."""
    axes = {"method": ["GRPO", "SAT-GRPO"], "lag": ["1", "8"]}
    cells = []
    for method, lag, seed in product(axes["method"], axes["lag"], range(seeds)):
        name = f"{method.lower()}_lag-{lag}_seed{seed}"
        cells.append({"labels": {"method": method, "lag": lag}, "seed": seed, "folder": f"runs/{name}"})
        condition = (method, lag, seed)
        if condition == ("SAT-GRPO", "8", 2):
            continue
        folder = RunFolder.create(root / "runs" / name, make_config(method.lower(), steps, int(lag)))
        folder.status("running")
        folder.evaluation(make_evaluation(0, 0.25))
        last = steps // 2 if condition == ("SAT-GRPO", "8", 1) else steps
        for step in range(1, last + 1):
            folder.step(make_report(step, steps, int(lag), method.startswith("SAT"), seed))
            has_collapsed = condition == ("GRPO", "8", 0) and step > steps // 2
            folder.evaluation(
                make_evaluation(step, 0.1 if has_collapsed else sweep_score(method, lag, seed, step / steps))
            )
        folder.status("finished" if last == steps else "stopped")
    index = {"recipe": "tiny.toml", "axes": axes, "seeds": list(range(seeds)), "cells": cells}
    (root / "sweep.json").write_text(json.dumps(index))
    return root


def sweep_score(method: str, lag: str, seed: int, done: float) -> float:
    return 0.25 + 0.5 * done + 0.05 * (method == "SAT-GRPO") - 0.004 * int(lag) + 0.01 * seed


def write_run(
    path: Path, preset: str = "sat-grpo", steps: int = 40, lag: int = 4, seed: int = 0, text: str = "3+4=7\n= 7"
) -> RunFolder:
    """A whole plausible run: the trainer waits a little for rollouts, the engine a little for weights."""
    folder = RunFolder.create(path, make_config(preset, steps, lag))
    folder.status("running")
    folder.evaluation(make_evaluation(0, 0.12))
    folder.rollouts(make_scored_batch(0, seed, text=text), lambda token: text if token == 7 else f"<{token}>")
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
    folder.rollouts(make_scored_batch(steps - 1, seed, text=text), lambda token: text if token == 7 else f"<{token}>")
    folder.status("finished")
    return folder
