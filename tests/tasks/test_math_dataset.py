"""The task over data sets: positions, epochs, prompts, grading."""

from __future__ import annotations

import pytest
from tasks.published import GSM8K_SCHEMA, gsm8k_row, jsonl, parquet

from steadyrl.errors import ConfigError
from steadyrl.task_config import MathDatasetTask
from steadyrl.tasks import math_dataset
from steadyrl.tasks.data_record import check_same_data, describe, store_data
from steadyrl.tasks.math_dataset import MathDataset, epoch_order
from steadyrl.tasks.verifier import Verdict

N = 7  # problems of the training set


class StubVerifier:
    """Right if the response is the gold answer; without processes."""

    def __init__(self, *_settings) -> None:
        self.closed = False

    def grade(self, answers):
        return [
            Verdict(float(a.response == a.gold), "right" if a.response == a.gold else "wrong", a.response)
            for a in answers
        ]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(math_dataset, "Verifier", StubVerifier)
    train = parquet(tmp_path / "train.parquet", [gsm8k_row(f"t{i}", str(i)) for i in range(N)], GSM8K_SCHEMA)
    test = jsonl(tmp_path / "test.jsonl", [{"problem": f"h{i}", "answer": str(i)} for i in range(3)])

    def _make(seed: int = 0, **changes) -> MathDataset:
        table = {"name": "math_dataset", "train": [train], "test": [test], "instruction": "", **changes}
        return MathDataset(MathDatasetTask.model_validate(table), tokenizer, seed)

    return _make


def texts(task: MathDataset, start: int, count: int, split="train") -> list[str]:
    return [prompt.text for prompt in task.prompts(split, start, count)]


def test_each_epoch_holds_every_problem_once_in_an_order_of_its_own(make):
    task = make()
    epochs = [texts(task, N * epoch, N) for epoch in range(6)]
    for epoch in epochs:
        assert sorted(epoch) == [f"t{i}" for i in range(N)]
    assert len({tuple(epoch) for epoch in epochs}) == 6


@pytest.mark.parametrize("stop", [5, N - 1, N, N + 1, 2 * N])
def test_a_resumed_task_goes_on_with_the_very_next_prompt_also_at_the_end_of_an_epoch(make, stop: int):
    """Batches of 3 cross the ends of epochs; one process takes the first `stop` prompts, another one the others."""
    whole = [text for start in range(0, 30, 3) for text in texts(make(), start, 3)]
    first, second = make(), make()
    resumed = texts(first, 0, stop) + texts(second, stop, 30 - stop)
    assert resumed == whole
    assert sorted(resumed[:N] + resumed[N : 2 * N]) == sorted(2 * [f"t{i}" for i in range(N)])


def test_positions_may_be_asked_for_in_any_order(make):
    task, again = make(), make()
    assert [texts(task, start, 5) for start in (40, 0, 12)] == [texts(again, start, 5) for start in (40, 0, 12)]
    assert texts(task, 0, 5) == texts(again, 0, 5)


def test_the_seed_decides_the_order_of_training_and_nothing_of_the_test(make):
    assert texts(make(seed=0), 0, N) != texts(make(seed=1), 0, N)
    assert texts(make(seed=0), 0, 3, "test") == texts(make(seed=1), 0, 3, "test") == ["h0", "h1", "h2"]


def test_orders_are_fixed_for_good():
    """A checkpoint of today is resumed by a version of tomorrow: these numbers must never change."""
    assert [epoch_order(8, 0, epoch) for epoch in range(2)] == [[7, 0, 1, 5, 3, 4, 2, 6], [5, 7, 6, 1, 0, 2, 4, 3]]
    assert epoch_order(8, 1, 0) == [5, 3, 7, 0, 4, 2, 6, 1]


def test_every_place_of_an_order_is_equally_likely():
    """Of 4000 orders of 4, each of the 24 comes about 167 times; chi-square with 23 degrees of freedom, 1 in 1000."""
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(4000):
        order = tuple(epoch_order(4, 5, epoch))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 4000 / 24) ** 2 / (4000 / 24) for count in counts.values()) < 49.7


