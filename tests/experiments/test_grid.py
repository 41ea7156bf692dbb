"""Grids: every combination with every seed, and a refusal with the remedy for what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadyrl.errors import ConfigError
from steadyrl.experiments.grid import load_grid

RECIPES = Path(__file__).parents[2] / "recipes"

GRID = """
recipe = "base.toml"
out = "runs/g"
seeds = 2
[set]
"trainer.steps" = 7
[axes]
"pipeline.lag" = [1, 4]
[axes.method]
"GRPO" = { objective = "grpo" }
"SAT + R3" = { objective = { preset = "sat-grpo" }, "model.routing_replay" = true }
[quick]
seeds = [5]
axes = { method = ["SAT + R3"] }
set = { "trainer.steps" = 3 }
"""


@pytest.fixture
def grid(tmp_path) -> Path:
    (tmp_path / "base.toml").write_text('objective = "gspo"\n[trainer]\nlr = 0.5\n')
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path / "grid.toml"


def changed(grid: Path, old: str, new: str) -> Path:
    assert old in GRID
    grid.write_text(GRID.replace(old, new))
    return grid


def test_every_combination_with_every_seed_one_seed_first(grid):
    plan = load_grid(grid)
    assert [cell.name for cell in plan.cells] == [
        f"lag-{lag}_{method}_seed{seed}" for seed in (0, 1) for lag in (1, 4) for method in ("grpo", "sat-r3")
    ]
    last = plan.cells[-1]
    assert last.labels == {"pipeline.lag": "4", "method": "SAT + R3"}
    config = last.config
    assert (config.seed, config.pipeline.lag, config.objective.preset) == (1, 4, "sat-grpo")
    assert (config.trainer.steps, config.trainer.lr, config.model.routing_replay) == (7, 0.5, True)
    assert (config.pipeline.backend, config.run_dir) == ("inline", f"runs/g/runs/{last.name}")
    assert plan.cells[0].config.objective.preset == "grpo"
    assert not plan.cells[0].config.model.routing_replay


def test_the_index_names_the_folder_of_every_run(grid):
    index = load_grid(grid).index()
    assert index["axes"] == {"pipeline.lag": ["1", "4"], "method": ["GRPO", "SAT + R3"]}
    assert index["cells"][1] == {
        "labels": {"pipeline.lag": "1", "method": "SAT + R3"},
        "seed": 0,
        "folder": "runs/lag-1_sat-r3_seed0",
    }


def test_quick_keeps_some_labels_in_another_folder(grid):
    plan = load_grid(grid, quick=True)
    assert [cell.name for cell in plan.cells] == ["lag-1_sat-r3_seed5", "lag-4_sat-r3_seed5"]
    assert {cell.config.trainer.steps for cell in plan.cells} == {3}
    assert plan.out == Path("runs/g_quick")
    assert load_grid(grid, quick=True, out=Path("o")).out == Path("o")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"trainer.steps" = 7', '"trainer.step" = 7', "unknown key 'trainer.step'; did you mean 'trainer.steps'"),
        ("seeds = 2", "seeds = 0", "seeds: write how many seeds to take, from 1"),
        ("seeds = 2", "seeds = []", "seeds: write how many seeds to take"),
        ("[1, 4]", "[]", "axes.pipeline.lag: write a list of values"),
        ("[1, 4]", "[1, 0]", "run lag-0_grpo_seed0: .*pipeline.lag = 0"),
        ("[1, 4]", '["GRPO", "grpo"]', "run lag-grpo_grpo_seed0: pipeline.lag"),
        ('"GRPO" = {', '"sat r3" = {', "the labels 1, sat r3 and 1, SAT [+] R3 would share the folder"),
        ('method = ["SAT + R3"]', 'method = ["SAT"]', r"quick.axes.method names no label 'SAT'"),
        ('method = ["SAT + R3"]', 'methods = ["SAT"]', r"quick.axes names no axis 'methods'; did you mean 'method'"),
        ('recipe = "base.toml"', 'recipe = "other.toml"', "there is no file .*other.toml"),
        ('out = "runs/g"', "# none", "a grid needs 'out', and this file has none"),
        ("seeds = 2", "sedes = 2", "unknown key 'sedes'; did you mean 'seeds'"),
        ("seeds = 2", "seeds = [1, 1]", "a seed is named twice"),
        ("[1, 4]", "[1, 1]", "the axis 'pipeline.lag' has a value twice"),
        ('objective = "grpo"', '"pipeline.lagg" = 1', "grid.toml: run lag-1_grpo_seed0: unknown key 'pipeline.lagg'"),
        ("seeds = 2", "seeds = 2501", "describes 10004 runs, more than 10000"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(grid, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load_grid(changed(grid, old, new))


@pytest.mark.parametrize("name", ["grid_paper", "grid_stress", "grid_lag_quantile"])
@pytest.mark.parametrize("quick", [False, True])
def test_the_shipped_grids_are_whole(name, quick):
    plan = load_grid(RECIPES / f"{name}.toml", quick=quick)
    assert len(plan.seeds) >= (2 if quick else 5)
    if name == "grid_paper" and not quick:
        assert len(plan.axes["method"]) == 13
        assert plan.axes["lag"] == ["1", "8"]
    if "lag" in plan.axes:
        assert {cell.config.pipeline.lag for cell in plan.cells} == {int(lag) for lag in plan.axes["lag"]}
