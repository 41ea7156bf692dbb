"""What a name stands for, in which order, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from inspection import dumps

from steadyrl.errors import ConfigError
from steadyrl.inspection.sources import find_sources
from steadyrl.inspection.study import inspect


@pytest.fixture(scope="module")
def run():
    return dumps.make_run(steps=12, responses=2, longest=8)


def names(paths):
    return [source.path.name for _, source in find_sources(paths)]


def test_a_run_folder_means_its_rollouts(tmp_path, run):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for batch in (2, 10):
        dumps.write_jsonl(tmp_path / "rollouts" / f"batch_{batch:06d}.jsonl", dumps.own_rows(run))
    assert names([tmp_path]) == ["batch_000002.jsonl", "batch_000010.jsonl"]


def test_steps_come_in_the_order_of_their_numbers(tmp_path, run):
    dumps.write_prime_rl(tmp_path, run)
    places = [source.path.parent.name for _, source in find_sources([tmp_path])]
    assert places == [f"step_{step}" for step in range(12) for _ in range(2)]


def test_several_files(tmp_path, run):
    first = dumps.write_own(tmp_path / "a", run)
    second = dumps.write_nemo_rl(tmp_path / "b", run)
    assert len(find_sources([first, second])) == 1 + 12
    with pytest.raises(ConfigError, match="named twice"):
        find_sources([first, first.parent])


def test_a_step_without_its_marker_is_named(tmp_path, run):
    dumps.write_prime_rl(tmp_path, run)
    (tmp_path / "token_exports" / "step_3" / "STABLE").unlink()
    assert any("no STABLE marker in step_3:" in note for note in inspect([tmp_path], ["grpo"]).notes)


def test_the_file_is_the_step_where_nothing_else_says_it(tmp_path, run):
    rows = [{**row, "train_version": None} for row in dumps.own_rows(run)]
    dumps.write_jsonl(tmp_path / "a.jsonl", rows[:10])
    dumps.write_jsonl(tmp_path / "b.jsonl", rows[10:])
    found = inspect([tmp_path], ["grpo"])
    assert [(row.step, row.responses) for row in found.steps] == [("file 1", 10), ("file 2", 14)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "", "is none of .jsonl"),
        ("x.jsonl", "not json\n", "first line of .* is not JSON"),
        (
            "x.jsonl",
            '{"text": "a", "reward": 1}\n',
            r"no log-probabilities under a known name \(its first keys: reward",
        ),
        ("x.jsonl", "[1, 2]\n", r"line 1 of .* is not an object"),
        ("x.jsonl", "\n3\n", r"line 2 of .* is not an object"),
        ("x.jsonl", "null\n", r"line 1 of .* is not an object"),
        (
            "x.jsonl",
            '{"behavior_logp": [], "trainer_logp": []}\n',
            "has behavior_logp and trainer_logp, but no loss_mask",
        ),
        ("x.jsonl", '{"loss_mask": [], "trainer_logp": []}\n', "has trainer_logp, but no behavior_logp"),
        ("x.jsonl", '{"trainer_logprobs": []}\n', "but no inference_logprobs and no loss_mask"),
        ("x.jsonl", '{"prev_logprobs": [], "token_loss_mask": []}\n', "but no generation_logprobs:"),
        ("x.jsonl", '{"generation_logprobs": [], "content": ""}\n', "without token_loss_mask"),
        ("x.parquet", "no parquet", "is not a parquet file"),
        ("x.pt", "no archive", "cannot be read without running code from it, or is damaged"),
    ],
)
def test_refused_in_one_sentence(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        inspect([path])
    assert "\n" not in str(refusal.value)


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match="no file or folder"):
        inspect([tmp_path / "gone"])
    with pytest.raises(ConfigError, match="holds no token data"):
        inspect([tmp_path])
    (tmp_path / "empty.jsonl").touch()
    for content in ("", "\n \n"):
        (tmp_path / "empty.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=r"empty\.jsonl is empty"):
            inspect([tmp_path])


def test_the_reason_of_a_damaged_archive_ends_with_a_word(tmp_path, monkeypatch):
    def load(*_arguments, **_options):
        raise RuntimeError("damaged " * 40)

    monkeypatch.setattr(torch, "load", load)
    (tmp_path / "0.pt").touch()
    with pytest.raises(ConfigError, match=r"\((damaged ){5,}\.\.\.\): convert"):
        inspect([tmp_path / "0.pt"])


def test_a_pickle_is_refused_with_the_way_out(tmp_path):
    """SkyRL's batches; loading one would run what is in it."""
    path = tmp_path / "dumped_data" / "global_step_1_training_input.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({"a": 1}))
    for named in (path, tmp_path):
        with pytest.raises(ConfigError, match=r"loading one runs whatever code is in it.*docs/inspect\.md"):
            inspect([named])


class Payload:
    def __reduce__(self):
        return (eval, ("open('ran', 'w')",))


