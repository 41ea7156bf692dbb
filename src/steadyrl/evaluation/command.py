"""What `steadyrl eval` does with its arguments."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from steadyrl.errors import ConfigError
from steadyrl.evaluation.comparison import EVALUATIONS, compare
from steadyrl.evaluation.display import comparison_lines, facts, score_table
from steadyrl.recipe import build_config

COMMAND_WORDS = {
    r"(?<=[Ss]et )model\.path\b": "MODEL",
    "as problem and answer of the source$": "with --problem and --answer",
}


def evaluate_and_show(
    given: dict[str, Any],
    sources: Sequence[str],
    columns: tuple[str, str],
    prompts: int | None,
    seed: int,
    max_tokens: int | None,
    overrides: Sequence[str],
    out: Path | None,
    console: Console,
) -> None:
    """Evaluate, print the scores, and write them; `given` are recipe tables from the command line.

    Raises:
        ConfigError: arguments, data or model that cannot work, or a place where nothing can be written.
    """
    if out is not None and not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out} is in no folder that exists: make it first")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' own progress bars
    from transformers.utils import logging as transformers_logging

    from steadyrl.evaluation.standalone import data_tables, evaluate_model
    from steadyrl.tasks.data_record import describe

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    tables = data_tables(sources, columns, prompts)
    config = build_config({**given, **tables, "evaluation": {**given["evaluation"], **tables["evaluation"]}}, overrides)
    bar_columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    # it goes away, so that an error has no unfinished bar above it
    with Progress(*bar_columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        answering = bar.add_task("problems answered", total=None)
        try:
            result = evaluate_model(
                config,
                seed=seed,
                max_response_tokens=max_tokens,
                progress=lambda done, total: bar.update(answering, completed=done, total=total),
            )
        except ConfigError as error:
            raise ConfigError(in_words_of_the_command(str(error))) from error
    for sentence in describe(result["data"]):
        console.print(sentence, soft_wrap=True)
    console.print(score_table(result))
    for line in facts(result):
        console.print(line, soft_wrap=True)
    if out is not None:
        _write(out, result)
        console.print(f"written to {out}", soft_wrap=True)


def compare_results(first: Path, second: Path, console: Console) -> None:
    """Print the paired difference of two results.

    Raises:
        ConfigError: nothing at a path, a run that was not evaluated, or as `compare`.
    """
    for path in (first, second):
        _check_evaluated(path)
    for line in comparison_lines((str(first), str(second)), compare(first, second)):
        console.print(line, soft_wrap=True)


def in_words_of_the_command(message: str) -> str:
    """A message whose remedy is a key of a recipe, with the argument that `steadyrl eval` has in its place."""
    for recipe, command in COMMAND_WORDS.items():
        message = re.sub(recipe, command, message)
    return message


def _check_evaluated(path: Path) -> None:
    if not path.exists():
        raise ConfigError(
            f"there is no file or folder {path}: name a run folder, or a file that steadyrl eval --out wrote"
        )
    rows = path / EVALUATIONS
    if path.is_dir() and not (rows.is_file() and rows.stat().st_size):
        raise ConfigError(
            f"the folder {path} holds no evaluation of a run (there is nothing in {EVALUATIONS}): name a run that was "
            "evaluated, or a file that steadyrl eval --out wrote"
        )


def _write(out: Path, result: dict[str, Any]) -> None:
    try:
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}): choose another place for --out") from None
