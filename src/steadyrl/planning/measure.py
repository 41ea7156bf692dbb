"""Rates out of the folder of a finished run, so that a run of other settings can be predicted from it.

A run with `pipeline.regime = "sync"` is best: there neither process slows the other down. Decoding and training are
fitted as a constant and a part in proportion to tokens. One run has batches of nearly one size, so the two parts are
known well together and badly apart: predict runs of about that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError
from steadyrl.planning.engine_clock import decode_steps
from steadyrl.planning.lengths import GroupLengths, RecordedLengths
from steadyrl.planning.memory import ITEMSIZE, checkpoint_bytes
from steadyrl.planning.model_count import count_model
from steadyrl.planning.rates import Rates, Speed
from steadyrl.recipe import build_config
from steadyrl.reports.recorder import RunData, read_rollouts, read_run, recorded_batches

WARM_UP = 2  # optimizer steps: the first calls are slow, and the first evaluation runs beside them
FEWEST = 5  # optimizer steps after them
AT_ONCE = 1e15  # bytes per second of what was never done, or took no time


def measured_speed(folder: Path) -> Speed:
    """Rates and lengths of a run.

    Raises:
        ConfigError: no run, one that streamed, or one that is too short or recorded too few rollouts.
    """
    run = read_run(folder)
    config = build_config(run.config)
    if config.pipeline.regime == "streaming":
        raise ConfigError(
            f"{folder} streamed, and a decode step cannot be told from its events: measure a run with "
            "pipeline.regime=sync or batch"
        )
    steps = [row for row in run.steps if row["step"] > WARM_UP]
    if len(steps) < FEWEST:
        raise ConfigError(
            f"{folder} has {len(run.steps)} optimizer steps, and {WARM_UP + FEWEST} are needed to measure rates: "
            "measure a longer run"
        )
    batches = {int(file.stem.removeprefix("batch_")): _groups(file) for file in recorded_batches(run)}
    groups = tuple(group for batch in batches.values() for group in batch)
    decoding = _decoding(run, config, batches)
    if len(decoding) < 2:
        raise ConfigError(
            f"{folder} recorded the rollouts of {len(batches)} batches, and 3 are needed to measure decoding: set "
            "record.rollouts_every_batches=2 in the run to measure"
        )
    shape = count_model(config.model.path)
    weights = shape.parameters * ITEMSIZE[config.engine.dtype]
    prompt = float(np.mean([group.prompt for group in groups]))
    responses = config.pipeline.responses_per_batch // config.pipeline.steps_per_batch
    tokens = [row["metrics"]["sampled_tokens"] + responses * prompt for row in steps]
    train_step_s, train_token_s = fit([(1.0, count) for count in tokens], [row["seconds"]["train"] for row in steps])
    if train_token_s == 0:
        train_step_s, train_token_s = 0.0, sum(row["seconds"]["train"] for row in steps) / sum(tokens)
    decode_step_s, decode_sequence_s = fit([row[:2] for row in decoding], [row[2] for row in decoding])
    other_s, record_s = _rest(run, config)
    per_step = config.pipeline.steps_per_batch
    rates = Rates(
        decode_step_s=decode_step_s,
        decode_sequence_s=decode_sequence_s * config.engine.count,
        prefill_token_s=0.0,  # is part of the decoding
        train_step_s=train_step_s,
        train_tokens_per_s=1 / train_token_s,
        broadcast_bytes_per_s=_bytes_per_s(weights, _durations(run, "trainer", "broadcast")),
        load_bytes_per_s=_bytes_per_s(weights, _durations(run, "engine", "load")),
        grade_response_s=_median(_durations(run, "trainer", "grade")[WARM_UP:]) / (responses * per_step),
        transfer_response_s=_median(_transfers(run)[WARM_UP:]) / (responses * per_step),
        step_other_s=other_s,
        record_batch_s=record_s,
        checkpoint_bytes_per_s=_bytes_per_s(checkpoint_bytes(shape, 0), _durations(run, "trainer", "checkpoint")),
    )
    source = (
        f"rates measured in {folder}: {len(steps)} optimizer steps, {sum(len(g.responses) for g in groups):,} responses"
    )
    return Speed(rates, RecordedLengths(groups), None, frozenset(), source, evaluation_prompts=30)


def fit(parts: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares of seconds = x * first + y * second, neither below 0 (non-negative least squares of two)."""
    a, b = np.asarray(parts, np.float64), np.asarray(seconds, np.float64)
    candidates = [np.linalg.lstsq(a, b, rcond=None)[0]]
    for column in (0, 1):
        alone = np.zeros(2)
        alone[column] = a[:, column] @ b / (a[:, column] @ a[:, column])
        candidates.append(alone)
    allowed = [x for x in candidates if (x >= 0).all()]
    best = min(allowed, key=lambda x: float(np.square(a @ x - b).sum()))
    return float(best[0]), float(best[1])


