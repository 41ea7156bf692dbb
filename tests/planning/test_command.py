"""`steadyrl plan`, from its words to its tables and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadyrl.cli import main
from steadyrl.planning.display import seconds, size

RECIPES = Path(__file__).parent.parent.parent / "recipes"
TINY, PAPER = str(RECIPES / "tiny.toml"), str(RECIPES / "paper_qwen3_30b_a3b.toml")


def plan(monkeypatch, capsys, *words):
    """Exit code, output, errors."""
    monkeypatch.setattr("sys.argv", ["steadyrl", "plan", *words])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    return end.value.code, printed.out, printed.err


def test_the_paper_s_recipe(monkeypatch, capsys, tmp_path):
    out = tmp_path / "plan.json"
    code, text, _ = plan(monkeypatch, capsys, PAPER, "--all-regimes", "--steps", "4", "--json", str(out))
    assert code == 0
    assert "30,532,122,624 parameters P, 3,353,032,704 active for a token" in text
    for name in ("AdamW moments", "activations", "keys and values", "rollouts to the trainer", "train_tokens_per_s"):
        assert name in text
    assert "assumed from the data sheet of a GPU and not measured" in text
    found = json.loads(out.read_text())
    assert [one["regime"] for one in found["predictions"]] == ["batch", "sync", "streaming"]
    batch, sync, _ = found["predictions"]
    assert sync["lag_max"] == 0
    assert batch["lag_max"] <= 8
    assert batch["step_s"] < sync["step_s"]
    weights = {item["name"]: item["total"] for item in found["memory"]["trainer"]}["weights"]
    assert weights == 4 * 30_532_122_624
    assert set(found["rates"]["assumed"]) == found["rates"].keys() - {"source", "assumed", "hardware"}


def test_every_server_is_an_engine_that_gets_the_weights(monkeypatch, capsys, tmp_path):
    sent = []
    for urls in ('["http://a:1"]', '["http://a:1", "http://b:1"]'):
        out = tmp_path / "plan.json"
        words = [PAPER, f"engine.urls={urls}", "--steps", "2", "--json", str(out)]
        assert plan(monkeypatch, capsys, *words)[0] == 0
        sent.append(json.loads(out.read_text())["traffic"][0])
    assert sent[0]["name"] == "weights to the engines"
    assert sent[1]["bytes_per_step"] == 2 * sent[0]["bytes_per_step"]


def test_only_the_recipe_s_own_regime_by_default(monkeypatch, capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert plan(monkeypatch, capsys, TINY, "--steps", "4", "--json", str(out))[0] == 0
    assert [one["regime"] for one in json.loads(out.read_text())["predictions"]] == ["batch"]


def test_a_regime_that_the_recipe_cannot_have_is_named(monkeypatch, capsys):
    words = [TINY, "objective.anchor=old_actor", "--all-regimes", "--steps", "4"]
    code, text, _ = plan(monkeypatch, capsys, *words)
    assert code == 0
    assert "no streaming row: objective.anchor" in text
    assert "no sync row: objective.anchor" in text


def test_rates_of_a_file(monkeypatch, capsys, tmp_path):
    file, out = tmp_path / "rates.toml", tmp_path / "plan.json"
    file.write_text("train_step_s = 1000\n")
    assert plan(monkeypatch, capsys, TINY, "--rates", str(file), "--steps", "4", "--json", str(out))[0] == 0
    assert json.loads(out.read_text())["predictions"][0]["step_s"] == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.toml"], "there is no file nowhere.toml"),
        ([TINY, "pipeline.lags=3"], "unknown key 'pipeline.lags'"),
        ([TINY, "--rates", "nowhere.toml"], "there is no file of rates at nowhere.toml"),
        ([TINY, "--from-run", "nowhere"], "there is no run folder at nowhere"),
        ([TINY, "--from-run", "a", "--rates", "b"], "give one of --from-run and --rates"),
        ([TINY, "--json", "nowhere/plan.json"], "choose another --json"),
        ([TINY, "model.path=no such folder"], "set model.path to"),
    ],
)
def test_a_bad_input_is_one_sentence_and_exit_code_2(monkeypatch, capsys, words, message):
    code, _, errors = plan(monkeypatch, capsys, *words, "--steps", "4")
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (114 * 2**30, "114 GiB"), (2**50 * 5000, "5000 PiB")],
)
def test_sizes(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (2.5e-5, "25 us"), (0.0123, "12.3 ms"), (59, "59 s"), (3600, "60 min"), (36_000, "10 h")],
)
def test_durations(value, text):
    assert seconds(value) == text
