"""Files, folders, packages and the hub (a double of its download function: no network here)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tasks.published import GSM8K_SCHEMA, gsm8k_row, jsonl, parquet

from steadyrl.errors import ConfigError
from steadyrl.tasks.schemas import BadRow
from steadyrl.tasks.sources import PUBLISHED, DataFile, find_files, read_columns, read_rows


def file_of(path: Path | str) -> DataFile:
    return DataFile(Path(path).name, Path(path))


def test_a_folder_is_read_with_its_subfolders_in_a_fixed_order(tmp_path):
    for name in ("b/2.jsonl", "a/1.jsonl", "a/notes.txt"):
        jsonl(tmp_path / name, [{"problem": "p", "answer": "1"}])
    names = [Path(file.name).relative_to(tmp_path).as_posix() for file in find_files(str(tmp_path), "train")]
    assert names == ["a/1.jsonl", "b/2.jsonl"]


def test_parquet_gives_the_wanted_columns_with_row_numbers(tmp_path):
    rows = [gsm8k_row(f"q{i}", str(i)) for i in range(3)]
    file = file_of(parquet(tmp_path / "x.parquet", rows, GSM8K_SCHEMA))
    assert read_columns(file) == ["question", "answer"]
    assert list(read_rows(file, ["question"])) == [(i + 1, {"question": f"q{i}"}) for i in range(3)]


def test_json_lines_are_numbered_and_a_broken_one_does_not_hide_the_next(tmp_path):
    file = file_of(jsonl(tmp_path / "x.jsonl", ['{"a": 1}', "", "{broken", "[1]", '{"a": 2}']))
    found = list(read_rows(file, ()))
    assert [number for number, _ in found] == [1, 3, 4, 5]
    assert [row for _, row in found if not isinstance(row, BadRow)] == [{"a": 1}, {"a": 2}]
    assert "no JSON" in str(found[1][1])
    assert "no object with named values but list" in str(found[2][1])
    assert read_columns(file) == ["a"]


def test_three_shapes_of_json(tmp_path):
    row = {"problem": "p", "answer": "1"}
    for name, data in {"list": [row, 7], "one": row, "named": {"problems": {"P_1": row}, "hints": {}}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
        found = [given for _, given in read_rows(file_of(tmp_path / f"{name}.json"), ())]
        assert found[0] == row
        assert (len(found), isinstance(found[-1], BadRow)) == ((2, True) if name == "list" else (1, False))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A double of the hub: what it was asked for, and a snapshot folder to answer with."""
    asked: list[tuple] = []
    snapshot = tmp_path / "snapshots" / "0123456789abcdef"

    def download(repo: str, *, repo_type: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, repo_type, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked, snapshot


def test_a_published_set_is_asked_of_the_hub_by_split(hub):
    asked, snapshot = hub
    for split in ("train", "test"):
        parquet(snapshot / f"main/{split}-00000-of-00001.parquet", [gsm8k_row("q", "1")], GSM8K_SCHEMA)
        (file,) = find_files("gsm8k", split)
        assert file.name == f"hub:openai/gsm8k@0123456789ab/main/{split}-00000-of-00001.parquet"
        assert asked[-1] == ("openai/gsm8k", "dataset", None, [f"main/{split}-*.parquet"])


def test_a_revision_goes_to_the_hub(hub):
    asked, snapshot = hub
    jsonl(snapshot / "data.jsonl", [])
    find_files("hub:someone/some.set@v1.2/data.jsonl", "test")
    assert asked == [("someone/some.set", "dataset", "v1.2", ["data.jsonl"])]


def test_what_the_hub_cannot_give_is_one_sentence(hub, monkeypatch):
    with pytest.raises(ConfigError, match=r"someone/set has no .* file data/\*\.parquet"):
        find_files("hub:someone/set/data/*.parquet", "test")
    for short in ("hub:someone/set", "hub:someone", "hub:"):
        with pytest.raises(ConfigError, match="names no files on the hub"):
            find_files(short, "test")

    def offline(*_args, **_settings):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"cannot be fetched from the hub, download it and .* instead: no route$"):
        find_files("aime24", "test")


def test_a_file_of_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "some_problems"
    jsonl(package / "data" / "v0.jsonl", [{"problem": "p", "answer": "1"}])
    (package / "__init__.py").write_text("raise RuntimeError('a package is not run')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (file,) = find_files("package:some_problems/data/v0.jsonl", "test")
    assert file.path == package / "data" / "v0.jsonl"
    assert "some_problems" not in sys.modules
    with pytest.raises(ConfigError, match=r"has no .* file 'v1\.jsonl'"):
        find_files("package:some_problems/v1.jsonl", "test")
    with pytest.raises(ConfigError, match="pip install not-there"):
        find_files("package:not_there/v0.jsonl", "test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing", None, "no file or folder .*nothing; published sets are dapo, dolci, aime24"),
        ("x.csv", b"a,b", "is no .parquet, .jsonl, .json file"),
        ("x.parquet", b"not parquet", "x.parquet cannot be read"),
        ("x.json", b"{", "x.json cannot be read"),
        ("x.jsonl", b"\xff\xfe{", "x.jsonl cannot be read"),
    ],
)
def test_unusable_files(tmp_path, name: str, content: bytes | None, message: str):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_all(str(path))


def read_all(source: str) -> list:
    return [list(read_rows(file, read_columns(file))) for file in find_files(source, "train")]


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no \.parquet"):
        find_files(str(tmp_path), "train")


def test_parquet_without_its_package_is_named_with_the_extra(tmp_path, monkeypatch):
    path = parquet(tmp_path / "x.parquet", [gsm8k_row("q", "1")], GSM8K_SCHEMA)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install \"steadyrl\[real\]\""):
        read_columns(file_of(path))


def test_every_published_set_has_files_for_both_splits():
    for published in PUBLISHED.values():
        assert published.train.startswith(("hub:", "package:"))
        assert published.test.startswith(("hub:", "package:"))
