"""What a page holds of the recorded rollouts."""

import json

import numpy as np
import pytest
from reports.synthetic import make_config, make_scored_batch

from steadyrl.reports import recorded, rollout_browser
from steadyrl.reports.recorder import RunFolder, read_rollouts, read_run, recorded_batches
from steadyrl.reports.rollout_browser import browser_data, script_json

LAST = 9


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", make_config("sat-grpo"))


def data_of(folder):
    (run,) = browser_data([read_run(folder.path)])["runs"]
    return run


def edit_rows(folder, change):
    """Apply `change` to every recorded row."""
    for file in recorded_batches(read_run(folder.path)):
        rows = read_rollouts(file)
        for row in rows:
            change(row)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_token_has_its_numbers(folder):
    batch = make_scored_batch(LAST)
    folder.rollouts(batch, lambda token: f"<{token}>")
    run = data_of(folder)
    assert [rule["name"] for rule in run["rules"]][:2] == ["GRPO clip", "SAT-GRPO (this run)"]
    (shown,) = run["batches"]
    assert (shown["title"], shown["total"], shown["note"]) == ("batch 9", 12, "")
    drifts = []
    for row, rollout in zip(shown["rollouts"], batch.rollouts, strict=True):
        d = rollout.consumed.trainer_logp[2:].astype(float) - rollout.behavior_logp[2:].astype(float)
        drifts += np.abs(d).tolist()
        assert row["tokens"] == [f"<{token}>" for token in rollout.token_ids[2:]]
        assert row["d"] == pytest.approx(d.tolist(), rel=1e-3)
        assert row["mu"] == pytest.approx(np.exp(rollout.behavior_logp[2:]).tolist(), rel=1e-3)
        assert row["lag"] == (LAST - rollout.versions[2:]).tolist()
        assert {len(letters) for letters in row["codes"]} == {rollout.num_sampled}
        assert (row["advantage"], row["status"], row["size"]) == (rollout.consumed.advantage, rollout.status, len(d))
    assert shown["scale"] == np.quantile(drifts, 0.99, method="inverted_cdf")


def test_a_folder_of_an_older_version_shows_the_text_and_says_why_it_has_no_colours(folder):
    folder.rollouts(make_scored_batch(text="= 7"), str)
    new = ("token_texts", "trainer_logp", "old_logp", "advantage", "train_version")
    edit_rows(folder, lambda row: [row.pop(name) for name in new])
    (batch,) = data_of(folder)["batches"]
    assert "older version" in batch["note"]
    assert batch["scale"] is None
    assert {row["text"] for row in batch["rollouts"]} == {"= 7"}
    assert not any("tokens" in row or "codes" in row for row in batch["rollouts"])


def test_rollouts_that_were_not_trained_on_show_what_the_engine_said(folder):
    batch = make_scored_batch()
    for rollout in batch.rollouts[:4]:
        rollout.consumed = None
    folder.rollouts(batch, str)
    (shown,) = data_of(folder)["batches"]
    assert shown["note"] == "4 of 12 rollouts were not trained on."
    first, last = shown["rollouts"][0], shown["rollouts"][-1]
    assert set(first["d"]) == set(first["lag"]) == {None}
    assert None not in first["mu"]
    assert "codes" not in first
    assert "codes" in last


def test_tokens_between_sampled_stretches_are_shown_without_numbers(folder):
    batch = make_scored_batch()
    for rollout in batch.rollouts:
        rollout.loss_mask[4] = False
    folder.rollouts(batch, str)
    row = data_of(folder)["batches"][0]["rollouts"][0]
    assert (row["d"][2], row["mu"][2], row["lag"][2], row["codes"][0][2]) == (None, None, None, " ")
    assert row["tokens"][2] == str(batch.rollouts[0].token_ids[4])


def test_a_page_stays_small_whatever_was_recorded(folder, monkeypatch):
    monkeypatch.setattr(rollout_browser, "CHARACTERS", 100_000)
    for number in range(10):
        folder.rollouts(make_scored_batch(number, groups=15), lambda token: "\u202e<" * 50)
    data = browser_data([read_run(folder.path)])
    batches = data["runs"][0]["batches"]
    assert [batch["title"] for batch in batches] == ["batch 0", "batch 3", "batch 6", "batch 9"]
    assert all(1 <= len(batch["rollouts"]) < 48 and batch["total"] == 60 for batch in batches)
    assert 80_000 < len(script_json(data)) < 110_000


def test_a_long_response_is_cut(folder, monkeypatch):
    monkeypatch.setattr(rollout_browser, "TOKENS_EACH", 5)
    batch = make_scored_batch()
    folder.rollouts(batch, str)
    row = data_of(folder)["batches"][0]["rollouts"][0]
    assert len(row["tokens"]) == len(row["d"]) == len(row["codes"][0]) == 5
    assert row["more"] == batch.rollouts[0].num_sampled - 5


def test_a_file_too_large_to_read_is_passed_over(folder, monkeypatch):
    folder.rollouts(make_scored_batch(), str)
    monkeypatch.setattr(recorded, "LARGEST_FILE", 100)
    assert browser_data([read_run(folder.path)]) is None


def test_damaged_rows_do_no_harm(folder):
    folder.rollouts(make_scored_batch(), str)
    edit_rows(folder, lambda row: row.update(token_texts=[1], trainer_logp="no", versions=None, prompt_text=None))
    assert "older version" in data_of(folder)["batches"][0]["note"]


def test_json_in_a_page_holds_no_markup():
    text = script_json({"</script><!--": "\u2028&\ud800"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"</script><!--": "\u2028&\ud800"}
