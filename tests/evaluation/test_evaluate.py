"""Scores against numbers worked out by hand and by enumeration."""

from __future__ import annotations

import json
import math
from typing import ClassVar

import numpy as np
import pytest

from steadyrl.config import EvaluationConfig
from steadyrl.errors import ConfigError, EngineError
from steadyrl.evaluation.evaluate import evaluation_request, score
from steadyrl.tasks.base import Grade
from steadyrl.types import Prompt, Rollout


class YesTask:
    """Takes "yes" for right, and everything else for a wrong answer of its own."""

    grader = "yes or no"
    template = "none"
    data: ClassVar = {}

    def __init__(self, test_size: int | None = None) -> None:
        self.test_size = test_size

    def prompts(self, split, start, count):
        return [
            Prompt(f"{split}/{i}", np.array([1], np.int32), f"question {i}", "yes") for i in range(start, start + count)
        ]

    def grade_all(self, prompts, responses):
        return [
            Grade(1.0, "right", text) if text == prompt.answer else Grade(0.0, "wrong", text)
            for prompt, text in zip(prompts, responses, strict=True)
        ]

    def close(self) -> None: ...


def request(prompts: int, k: int):
    config = EvaluationConfig(
        prompts=prompts,
        samples_per_prompt=k,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        stop=("\n\n",),
        max_response_tokens=9,
    )
    return evaluation_request(YesTask(), config, seed=5)


def rollout(prompt_id: str, text: str = "yes", finish: str = "stop", versions: tuple[int, ...] = (3, 3)) -> Rollout:
    n = 1 + len(versions)
    mask = np.arange(n) > 0
    return Rollout(
        prompt_id=prompt_id,
        group=0,
        token_ids=np.ones(n, np.int32),
        loss_mask=mask,
        behavior_logp=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.array([-1, *versions], np.int32),
        routed_experts=None,
        finish=finish,
        text=text,
    )


def answers(*rows: str) -> list[Rollout]:
    """One row per problem, one letter per sample: y right, n wrong, t right but truncated."""
    return [
        rollout(f"test/{i}", "no" if letter == "n" else "yes", "length" if letter == "t" else "stop")
        for i, row in enumerate(rows)
        for letter in row
    ]


def test_the_request_covers_the_held_out_set_with_the_settings_of_the_evaluation():
    made = request(4, 2)
    assert [prompt.prompt_id for prompt in made.prompts] == ["test/0", "test/1", "test/2", "test/3"]
    assert (made.samples_per_prompt, made.temperature, made.max_response_tokens, made.seed) == (2, 0.7, 9, 5)
    assert (made.top_p, made.top_k, made.stop) == (0.9, 20, ("\n\n",))


def test_no_number_of_prompts_means_all_of_a_data_set():
    config = EvaluationConfig(prompts=0)
    assert len(evaluation_request(YesTask(test_size=30), config, seed=0).prompts) == 30
    with pytest.raises(ConfigError, match=r"evaluation\.prompts = 0 means a whole data set"):
        evaluation_request(YesTask(), config, seed=0)


def test_hand_computed_row():
    row = score(YesTask(), request(3, 4), answers("yyyy", "ynnn", "nnnn"))
    # shares 1, 1/4, 0: mean 5/12, sum of squared deviations 49/144 + 4/144 + 25/144 = 13/24
    assert row["avg_at_k"] == pytest.approx(5 / 12, abs=1e-12)
    assert row["avg_at_k_se"] == pytest.approx(math.sqrt(13 / 24 / 2 / 3), abs=1e-12)
    assert row["pass_at_k"] == pytest.approx(2 / 3, abs=1e-12)
    assert row["pass_at_k_se"] == pytest.approx(1 / 3, abs=1e-12)
    # majorities: 1, 0 (three times "no" against one "yes"), 0
    assert row["maj_at_k"] == pytest.approx(1 / 3, abs=1e-12)
    # chances of a right one among 2 of 4: 1, 1 - C(3, 2) / C(4, 2) = 1/2, 0
    assert row["pass_at"]["2"]["value"] == pytest.approx(1 / 2, abs=1e-12)
    assert list(row["pass_at"]) == ["1", "2", "4"]
    assert row["pass_at"]["1"]["value"] == row["avg_at_k"]
    assert row["pass_at"]["4"]["value"] == row["pass_at_k"]
    assert row["right"] == [4, 1, 0]
    assert row["statuses"] == {"right": 5, "wrong": 7, "unparsable": 0, "truncated": 0, "timeout": 0, "error": 0}


