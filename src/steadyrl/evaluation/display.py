"""Scores in the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from steadyrl.evaluation.comparison import Comparison


def score_table(result: dict[str, Any]) -> Table:
    """The scores of one evaluation beside what they mean something by."""
    row = result["score"]
    table = Table(title=f"{result['model']}: {row['prompts']} problems x {row['k']} samples", title_justify="left")
    for name in ("score", "value", "se over problems", "se over samples"):
        table.add_column(name)
    for label, name in (("avg", "avg_at_k"), ("maj", "maj_at_k")):
        table.add_row(f"{label}@{row['k']}", *_numbers(row[name], row[f"{name}_se"], row[f"{name}_se_samples"]))
    for j, passed in row["pass_at"].items():
        table.add_row(f"pass@{j}", *_numbers(passed["value"], passed["se"], passed["se_samples"]))
    table.add_row("truncated", *_numbers(row["truncated"], None, None))
    return table


def facts(result: dict[str, Any]) -> list[str]:
    """What the scores were made with, a line each."""
    row = result["score"]
    statuses = ", ".join(f"{count} {status}" for status, count in row["statuses"].items() if count)
    return [
        f"samples: {statuses}; {row['response_tokens']:.0f} tokens on average",
        f"sampling: temperature {row['temperature']:g}, top-p {row['top_p']:g}, top-k {row['top_k']}, "
        f"at most {row['max_response_tokens']} tokens, seed {row['seed']}, {result['dtype']}",
        f"data {row['data_checksum']}, weights {result['weights']} (version {result['version']})",
        f"template: {row['template']}; graded by: {row['grader']}",
    ]


def comparison_lines(names: tuple[str, str], found: Comparison) -> list[str]:
    """The two scores, their difference, and the settings in which they differ."""
    difference = found.difference
    lines = [
        f"{name}: avg@{row['k']} {row['avg_at_k']:.4f}"
        + (f" +- {row['avg_at_k_se']:.4f}" if row["avg_at_k_se"] else "")
        for name, row in zip(names, (found.first, found.second), strict=True)
    ]
    interval = (
        f"[{difference.low:+.4f}, {difference.high:+.4f}]" if difference.count > 1 else "unknown from one problem"
    )
    lines.append(
        f"difference over {difference.count} problems: {difference.mean:+.4f}, {difference.level:.0%} interval "
        f"{interval}, p = {difference.p_value:.4f}"
    )
    lines += [f"not the same: {name} is {left!r} and {right!r}" for name, (left, right) in found.differing.items()]
    return lines


def _numbers(value: float, *errors: float | None) -> list[str]:
    return [f"{value:.4f}", *("-" if error is None else f"{error:.4f}" for error in errors)]
