"""The command line. Exit codes: 0 done, 1 the run failed, 2 the input has to change."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from steadyrl.errors import ConfigError, EngineError, SteadyRLError
from steadyrl.recipe import load_config

if TYPE_CHECKING:
    from steadyrl.reports.summary import Summary

app = typer.Typer(
    help="Stable asynchronous reinforcement learning of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
WIDE = 190  # characters that the whole table of methods takes
LEAVE_S = 30.0  # for the end of the process, once there is nothing left to do
console = Console(markup=False, highlight=False)

Recipe = Annotated[Path, typer.Argument(help="a TOML recipe, for example recipes/tiny.toml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, for example pipeline.lag=4 objective.preset=gspo")
]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint of run_dir")] = False,
) -> None:
    """Train a recipe and write its run folder and report."""
    config = load_config(recipe, overrides or [])
    for sentence in config.arithmetic():
        console.print(sentence, soft_wrap=True)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' own progress bars, here and in the engine's process
    from transformers.utils import logging as transformers_logging

    from steadyrl.reports.progress import TrainingProgress
    from steadyrl.run import train as run_training

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    result = run_training(config, resume=resume, progress=TrainingProgress(console))
    _close(result.folder)
    if not result.finished:
        given = [override for override in overrides or [] if not override.startswith("run_dir=")]
        words = [sys.argv[0], "train", str(recipe), *given, f"run_dir={result.folder}", "--resume"]
        console.print(f"stopped before its last step; continue with: {shlex.join(words)}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="one or more run folders, or the folder of a sweep")],
    out: Annotated[
        Path | None, typer.Option(help="the page to write; else FOLDER/report.html, or ./report.html for several runs")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="a folder for every figure as PNG and CSV and every table as Markdown and CSV")
    ] = None,
) -> None:
    """Rebuild the report of a run or a sweep, or lay several runs over each other."""
    from steadyrl.reports.html import write_report

    page = write_report(runs, out or (Path("report.html") if len(runs) > 1 else None), export)
    console.print(f"report: {page}", soft_wrap=True)
    if export is not None:
        console.print(f"figures and tables: {export}", soft_wrap=True)


@app.command()
def sweep(
    grid: Annotated[Path, typer.Argument(help="a TOML grid, for example recipes/grid_paper.toml")],
    out: Annotated[Path | None, typer.Option(help="the folder of the runs; else the one that the grid names")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="runs at a time; else one for each core")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="the smaller grid, as the table named quick in it says")
    ] = False,
) -> None:
    """Run methods x lags x seeds, and report on them; started again, it goes on with the runs that are missing."""
    from steadyrl.experiments.display import SweepProgress
    from steadyrl.experiments.grid import load_grid
    from steadyrl.experiments.sweep import run_sweep
    from steadyrl.reports.html import write_report

    plan = load_grid(grid, quick=quick, out=out)
    at_once = min(jobs or len(os.sched_getaffinity(0)), len(plan.cells))
    size = " x ".join([*(f"{name} {len(labels)}" for name, labels in plan.axes.items()), f"seed {len(plan.seeds)}"])
    console.print(f"{size}: {len(plan.cells)} to run, {at_once} at a time, in {plan.out}", soft_wrap=True)
    with SweepProgress(console) as progress:
        state = run_sweep(plan, at_once, progress)
    for name, why in state.failed.items():
        console.print(f"failed: {name}: {why}", soft_wrap=True)
    if state.failed:
        console.print("run the same command again to try these runs again", soft_wrap=True)
    try:
        console.print(f"report: {write_report([plan.out])}", soft_wrap=True)
    except ConfigError as error:  # no plotting library: the runs themselves are complete
        console.print(f"no report: {error}", soft_wrap=True)


@app.command()
def inspect(
    dumps: Annotated[list[Path], typer.Argument(help="run folders, or files and folders of recorded token data")],
    out: Annotated[
        Path, typer.Option(help="the folder for inspect.html, steps.csv and rules.csv; written over if they are there")
    ] = Path("inspection"),
    rules: Annotated[
        str | None,
        typer.Option(help="replay only these objectives, for example dapo,dppo-tv; SAT and its bases always"),
    ] = None,
) -> None:
    """Read recorded token data: how stale it is, where the mismatch came from, what each clip rule would have cut."""
    from steadyrl.inspection.command import inspect_dumps

    inspect_dumps(dumps, out, None if rules is None else [name.strip() for name in rules.split(",")], console)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    from_run: Annotated[Path | None, typer.Option(help="a run folder to measure the rates in")] = None,
    rates: Annotated[
        Path | None, typer.Option(help="a TOML file of rates; what neither names is assumed for a data-center GPU")
    ] = None,
    all_regimes: Annotated[bool, typer.Option("--all-regimes", help="the other two regimes as well")] = False,
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps to simulate")] = 48,
    json: Annotated[Path | None, typer.Option(help="a file for all the numbers")] = None,
) -> None:
    """Say what a recipe takes in memory, traffic and time, without running it."""
    from steadyrl.planning.command import plan_recipe

    plan_recipe(
        recipe,
        overrides or [],
        from_run=from_run,
        rates=rates,
        all_regimes=all_regimes,
        steps=steps,
        out=json,
        console=console,
    )


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="a model folder, a checkpoint folder of a run, bundled:NAME, or a hub name")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, for example engine.threads=4 task.verifier.workers=4")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="aime24, gsm8k, ..., a file or folder, hub:OWNER/NAME/FILES, or arithmetic, reasoning_gym"),
    ] = None,
    problem: Annotated[str, typer.Option(help="the column of the problem, of a file in no published schema")] = "",
    answer: Annotated[str, typer.Option(help="the column of its answer")] = "",
    k: Annotated[int, typer.Option(min=1, help="samples of each problem")] = 8,
    prompts: Annotated[int | None, typer.Option(min=1, help="only so many problems, the first ones")] = None,
    temperature: Annotated[float, typer.Option(help="of sampling")] = 1.0,
    top_p: Annotated[float, typer.Option(help="draw from the likeliest tokens with this mass")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="of a response; else what the context leaves")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of sampling")] = 0,
    out: Annotated[Path | None, typer.Option(help="a JSON file for scores, settings and all samples")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="two such files, or run folders: their paired difference")
    ] = None,
) -> None:
    """Score a model on data, with error bars; or compare two scores problem by problem."""
    from steadyrl.evaluation.command import compare_results, evaluate_and_show

    if compare is not None:
        compare_results(*compare, console)
        return
    if model is None or not data:
        raise ConfigError("steadyrl eval needs a model and --data, for example: steadyrl eval MODEL --data aime24")
    sampling = {"samples_per_prompt": k, "temperature": temperature, "top_p": top_p}
    given = {"model": {"path": model}, "evaluation": sampling}
    evaluate_and_show(given, data, (problem, answer), prompts, seed, max_tokens, overrides or [], out, console)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the page on 127.0.0.1; 0 takes a free one")] = 8642,
) -> None:
    """Show the report of a run live while it trains, on a page for this machine alone, until Ctrl-C."""
    from steadyrl.reports.watch import watch as serve

    serve(run, port, lambda url: console.print(f"watching {run}: {url} (Ctrl-C ends it)", soft_wrap=True))


@app.command()
def rollout_server(
    recipe: Recipe,
    overrides: Overrides = None,
    python: Annotated[
        Path | None, typer.Option(help="the Python of the environment that the server is installed in; else this one")
    ] = None,
    number: Annotated[int, typer.Option(min=0, help="which of engine.urls, from 0")] = 0,
    only_print: Annotated[bool, typer.Option("--print", help="only print the command")] = False,
    options: Annotated[
        str, typer.Option(help="more options for the server, for example '--tensor-parallel-size 2'")
    ] = "",
) -> None:
    """Start a rollout server as a recipe needs it, until Ctrl-C (docs/engines.md)."""
    from steadyrl.engines.launch import running, served_model, server_command

    config = load_config(recipe, overrides or [])
    try:
        more = shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--options {options} cannot be read ({error}): quote it as for a shell") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server must not outlive this process
    with served_model(config.model.path) as model:
        command = server_command(config, number, python=str(python or sys.executable), model=model, options=more)
        if only_print:
            print(command)
            return
        console.print(str(command), soft_wrap=True)
        with running(command, config.engine.start_timeout_s) as process:
            console.print(f"the server at {command.url} is ready (Ctrl-C ends it)", soft_wrap=True)
            try:
                code = process.wait()
            except KeyboardInterrupt:
                return
    raise EngineError(f"the server at {command.url} ended with exit code {code}: see what it printed")


@app.command()
def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="what a server is compared with, a TOML recipe")] = None,
    overrides: Overrides = None,
    engine: Annotated[
        str | None, typer.Option(help="compare this running server with a recipe, http://HOST:PORT")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="of the server, vllm or sglang; else engine.kind of the recipe")
    ] = None,
) -> None:
    """Say what is installed and usable here, or whether a rollout server is what a recipe needs."""
    from steadyrl.engines.doctor import check_installation, check_server

    if engine is None:
        check_installation(console)
        return
    if recipe is None:
        raise ConfigError(
            "steadyrl doctor --engine needs the recipe that the server is for, for example: "
            "steadyrl doctor recipes/tiny.toml --engine http://127.0.0.1:8000 --kind vllm"
        )
    server = [f'engine.urls=["{engine}"]', *([f"engine.kind={kind}"] if kind else [])]
    check_server(load_config(recipe, [*(overrides or []), *server]), console)


@app.command()
def make_base(
    folder: Annotated[Path, typer.Argument(help="where to write the checkpoint")],
    seed: Annotated[int, typer.Option(help="of the weights and the warm-up data")] = 0,
) -> None:
    """Make the tiny mixture-of-experts base model from its seed (under two minutes on one core)."""
    from rich.progress import Progress

    from steadyrl.assets.make_base import make_base as make

    with Progress(console=console) as bar:
        warm_up = bar.add_task("supervised warm-up", total=None)
        make(folder, seed, progress=lambda step, total, _loss: bar.update(warm_up, completed=step, total=total))
    console.print(f"base model: {folder}")


@app.command()
def methods(
    plot: Annotated[Path | None, typer.Option(help="a folder for figures of every boundary rule")] = None,
) -> None:
    """List the objectives by name, or draw what each of them does with a gradient."""
    from steadyrl.reports.methods import COLUMNS, NARROW_COLUMNS, draw, table

    if plot is None:
        page = console if console.is_terminal else Console(width=WIDE, markup=False)  # a pipe has no width
        page.print(table(COLUMNS if page.width >= WIDE else NARROW_COLUMNS))
        return
    console.print(f"{len(draw(plot))} files in {plot}, as SVG and PNG; start with overview.png", soft_wrap=True)


def main() -> None:
    """A command; errors of steadyrl become one sentence and an exit code."""
    try:
        app()
    except SteadyRLError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


def entry() -> None:
    """A command that is all that its process is for."""
    code: int | str | None = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
        raise
    finally:
        timer = threading.Timer(LEAVE_S, _leave, [code])
        timer.daemon = True
        timer.start()


def _leave(code: int | str | None) -> None:
    """End a process that a library's thread or exit handler keeps alive: everything is written."""
    others = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]
    print(f"left without waiting longer than {LEAVE_S:.0f} s for {', '.join(others)}", file=sys.stderr, flush=True)
    os._exit(code if isinstance(code, int) else int(code is not None))


