"""steps.csv and rules.csv: one row per optimizer step, one row per rule."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from steadyrl.errors import ConfigError
from steadyrl.inspection.rules import RuleTotals
from steadyrl.inspection.study import Findings

STEP_COLUMNS = {
    "lag_mean": "staleness/lag",
    "d_bar": "mismatch/d_bar",
    "k3": "mismatch/k3",
    "ratio_mean": "mismatch/weight_token",
    "ess": "mismatch/ess_token",
    "q50": "mismatch/q50",
    "q90": "mismatch/q90",
    "q99": "mismatch/q99",
    "max_abs": "mismatch/max_abs",
    "policy_d_bar": "split/policy_d_bar",
    "engine_d_bar": "split/engine_d_bar",
    "grpo_clip_low": "grpo:objective/clip_low",
    "grpo_clip_high": "grpo:objective/clip_high",
    "sat_q": "sat-grpo:sat/q",
    "sat_gate_rate": "sat-grpo:sat/gate_rate",
    "sat_intervention_rate": "sat-grpo:sat/intervention_rate",
    "sat_gspo_gate_rate": "sat-gspo:sat/gate_rate",
    "sat_gspo_intervention_rate": "sat-gspo:sat/intervention_rate",
}
RULE_COLUMNS = {
    "outside": "objective/outside_band",
    "clip_low": "objective/clip_low",
    "clip_high": "objective/clip_high",
    "no_gradient": "inspect/no_gradient",
    "signal_cut": "inspect/signal_cut",
    "gradient_kept": "inspect/gradient_kept",
    "correction_zero": "correction/zero",
    "correction_weight": "correction/weight",
    "gate_rate": "sat/gate_rate",
    "intervention_rate": "sat/intervention_rate",
    "q": "sat/q",
    "radius_low": "sat/radius_low",
    "radius_high": "sat/radius_high",
}
BY_ADVANTAGE = {"clip_low", "clip_high", "no_gradient", "signal_cut", "gradient_kept", "intervention_rate"}


def rule_values(totals: RuleTotals, has_advantage: bool) -> dict[str, float | None]:
    """The columns of a rule; None where the dump, or the rule, has no such number."""
    means = totals.means()
    found: dict[str, float | None] = {}
    for column, name in RULE_COLUMNS.items():
        value = means.get(name)
        is_known = value is not None and math.isfinite(value) and (has_advantage or column not in BY_ADVANTAGE)
        found[column] = value if is_known else None
    rejected = [value for name, value in means.items() if name.startswith("rejection/")]
    found["rejected"] = max(rejected) if rejected else None
    return found


def write_csv(findings: Findings, folder: Path) -> list[Path]:
    """Write both files. An empty cell is a number that the dump does not give.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    steps: list[list[str | int]] = [["step", "responses", "tokens", *STEP_COLUMNS]]
    for row in findings.steps:
        steps.append([row.step, row.responses, row.tokens, *(_cell(row.means.get(n)) for n in STEP_COLUMNS.values())])
    rules: list[list[str | int]] = [["rule", "presets", "steps", *RULE_COLUMNS, "rejected", "not_answered"]]
    for totals in findings.rules:
        values = rule_values(totals, findings.has_advantage)
        rules.append(
            [
                totals.rule.name,
                " ".join(totals.rule.presets),
                totals.steps,
                *map(_cell, values.values()),
                totals.missing,
            ]
        )
    for name, reason in findings.refused.items():
        rules.append([name, name, 0, *[""] * (len(RULE_COLUMNS) + 1), reason])
    return [_write(folder / "steps.csv", steps), _write(folder / "rules.csv", rules)]


def _write(path: Path, rows: list[list[str | int]]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}): name another folder with --out") from None
    return path


def _cell(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else repr(float(value))
