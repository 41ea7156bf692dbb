"""A made-up run, and the same numbers written down in every format from its documented fields."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT = 4  # tokens in front of every response
VOCABULARY = 48


@dataclass
class Made:
    """One response: p prompt tokens, then n sampled ones. All lists have p + n entries."""

    step: int
    token_ids: list[int]
    loss_mask: list[int]
    behavior_logp: list[float]
    trainer_logp: list[float]
    old_logp: list[float]
    versions: list[int]
    advantage: float
    reward: float


def make_run(
    steps: int = 3,
    responses: int = 12,
    longest: int = 40,
    seed: int = 0,
    engine_noise: float = 0.02,
    drift: float = 0.05,
    engine_temperature: float = 1.0,
    sampled_at: float = 1.0,
    trainer_temperature: float = 1.0,
    top_p: float = 1.0,
) -> list[Made]:
    """Tokens drawn from random softmax policies; the trainer's logits have moved a little for each step of lag.

    `engine_temperature` is that of the engine's report, `sampled_at` that of its sampling.
    """
    rng = np.random.default_rng(seed)
    made = []
    for step in range(steps):
        for index in range(responses):
            n = int(rng.integers(longest // 4 + 1, longest + 1))
            version = max(step - index % 4, 0)
            logits = rng.normal(size=(n, VOCABULARY)) * np.exp(rng.uniform(-1, 1.5, (n, 1)))
            scored = logits + rng.normal(size=logits.shape) * engine_noise
            trained = scored + rng.normal(size=logits.shape) * drift * np.sqrt(step - version)
            sampling, reported = _nucleus(logits / sampled_at, top_p), _nucleus(logits / engine_temperature, top_p)
            tokens = (np.exp(sampling).cumsum(1) < rng.random((n, 1))).sum(1).clip(max=VOCABULARY - 1)
            picked = np.arange(n), tokens
            made.append(
                Made(
                    step=step,
                    token_ids=rng.integers(0, VOCABULARY, PROMPT).tolist() + tokens.tolist(),
                    loss_mask=[0] * PROMPT + [1] * n,
                    behavior_logp=_after_prompt(reported[picked]),
                    trainer_logp=_after_prompt(_log_softmax(trained / trainer_temperature)[picked]),
                    old_logp=_after_prompt(_log_softmax(scored / trainer_temperature)[picked]),
                    versions=[-1] * PROMPT + [version] * n,
                    advantage=0.0 if index % 6 == 5 else float(np.float32(rng.normal())),
                    reward=float(rng.integers(0, 2)),
                )
            )
    return made


def own_rows(run: list[Made]) -> list[dict[str, Any]]:
    """As a run folder of steadyrl has them."""
    return [
        {
            "prompt_id": f"q{index}",
            "group": index // 4,
            "token_ids": one.token_ids,
            "loss_mask": one.loss_mask,
            "behavior_logp": one.behavior_logp,
            "versions": one.versions,
            "routed_experts": None,
            "finish": "stop",
            "prompt_text": "<b>?</b>",
            "text": "!",
            "reward": one.reward,
            "status": "right",
            "trainer_logp": one.trainer_logp,
            "old_logp": one.old_logp,
            "advantage": one.advantage,
            "train_version": one.step,
            "token_texts": ["x"] * len(one.token_ids),
        }
        for index, one in enumerate(run)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_own(folder: Path, run: list[Made]) -> Path:
    return write_jsonl(folder / "dump.jsonl", own_rows(run))


def write_parquet(folder: Path, run: list[Made]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(own_rows(run)), folder / "dump.parquet", row_group_size=10)
    return folder / "dump.parquet"


def write_prime_rl(folder: Path, run: list[Made]) -> Path:
    """token_exports/step_N/rank_R.jsonl, the responses dealt to two ranks."""
    for step in sorted({one.step for one in run}):
        for rank in (0, 1):
            rows = []
            for index, one in enumerate([one for one in run if one.step == step][rank::2]):
                n = len(one.token_ids)
                rows.append(
                    {
                        "schema_version": 1,
                        "step": step,
                        "export_step": step,
                        "rank": rank,
                        "micro_step": 0,
                        "micro_sequence_idx": index,
                        "export_sequence_idx": index,
                        "run_id": None,
                        "env_name": "sums",
                        "token_ids": one.token_ids,
                        "position_ids": list(range(n)),
                        "loss_mask": [bool(bit) for bit in one.loss_mask],
                        "advantages": [one.advantage] * n,
                        "rewards": [one.reward] * n,
                        "inference_logprobs": one.behavior_logp,
                        "trainer_logprobs": _everywhere(one.trainer_logp),
                        "entropy": [0.5] * n,
                        "is_masked": [False] * n,
                    }
                )
            path = folder / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl"
            write_jsonl(path, rows)
            (path.parent / "STABLE").touch()
    return folder


def write_nemo_rl(folder: Path, run: list[Made]) -> Path:
    """train_data_stepN.jsonl, padded to the longest response of the step."""
    for step in sorted({one.step for one in run}):
        batch = [one for one in run if one.step == step]
        width = max(len(one.token_ids) for one in batch)

        def padded(values: list[Any], filler: Any, width: int = width) -> list[Any]:
            return values + [filler] * (width - len(values))

        rows = [
            {
                "content": "?!",
                "rewards": one.reward,
                "input_lengths": len(one.token_ids),
                "token_ids": padded(one.token_ids, 0),
                "token_loss_mask": padded(one.loss_mask, 0),
                "sample_loss_mask": 1.0,
                "advantages": [one.advantage] * width,
                "generation_logprobs": padded(one.behavior_logp, 0.0),
                "prev_logprobs": padded(_everywhere(one.trainer_logp), -3.0),
                "idx": index,
            }
            for index, one in enumerate(batch)
        ]
        write_jsonl(folder / f"train_data_step{step}.jsonl", rows)
    return folder


def write_slime(folder: Path, run: list[Made]) -> Path:
    """--dump-details, format 2: samples in the order of the rollout file, which has the weight versions."""
    for step in sorted({one.step for one in run}):
        batch = [one for one in run if one.step == step]
        samples = [
            {"data_parallel_rank": place % 2, "sample_index": place, "rollout_position": place, **_slime_fields(one)}
            for place, one in enumerate(batch)
        ]
        _save(
            folder / "train_data" / f"{step}.pt",
            {"format_version": 2, "rollout_id": step, "rank": 0, "samples": samples, "dp_shards": []},
        )
        rollouts = [
            {
                "tokens": one.token_ids,
                "response_length": sum(one.loss_mask),
                "rollout_log_probs": one.behavior_logp[PROMPT:],
                "weight_versions": [str(max(one.versions)), str(max(one.versions) + 1)],
                "rollout_routed_experts": np.zeros((3, 2), np.uint8),
            }
            for one in batch
        ]
        _save(folder / "rollout_data" / f"{step}.pt", {"rollout_id": step, "samples": rollouts})
    return folder


def write_miles(folder: Path, run: list[Made]) -> Path:
    """--dump-details of miles, and of slime before format 2: each rank writes its columns."""
    for step in sorted({one.step for one in run}):
        batch = [one for one in run if one.step == step]
        for rank in (0, 1):
            fields = [_slime_fields(one) for one in batch[rank::2]]
            columns: dict[str, Any] = {name: [one[name] for one in fields] for name in fields[0]}
            columns["micro_batch_indices"] = [[0]]
            _save(
                folder / "train_data" / f"{step}_{rank}.pt",
                {"rollout_id": step, "rank": rank, "rollout_data": columns},
            )
    return folder


def _slime_fields(one: Made) -> dict[str, Any]:
    n = sum(one.loss_mask)
    return {
        "tokens": torch.tensor(one.token_ids),
        "response_lengths": n,
        "total_lengths": len(one.token_ids),
        "loss_masks": torch.ones(n, dtype=torch.int32),
        "log_probs": torch.tensor(one.trainer_logp[PROMPT:]),
        "rollout_log_probs": torch.tensor(one.behavior_logp[PROMPT:]),
        "advantages": torch.full((n,), one.advantage),
        "rewards": one.reward,
    }


def _save(path: Path, payload: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(payload, path)


def _everywhere(logp: list[float]) -> list[float]:
    """Trainers score the prompt too."""
    return [-1.25] * PROMPT + logp[PROMPT:]


def _after_prompt(logp: np.ndarray) -> list[float]:
    return [0.0] * PROMPT + logp.astype(np.float32).tolist()


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _nucleus(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Renormalized over the smallest set that holds top_p of the probability; about -1e9 outside."""
    logp = _log_softmax(logits)
    if top_p >= 1:
        return logp
    ordered = np.sort(np.exp(logp), 1)[:, ::-1]
    kept = (ordered.cumsum(1) - ordered < top_p).sum(1)
    least = np.take_along_axis(ordered, kept[:, None] - 1, 1)
    return _log_softmax(np.where(np.exp(logp) >= least, logp, -1e9))