def _close(folder: Path) -> None:
    """The numbers of a run, and its report."""
    from steadyrl.reports.html import write_report
    from steadyrl.reports.recorder import read_run
    from steadyrl.reports.summary import summary

    console.print(_closing_table(summary(read_run(folder))))
    try:
        console.print(f"report: {write_report([folder])}", soft_wrap=True)
    except ConfigError as error:  # no plotting library: the run itself is complete
        console.print(f"no report: {error}", soft_wrap=True)


def _closing_table(numbers: Summary) -> Table:
    table = Table(title=f"{numbers['name']}: {numbers['method']}", show_header=False, title_justify="left")
    k = numbers["evaluation_k"]
    rows = [
        (f"evaluation avg@{k} before", _score(numbers, "evaluation_before")),
        (f"evaluation avg@{k} after", _score(numbers, "evaluation_after")),
        ("largest lag", _number(numbers["largest_lag"], "d")),
        ("mean d-bar", _number(numbers["d_bar"], ".4f")),
        ("gate rate", _number(numbers["gate_rate"], ".4f")),
        ("intervention rate", _number(numbers["intervention_rate"], ".4f")),
        ("trainer utilisation", _number(numbers["trainer_utilisation"], ".2f")),
        ("engine utilisation", _number(numbers["engine_utilisation"], ".2f")),
        ("wall seconds", _number(numbers["wall_s"], ".0f")),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _score(numbers: Summary, name: str) -> str:
    error = numbers[f"{name}_se"]
    text = _number(numbers[name], ".3f")
    return text if error is None else f"{text} +- {_number(error, '.3f')}"


def _number(value: float | int | str | None, form: str) -> str:
    return "-" if value is None else format(value, form)