def test_a_prompt_is_the_problem_and_the_instruction_and_knows_where_it_comes_from(make, tokenizer, tmp_path):
    prompt = make(instruction="9+9=").prompts("test", 1, 1)[0]
    assert prompt.text == "h1\n\n9+9="
    assert prompt.token_ids.tolist() == tokenizer.encode(prompt.text)
    assert (prompt.prompt_id, prompt.answer) == ("test/1", "1")
    assert prompt.meta == {"source": str(tmp_path / "test.jsonl"), "place": f"{tmp_path / 'test.jsonl'} row 2"}


def test_test_problems_are_never_trained_on(make, tmp_path):
    both = jsonl(tmp_path / "both.jsonl", [{"problem": " h1\n", "answer": "1"}, {"problem": "t", "answer": "1"}])
    task = make(train=[both])
    assert texts(task, 0, 2) == ["t", "t"]
    assert task.data["train"]["sources"][0]["in_test_set"] == 1


def test_missing_problems_are_refused(make):
    assert make().test_size == 3
    with pytest.raises(
        ConfigError, match=r"the test sources hold 3 problems: set evaluation\.prompts to that, or to 0"
    ):
        make().prompts("test", 0, 4)
    with pytest.raises(ConfigError, match=r"task\.train names no problems"):
        make(train=[]).prompts("train", 0, 1)


def test_grades_are_the_verdicts_with_answers_in_one_spelling(make):
    task = make()
    prompts = task.prompts("test", 0, 3)
    grades = task.grade_all(prompts, ["0", r"\dfrac{1}{2}.", "2"])
    assert [(grade.reward, grade.status, grade.answer) for grade in grades] == [
        (1.0, "right", "0"),
        (0.0, "wrong", r"\frac{1}{2}"),
        (1.0, "right", "2"),
    ]


def test_the_real_verifier_grades_in_order(make, monkeypatch):
    pytest.importorskip("math_verify", reason="math-verify (extra `real`) is not installed")
    from steadyrl.tasks.verifier import Verifier

    monkeypatch.setattr(math_dataset, "Verifier", Verifier)
    task = make(verifier={"workers": 1})
    try:
        prompts = task.prompts("test", 0, 3)
        grades = task.grade_all(prompts, [r"So \boxed{0}.", r"\boxed{\frac{2}{2}}", "I do not know"])
    finally:
        task.close()
    assert [grade.status for grade in grades] == ["right", "right", "unparsable"]
    assert grades[1].answer == r"\frac{2}{2}"


def test_the_name_of_the_grader_changes_with_the_policy(make, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text('percent = "converted"\n', encoding="utf-8")
    one, other = make().grader, make(verifier={"policy": str(policy)}).grader
    assert one != other
    assert "math-verify" in one


def test_the_data_are_described_and_a_run_goes_on_with_the_same_ones_only(make, tmp_path):
    task = make()
    sentences = describe(task.data)
    assert f"train data: {tmp_path / 'train.parquet'}: 7 rows, 7 different problems" in sentences
    assert sentences[1] == f"train data: 7 problems, checksum {task.data['train']['checksum']}"
    with pytest.raises(ConfigError, match=r"data\.json cannot be read"):
        check_same_data(tmp_path, task.data)
    store_data(tmp_path, task.data)
    check_same_data(tmp_path, make(seed=5).data)
    parquet(tmp_path / "train.parquet", [gsm8k_row(f"t{i}", str(i)) for i in range(N + 1)], GSM8K_SCHEMA)
    with pytest.raises(
        ConfigError, match=r"the train data of .* have changed .*: restore them, or start a new run_dir"
    ):
        check_same_data(tmp_path, make().data)


def test_a_procedural_task_has_nothing_to_store(tmp_path):
    store_data(tmp_path, {})
    check_same_data(tmp_path, {})
    assert describe({}) == []
    assert list(tmp_path.iterdir()) == []
