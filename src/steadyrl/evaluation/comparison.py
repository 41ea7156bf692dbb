"""The paired difference of two evaluations of the same problems."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadyrl.errors import ConfigError
from steadyrl.statistics import PairedDifference, paired_difference

EVALUATIONS = "evaluations.jsonl"  # in a run folder
NEEDED = ("data_checksum", "right", "k", "avg_at_k")
SETTINGS = ("grader", "template", "temperature", "top_p", "top_k", "max_response_tokens", "k", "seed")
ENOUGH_FOR_BCA = 30  # problems; with fewer, Student's interval holds its level better (statistics.py)


@dataclass(frozen=True)
class Comparison:
    first: dict[str, Any]  # the rows of scores
    second: dict[str, Any]
    difference: PairedDifference  # of avg@k, first minus second, over problems
    differing: dict[str, tuple[Any, Any]]  # settings that are not the same, so that the models are not all that differs


def compare(first: Path, second: Path) -> Comparison:
    """Compare two results of `steadyrl eval --out`, or two run folders by their last evaluation.

    Raises:
        ConfigError: a file that is neither, or results of different data.
    """
    left, right = read_score(first), read_score(second)
    if left["data_checksum"] != right["data_checksum"]:
        raise ConfigError(
            f"{first} and {second} were scored on different data (checksums {left['data_checksum']} and "
            f"{right['data_checksum']}): only equal problems pair up, evaluate both on the same"
        )
    shares = [[count / row["k"] for count in row["right"]] for row in (left, right)]
    method = "bca" if len(shares[0]) >= ENOUGH_FOR_BCA else "t"
    differing = {name: (left.get(name), right.get(name)) for name in SETTINGS if left.get(name) != right.get(name)}
    return Comparison(left, right, paired_difference(shares[0], shares[1], method=method), differing)


def read_score(path: Path) -> dict[str, Any]:
    """The row of scores in a result of `steadyrl eval`, or the last one of a run folder.

    Raises:
        ConfigError: there is none.
    """
    file = path / EVALUATIONS if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        row = json.loads(text.splitlines()[-1]) if path.is_dir() else json.loads(text)["score"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"{file} holds no scores: name a file that steadyrl eval --out wrote, or a run folder"
        ) from None
    if not isinstance(row, dict) or not all(name in row for name in NEEDED):
        raise ConfigError(f"{file} was written by another version of steadyrl: evaluate again")
    return row
