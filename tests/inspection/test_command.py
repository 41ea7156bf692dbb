"""The command, end to end: what it prints, writes, and how much memory it takes."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inspection import dumps
from rich.console import Console
from typer.testing import CliRunner

from steadyrl.cli import app
from steadyrl.errors import ConfigError
from steadyrl.inspection.answers import answers
from steadyrl.inspection.command import inspect_dumps
from steadyrl.inspection.study import inspect
from steadyrl.inspection.table_files import RULE_COLUMNS, STEP_COLUMNS


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a <script> & folder")
    return dumps.write_own(folder, dumps.make_run(steps=4, responses=30, drift=0.2))


@pytest.fixture(scope="module")
def written(dump):
    out = dump.parent / "out"
    result = CliRunner().invoke(app, ["inspect", str(dump), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return result.output, out


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_terminal_has_checks_answers_and_rules(written):
    text = " ".join(written[0].split())
    assert "120 responses" in text
    assert "4 optimizer steps" in text
    for question in ("How stale", "Where did the mismatch", "What would each clip rule", "What would SAT"):
        assert question in text
    assert "sat-gspo" in text


def test_steps_csv(written, dump):
    found = inspect([dump], ["grpo"])
    rows = rows_of(written[1] / "steps.csv")
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert list(rows[0]) == ["step", "responses", "tokens", *STEP_COLUMNS]
    for row, step in zip(rows, found.steps, strict=True):
        assert int(row["tokens"]) == step.tokens
        assert float(row["d_bar"]) == step.means["mismatch/d_bar"]
        assert float(row["sat_gate_rate"]) == step.means["sat-grpo:sat/gate_rate"]


def test_rules_csv(written, dump):
    found = {totals.rule.name: totals for totals in inspect([dump]).rules}
    rows = {row["rule"]: row for row in rows_of(written[1] / "rules.csv")}
    assert rows["grpo"]["presets"] == "grpo dr-grpo"
    assert rows["dppo-topk-tv"]["not_answered"].startswith("needs the likeliest tokens")
    for name in ("grpo", "sat-grpo", "icepop"):
        for column, key in RULE_COLUMNS.items():
            value = found[name].means().get(key)
            assert rows[name][column] == ("" if value is None else repr(value)), (name, column)


def test_the_page_is_whole_escaped_and_needs_no_network(written):
    page = (written[1] / "inspect.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page)
    assert not re.search(r"url\((?!#)", page)
    assert page.count("<svg") == 8
    assert "prefers-color-scheme: dark" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert "#123456" not in svg  # text and frames follow the page


def test_a_fault_is_announced_on_the_page(tmp_path):
    path = dumps.write_own(tmp_path, dumps.make_run(steps=2, responses=40, longest=120, top_p=0.8))
    inspect_dumps([path], tmp_path / "out", ["grpo"], Console(quiet=True))
    page = (tmp_path / "out" / "inspect.html").read_text(encoding="utf-8")
    assert "Something is wrong with the data" in page


def test_a_dump_without_a_trainer_still_makes_a_page(tmp_path):
    rows = [{"loss_mask": [0, 1], "behavior_logp": [0.0, -1.0]}] * 3
    inspect_dumps([dumps.write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", None, Console(quiet=True))
    assert "lag is unknown" in (tmp_path / "out" / "inspect.html").read_text(encoding="utf-8")
    assert rows_of(tmp_path / "out" / "steps.csv") == []


def test_without_matplotlib_the_tables_are_there(dump, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = Console(record=True, width=200)
    inspect_dumps([dump], tmp_path / "out", ["grpo"], console)
    assert 'pip install "steadyrl[report]"' in console.export_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"steps.csv", "rules.csv"}


def test_without_pyarrow(tmp_path, monkeypatch):
    path = dumps.write_parquet(tmp_path, dumps.make_run(steps=1, responses=2))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"steadyrl\[offline\]"):
        inspect([path])


def test_an_unknown_rule_and_a_folder_that_cannot_be_written(dump, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'dapo'"):
        inspect([dump], ["dapoo"])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another folder with --out"):
        inspect_dumps([dump], tmp_path / "file" / "out", ["grpo"], Console(quiet=True))


def test_an_error_is_all_that_is_printed(tmp_path):
    console = Console(record=True, width=80)
    with pytest.raises(ConfigError, match="no file or folder"):
        inspect_dumps([tmp_path / "gone"], tmp_path / "out", None, console)
    assert console.export_text() == ""


@pytest.mark.parametrize("rules", [",", "", "grpo,,"])
def test_empty_names_of_rules_are_none(dump, tmp_path, rules):
    result = CliRunner().invoke(app, ["inspect", str(dump), "--out", str(tmp_path / "out"), "--rules", rules])
    assert result.exit_code == 0, result.output
    assert {row["rule"] for row in rows_of(tmp_path / "out" / "rules.csv")} == {"grpo", "sat-grpo", "gspo", "sat-gspo"}


@pytest.mark.parametrize(
    ("responses", "sentence"), [(2, r"rules cut none of the \d\d tokens\."), (12, "one token in ten")]
)
def test_a_share_of_few_tokens_is_a_count(tmp_path, responses, sentence):
    rows = dumps.own_rows(dumps.make_run(steps=1, responses=responses, longest=40 if responses == 2 else 1500))
    found = inspect([dumps.write_jsonl(tmp_path / "dump.jsonl", rows)], ["grpo"])
    assert (sum(row.tokens for row in found.steps) > 10_000) == (responses == 12)
    assert re.search(sentence, answers(found)[2].text)


def test_progress_is_reported_to_its_end(dump):
    seen = {}
    inspect([dump], ["grpo"], lambda what, done, total: seen.update({what: (done, total)}))
    assert set(seen) == {"reading", "measuring"}
    assert all(done == total > 0 for done, total in seen.values())


PEAK = """
import sys
from pathlib import Path
from steadyrl.inspection.study import inspect
found = inspect([Path(sys.argv[1])], ["grpo"])
# ru_maxrss would hold what the parent had when it started this process
(peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(found.evidence.active, int(peak.split()[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process where Linux has it")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """One optimizer step, 15 times larger: 1.1 million tokens, 22 MB even in the smallest form, 80 MB in the file."""
    row = json.dumps(dumps.own_rows(dumps.make_run(steps=1, responses=1, longest=4000, seed=3))[0]) + "\n"
    small_pages = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "PYTHONMALLOC")}
    peaks, tokens = [], []
    for copies in (20, 300):
        path = tmp_path / f"{copies}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for _ in range(copies):
                file.write(row)
        words = [sys.executable, "-c", PEAK, str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=small_pages)
        active, peak = map(int, done.stdout.split())
        tokens.append(active)
        peaks.append(peak)
    assert tokens[1] == 15 * tokens[0]
    assert tokens[1] > 10**6
    assert peaks[1] < peaks[0] + 40, peaks  # half of the file's size; what a machine under load adds is below that


def test_the_examples_of_the_document(tmp_path):
    """The row of our own format, and the ten lines that turn a SkyRL batch into such rows."""
    text = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")
    own, skyrl = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", own], cwd=tmp_path, check=True)
    found = inspect([tmp_path / "dump.jsonl"], ["grpo"])
    assert found.evidence.active == 2
    assert dict(found.evidence.ages) == {2: 2}

    batch = {
        "loss_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "rollout_logprobs": torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -0.25, -1.0]]),
        "action_log_probs": torch.tensor([[-1.5, -2.0, -9.0], [-0.5, -0.25, -1.0]]),
        "advantages": torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]),
    }
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))
    subprocess.run([sys.executable, "-c", skyrl, "batch.pkl"], cwd=tmp_path, check=True)
    found = inspect([tmp_path / "skyrl_1.jsonl"], ["grpo"])
    assert found.means["mismatch/d_bar"] == pytest.approx(0.5 / 5)
    assert found.has_advantage
