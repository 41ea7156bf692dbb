"""Where problems are read from: published sets, files, folders, installed packages, the Hugging Face hub.

A source takes one of these forms:

    aime24                                     a published set, see PUBLISHED
    problems.jsonl, folder                     .parquet, .jsonl and .json files; a folder is read with its subfolders
    hub:OWNER/NAME[@REVISION]/FILES            files of a data set on the hub, such as data/train-*.parquet
    package:PACKAGE/FILE                       a file that an installed Python package carries
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from steadyrl.errors import ConfigError
from steadyrl.tasks.schemas import BadRow, Row

SUFFIXES = (".parquet", ".jsonl", ".json")
ROWS_AT_ONCE = 4096  # of a parquet file held in memory
PYARROW = 'pip install "steadyrl[real]"'


@dataclass(frozen=True)
class Published:
    """The files of a published set, by split; a set with one split has the same for both."""

    train: str
    test: str


AIME24 = "hub:HuggingFaceH4/aime_2024/data/*.parquet"
DAPO = "hub:BytedTsinghua-SIA/DAPO-Math-17k/data/*.parquet"
DOLCI = "hub:allenai/Dolci-RL-Zero-Math-7B/data/*.parquet"
CHAMP = "package:champ_dataset/dataset_files/v0.json"
PUBLISHED = {
    "dapo": Published(DAPO, DAPO),
    "dolci": Published(DOLCI, DOLCI),
    "aime24": Published(AIME24, AIME24),
    "math500": Published(*2 * ["hub:HuggingFaceH4/MATH-500/test.jsonl"]),
    "gsm8k": Published("hub:openai/gsm8k/main/train-*.parquet", "hub:openai/gsm8k/main/test-*.parquet"),
    "math": Published(
        "hub:EleutherAI/hendrycks_math/*/train-*.parquet", "hub:EleutherAI/hendrycks_math/*/test-*.parquet"
    ),
    "champ": Published(CHAMP, CHAMP),
}


@dataclass(frozen=True)
class DataFile:
    name: str  # as it is shown and recorded
    path: Path


def find_files(source: str, split: Literal["train", "test"]) -> list[DataFile]:
    """The files of a source, in a fixed order.

    Raises:
        ConfigError: there is no such source, or it cannot be fetched.
    """
    if source in PUBLISHED:
        source = getattr(PUBLISHED[source], split)
    if source.startswith("hub:"):
        return _from_hub(source)
    if source.startswith("package:"):
        return [_from_package(source)]
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise ConfigError(f"the folder {source} holds no {', '.join(SUFFIXES)} file: name another source")
        return [DataFile(str(file), file) for file in files]
    if not path.is_file():
        known = ", ".join(PUBLISHED)
        raise ConfigError(
            f"there is no file or folder {source}; published sets are {known}, others are hub:OWNER/NAME/FILES"
        )
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{source} is no {', '.join(SUFFIXES)} file: convert it to one")
    return [DataFile(source, path)]


def _from_hub(source: str) -> list[DataFile]:
    owner, _, rest = source.removeprefix("hub:").partition("/")
    name, _, pattern = rest.partition("/")
    name, _, revision = name.partition("@")
    if not (owner and name and pattern):
        raise ConfigError(
            f"{source} names no files on the hub: write hub:OWNER/NAME/FILES, such as data/train-*.parquet"
        )
    import huggingface_hub  # slow to load, and offline data does without it

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                f"{owner}/{name}", repo_type="dataset", revision=revision or None, allow_patterns=[pattern]
            )
        )
    except Exception as error:  # no network, no such set, no access: each has an exception of its own
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"{source} cannot be fetched from the hub, download it and name the file or folder instead: {reason}"
        ) from None
    files = sorted(file for file in folder.glob(pattern) if file.suffix in SUFFIXES)
    if not files:
        raise ConfigError(f"{owner}/{name} has no {', '.join(SUFFIXES)} file {pattern}: look at its list of files")
    # the folder of a snapshot is named after its commit
    return [DataFile(f"hub:{owner}/{name}@{folder.name[:12]}/{file.relative_to(folder)}", file) for file in files]


def _from_package(source: str) -> DataFile:
    package, _, file = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None  # runs none of the package's code
    if spec is None:
        raise ConfigError(f"{source} needs a package: pip install {package.replace('_', '-')}")
    for folder in spec.submodule_search_locations or ():
        if (Path(folder) / file).is_file() and Path(file).suffix in SUFFIXES:
            return DataFile(source, Path(folder) / file)
    raise ConfigError(f"the package {package} has no {', '.join(SUFFIXES)} file {file!r}: write package:PACKAGE/FILE")


def read_columns(file: DataFile) -> list[str]:
    """The names of the columns, for JSON those of the first row that is an object; none if there is no such row.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file.path.suffix == ".parquet":
        return list(_parquet(file).schema_arrow.names)
    return next((list(row) for _, row in read_rows(file, ()) if isinstance(row, Mapping)), [])


def read_rows(file: DataFile, columns: Sequence[str]) -> Iterator[tuple[int, Row | BadRow]]:
    """(row or line number from 1, row or what is wrong with it); of a parquet file the given columns only.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file.path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(file, columns), start=1)
    elif file.path.suffix == ".jsonl":
        yield from _json_lines(file)
    else:
        records = _records(file)
        yield from enumerate((_checked(record) for record in records), start=1)


def _parquet(file: DataFile) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"reading {file.name} needs a package: {PYARROW}") from None
    try:
        return pyarrow.parquet.ParquetFile(file.path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise _unreadable(file, error) from None


def _parquet_rows(file: DataFile, columns: Sequence[str]) -> Iterator[Row]:
    parquet = _parquet(file)
    try:
        for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=list(columns)):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None


def _json_lines(file: DataFile) -> Iterator[tuple[int, Row | BadRow]]:
    try:
        with file.path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _checked(_parsed(line))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from None


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(f"no JSON: {error}")


def _checked(record: Any) -> Row | BadRow:
    if isinstance(record, Mapping | BadRow):
        return record
    return BadRow(f"no object with named values but {type(record).__name__}")


def _records(file: DataFile) -> list[Any]:
    """A list of rows, one row (as in the folders of MATH), or a table "problems" of rows by name (as in CHAMP)."""
    try:
        data = json.loads(file.path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(file, error) from None
    if isinstance(data, list):
        return data
    problems = data.get("problems") if isinstance(data, dict) else None
    return list(problems.values()) if isinstance(problems, dict) else [data]


def _unreadable(file: DataFile, error: Exception) -> ConfigError:
    return ConfigError(f"{file.name} cannot be read, write it again or leave it out: {error}")