def test_code_in_an_archive_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 0, "samples": [Payload()]}, tmp_path / "0.pt")
    with pytest.raises(ConfigError, match="cannot be read without running code"):
        inspect([tmp_path / "0.pt"])
    assert not (tmp_path / "ran").exists()


def test_tool_tokens_and_bfloat16_of_slime(tmp_path, run):
    """Tokens that the policy did not sample are masked inside the response; a trainer may store bfloat16."""
    dumps.write_slime(tmp_path, run)
    path = tmp_path / "train_data" / "11.pt"
    payload = torch.load(path, weights_only=True)
    first = payload["samples"][0]
    first["loss_masks"][1] = 0
    first["rollout_log_probs"][1] = float("nan")
    first["log_probs"] = first["log_probs"].bfloat16()
    torch.save(payload, path)
    found = inspect([path], ["grpo"])
    assert found.evidence.active == sum(sum(one.loss_mask) for one in run if one.step == 11) - 1
    assert not found.evidence.not_finite
    assert found.evidence.version_spans  # the rollout file beside it was read, numpy arrays and all


def test_a_sample_that_nemo_rl_masks_is_not_counted(tmp_path, run):
    dumps.write_nemo_rl(tmp_path, run)
    path = tmp_path / "train_data_step5.jsonl"
    path.write_text(path.read_text().replace('"sample_loss_mask": 1.0', '"sample_loss_mask": 0.0', 1))
    found = inspect([path], ["grpo"])
    assert (found.evidence.rows, found.evidence.responses, found.evidence.empty) == (2, 1, 1)


def test_missing_fields_limit_the_answer_not_the_tool(tmp_path, run):
    """No trainer side, no advantages, no versions, no tokens: each takes away what needs it, with a sentence."""
    from steadyrl.inspection.answers import answers

    rows = dumps.own_rows(run)
    least = [{"loss_mask": row["loss_mask"], "behavior_logp": row["behavior_logp"]} for row in rows]
    texts = [answer.text for answer in answers(inspect([dumps.write_jsonl(tmp_path / "a.jsonl", least)]))]
    assert "lag is unknown" in texts[0]
    assert "no response has log-probabilities of the trainer" in texts[1]
    assert texts[2].startswith("Unknown")
    assert texts[3].startswith("Unknown")

    more = [{**row, "trainer_logp": full["trainer_logp"]} for row, full in zip(least, rows, strict=True)]
    found = inspect([dumps.write_jsonl(tmp_path / "b.jsonl", more)])
    texts = [answer.text for answer in answers(found)]
    assert "cannot be told apart" in texts[1]
    assert "Advantages are not recorded" in texts[2]
    assert "sat-grpo would have narrowed the interval" in texts[3]
    assert "removed the gradient" not in texts[3]
    unanswered = {totals.rule.name: totals.missing for totals in found.rules if not totals.steps}
    assert "old_logp" in unanswered["icepop"]
    assert "train_version" in unanswered["a3po"]


def test_engine_and_age_told_apart(tmp_path):
    from steadyrl.inspection.answers import answers

    stale = dumps.make_run(steps=8, responses=24, engine_noise=0.01, drift=0.2)
    by_split = answers(inspect([dumps.write_own(tmp_path / "a", stale)], ["grpo"]))[1].text
    assert "Training is the larger part" in by_split
    rows = [{**row, "old_logp": None} for row in dumps.own_rows(stale)]
    by_age = answers(inspect([dumps.write_jsonl(tmp_path / "b.jsonl", rows)], ["grpo"]))[1].text
    assert "at lag 0 there is only the engine" in by_age
    fresh = dumps.make_run(steps=1, responses=24)
    rows = [{**row, "old_logp": None} for row in dumps.own_rows(fresh)]
    all_fresh = answers(inspect([dumps.write_jsonl(tmp_path / "d.jsonl", rows)], ["grpo"]))[1].text
    assert "Every token was fresh, so all of it is the engine's" in all_fresh
    noisy = dumps.make_run(steps=8, responses=24, engine_noise=0.3, drift=0.01)
    assert (
        "The engine is the larger part" in answers(inspect([dumps.write_own(tmp_path / "c", noisy)], ["grpo"]))[1].text
    )


def test_noise_that_grows_along_the_response(tmp_path):
    from steadyrl.inspection.answers import answers

    rng = np.random.default_rng(0)
    rows = dumps.own_rows(dumps.make_run(steps=2, responses=200, longest=100, engine_noise=0.0, drift=0.0))
    for row in rows:
        n = len(row["token_ids"]) - dumps.PROMPT
        noise = rng.normal(size=n) * np.linspace(1e-3, 0.05, n)
        row["behavior_logp"] = [0.0] * dumps.PROMPT + np.minimum(
            row["behavior_logp"][dumps.PROMPT :] + noise, 0
        ).tolist()
    text = answers(inspect([dumps.write_jsonl(tmp_path / "dump.jsonl", rows)], ["grpo"]))[1].text
    assert "It grows along the response" in text
