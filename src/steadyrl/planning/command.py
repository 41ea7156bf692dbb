"""What `steadyrl plan` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from steadyrl.errors import ConfigError
from steadyrl.planning.display import show
from steadyrl.planning.plan import make_plan
from steadyrl.recipe import read_toml


def plan_recipe(
    recipe: Path,
    overrides: Sequence[str],
    *,
    from_run: Path | None,
    rates: Path | None,
    all_regimes: bool,
    steps: int,
    out: Path | None,
    console: Console,
) -> None:
    """Print the plan of a recipe, and write it as JSON to `out`.

    Raises:
        ConfigError: something cannot be used, or `out` cannot be written.
    """
    plan = make_plan(read_toml(recipe), overrides, from_run=from_run, rates=rates, all_regimes=all_regimes, steps=steps)
    show(plan, console)
    if out is None:
        return
    try:
        out.write_text(json.dumps(plan.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}): choose another --json") from None
