"""Files as streams of rows: JSON lines, parquet, and torch archives, each with how many bytes are behind."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from steadyrl.errors import ConfigError
from steadyrl.inspection.response import Row

Rows = Iterator[tuple[Row | str, int]]
"""A row, or why there is none, and the bytes of the file read so far."""

CUT_OFF = "cut off, as in a file that is still being written"


def json_rows(path: Path) -> Rows:
    """One line at a time. A last line that does not end is `CUT_OFF`, unless it is whole all the same."""
    done = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            done += len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                problem = "not JSON" if line.endswith(b"\n") else CUT_OFF
                yield f"{path.name}, line {number}: {problem}", done
                continue
            yield (row if isinstance(row, dict) else f"{path.name}, line {number}: not a JSON object"), done


def parquet_rows(path: Path, columns: tuple[str, ...], rows_at_once: int = 64) -> Rows:
    """Some rows at a time, only the named columns; lists come as numpy arrays.

    Raises:
        ConfigError: pyarrow is missing, or the file is damaged, of which the first rows may have come already.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError('a parquet file needs pyarrow: pip install "steadyrl[offline]"') from None
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            known = [name for name in columns if name in file.schema_arrow.names]
            total, size, done = file.metadata.num_rows, path.stat().st_size, 0
            for batch in file.iter_batches(batch_size=rows_at_once, columns=known):
                for index in range(batch.num_rows):
                    done += 1
                    yield {name: _cell(batch.column(name)[index]) for name in known}, size * done // total
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = _short(str(error))
        raise ConfigError(f"{path} is not a parquet file that can be read ({reason}): write it again") from None


def torch_archive(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, restricted to tensors, numpy arrays and plain Python values; tensors stay on the disk.

    Raises:
        ConfigError: it holds anything else (which could run code when it is loaded), or is damaged.
    """
    import torch

    arrays = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in ("u1", "u2", "i4", "i8", "f4", "f8", "?"))]
    rebuild = np._core.multiarray._reconstruct  # type: ignore[attr-defined]  # how numpy stores an array
    try:
        with torch.serialization.safe_globals([rebuild, *arrays]):
            payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zipfile and torch each have their own
        reason = _short(str(error)) or type(error).__name__
        raise ConfigError(
            f"{path} cannot be read without running code from it, or is damaged ({reason}): "
            "convert it to JSON lines where it was written, as docs/inspect.md shows"
        ) from None
    if not isinstance(payload, dict):
        raise ConfigError(f"{path} holds no training data: name the files of a --dump-details folder")
    return payload


def _short(text: str) -> str:
    """The beginning of a library's message, in one line and whole words."""
    return textwrap.shorten(text, 160, placeholder=" ...")


def _cell(scalar: Any) -> Any:
    values = getattr(scalar, "values", None)  # of a list
    return values.to_numpy(zero_copy_only=False) if values is not None else scalar.as_py()
