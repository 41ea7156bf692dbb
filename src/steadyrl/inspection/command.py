"""What `steadyrl inspect` does: read with a bar, show, write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from steadyrl.errors import ConfigError
from steadyrl.inspection.page import write_page
from steadyrl.inspection.study import Findings, inspect
from steadyrl.inspection.table_files import write_csv
from steadyrl.inspection.terminal import show


def inspect_dumps(dumps: Sequence[Path], out: Path, rules: Sequence[str] | None, console: Console) -> Findings:
    """Inspect dumps, print the summary, and write the page and the tables into `out`.

    Raises:
        ConfigError: nothing can be read, a preset is unknown, or `out` cannot be written.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # without a terminal, all that is left of a bar is an empty line
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=max(total, 1))

        findings = inspect(dumps, rules, progress)
    show(findings, console)
    written = write_csv(findings, out)
    try:
        written.insert(0, write_page(findings, out / "inspect.html"))
    except ConfigError as error:  # no plotting library: the tables are complete
        console.print(Text(f"no page: {error}"), soft_wrap=True)
    console.print(Text(f"written: {', '.join(map(str, written))}"), soft_wrap=True)
    return findings
