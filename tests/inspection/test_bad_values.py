"""Values of the wrong kind: the row is left out and named, or the file refused in a sentence; nothing is mended."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from inspection import dumps

from steadyrl.errors import ConfigError
from steadyrl.inspection.formats import Source, nemo_rl_response, own_response, prime_rl_response, slime_rows
from steadyrl.inspection.response import BadRow
from steadyrl.inspection.study import inspect

HUGE = 10**400  # an integer that no float holds


@pytest.fixture(scope="module")
def run():
    return dumps.make_run(steps=2, responses=10)


def changed(row, name, value):
    """With a value, or with what a function makes of the one there."""
    return {**row, name: value(row[name]) if callable(value) else value}


def first_is(value):
    return lambda values: [*values[:-1], value]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("versions", first_is(4.5), "versions has entries that are no whole numbers of 32 bits"),
        ("versions", first_is(2**31), "versions has entries that are no whole numbers of 32 bits"),
        ("versions", first_is(1e300), "versions has entries that are no whole numbers of 32 bits"),
        ("versions", first_is(None), "versions has entries that are no whole numbers of 32 bits"),
        ("versions", first_is(HUGE), "versions is not a list of numbers"),
        ("versions", first_is("4"), "versions is not a list of numbers"),
        ("versions", lambda values: [True] * len(values), "versions has entries that are no whole numbers"),
        ("versions", 3, "versions is not a list of numbers"),
        ("token_ids", first_is(0.5), "token_ids has entries that are no whole numbers of 64 bits"),
        ("token_ids", first_is(2**63), "token_ids has entries that are no whole numbers of 64 bits"),
        ("train_version", 6.5, "train_version is not a whole number from 0 to 2,147,483,647"),
        ("train_version", 10**30, "train_version is not a whole number"),
        ("train_version", 2**31, "train_version is not a whole number"),
        ("train_version", -1, "train_version is not a whole number"),
        ("train_version", "6", "train_version is not a whole number"),
        ("train_version", True, "train_version is not a whole number"),
        ("train_version", float("nan"), "train_version is not a whole number"),
        ("step", "a", "step is not a whole number"),
        ("step", [1], "step is not a whole number"),
        ("reward", "x", "reward is not a finite number"),
        ("reward", HUGE, "reward is not a finite number"),
        ("reward", float("nan"), "reward is not a finite number"),
        ("reward", {"score": 1}, "reward is not a finite number"),
        ("advantage", HUGE, "advantage is beyond all floats"),
        ("advantage", "x", "advantage is not a list of numbers"),
        ("behavior_logp", first_is("-0.5"), "behavior_logp is not a list of numbers"),
        ("behavior_logp", lambda values: [None, "-0.5", *values[2:]], "behavior_logp is not a list of numbers"),
        ("trainer_logp", first_is(HUGE), "trainer_logp is not a list of numbers"),
        ("loss_mask", first_is("1"), "loss_mask is not a list of numbers"),
    ],
)
def test_the_row_is_left_out_and_named(tmp_path, run, name, value, problem):
    rows = dumps.own_rows(run)
    rows[3] = changed(rows[3], name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = inspect([dumps.write_jsonl(tmp_path / "dump.jsonl", rows)], ["grpo"])
    check = found.checks[0]
    assert check.state == "bad"
    assert check.sentence.startswith(f"1 of 20 rows were left out, such as dump.jsonl: {problem}")
    assert found.evidence.responses == sum(row.responses for row in found.steps) == 19


@pytest.mark.parametrize("value", [1e308, -1e39, [1e308], float("inf"), float("nan")])
def test_an_advantage_beyond_float32_is_left_out_and_named(tmp_path, run, value):
    rows = dumps.own_rows(run)
    rows[3]["advantage"] = value * len(rows[3]["loss_mask"]) if isinstance(value, list) else value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = inspect([dumps.write_jsonl(tmp_path / "dump.jsonl", rows)], ["grpo"])
    numbers = next(check for check in found.checks if check.name == "numbers")
    assert numbers.state == "bad"
    assert "(1 of the advantage)" in numbers.sentence
    assert sum(row.responses for row in found.steps) == 19


def test_whole_numbers_may_be_written_as_floats(tmp_path, run):
    """As pandas does with a column that has nulls."""
    rows = dumps.own_rows(run)
    plain = inspect([dumps.write_jsonl(tmp_path / "a.jsonl", rows)], ["grpo"])
    for row in rows:
        row |= {name: [float(value) for value in row[name]] for name in ("versions", "token_ids", "loss_mask")}
        row |= {"train_version": float(row["train_version"]), "reward": int(row["reward"])}
    floats = inspect([dumps.write_jsonl(tmp_path / "b.jsonl", rows)], ["grpo"])
    assert floats.evidence == plain.evidence
    assert [row.step for row in floats.steps] == ["0", "1"]


def test_the_other_formats_are_as_strict(tmp_path):
    source = Source(tmp_path / "x", 0)
    prime = {"loss_mask": [1], "inference_logprobs": [-1.0], "rewards": [0.5], "step": 3}
    assert prime_rl_response(prime, source).reward == 0.5
    with pytest.raises(BadRow, match="rewards is not a finite number"):
        prime_rl_response({**prime, "rewards": ["x"]}, source)
    with pytest.raises(BadRow, match="step is not a whole number"):
        prime_rl_response({**prime, "step": 3.5}, source)
    nemo = {"token_loss_mask": [0, 1], "generation_logprobs": [0.0, -1.0], "input_lengths": 2}
    assert nemo_rl_response(nemo, source).loss_mask.tolist() == [False, True]
    with pytest.raises(BadRow, match="input_lengths is not a whole number"):
        nemo_rl_response({**nemo, "input_lengths": 1.5}, source)
    with pytest.raises(BadRow, match="sample_loss_mask is not a finite number"):
        nemo_rl_response({**nemo, "sample_loss_mask": "no"}, source)


def test_samples_of_slime_that_are_none(tmp_path, run):
    dumps.write_slime(tmp_path, run)
    path = tmp_path / "train_data" / "1.pt"
    payload = torch.load(path, weights_only=True)
    payload["samples"][0]["rollout_position"] = 0.5
    payload["samples"][1] = [1, 2]
    payload["samples"][2]["rollout_position"] = torch.tensor(2)
    torch.save(payload, path)
    rows = [row for row, _ in slime_rows(path)]
    assert rows[0].startswith("1.pt: rollout_position is not a whole number")
    assert rows[1] == "1.pt: sample 2 is no table"
    assert rows[2]["weight_version"] == max(run[12].versions)
    found = inspect([path], ["grpo"])
    assert sum(found.evidence.unusable.values()) == 2
    assert found.evidence.responses == 8
    payload["rollout_id"] = "1"
    torch.save(payload, path)
    with pytest.raises(ConfigError, match="rollout_id is not a whole number"):
        inspect([path])


def test_numbers_of_numpy_are_numbers(tmp_path):
    row = {"loss_mask": [1], "behavior_logp": [-1.0], "train_version": np.int64(3), "advantage": np.float32(0.5)}
    response = own_response({**row, "reward": np.float64(1.0)}, Source(tmp_path / "x", 0))
    assert (response.train_version, response.reward, response.step) == (3, 1.0, ("step", 3))
    assert response.advantage is not None
    assert response.advantage.tolist() == [0.5]


def test_a_last_line_that_is_cut_off_is_counted_and_named(tmp_path, run):
    rows = dumps.own_rows(run)
    path = dumps.write_jsonl(tmp_path / "dump.jsonl", rows)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:-30], encoding="utf-8")
    found = inspect([path], ["grpo"])
    assert found.checks[0].state == "good"  # a run goes on writing
    assert found.checks[0].sentence.startswith("1 of 20 rows were left out, such as dump.jsonl, line 20: cut off")
    assert found.evidence.responses == 19
    path.write_text(text[:-30] + "\n" + json.dumps(rows[0])[:-30], encoding="utf-8")
    found = inspect([path], ["grpo"])
    assert found.checks[0].state == "bad"
    assert sum(found.evidence.unusable.values()) == 2
    path.write_text(text[:-1], encoding="utf-8")  # whole, but for the end of its line
    assert inspect([path], ["grpo"]).checks[0].sentence.startswith("All 20 rows")


@pytest.mark.parametrize("part", ["rows", "description"])
def test_a_damaged_parquet_file_is_refused_in_one_sentence(tmp_path, run, part):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "dump.parquet"
    pq.write_table(pa.Table.from_pylist(dumps.own_rows(run)), path, row_group_size=5)
    inspect([path], ["grpo"])
    content = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(2)
    columns = [group.column(index) for index in range(group.num_columns)]
    pages = next(column for column in columns if column.path_in_schema.startswith("behavior_logp"))
    place = pages.dictionary_page_offset or pages.data_page_offset
    place = place if part == "rows" else len(content) - 100
    content[place : place + 60] = bytes(60)
    path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match=r"dump\.parquet is not a parquet file that can be read") as refusal:
        inspect([path], ["grpo"])
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("write it again")
