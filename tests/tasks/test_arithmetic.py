"""The running-sum task: disjoint splits, exact grading."""

from __future__ import annotations

import pytest

from steadyrl.errors import ConfigError
from steadyrl.task_config import ArithmeticTask
from steadyrl.tasks.arithmetic import Arithmetic, question, split_of, steps


@pytest.fixture
def task(tokenizer):
    return Arithmetic(ArithmeticTask(), tokenizer, seed=3)


def test_train_and_test_are_disjoint_and_the_test_has_no_doubles(task):
    train = {prompt.text for prompt in task.prompts("train", 0, 3000)}
    held_out = [prompt.text for prompt in task.prompts("test", 0, 500)]
    assert len(set(held_out)) == 500
    assert not train & set(held_out)


def test_prompts_are_found_again_from_their_position(tokenizer, task):
    again = Arithmetic(ArithmeticTask(), tokenizer, seed=3)
    assert [p.text for p in again.prompts("train", 95, 10)] == [p.text for p in task.prompts("train", 90, 20)][5:15]
    other = Arithmetic(ArithmeticTask(), tokenizer, seed=4)
    assert [p.text for p in other.prompts("train", 0, 10)] != [p.text for p in task.prompts("train", 0, 10)]


def test_the_held_out_set_is_the_same_for_every_seed(tokenizer, task):
    other = Arithmetic(ArithmeticTask(), tokenizer, seed=4)
    assert [p.text for p in other.prompts("test", 0, 50)] == [p.text for p in task.prompts("test", 0, 50)]


def test_a_prompt_is_its_text_behind_one_bos(tokenizer, task):
    prompt = task.prompts("train", 0, 1)[0]
    assert prompt.token_ids[0] == tokenizer.bos_token_id
    assert (prompt.token_ids == tokenizer.bos_token_id).sum() == 1
    assert tokenizer.decode(prompt.token_ids[1:]) == prompt.text
    assert int(prompt.answer) == sum(map(int, prompt.text.rstrip("=").split("+")))


@pytest.mark.parametrize(
    ("offset", "form", "expected"),
    [
        (0, "11,{}", (1.0, "right")),
        (0, "{}", (1.0, "right")),
        (0, "0{}", (1.0, "right")),
        (1, "11,{}", (0.0, "wrong")),
        (0, "{},11", (0.0, "wrong")),
        (0, "11," + 5000 * "9", (0.0, "wrong")),
        (0, "11,{},", (0.0, "unparsable")),
        (0, "", (0.0, "unparsable")),
        (0, "11,{}=", (0.0, "unparsable")),
        (0, "11,-{}", (0.0, "unparsable")),
    ],
)
def test_grading(task, offset, form, expected):
    prompt = task.prompts("train", 0, 1)[0]
    grade = task.grade_all([prompt], [form.format(int(prompt.answer) + offset)])[0]
    assert (grade.reward, grade.status) == expected
    assert (grade.answer is None) == (grade.status == "unparsable")


def test_grades_come_in_order_with_the_answer_in_one_spelling(task):
    prompts = task.prompts("train", 0, 3)
    responses = [f"1,00{prompts[0].answer}", "no", prompts[2].answer]
    found = [(grade.status, grade.answer) for grade in task.grade_all(prompts, responses)]
    assert found == [("right", prompts[0].answer), ("unparsable", None), ("right", prompts[2].answer)]


def test_steps_end_in_the_sum():
    assert steps([3, 8, 2]) == [11, 13]
    assert question([3, 8, 2]) == "3+8+2="
    assert split_of([3, 8, 2]) in ("train", "test")


def test_a_task_without_training_problems_is_refused(tokenizer):
    only_held_out = next(terms for terms in range(2, 20) if split_of([1] * terms) == "test")
    with pytest.raises(ConfigError, match="no training problems"):
        Arithmetic(ArithmeticTask(terms=only_held_out, max_term=1), tokenizer, 0).prompts("train", 0, 1)


def test_a_task_too_small_for_its_test_set_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"evaluation\.prompts"):
        Arithmetic(ArithmeticTask(terms=2, max_term=3), tokenizer, 0).prompts("test", 0, 50)
