"""A report's figures and tables as files: PNG and CSV, Markdown and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steadyrl.errors import ConfigError
from steadyrl.reports.canvas import png
from steadyrl.reports.sections import Section
from steadyrl.reports.tables import csv_text, markdown


def write_figures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """NAME.png and NAME.csv for every figure, NAME.md and NAME.csv for every table.

    Raises:
        ConfigError: if `folder` is a file, or cannot be written to.
    """
    contents: dict[str, bytes] = {}
    for section in sections:
        for plot in section.plots:
            contents[f"{plot.name}.png"] = png(plot)
            contents[f"{plot.name}.csv"] = csv_text(plot.columns, plot.rows).encode("utf-8", errors="replace")
        for table in section.tables:
            contents[f"{table.name}.md"] = markdown(table).encode("utf-8", errors="replace")
            contents[f"{table.name}.csv"] = csv_text(table.columns, table.numbers).encode("utf-8", errors="replace")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the figures cannot be written to {str(folder)!r} ({error}): name another folder with --export"
        ) from None
    return [folder / name for name in contents]
