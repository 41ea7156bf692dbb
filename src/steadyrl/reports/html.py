"""One self-contained HTML page about one run, several laid over each other, or a sweep; and its figures as files."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadyrl.errors import ConfigError
from steadyrl.reports.comparison import SWEEP, is_sweep, read_sweep
from steadyrl.reports.recorder import CONFIG, RunData, read_run
from steadyrl.reports.summary import Summary, summary

if TYPE_CHECKING:
    from steadyrl.reports.sections import Section
    from steadyrl.reports.tables import Table

HERE = Path(__file__).parent
TEMPLATE, STYLE_SHEET, SCRIPT = HERE / "page.html.jinja", HERE / "page.css", HERE / "rollouts.js"


def write_report(
    folders: Sequence[Path | str], out: Path | str | None = None, export: Path | str | None = None
) -> Path:
    """Write the report of one run or sweep (to FOLDER/report.html by default) or of several runs (to `out`).

    Args:
        folders: run folders, or one folder of a sweep (with its sweep.json).
        out: the page.
        export: a folder for every figure as PNG and its numbers as CSV, every table as Markdown and CSV.

    Raises:
        ConfigError: if a folder is no run, something cannot be written, or matplotlib or jinja2 is not installed.
    """
    if not folders:
        raise ConfigError("a report needs at least one run folder")
    if out is None and len(folders) > 1:
        raise ConfigError(
            "a report about several runs belongs to none of their folders: say where with --out FILE.html"
        )
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError('a report needs matplotlib and jinja2: pip install "steadyrl[report]"') from None

    sweeps = [folder for folder in folders if is_sweep(Path(folder))]
    if sweeps and len(folders) > 1:
        raise ConfigError(f"{sweeps[0]} is a sweep: report on it alone, or name runs inside it")
    page, sections = _of_sweep(Path(sweeps[0])) if sweeps else _of_runs(folders)
    path = Path(out) if out is not None else Path(folders[0]) / "report.html"
    html = _render(page, sections)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the report cannot be written to {str(path)!r} ({error}): name another file with --out"
        ) from None
    if export is not None:
        from steadyrl.reports.export import write_figures

        write_figures(sections, Path(export))
    return path


def _of_runs(folders: Sequence[Path | str]) -> tuple[dict[str, Any], list[Section]]:
    from steadyrl.reports.rollout_browser import browser_data
    from steadyrl.reports.sections import Section, run_sections

    runs = [read_run(folder) for folder in folders]
    runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, _distinct_names(runs), strict=True)]
    page = {
        "title": runs[0].name if len(runs) == 1 else " / ".join(run.name for run in runs),
        "subtitle": _subtitle(runs),
        "runs": [_about(run) for run in runs],
        "rollouts": browser_data(runs),
        "configurations": [(f"{run.name}: {CONFIG}", _text(run.path / CONFIG)) for run in runs],
    }
    several = [Section("Runs", "", "", [], [_table(runs)])] if len(runs) > 1 else []
    return page, [*several, *run_sections(runs)]


def _of_sweep(folder: Path) -> tuple[dict[str, Any], list[Section]]:
    from steadyrl.reports.sections import sweep_sections

    comparison = read_sweep(folder)
    whole = sum(cell.problem is None for cell in comparison.cells)
    across = f" and {comparison.column_axis}" if comparison.column_axis else ""
    seeds = len({cell.seed for cell in comparison.cells})
    page = {
        "title": folder.resolve().name,
        "subtitle": f"A sweep over {comparison.row_axis}{across} with {seeds} seeds: {whole} of "
        f"{len(comparison.cells)} runs are finished.",
        "runs": [],
        "rollouts": None,
        "configurations": [(SWEEP, _text(folder / SWEEP))],
    }
    return page, sweep_sections(comparison)


def _render(page: dict[str, Any], sections: list[Section]) -> str:
    import jinja2
    from markupsafe import Markup

    from steadyrl.reports.canvas import Plot, svg
    from steadyrl.reports.rollout_browser import script_json

    def inline(plot: Plot) -> Markup:
        return Markup(svg(plot))

    script = SCRIPT.read_text(encoding="utf-8")
    # the page runs this script and no other, whatever a model wrote
    script_hash = "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        **{**page, "rollouts": page["rollouts"] and Markup(script_json(page["rollouts"]))},
        sections=sections,
        svg=inline,
        css=Markup(STYLE_SHEET.read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=script_hash,
    )


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _distinct_names(runs: list[RunData]) -> list[str]:
    """Folder names, with as many parents in front as it takes to tell the runs apart."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("the same run folder is named twice: name each once")


