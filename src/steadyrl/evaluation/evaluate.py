"""Scores of finished rollouts, with everything that a score means something by.

A row of scores says what was measured (avg@k, pass@j, maj@k and their standard errors, see scores.py), how many
samples ended in which way, and what it was measured with: the data by their checksum, the verifier and the chat
template by name, the sampling, the weights by version. Rows with equal `data_checksum` pair up problem by problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from steadyrl.config import EvaluationConfig
from steadyrl.errors import ConfigError, EngineError
from steadyrl.evaluation.scores import Votes, avg_at_k, maj_at_k, pass_at
from steadyrl.tasks.base import Grade, Task, checksum, grade_rollouts
from steadyrl.types import GenerationRequest, Prompt, Rollout, Status


def evaluation_request(task: Task, config: EvaluationConfig, seed: int) -> GenerationRequest:
    """What to generate: k samples for each prompt of the whole test split.

    Raises:
        ConfigError: all of a test split that does not end, or more of one than it has.
    """
    count = config.prompts or task.test_size
    if count is None:
        raise ConfigError("evaluation.prompts = 0 means a whole data set, and this task has no end: set a number")
    return GenerationRequest(
        prompts=task.prompts("test", 0, count),
        samples_per_prompt=config.samples_per_prompt,
        max_response_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        seed=seed,
    )


def score(task: Task, request: GenerationRequest, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """One row of scores for the rollouts that answer `request`, in its order; see `grade_samples` and `score_row`."""
    return score_row(task, request, rollouts, grade_samples(task, request, rollouts))


def grade_samples(task: Task, request: GenerationRequest, rollouts: Sequence[Rollout]) -> list[Grade]:
    """Grades in the order of the request. A truncated sample and one that the engine failed on count, as wrong.

    Raises:
        EngineError: if a sample is missing, doubled or misplaced, or if the sampled tokens do not all
            come from one weight version.
    """
    _check_complete(request, rollouts)
    _single_version(rollouts)
    k = request.samples_per_prompt
    return grade_rollouts(task, [prompt for prompt in request.prompts for _ in range(k)], rollouts)


def score_row(
    task: Task, request: GenerationRequest, rollouts: Sequence[Rollout], grades: Sequence[Grade]
) -> dict[str, Any]:
    """The row of scores as JSON."""
    k = request.samples_per_prompt
    samples = [(grade.status == "right", grade.answer) for grade in grades]
    votes = [Votes.count(samples[start : start + k]) for start in range(0, len(samples), k)]
    average, passed, majority = avg_at_k(votes), pass_at(k, votes), maj_at_k(votes)
    powers = [2**power for power in range(k.bit_length())]  # 1, 2, 4, ... up to k
    statuses = [grade.status for grade in grades]
    return {
        "version": _single_version(rollouts),
        "avg_at_k": average.value,
        "avg_at_k_se": average.se,
        "avg_at_k_se_samples": average.se_samples,
        "pass_at_k": passed.value,
        "pass_at_k_se": passed.se,
        "pass_at_k_se_samples": passed.se_samples,
        "maj_at_k": majority.value,
        "maj_at_k_se": majority.se,
        "maj_at_k_se_samples": majority.se_samples,
        "pass_at": {str(j): vars(pass_at(j, votes)) for j in powers},
        "k": k,
        "prompts": len(request.prompts),
        "samples": len(rollouts),
        "truncated": statuses.count("truncated") / len(rollouts),
        "statuses": {status: statuses.count(status) for status in get_args(Status)},
        "response_tokens": sum(rollout.num_sampled for rollout in rollouts) / len(rollouts),
        "right": [vote.right for vote in votes],
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": list(request.stop),
        "max_response_tokens": request.max_response_tokens,
        "seed": request.seed,
        "data_checksum": data_checksum(request.prompts),
        "grader": task.grader,
        "template": task.template,
    }


def data_checksum(prompts: Sequence[Prompt]) -> str:
    """Of the texts, instruction included, and the answers, in order."""
    return checksum(text for prompt in prompts for text in (prompt.text, prompt.answer))


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
