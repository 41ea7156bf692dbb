"""Which recorded batches a report looks into."""

from __future__ import annotations

from pathlib import Path

from steadyrl.reports.recorder import RunData, recorded_batches

LARGEST_FILE = 256 * 2**20  # bytes; a batch is read into memory as a whole


def readable_batches(run: RunData, count: int) -> list[Path]:
    """At most `count` of them: the first, the last, and what lies evenly between."""
    files = [file for file in recorded_batches(run) if file.stat().st_size <= LARGEST_FILE]
    if len(files) <= count:
        return files
    return [files[round(index * (len(files) - 1) / (count - 1))] for index in range(count)]


def batch_id(file: Path) -> int:
    return int(file.stem.removeprefix("batch_"))
