"""What the verifier counts as right where tastes differ, read from a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from steadyrl.errors import ConfigError

MarkReading = Literal["number", "converted", "either"]


@dataclass(frozen=True)
class Policy:
    """The choices of docs/verifier.md; the defaults are those of competition problems.

    A mark that only one of the two answers has (28 % and 0.28, 90 degrees and pi/2) is dropped
    ("number": 28 % is 28), converted ("converted": 28 % is 0.28), or both are right ("either").
    """

    answer_part: Literal["after_thinking", "whole"] = "after_thinking"  # where an answer may stand
    without_box: Literal["unparsable", "stated", "last_number"] = "stated"  # what a response without a box gives
    percent: MarkReading = "number"
    degrees: MarkReading = "number"
    approximation: Literal["exact", "either", "refuse"] = "exact"  # which side of an approximately-equal sign counts
    intervals: Literal["inequality", "strict"] = "inequality"  # whether (0, 1) and 0 < x < 1 are the same
    sets: Literal["list", "strict"] = "list"  # whether {1, 2} and "1, 2", {1} and 1 are the same
    tolerance: float = 0.0  # relative, where one of two numbers is written with a decimal point
    digits: int = 6  # significant digits from which a decimal may stand for a number without a finite decimal form

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Policy).items():
            value, choices = getattr(self, name), get_args(hint)
            if choices and value not in choices:
                raise ConfigError(f"{name} = {value!r} in a verifier policy: write one of {', '.join(choices)}")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            raise ConfigError(f"tolerance = {self.tolerance!r} in a verifier policy: write a number from 0 to below 1")
        if type(self.digits) is not int or self.digits < 1:
            raise ConfigError(f"digits = {self.digits!r} in a verifier policy: write a whole number of at least 1")


def read_policy(path: Path | str) -> Policy:
    """A policy from a TOML file whose keys are the fields of `Policy`; what is absent keeps its default.

    Raises:
        ConfigError: no such file, not TOML, an unknown key, or a value out of its range.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no verifier policy at {path}: write one, or leave the key out") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no TOML
        raise ConfigError(f"the verifier policy {str(path)!r} cannot be read, mend it: {error}") from None
    return make_policy(data)


def make_policy(data: dict[str, Any]) -> Policy:
    """A policy from a table of its fields.

    Raises:
        ConfigError: an unknown key, or a value out of its range.
    """
    from steadyrl.method import nearest  # it loads pydantic, which no worker needs

    known = {field.name for field in fields(Policy)}
    for key in data:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in a verifier policy{nearest(key, known)}")
    return Policy(**data)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
