"""Paired differences of two evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from steadyrl.errors import ConfigError
from steadyrl.evaluation.comparison import compare, read_score
from steadyrl.evaluation.display import comparison_lines
from steadyrl.statistics import paired_difference


def row(right: list[int], k: int = 4, **changes) -> dict:
    shares = [count / k for count in right]
    se = float(np.std(shares, ddof=1) / len(right) ** 0.5)
    settings = {"grader": "g", "template": "t", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    measured = {"avg_at_k": float(np.mean(shares)), "avg_at_k_se": se, "k": k, "right": right, "max_response_tokens": 9}
    return {**settings, **measured, "data_checksum": "d", **changes}


def result(path: Path, scores: dict) -> Path:
    path.write_text(json.dumps({"model": "m", "score": scores}), encoding="utf-8")
    return path


def run_folder(path: Path, *rows: dict) -> Path:
    path.mkdir()
    (path / "evaluations.jsonl").write_text("".join(json.dumps(given) + "\n" for given in rows), encoding="utf-8")
    return path


def test_the_difference_is_over_problems(tmp_path):
    first, second = [4, 3, 2, 2], [3, 3, 0, 1]
    found = compare(result(tmp_path / "a", row(first)), result(tmp_path / "b", row(second)))
    assert found.difference == paired_difference(np.array(first) / 4, np.array(second) / 4, method="t")
    assert found.difference.mean == pytest.approx(1 / 4)
    # differences 1, 0, 2, 1 quarters: of the 16 sign patterns 4 reach the sum of 4 and 4 that of -4
    assert found.difference.p_value == pytest.approx(4 / 16)
    assert found.differing == {}


def test_runs_are_compared_by_their_last_evaluation_also_with_another_k(tmp_path):
    run = run_folder(tmp_path / "run", row([0, 0]), row([2, 4]))
    found = compare(run, result(tmp_path / "b", row([1, 1], k=2, temperature=0.6)))
    assert found.difference.mean == pytest.approx(0.75 - 0.5)
    assert found.differing == {"temperature": (1.0, 0.6), "k": (4, 2)}
    lines = comparison_lines(("run", "b"), found)
    assert lines[0].startswith("run: avg@4 0.7500 +- 0.2500")
    assert lines[2].startswith("difference over 2 problems: +0.2500, 95% interval [")
    assert "not the same: temperature is 1.0 and 0.6" in lines


def test_many_problems_get_the_bootstrap_that_follows_skewed_values(tmp_path):
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 5, size=30).tolist() for _ in range(2))
    found = compare(result(tmp_path / "a", row(first)), result(tmp_path / "b", row(second)))
    assert found.difference == paired_difference(np.array(first) / 4, np.array(second) / 4, method="bca")


def test_other_data_do_not_pair_up(tmp_path):
    with pytest.raises(ConfigError, match=r"different data \(checksums d and e\)"):
        compare(result(tmp_path / "a", row([1, 3])), result(tmp_path / "b", row([1, 2], data_checksum="e")))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"score": 3}', '{"score": {"avg_at_k": 1.0}}', "\udcff"])
def test_what_holds_no_scores_is_refused(tmp_path, text: str):
    (tmp_path / "a").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"holds no scores|another version"):
        read_score(tmp_path / "a")


def test_missing_files_and_runs_without_evaluations_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no scores"):
        read_score(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no scores"):
        read_score(run_folder(tmp_path / "run"))
