"""A grid of runs, described in TOML: one recipe, some axes of overrides, and seeds.

    recipe = "tiny.toml"                 # relative to this file
    out = "runs/grid"
    seeds = 5                            # 0 to 4, or a list

    [set]                                # overrides for every run
    "trainer.steps" = 120

    [axes]
    "pipeline.lag" = [1, 8]              # an axis that is a recipe key
    [axes.method]                        # an axis of named tables of overrides
    "GRPO + R3" = { objective = "grpo", "model.routing_replay" = true }

    [quick]                              # what `--quick` changes; all of it may be left out
    seeds = 2
    axes = { method = ["GRPO + R3"] }    # the labels that are kept
    set = { "trainer.steps" = 40 }

Every combination of one label per axis is run with every seed. A seed gives all of them the same prompts
and sampling streams, so that methods can be compared pair by pair.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from steadyrl.axes import Table
from steadyrl.config import RunConfig
from steadyrl.errors import ConfigError
from steadyrl.method import nearest
from steadyrl.recipe import build_config, read_toml, with_values

RUNS = "runs"
MOST_RUNS = 10_000

Values = dict[str, Any]  # recipe key -> value
Axis = dict[str, Values] | list[Any]


def _as_seeds(value: Any) -> Any:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or any(type(number) is not int or number < 0 for number in numbers) or value == 0:
        raise ValueError(f"write how many seeds to take, from 1, or a list of them (got {value!r})")
    if len(numbers) > len(set(numbers)):
        raise ValueError(f"a seed is named twice: leave one out (got {value!r})")
    return sorted(value) if isinstance(value, list) else list(range(min(value, MOST_RUNS + 1)))


def _as_axis(value: Any) -> Any:
    tables = value.values() if isinstance(value, dict) else []
    if not value or not isinstance(value, dict | list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            'write a list of values for a recipe key, as in "pipeline.lag" = [1, 8], or a table of overrides for '
            f'each label, as in {{ fast = {{ "trainer.lr" = 1e-3 }} }} (got {value!r})'
        )
    return value


Seeds = Annotated[list[int], BeforeValidator(_as_seeds)]


class Quick(Table):
    """The smaller grid of `--quick`."""

    seeds: Seeds | None = None
    axes: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    set: Values = Field(default_factory=dict)


class GridFile(Table):
    recipe: str
    out: Annotated[str, Field(min_length=1)]
    seeds: Seeds = Field(default_factory=lambda: list(range(5)))
    set: Values = Field(default_factory=dict)
    axes: Annotated[dict[str, Annotated[Axis, BeforeValidator(_as_axis)]], Field(min_length=1)]
    quick: Quick = Quick()

    @model_validator(mode="after")
    def _quick_keeps_what_there_is(self) -> GridFile:
        for name, kept in self.quick.axes.items():
            if name not in self.axes:
                raise ValueError(f"quick.axes names no axis {name!r}{nearest(name, self.axes)}")
            labels = _labelled(name, self.axes[name])
            for label in kept:
                if label not in labels:
                    raise ValueError(f"quick.axes.{name} names no label {label!r}{nearest(label, labels)}")
        return self


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    labels: dict[str, str]  # axis -> label
    seed: int
    name: str  # of its folder
    config: RunConfig


@dataclass(frozen=True)
class Grid:
    recipe: str
    out: Path
    axes: dict[str, list[str]]  # axis -> labels
    seeds: list[int]
    cells: list[Cell]  # a whole grid of one seed first

    def index(self) -> dict[str, Any]:
        """What `sweep.json` says: which run is which."""
        return {
            "recipe": self.recipe,
            "axes": self.axes,
            "seeds": self.seeds,
            "cells": [
                {"labels": cell.labels, "seed": cell.seed, "folder": f"{RUNS}/{cell.name}"} for cell in self.cells
            ],
        }


def load_grid(path: Path, *, quick: bool = False, out: Path | None = None) -> Grid:
    """Read a grid and check every recipe in it.

    Raises:
        ConfigError: with one sentence that names what to change.
    """
    try:
        file = GridFile.model_validate(read_toml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_sentence(error.errors()[0])}") from None
    recipe = path.parent / file.recipe
    base = with_values(read_toml(recipe), file.set)
    axes = {name: _labelled(name, axis) for name, axis in file.axes.items()}
    seeds = file.seeds
    folder = out or Path(file.out)
    if quick:
        base = with_values(base, file.quick.set)
        axes = {
            name: {label: labels[label] for label in file.quick.axes.get(name, labels)} for name, labels in axes.items()
        }
        seeds = file.quick.seeds or seeds
        folder = out or Path(f"{file.out}_quick")
    size = len(seeds)
    for labels in axes.values():
        size *= len(labels)
    if size > MOST_RUNS:
        raise ConfigError(f"{path} describes {size} runs, more than {MOST_RUNS}: take fewer labels or seeds")
    cells = []
    combinations = itertools.product(*(labels.items() for labels in axes.values()))
    for seed, chosen in itertools.product(seeds, list(combinations)):
        labels = {name: label for name, (label, _) in zip(axes, chosen, strict=True)}
        name = "_".join([*(_slug(axis, label) for axis, label in labels.items()), f"seed{seed}"])
        try:
            config = _config(base, [values for _, values in chosen], seed, folder / RUNS / name)
        except ConfigError as error:
            raise ConfigError(f"{path}: run {name}: {error}") from None
        cells.append(Cell(labels, seed, name, config))
    _check_distinct(path, cells)
    return Grid(file.recipe, folder, {name: list(labels) for name, labels in axes.items()}, seeds, cells)


def _config(base: Values, overrides: list[Values], seed: int, folder: Path) -> RunConfig:
    data = base
    for values in overrides:
        data = with_values(data, values)
    return build_config(with_values(data, {"seed": seed, "run_dir": str(folder), "pipeline.backend": "inline"}))


def _sentence(item: Any) -> str:
    """One pydantic error of a grid file."""
    name = str(item["loc"][-1]) if item["loc"] else ""
    if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
        return f"unknown key {name!r}{nearest(name, GridFile.model_fields)}"
    if item["type"] == "missing" and len(item["loc"]) == 1:
        return f"a grid needs {name!r}, and this file has none (a recipe is no grid: see docs/sweeps.md)"
    where = ".".join(str(part) for part in item["loc"]) or "the grid"
    return f"{where}: {item['msg'].removeprefix('Value error, ')}"


def _labelled(name: str, axis: Axis) -> dict[str, Values]:
    """The labels of an axis, with the recipe keys that each of them sets."""
    if isinstance(axis, dict):
        return axis
    labels = [str(value) for value in axis]
    if len(labels) > len(set(labels)):
        raise ConfigError(f"the axis {name!r} has a value twice: leave one out (got {axis!r})")
    return {str(value): {name: value} for value in axis}


def _slug(axis: str, label: str) -> str:
    """A part of a folder's name: lag-8, grpo-r3."""
    word = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")
    return word if axis == "method" else f"{axis.rsplit('.', 1)[-1]}-{word}"


def _check_distinct(path: Path, cells: list[Cell]) -> None:
    names: dict[str, Cell] = {}
    for cell in cells:
        other = names.setdefault(cell.name, cell)
        if other is not cell:
            raise ConfigError(
                f"{path}: the labels {', '.join(other.labels.values())} and {', '.join(cell.labels.values())} would "
                f"share the folder {cell.name}: name them differently"
            )
