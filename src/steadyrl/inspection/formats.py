"""The formats: where each has its numbers, and what they mean there.

`TRAINER_SIDE` matters most: every trainer dumps a "trainer log-probability", and they are not all of the same policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadyrl.inspection.response import BadRow, Response, Row, StepKey, advantages, column, mask, needed, number, whole
from steadyrl.inspection.rows import Rows, json_rows, parquet_rows, torch_archive

OWN_COLUMNS = (
    "token_ids",
    "loss_mask",
    "behavior_logp",
    "trainer_logp",
    "old_logp",
    "advantage",
    "versions",
    "train_version",
    "step",
    "reward",
)


@dataclass(frozen=True)
class Source:
    """A file, and the step it holds if only its name or its place says so."""

    path: Path
    place: int  # among the files
    step: int | None = None  # from its name


@dataclass(frozen=True)
class Format:
    """How a file of this kind is read."""

    name: str
    rows: Callable[[Path], Rows]
    response: Callable[[Row, Source], Response]
    trainer_side: str  # whose log-probabilities stand on the trainer's side
    steps: str  # what one optimizer step is


def _step_of(row: Row, source: Source, *names: str) -> StepKey:
    found = next((value for name in names if (value := whole(row, name)) is not None), source.step)
    return ("file", source.place) if found is None else ("step", found)


# ---- our own: JSON lines and parquet ----


def own_response(row: Row, source: Source) -> Response:
    """A row of docs/inspect.md; `loss_mask` and `behavior_logp` have to be there."""
    loss_mask = mask(row, "loss_mask")
    n = len(loss_mask)
    return Response(
        step=_step_of(row, source, "step", "train_version"),
        loss_mask=loss_mask,
        behavior_logp=needed(row, "behavior_logp", np.float32, n),
        trainer_logp=column(row, "trainer_logp", np.float32, n),
        old_logp=column(row, "old_logp", np.float32, n),
        advantage=advantages(row, "advantage", n),
        versions=column(row, "versions", np.int32, n),
        train_version=whole(row, "train_version"),
        token_ids=column(row, "token_ids", np.int64, n),
        reward=number(row, "reward"),
    )


OWN_TRAINER = "the policy being trained, at the optimizer step that used the response"
OWN_STEPS = "responses with the same step, else the same train_version, else of the same file, are one optimizer step"
OWN = Format("steadyrl JSON lines", json_rows, own_response, OWN_TRAINER, OWN_STEPS)
OWN_PARQUET = Format(
    "steadyrl parquet", lambda path: parquet_rows(path, OWN_COLUMNS), own_response, OWN_TRAINER, OWN_STEPS
)


# ---- prime-rl: token_exports/step_N/rank_R.jsonl ----


def prime_rl_response(row: Row, source: Source) -> Response:
    loss_mask = mask(row, "loss_mask")
    n = len(loss_mask)
    advantage = column(row, "advantages", np.float32, n)
    if advantage is not None and np.isnan(advantage[loss_mask]).all():
        advantage = None  # a list of nulls: no reinforcement-learning term was trained here
    rewards = row.get("rewards")
    if isinstance(rewards, list):  # one for each token, all the same
        rewards = rewards[0] if rewards else None
    return Response(
        step=_step_of(row, source, "step"),
        loss_mask=loss_mask,
        behavior_logp=needed(row, "inference_logprobs", np.float32, n),
        trainer_logp=column(row, "trainer_logprobs", np.float32, n),
        advantage=advantage,
        token_ids=column(row, "token_ids", np.int64, n),
        reward=number({"rewards": rewards}, "rewards"),
    )


PRIME_RL = Format(
    "prime-rl token export",
    json_rows,
    prime_rl_response,
    "the policy being trained, in the forward pass of the step",
    "all ranks of one step are one optimizer step",
)


# ---- NeMo-RL: train_data_stepN.jsonl ----


def nemo_rl_response(row: Row, source: Source) -> Response:
    """Lists are padded to the longest response of the batch; `input_lengths` says where the padding starts."""
    length = whole(row, "input_lengths")
    whole_mask = mask(row, "token_loss_mask")
    n = len(whole_mask)
    length = n if length is None else length
    if not 0 < length <= n:
        raise BadRow(f"input_lengths is {length} for lists of {n} tokens")
    keep = slice(0, length)

    def cut(values: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if values is None else values[keep]

    used = number(row, "sample_loss_mask") != 0
    loss_mask = whole_mask[keep] & used
    loss_mask[:1] = False  # nothing predicts the first token
    return Response(
        step=_step_of(row, source, "step"),
        loss_mask=loss_mask,
        behavior_logp=needed(row, "generation_logprobs", np.float32, n)[keep],
        trainer_logp=cut(column(row, "prev_logprobs", np.float32, n)),
        advantage=cut(advantages(row, "advantages", n)),
        token_ids=cut(column(row, "token_ids", np.int64, n)),
        reward=number(row, "rewards"),
    )


NEMO_RL = Format(
    "NeMo-RL train data",
    json_rows,
    nemo_rl_response,
    "prev_logprobs, the trainer before the first optimizer step on the batch",
    "each file is taken as one optimizer step; later steps on the same batch are not in it",
)


# ---- slime and miles: --dump-details ----


def slime_rows(path: Path) -> Rows:
    """The samples of one train_data file, with the weight versions of the rollout_data file beside it."""
    payload = torch_archive(path)
    size = path.stat().st_size
    samples = list(_slime_samples(payload))
    versions = _slime_versions(path, payload)
    for index, sample in enumerate(samples):
        done = size * (index + 1) // len(samples)
        try:
            if not isinstance(sample, dict):
                raise BadRow(f"sample {index + 1} is no table")
            position = whole(sample, "rollout_position")
        except BadRow as problem:
            yield f"{path.name}: {problem}", done
            continue
        known = versions[position] if position is not None and position < len(versions) else None
        yield {**sample, "rollout_id": payload.get("rollout_id"), "weight_version": known}, done


def _slime_samples(payload: dict[str, Any]) -> Iterator[Any]:
    """Format 2 has a list of samples; before that, and in miles, each rank wrote columns."""
    if isinstance(payload.get("samples"), list):
        yield from payload["samples"]
        return
    columns = payload.get("rollout_data")
    if not isinstance(columns, dict) or not isinstance(columns.get("loss_masks"), list):
        return
    count = len(columns["loss_masks"])
    per_sample = {
        name: values for name, values in columns.items() if isinstance(values, list | tuple) and len(values) == count
    }
    positions = per_sample.get("partition", [None] * count)
    for index in range(count):
        yield {**{name: values[index] for name, values in per_sample.items()}, "rollout_position": positions[index]}


def _slime_versions(path: Path, payload: dict[str, Any]) -> list[int | None]:
    """One version for each sample of the rollout file: the oldest, so that no token is taken for fresher than it is."""
    rollout_id = payload.get("rollout_id")
    beside = path.parent.parent / "rollout_data" / f"{rollout_id}.pt"
    if not isinstance(rollout_id, int) or not beside.exists():
        return []
    found: list[int | None] = []
    for sample in torch_archive(beside).get("samples", []):
        names = [str(name) for name in sample.get("weight_versions") or []] if isinstance(sample, dict) else []
        found.append(min(map(int, names)) if names and all(re.fullmatch(r"\d+", name) for name in names) else None)
    return found


def slime_response(row: Row, source: Source) -> Response:
    """Lists cover the response alone, without the prompt."""
    loss_mask = mask(row, "loss_masks")
    n = len(loss_mask)
    tokens = column(row, "tokens", np.int64)
    if tokens is not None and len(tokens) < n:
        raise BadRow(f"tokens has {len(tokens)} entries for a response of {n}")
    version = whole(row, "weight_version")
    return Response(
        step=_step_of(row, source, "rollout_id"),
        loss_mask=loss_mask,
        behavior_logp=needed(row, "rollout_log_probs", np.float32, n),
        trainer_logp=column(row, "log_probs", np.float32, n),
        advantage=advantages(row, "advantages", n),
        versions=None if version is None else np.full(n, version, np.int32),
        token_ids=None if tokens is None else tokens[-n:] if n else tokens[:0],
        reward=number(row, "rewards") if "rewards" in row else number(row, "reward"),
    )


SLIME = Format(
    "slime or miles --dump-details",
    slime_rows,
    slime_response,
    "log_probs, the trainer before the first optimizer step on the batch (with --keep-old-actor: the weights that "
    "sampled)",
    "all ranks of one rollout_id are taken as one optimizer step; weight versions count weight syncs, not steps",
)