def test_a_row_says_what_it_was_measured_with():
    row = score(YesTask(), request(3, 4), answers("yyyy", "ynnn", "nnnn"))
    settings = {
        "k": 4, "prompts": 3, "samples": 12, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "stop": ["\n\n"],
        "max_response_tokens": 9, "seed": 5, "version": 3, "grader": "yes or no", "template": "none",
    }  # fmt: skip
    assert {name: row[name] for name in settings} == settings
    other = score(YesTask(), request(2, 4), answers("yyyy", "ynnn"))
    assert other["data_checksum"] != row["data_checksum"]
    assert row["response_tokens"] == 2.0
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_thirty_problems_with_one_sample_each_leave_eight_points_of_error():
    row = score(YesTask(), request(30, 1), answers(*["y"] * 9, *["n"] * 21))
    assert row["avg_at_k"] == pytest.approx(0.3)
    assert row["avg_at_k_se"] == pytest.approx(math.sqrt(0.3 * 0.7 / 29), abs=1e-12)  # 0.0851
    assert row["pass_at_k_se"] == row["avg_at_k_se"]


def test_samples_of_one_problem_do_not_shrink_the_error():
    few, many = (score(YesTask(), request(2, k), answers("y" * k, "n" * k)) for k in (1, 16))
    assert few["avg_at_k_se"] == many["avg_at_k_se"] == pytest.approx(0.5)


def test_the_error_of_one_problem_is_unknown_not_zero():
    row = score(YesTask(), request(1, 4), answers("yynn"))
    assert (row["avg_at_k"], row["avg_at_k_se"], row["pass_at_k_se"]) == (0.5, None, None)


def test_truncated_samples_are_counted_and_wrong():
    row = score(YesTask(), request(2, 2), answers("yt", "tt"))
    assert row["truncated"] == 0.75
    assert row["avg_at_k"] == 0.25
    assert row["pass_at_k"] == 0.5
    assert row["statuses"]["truncated"] == 3


@pytest.mark.parametrize("finish", ["error", "too_long"])
def test_a_failed_sample_stays_in_the_count(finish: str):
    rollouts = answers("y", "y")
    rollouts[1] = rollout("test/1", finish=finish, versions=())
    row = score(YesTask(), request(2, 1), rollouts)
    assert (row["avg_at_k"], row["statuses"]["error"], row["samples"]) == (0.5, 1, 2)


@pytest.mark.parametrize("versions", [((3, 3), (4, 4)), ((3, 4), (3, 3)), ((-1, -1), (-1, -1)), ((), ())], ids=str)
def test_a_score_belongs_to_one_known_version(versions):
    rollouts = [rollout(f"test/{i}", versions=version) for i, version in enumerate(versions)]
    with pytest.raises(EngineError, match="one known weight version"):
        score(YesTask(), request(2, 1), rollouts)


def test_missing_surplus_misplaced_and_doubled_samples_are_refused():
    made, rollouts = request(2, 2), answers("yy", "nn")
    for wrong in (rollouts[:3], [*rollouts, rollouts[0]], []):
        with pytest.raises(EngineError, match=f"got {len(wrong)} samples"):
            score(YesTask(), made, wrong)
    with pytest.raises(EngineError, match="sample 1 answers test/1; it should answer test/0"):
        score(YesTask(), made, [rollouts[0], rollouts[2], rollouts[1], rollouts[3]])
    with pytest.raises(EngineError, match="more than once"):
        score(YesTask(), made, [rollouts[0], rollouts[0], *rollouts[2:]])
