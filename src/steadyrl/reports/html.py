"""One self-contained HTML page about one run, or several laid over each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadyrl.errors import ConfigError
from steadyrl.reports.recorder import CONFIG, Row, RunData, read_rollouts, read_run, recorded_batches
from steadyrl.reports.summary import Summary, summary

TEMPLATE = Path(__file__).with_name("page.html.jinja")
SAMPLES_PER_BATCH = 4
LONGEST_TEXT = 2000  # characters shown of one response


def write_report(folders: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the report of one run (to RUN/report.html by default) or of several (to `out`).

    Raises:
        ConfigError: if a folder is no run, the page cannot be written, or matplotlib or jinja2 is not installed.
    """
    if not folders:
        raise ConfigError("a report needs at least one run folder")
    if out is None and len(folders) > 1:
        raise ConfigError(
            "a report about several runs belongs to none of their folders: say where with --out FILE.html"
        )
    try:
        import jinja2
        import matplotlib  # noqa: F401
        from markupsafe import Markup
    except ImportError:
        raise ConfigError('a report needs matplotlib and jinja2: pip install "steadyrl[report]"') from None

    runs = [read_run(folder) for folder in folders]
    runs = [dataclasses.replace(run, name=name) for run, name in zip(runs, _distinct_names(runs), strict=True)]
    sections = [{**section, "svg": section["svg"] and Markup(section["svg"])} for section in _sections(runs)]
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    path = Path(out) if out is not None else runs[0].path / "report.html"
    html = template.render(
        title=runs[0].name if len(runs) == 1 else " / ".join(run.name for run in runs),
        subtitle=_subtitle(runs),
        runs=[_about(run) for run in runs],
        table=_table(runs),
        sections=sections,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the report cannot be written to {str(path)!r} ({error}): name another file with --out"
        ) from None
    return path


def _sections(runs: list[RunData]) -> list[dict[str, Any]]:
    from steadyrl.reports import figures, timeline  # they need matplotlib

    plan = [
        (
            "Score",
            figures.reward,
            "Thin lines are single steps, bold lines a running mean. Points are evaluations on held-out prompts, "
            "with one standard error; a real gain is several error bars high.",
            "No step and no evaluation has been recorded yet.",
        ),
        (
            "Drift between trainer and engine",
            figures.mismatch,
            "How far the trained policy is from the one that sampled, over the tokens trained on. A narrow band is "
            "healthy; a band that widens or spikes comes before a collapse.",
            "No mismatch was recorded.",
        ),
        (
            "Lag",
            figures.lags,
            "How many optimizer steps old the tokens were when they were trained on.",
            "No lags were recorded.",
        ),
        (
            "Trust region",
            figures.trust_region,
            "Shares of the trained tokens. Left: those whose gradient was removed at the lower or the upper edge, "
            "SAT's part included. Right: the gate rate (tokens whose interval SAT narrowed) and the intervention rate "
            "(tokens whose gradient only the narrowing removed), which is where SAT differs from a fixed clip.",
            "No clip fractions were recorded.",
        ),
        (
            "Interval that SAT left",
            figures.sat_radii,
            "Mean radii after narrowing, over all trained tokens, and the quantile q of |log ratio| above which a "
            "token is gated. q follows the drift of the batch.",
            "No run here uses a Staleness-Adaptive Trust Region.",
        ),
        (
            "Optimisation",
            figures.optimisation,
            "Spikes of the gradient norm are early signs of trouble; so is a response length that runs away.",
            "No gradient norm was recorded.",
        ),
        (
            "Timeline",
            timeline.gantt,
            "What trainer and engine did. Grey stretches are waiting: on the trainer's lane for responses, on the "
            "engine's lane for weights or for work.",
            "No timeline was recorded.",
        ),
        (
            "Utilisation",
            timeline.utilisation_over_time,
            "Share of time spent working, through the run. The actor near 100% is the bottleneck: more of it, or less "
            "work for it, shortens the run.",
            "No timeline was recorded.",
        ),
    ]
    return [
        {"title": title, "svg": draw(runs), "text": text, "missing": missing} for title, draw, text, missing in plan
    ]


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
        "batches": _batches(run),
        "toml": (run.path / CONFIG).read_text(encoding="utf-8"),
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


def _table(runs: list[RunData]) -> dict[str, Any]:
    rows = []
    for run in runs:
        numbers = summary(run)
        fixed = [run.name, str(numbers["method"]), numbers["state"] or "-", str(numbers["steps"])]
        rows.append(fixed + [cell(numbers) for _, cell in COLUMNS])
    return {"head": ["run", "method", "state", "steps", *(label for label, _ in COLUMNS)], "rows": rows}


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


def _batches(run: RunData) -> list[dict[str, Any]]:
    """Samples from the first and the last recorded batch."""
    files = recorded_batches(run)
    chosen = [files[0], files[-1]] if len(files) > 1 else files
    titles = ["First recorded batch", "Last recorded batch"]
    return [
        {"title": f"{title} ({int(file.stem.removeprefix('batch_'))})", "samples": _samples(read_rollouts(file))}
        for title, file in zip(titles, chosen, strict=False)
    ]


def _samples(rollouts: list[Row]) -> list[dict[str, Any]]:
    """One response to each of the first few prompts."""
    first_of_group: dict[int, Row] = {}
    for rollout in rollouts:
        first_of_group.setdefault(rollout["group"], rollout)
    return [_sample(rollout) for rollout in list(first_of_group.values())[:SAMPLES_PER_BATCH]]


def _sample(rollout: Row) -> dict[str, Any]:
    text = rollout["text"]
    cut = f"\n... {len(text) - LONGEST_TEXT:,} more characters" if len(text) > LONGEST_TEXT else ""
    return {
        "prompt_id": rollout["prompt_id"],
        "reward": _decimal(rollout["reward"]),
        "status": rollout["status"],
        "tokens": sum(rollout["loss_mask"]),
        "prompt": rollout.get("prompt_text", ""),
        "text": text[:LONGEST_TEXT] + cut,
    }


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
