"""Scores of finished rollouts: avg@k and pass@k, with their standard errors and the settings behind them.

n problems were answered k times each:

    avg@k   the mean over problems of a problem's share of right samples
    pass@k  the mean over problems of the chance that k of its samples hold a right one
    _se     standard deviation over problems (n - 1 in the denominator) / sqrt(n); None for n = 1, where
            it is unknown. Problems are the unit: samples of one problem are no independent evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from steadyrl.config import EvaluationConfig
from steadyrl.errors import EngineError
from steadyrl.tasks.base import Task
from steadyrl.types import GenerationRequest, Prompt, Rollout, Status


def evaluation_request(task: Task, config: EvaluationConfig, seed: int) -> GenerationRequest:
    """What to generate: k samples for each prompt of the whole test split."""
    return GenerationRequest(
        prompts=task.prompts("test", 0, config.prompts),
        samples_per_prompt=config.samples_per_prompt,
        max_response_tokens=config.max_response_tokens,
        temperature=config.temperature,
        seed=seed,
    )


def score(task: Task, request: GenerationRequest, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """One row of scores for the rollouts that answer `request`, in its order.

    A sample is right if the task says so and it was finished: a truncated one counts as wrong. A
    sample that the engine failed on stays in the count, as wrong.

    Raises:
        EngineError: if a sample is missing, doubled or misplaced, or if the sampled tokens do not all
            come from one weight version.
    """
    k = request.samples_per_prompt
    _check_complete(request, rollouts)
    version = _single_version(rollouts)
    statuses = [_status(task, request.prompts[i // k], rollout) for i, rollout in enumerate(rollouts)]
    right = [statuses[start : start + k].count("right") for start in range(0, len(statuses), k)]
    average, average_se = mean_and_se([count / k for count in right])
    passed, passed_se = mean_and_se([pass_at_k(k, count, k) for count in right])
    return {
        "version": version,
        "avg_at_k": average,
        "avg_at_k_se": average_se,
        "pass_at_k": passed,
        "pass_at_k_se": passed_se,
        "k": k,
        "prompts": len(request.prompts),
        "samples": len(rollouts),
        "truncated": sum(rollout.finish == "length" for rollout in rollouts) / len(rollouts),
        "statuses": {status: statuses.count(status) for status in get_args(Status)},
        "temperature": request.temperature,
        "max_response_tokens": request.max_response_tokens,
        "seed": request.seed,
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one of the c right ones.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k from n >= k samples.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, not n = {n}, c = {c}, k = {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_and_se(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; None as the error of a single value."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, math.sqrt(variance / n)


def _status(task: Task, prompt: Prompt, rollout: Rollout) -> Status:
    if rollout.finish != "stop":  # whatever its text says
        return "truncated" if rollout.finish == "length" else "error"
    return task.grade(prompt, rollout)[1]


def _check_complete(request: GenerationRequest, rollouts: Sequence[Rollout]) -> None:
    k = request.samples_per_prompt
    wanted = [prompt.prompt_id for prompt in request.prompts for _ in range(k)]
    if not wanted or len(rollouts) != len(wanted):
        raise EngineError(f"evaluation of {len(request.prompts)} prompts x {k} samples got {len(rollouts)} samples")
    for i, (rollout, prompt_id) in enumerate(zip(rollouts, wanted, strict=True)):
        if rollout.prompt_id != prompt_id:
            raise EngineError(f"evaluation sample {i} answers {rollout.prompt_id}; it should answer {prompt_id}")
    if len({id(rollout) for rollout in rollouts}) != len(rollouts):
        raise EngineError("evaluation got the same sample more than once")


def _single_version(rollouts: Sequence[Rollout]) -> int:
    versions = {int(version) for rollout in rollouts for version in rollout.versions[rollout.loss_mask]}
    if len(versions) != 1 or min(versions) < 0:
        found = ", ".join(map(str, sorted(versions))) or "none"
        raise EngineError(f"an evaluation needs one known weight version for all its tokens; found: {found}")
    return versions.pop()