def _groups(file: Path) -> list[GroupLengths]:
    """Lengths of the groups of a recorded batch."""
    masks: dict[int, list[NDArray[np.int64]]] = {}
    for row in read_rollouts(file):
        masks.setdefault(row["group"], []).append(np.asarray(row["loss_mask"], np.int64))
    return [
        GroupLengths(int(len(group[0]) - group[0].sum()), np.array([max(1, mask.sum()) for mask in group]))
        for group in masks.values()
    ]


def _decoding(
    run: RunData, config: RunConfig, batches: dict[int, list[GroupLengths]]
) -> list[tuple[float, float, float]]:
    """(decode steps, sequences over all of them, seconds) of the recorded batches, the first one left out."""
    places = config.engine.count * config.engine.max_sequences
    generations = [event for event in run.timeline if (event["actor"], event["phase"]) == ("engine", "generate")]
    rows = []
    for batch, event in enumerate(generations):
        if batch == 0 or batch not in batches:
            continue
        lengths = [int(tokens) for group in batches[batch] for tokens in group.responses]
        rows.append((float(decode_steps(lengths, places)), float(sum(lengths)), event["end_s"] - event["start_s"]))
    return rows


def _transfers(run: RunData) -> list[float]:
    """Seconds from the end of a generation to the end of the wait for it, where the trainer waited."""
    ends = [event["end_s"] for event in run.timeline if (event["actor"], event["phase"]) == ("engine", "generate")]
    waits = [event for event in run.timeline if (event["actor"], event["phase"]) == ("trainer", "wait")]
    return [wait["end_s"] - end for end in ends for wait in waits if wait["start_s"] < end <= wait["end_s"]]


def _rest(run: RunData, config: RunConfig) -> tuple[float, float]:
    """Median seconds of the trainer in a step beside its phases; how much more where the batch before was recorded."""
    every, per_batch = config.record.rollouts_every_batches, config.pipeline.steps_per_batch
    plain, recorded = [], []
    for row in run.steps[WARM_UP:]:
        seconds = row["seconds"]
        rest = seconds["step"] - sum(
            seconds.get(phase) or 0.0 for phase in ("train", "grade", "broadcast", "wait", "checkpoint")
        )
        is_first = (row["step"] - 1) % per_batch == 0  # of its batch: what came before is in its time
        after_record = is_first and every > 0 and (row["batch_id"] - 1) % every == 0
        (recorded if after_record else plain).append(rest)
    if not plain:
        return _median(recorded), 0.0
    other = max(0.0, _median(plain))
    return other, max(0.0, _median(recorded) - other) if recorded else 0.0


def _durations(run: RunData, actor: str, phase: str) -> list[float]:
    return [
        event["end_s"] - event["start_s"]
        for event in run.timeline
        if (event["actor"], event["phase"]) == (actor, phase)
    ]


def _bytes_per_s(size: int, seconds: list[float]) -> float:
    taken = _median(seconds)
    return size / taken if taken > 0 else AT_ONCE


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
