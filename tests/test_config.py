"""Recipes, overrides, and what is refused with which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steadyrl.config import PipelineConfig, RunConfig
from steadyrl.errors import ConfigError
from steadyrl.presets import PRESETS
from steadyrl.recipe import build_config, load_config

RECIPES = Path(__file__).parent.parent / "recipes"


GRIDS = sorted(RECIPES.glob("grid_*.toml"))  # no recipes: tests/experiments/test_grid.py


@pytest.mark.parametrize(
    "recipe", sorted(path for path in RECIPES.glob("*.toml") if path not in GRIDS), ids=lambda path: path.stem
)
def test_every_recipe_is_valid(recipe):
    assert load_config(recipe).trainer.steps >= 1


def test_overrides_reach_their_place():
    config = load_config(
        RECIPES / "tiny.toml", ["objective=grpo", "pipeline.lag=1", "seed=3", "run_dir=somewhere/else"]
    )
    assert config.objective.unit == "token"
    assert config.objective.boundary.rule == "clip"
    assert (config.pipeline.lag, config.seed, config.run_dir) == (1, 3, "somewhere/else")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_objective(name):
    config = build_config({"objective": name})
    assert config.objective.preset == name
    assert config.objective.boundary.rule == PRESETS[name]["boundary"]["rule"]


def test_a_preset_can_be_changed_in_part():
    config = build_config({"objective": "sat-gspo"}, ["objective.boundary.alpha=0.8", "objective.kl_coef=0"])
    assert config.objective.unit == "sequence"
    assert config.objective.boundary.alpha == 0.8
    assert config.objective.boundary.high == 0.2
    assert config.objective.kl_coef == 0


def test_a_preset_can_get_another_rule():
    config = build_config({"objective": "gspo"}, ["objective.boundary.rule=sat"])
    assert (config.objective.unit, config.objective.boundary.rule) == ("sequence", "sat")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pipelin.lag=8", "'pipeline.lag'"),
        ("pipeline.lags=8", "'pipeline.lag'"),
        ("trainer.learning_rate=1", "unknown key 'trainer.learning_rate'"),
        ("objective=sat-gpso", "'sat-gspo'"),
        ("objective.boundary.alpa=0.8", "'objective.boundary.alpha'"),
        ("trainer.lr=fast", "trainer.lr"),
        ("trainer.lr=-1", "trainer.lr"),
        ("trainer.lr=nan", "trainer.lr"),
        ("pipeline.responses_per_prompt=1", "pipeline.responses_per_prompt"),
        ("pipeline.lag", "key=value"),
        ("pipeline.regime=sync", "set pipeline.lag=0"),
        ("pipeline.lag=0", "pipeline.regime=sync"),
        ("pipeline.steps_per_batch=3", "trainer.steps"),
        ("pipeline=8", "pipeline"),
        ("model.path.x=1", "model.path"),
    ],
)
def test_bad_overrides_name_the_remedy(override, words):
    with pytest.raises(ConfigError) as error:
        build_config({"trainer": {"steps": 16}}, [override])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_prompts_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="multiple of 4"):
        build_config({}, ["pipeline.steps_per_batch=4", "pipeline.prompts_per_batch=6"])


def test_an_anchor_that_makes_every_ratio_one_is_refused():
    overrides = ["objective.anchor=old_actor", "pipeline.regime=sync", "pipeline.lag=0"]
    with pytest.raises(ConfigError, match=r"every ratio exactly 1.*objective\.anchor=rollout"):
        build_config({}, overrides)
    with_lag = build_config({}, ["objective.anchor=old_actor", "pipeline.lag=1"])
    assert with_lag.objective.anchor == "old_actor"


def test_broken_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("data", "overrides", "words"),
    [
        ({}, ["model=5", "model.path=x"], "model = 5"),
        ({}, ["objective=5", "objective.preset=grpo"], "objective = 5"),
        ({"trainer": 5}, ["trainer.lr=1"], "trainer = 5"),
        ({"trainer": [5]}, ["trainer.lr=1"], "trainer = [5]"),
        ({}, ["task=arithmetic", "task.terms=3"], "task = 'arithmetic'"),
        ({}, ["objective.boundary=sat", "objective.boundary.alpha=0.5"], "objective.boundary = 'sat'"),
        ({}, ["seed=" + "9" * 5000], "seed"),
        ({}, ["seed=0x" + "f" * 5000], "seed"),
        ({}, ["seed=" + "[" * 5000], "seed"),
        ({}, ["task.name=reasoning_gym", "task.options." + "a." * 5000 + "a=1"], "nested"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_of_an_odd_shape_are_refused(data, overrides, words):
    with pytest.raises(ConfigError) as error:
        build_config(data, overrides)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["9" * 5000, "0x" + "f" * 5000, "[" * 5000, "{a=" * 5000])
def test_recipes_with_endless_values_are_refused(tmp_path, value):
    (tmp_path / "long.toml").write_text(f"seed = {value}")
    with pytest.raises(ConfigError, match=r"long\.toml"):
        load_config(tmp_path / "long.toml")


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    (tmp_path / "notepad.toml").write_text("seed = 4", encoding="utf-8-sig")
    assert load_config(tmp_path / "notepad.toml").seed == 4


def test_a_recipe_path_that_cannot_exist_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\0b")


def test_the_arithmetic_is_spelled_out():
    config = build_config({"pipeline": {"prompts_per_batch": 32, "responses_per_prompt": 8, "lag": 8}})
    text = " ".join(config.arithmetic())
    assert "32 prompts x 8 responses = 256 responses" in text
    assert "every 8 optimizer steps; largest possible lag: 8" in text


@pytest.mark.parametrize(
    ("regime", "lag", "steps", "largest"),
    [
        ("sync", 0, 1, 0),
        ("sync", 0, 4, 3),
        ("batch", 1, 1, 1),
        ("batch", 8, 1, 8),
        ("batch", 4, 4, 7),
        ("batch", 3, 2, 5),
    ],
)
def test_largest_lag(regime, lag, steps, largest):
    pipeline = PipelineConfig(regime=regime, lag=lag, steps_per_batch=steps, prompts_per_batch=12)
    assert pipeline.largest_lag == largest


def test_a_configuration_survives_its_dump():
    config = load_config(RECIPES / "tiny.toml", ["objective.boundary.alpha=0.7"])
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_reading_a_recipe_loads_no_torch():
    code = "import sys, steadyrl.config, steadyrl.presets, steadyrl.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("pipeline.lag=true", "lag = true"),
        ("trainer.lr=true", "lr = true"),
        ("seed=false", "seed = false"),
        ("trainer.betas=[1.0,0.98]", "trainer.betas"),
        ("trainer.threads=1000000000000", "trainer.threads"),
        ("pipeline.lag=10001", "pipeline.lag"),
        ("sampling.temperature=1e-40", "sampling.temperature"),
        ("evaluation.temperature=1e9", "evaluation.temperature"),
        ("run_dir=", "run_dir"),
        ("objective.boundary=sat", "objective.boundary"),
        ("objective.preset=5", "given by its name"),
        ("objective.preset=[1]", "given by its name"),
        ("objective=5", "objective"),
    ],
)
def test_values_of_the_wrong_kind_or_size_are_refused(override, words):
    with pytest.raises(ConfigError) as error:
        build_config({}, [override])
    assert words in str(error.value)
    assert "\n" not in str(error.value)
