"""One self-contained HTML page about a dump, in the look of the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steadyrl.errors import ConfigError
from steadyrl.inspection.answers import answers
from steadyrl.inspection.study import Findings
from steadyrl.inspection.terminal import COLUMNS, cells, subtitle
from steadyrl.reports.html import STYLE_SHEET

TEMPLATE = Path(__file__).with_name("page.html.jinja")
WORDS = {"good": "good", "bad": "bad", "unknown": "not known"}


def write_page(findings: Findings, path: Path) -> Path:
    """Write the page.

    Raises:
        ConfigError: it cannot be written, or matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401
        from markupsafe import Markup
    except ImportError:
        raise ConfigError('the page needs matplotlib and jinja2: pip install "steadyrl[report]"') from None
    from steadyrl.reports.canvas import svg

    sections = [
        {"title": title, "text": text, "figures": [Markup(svg(plot)) for plot in plots if plot is not None]}
        for title, text, plots in _sections(findings)
    ]
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    html = template.render(
        style=Markup(STYLE_SHEET.read_text(encoding="utf-8")),
        title=f"Inspection of {', '.join(findings.names)}",
        subtitle=subtitle(findings),
        checks=[(WORDS[check.state], check) for check in findings.checks],
        answers=answers(findings),
        sections=[section for section in sections if section["figures"]],
        head=["rule", *COLUMNS.values()],
        rows=[
            [", ".join(totals.rule.presets), *cells(totals, findings.has_advantage)]
            for totals in findings.rules
            if totals.steps
        ],
        refused=_refused(findings),
        trainer_sides=[f"{format.name}: {format.trainer_side}" for format in findings.formats],
        notes=findings.notes,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}): name another folder with --out") from None
    return path


def _sections(findings: Findings) -> list[tuple[str, str, list[Any]]]:
    from steadyrl.inspection import charts

    return [
        (
            "Lag and drift",
            "How old the tokens were, and how far the trained policy had gone from the one that sampled.",
            [
                charts.lags(findings),
                charts.drift_histogram(findings),
                charts.over_steps(findings),
                charts.by_bucket(findings, "age", "d-bar by lag", "lag (optimizer steps)"),
            ],
        ),
        (
            "Where the drift sits",
            "Drift of the policy grows with age. An engine's own error does not; it grows along the response, or sits "
            "on improbable tokens.",
            [
                charts.by_bucket(findings, "position", "d-bar by place in the response", "token of the response"),
                charts.by_bucket(findings, "probability", "d-bar by probability", "probability under the engine"),
            ],
        ),
        (
            "What the rules would have done",
            "Replayed on the recorded tokens and advantages. A rule in use from the start would have made another "
            "policy; this shows what it does to these data.",
            [charts.cuts(findings), charts.sat_over_steps(findings)],
        ),
    ]


def _refused(findings: Findings) -> list[tuple[str, str]]:
    """Reason, and the presets it holds for."""
    reasons: dict[str, list[str]] = {}
    for totals in findings.rules:
        if not totals.steps and totals.missing:
            reasons.setdefault(totals.missing, []).extend(totals.rule.presets)
    for name, reason in findings.refused.items():
        reasons.setdefault(reason, []).append(name)
    return [(reason, ", ".join(names)) for reason, names in reasons.items()]