def _subtitle(runs: list[RunData]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} training runs, one colour each"
    numbers = summary(runs[0])
    config = runs[0].config
    planned = config.get("trainer", {}).get("steps", "?")
    return (
        f"{numbers['method']} on {config.get('task', {}).get('name', 'a task')} with "
        f"{config.get('model', {}).get('path', 'a model')}: {numbers['state'] or 'unfinished'}, "
        f"{numbers['steps']} of {planned} optimizer steps, seed {config.get('seed', '?')}"
    )


def _about(run: RunData) -> dict[str, Any]:
    numbers = summary(run)
    return {
        "name": run.name,
        "verdict": _verdict(numbers),
        "tiles": _tiles(numbers),
        "counts": _counts(run),
    }


def _verdict(numbers: Summary) -> str:
    before = _with_error(numbers["evaluation_before"], numbers["evaluation_before_se"])
    after = _with_error(numbers["evaluation_after"], numbers["evaluation_after_se"])
    k = numbers["evaluation_k"]
    sentences = []
    if numbers["evaluation_after"] is not None:
        sentences.append(f"The evaluation score went from {before} to {after} (avg@{k} with standard error).")
    elif numbers["evaluation_before"] is not None:
        sentences.append(f"The one evaluation so far scored {before} (avg@{k} with standard error).")
    else:
        sentences.append("There is no evaluation yet.")
    if numbers["largest_lag"] is not None:
        sentences.append(
            f"Tokens were at most {numbers['largest_lag']} optimizer steps old; mean |log ratio| between trainer and "
            f"engine (d-bar) was {_decimal(numbers['d_bar'])}."
        )
    if numbers["gate_rate"] is not None:
        sentences.append(
            f"SAT gated {_percent(numbers['gate_rate'])} of the tokens and removed the gradient of "
            f"{_percent(numbers['intervention_rate'])}."
        )
    if numbers["trainer_utilisation"] is not None:
        sentences.append(
            f"In {_duration(numbers['wall_s'])}, the trainer worked {_percent(numbers['trainer_utilisation'])} "
            f"of the time and the engine {_percent(numbers['engine_utilisation'])}."
        )
    return " ".join(sentences)


COLUMNS = (
    ("score before", lambda n: _with_error(n["evaluation_before"], n["evaluation_before_se"])),
    ("score after", lambda n: _with_error(n["evaluation_after"], n["evaluation_after_se"])),
    ("largest lag", lambda n: _decimal(n["largest_lag"])),
    ("mean d-bar", lambda n: _decimal(n["d_bar"])),
    ("gate rate", lambda n: _percent(n["gate_rate"])),
    ("intervention rate", lambda n: _percent(n["intervention_rate"])),
    ("trainer busy", lambda n: _percent(n["trainer_utilisation"])),
    ("engine busy", lambda n: _percent(n["engine_utilisation"])),
    ("wall time", lambda n: _duration(n["wall_s"])),
)


def _tiles(numbers: Summary) -> list[tuple[str, str]]:
    return [(label, text) for label, cell in COLUMNS if (text := cell(numbers)) != "-"]


def _table(runs: list[RunData]) -> Table:
    from steadyrl.reports.tables import Table

    rows = []
    for run in runs:
        numbers = summary(run)
        fixed = [run.name, str(numbers["method"]), numbers["state"] or "-", str(numbers["steps"])]
        rows.append([*map(str, fixed), *(cell(numbers) for _, cell in COLUMNS)])
    head = ["run", "method", "state", "steps", *(label for label, _ in COLUMNS)]
    return Table("summary", head, rows, tuple(head), [tuple(row) for row in rows])


def _counts(run: RunData) -> str:
    names = ("generated", "trained", "dropped", "buffered")
    last = run.steps[-1]["metrics"] if run.steps else {}
    counts = [round(count) for name in names if (count := last.get(f"counts/{name}")) is not None]
    if len(counts) < len(names):
        return "Not counted."
    generated, trained, dropped, buffered = counts
    balance = "" if generated == trained + dropped + buffered else " These do not add up: responses were lost."
    return (
        f"{generated:,} generated = {trained:,} trained + {dropped:,} dropped + {buffered:,} buffered "
        f"(after the last step).{balance}"
    )


def _decimal(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: Any) -> str:
    return "-" if value is None else f"{100 * value:.3g}%"


def _with_error(value: Any, error: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if error is None else f"{value:.3f} \u00b1 {error:.3f}"


def _duration(seconds: Any) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
