"""The findings as text for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steadyrl.inspection.answers import answers
from steadyrl.inspection.rules import RuleTotals
from steadyrl.inspection.study import Findings
from steadyrl.inspection.table_files import rule_values

SHOWN = {
    "grpo", "sat-grpo", "dapo", "gspo", "sat-gspo", "gspo-published", "dppo-tv", "dppo-kl", "dppo-sat-paper", "cispo",
    "m2po", "kpop", "dis", "grpo-tis", "icepop", "mis", "seqclip", "opsm",
}  # fmt: skip
MARKS = {"good": ("ok", "green"), "bad": ("!!", "bold red"), "unknown": ("??", "yellow")}
COLUMNS = {
    "outside": "outside",
    "clip_low": "cut low",
    "clip_high": "cut high",
    "no_gradient": "no gradient",
    "signal_cut": "|A| cut",
    "gradient_kept": "gradient kept",
}


def subtitle(findings: Findings) -> str:
    e = findings.evidence
    named = " and ".join(format.name for format in findings.formats)
    return (
        f"{named}: {findings.files:,} file{'s' * (findings.files != 1)}, {e.responses:,} responses, {e.active:,} "
        f"trained tokens, {len(findings.steps):,} optimizer step{'s' * (len(findings.steps) != 1)}"
    )


def show(findings: Findings, console: Console) -> None:
    """Checks first: with a bad one, the answers below may be about the fault and not about the run."""
    console.print(Text(subtitle(findings)), soft_wrap=True)
    table = Table(title="the data", title_justify="left", show_header=False, pad_edge=False)
    for check in findings.checks:
        mark, style = MARKS[check.state]
        table.add_row(Text(mark, style), check.name, Text(check.sentence))  # [ratio] is no markup
    console.print(table)
    for answer in answers(findings):
        console.print(Text(answer.question, "bold"))
        console.print(Padding(Text(answer.text), (0, 0, 1, 2)))
    if any(totals.steps for totals in findings.rules):
        console.print(_rules(findings))


def cells(totals: RuleTotals, has_advantage: bool) -> list[str]:
    """COLUMNS of a rule as per cent."""
    values = rule_values(totals, has_advantage)
    return [_percent(values[column]) for column in COLUMNS]


def _rules(findings: Findings) -> Table:
    table = Table(title="what each rule would have done, per cent", title_justify="left", pad_edge=False)
    table.add_column("rule", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    answered = [totals for totals in findings.rules if totals.steps]
    if len(answered) > len(SHOWN):  # the page and rules.csv have them all
        answered = [totals for totals in answered if totals.rule.name in SHOWN]
    for totals in answered:
        table.add_row(totals.rule.name, *cells(totals, findings.has_advantage))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3f}" if value < 0.1 else f"{100 * value:.1f}"
