"""The evaluation of a model by itself, with the embedded engine: what `steadyrl eval` runs.

With the seed that a row of a run's evaluations.jsonl has, a checkpoint gets the request that the run gave it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from steadyrl.config import RunConfig
from steadyrl.engines.base import Engine
from steadyrl.engines.build import build_local_engine
from steadyrl.errors import ConfigError
from steadyrl.evaluation.evaluate import evaluation_request, grade_samples, score_row
from steadyrl.models.load import context_length, load_model, load_tokenizer
from steadyrl.tasks.base import Grade
from steadyrl.tasks.build import build_task
from steadyrl.types import GenerationRequest, Rollout

PROCEDURAL = ("arithmetic", "reasoning_gym")
MOST_TOKENS = 32_768  # of a response, where nothing else is asked for and the context leaves so much


def evaluate_model(
    config: RunConfig, *, seed: int, max_response_tokens: int | None, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Generate, grade and score.

    Args:
        config: of it the tables model, task, evaluation and engine count; `model.path` may also be a checkpoint folder
            of a run.
        seed: of the sampling.
        max_response_tokens: in place of the one in `config`; None = what the context leaves beside the longest prompt.
        progress: hears how many problems of how many are done.

    Returns:
        JSON: model, version and checksum of the weights, task, data, score, and every problem with its samples.

    Raises:
        ConfigError: model, data or sizes that cannot work.
    """
    torch.set_num_threads(config.engine.threads)
    path, version = find_model(config.model.path)
    tokenizer = load_tokenizer(path)
    dtype, max_sequences = config.engine.dtype, config.engine.max_sequences
    with closing(build_task(config.task, tokenizer, config.seed)) as task:
        request = evaluation_request(task, config.evaluation, seed)
        model = load_model(path, getattr(torch, dtype))
        request = with_room(request, context_length(model), max_response_tokens)
        engine = build_local_engine(path, dtype, max_sequences, records_routing=False)
        with closing(engine):
            weights = engine.load_weights(dict(model.named_parameters()), version)
            del model
            rollouts = generate(engine, request, max_sequences, progress)
        grades = grade_samples(task, request, rollouts)
        return {
            "model": config.model.path,
            "version": version,
            "weights": weights,
            "dtype": dtype,
            "task": config.task.model_dump(mode="json"),
            "data": task.data,
            "score": {**score_row(task, request, rollouts, grades), "weights": weights},
            "problems": _problems(request, rollouts, grades),
        }


def generate(
    engine: Engine, request: GenerationRequest, max_sequences: int, progress: Callable[[int, int], None]
) -> list[Rollout]:
    """All responses to a request, asked for in parts; a prompt's random numbers do not depend on the parts."""
    total, at_once = len(request.prompts), max(1, max_sequences // request.samples_per_prompt)
    rollouts: list[Rollout] = []
    for start in range(0, total, at_once):
        progress(start, total)
        rollouts += engine.generate(replace(request, prompts=request.prompts[start : start + at_once], first=start))
    progress(total, total)
    return rollouts


def find_model(path: str) -> tuple[str, int]:
    """(model path, version): a checkpoint folder of a run holds its model in a folder, and knows its step.

    Raises:
        ConfigError: a checkpoint without a readable state.
    """
    state = Path(path) / "state.json"
    if not state.is_file():
        return path, 0
    try:
        return str(Path(path) / "model"), int(json.loads(state.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{state} cannot be read, name another checkpoint: {error!r}") from None


def with_room(request: GenerationRequest, context: int, max_response_tokens: int | None) -> GenerationRequest:
    """The request with as many response tokens as asked for, or as the context leaves.

    Raises:
        ConfigError: the longest prompt and its response do not fit into the context.
    """
    longest = max(request.prompts, key=lambda prompt: len(prompt.token_ids))
    room = context - len(longest.token_ids)
    tokens = max_response_tokens or min(room, MOST_TOKENS)
    if not 0 < tokens <= room:
        raise ConfigError(
            f"{longest.prompt_id} has {len(longest.token_ids)} tokens, of the model's {context} that leaves "
            f"{max(room, 0)} for a response: set --max-tokens to that or less, or take a model with a longer context"
        )
    return replace(request, max_response_tokens=tokens)


def data_tables(sources: Sequence[str], columns: tuple[str, str], prompts: int | None) -> dict[str, dict[str, Any]]:
    """The tables task and evaluation of a recipe for what `--data` names: a procedural task, or sources of problems.

    `columns` are those of problem and answer where a file follows no published schema; `prompts` None = all of a data
    set, and the default number of a procedural task.

    Raises:
        ConfigError: one column without the other.
    """
    if bool(columns[0]) != bool(columns[1]):
        raise ConfigError("--problem and --answer name two columns of one file: give both, or neither")
    size = {} if prompts is None else {"prompts": prompts}
    if len(sources) == 1 and sources[0] in PROCEDURAL:
        return {"task": {"name": sources[0]}, "evaluation": size}
    test = [{"source": source, "problem": columns[0], "answer": columns[1]} for source in sources]
    return {"task": {"name": "math_dataset", "test": test}, "evaluation": {"prompts": 0, **size}}


def _problems(request: GenerationRequest, rollouts: Sequence[Rollout], grades: Sequence[Grade]) -> list[dict[str, Any]]:
    k = request.samples_per_prompt
    samples = [
        {"status": grade.status, "answer": grade.answer, "tokens": rollout.num_sampled, "text": rollout.text}
        for rollout, grade in zip(rollouts, grades, strict=True)
    ]
    return [
        {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text,
            "answer": prompt.answer,
            **prompt.meta,
            "samples": samples[number * k : (number + 1) * k],
        }
        for number, prompt in enumerate(request.prompts)
    ]
