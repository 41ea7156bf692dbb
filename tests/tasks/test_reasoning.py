"""Tasks of reasoning-gym: repeatable prompts, disjoint splits, strict grading."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from steadyrl.errors import ConfigError
from steadyrl.task_config import ReasoningTask
from steadyrl.tasks.answers import last_number
from steadyrl.tasks.reasoning import ReasoningGymTask

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95, "<end>": 96}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<end>")


@pytest.fixture
def make(tokenizer):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym (extra `real`) is not installed")

    def _make(seed: int = 0, **changes) -> ReasoningGymTask:
        return ReasoningGymTask(ReasoningTask(name="reasoning_gym", **{"options": EASY, **changes}), tokenizer, seed)

    return _make


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12.", "12"),
        ("12", "12"),
        ("**12**", "12"),
        ("The answer is...12", "12"),
        ("It is 1,234.", "1234"),
        ("1,234,567", "1234567"),
        ("1, 2, 3", "3"),
        ("1,2345", "2345"),
        ("about -1,234.50!", "-1234.50"),
        ("= -5", "-5"),
        ("= \N{MINUS SIGN}5", "-5"),
        ("7-5", "5"),
        ("+9", "9"),
        ("-0", "0"),
        ("007", "7"),
        ("-007", "-7"),
        ("0.5", "0.5"),
        ("-0.5", "-0.5"),
        ("first 3, then 4\nSo it is seven.", "4"),
        ("twelve", None),
        ("x2", None),
        ("", None),
        ("-.,", None),
    ],
)
def test_the_last_number_of_a_response(text: str, number: str | None):
    assert last_number(text) == number


def test_prompts_depend_on_seed_and_position_only(make):
    whole = make().prompts("train", 0, 40)
    other = make()
    other.prompts("test", 0, 5)
    parts = [other.prompts("train", start, 10) for start in (30, 0, 20, 10)]
    again = [*parts[1], *parts[3], *parts[2], *parts[0]]
    assert [prompt.text for prompt in again] == [prompt.text for prompt in whole]
    assert [prompt.prompt_id for prompt in again] == [f"train/{i}" for i in range(40)]
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(again, whole, strict=True))


def test_seeds_give_other_training_prompts_not_the_same_ones_shifted(make):
    hard = {"min_terms": 5, "max_terms": 5}
    texts = [{prompt.text for prompt in make(seed, options=hard).prompts("train", 0, 200)} for seed in (0, 1)]
    assert not texts[0] & texts[1]


def test_training_goes_on_beyond_one_data_set_without_repeating_it(make):
    texts = [prompt.text for prompt in make(options={"min_terms": 5, "max_terms": 5}).prompts("train", 0, 1200)]
    assert len(set(texts)) == 1200


def test_test_questions_are_distinct_the_same_for_every_seed_and_never_trained_on(make):
    held_out = [prompt.text for prompt in make(seed=0).prompts("test", 0, 12)]
    assert len(set(held_out)) == 12
    assert [prompt.text for prompt in make(seed=7).prompts("test", 0, 12)] == held_out
    # 2000 draws from 200 possible questions meet nearly all of them
    trained_on = {prompt.text for prompt in make(seed=7).prompts("train", 0, 2000)}
    assert len(trained_on) > 150
    assert not trained_on & set(held_out)


def test_more_test_questions_than_there_are_is_refused(make):
    with pytest.raises(ConfigError, match=r"give only \d+ different test questions: set evaluation\.prompts"):
        make().prompts("test", 0, 200)


def test_the_instruction_stands_in_front_of_the_question(make, tokenizer):
    plain = make().prompts("test", 0, 1)[0]
    prompt = make(instruction="Answer with the number only.").prompts("test", 0, 1)[0]
    assert prompt.text == "Answer with the number only.\n" + plain.text
    assert prompt.token_ids.tolist() == tokenizer.encode(prompt.text)


def test_options_reach_the_generator(make):
    for prompt in make(options={"min_terms": 4, "max_terms": 4, "min_digits": 2, "max_digits": 2}).prompts(
        "train", 0, 9
    ):
        numbers = [word for word in prompt.text.split() if word.isdigit()]
        assert [len(number) for number in numbers] == [2, 2, 2, 2]


def test_grading(make):
    task = make()
    prompt = next(prompt for prompt in task.prompts("train", 0, 50) if int(prompt.answer) > 9)
    right = prompt.answer
    cases = {
        f"7 + 5 = {right}.": (1.0, "right", right),
        f"0{right}": (1.0, "right", right),
        f"{right} or 3": (0.0, "wrong", "3"),
        f"-{right}": (0.0, "wrong", f"-{right}"),
        # the scorer of the package gives partial credit to an answer that contains the right one
        f"{right}0": (0.0, "wrong", f"{right}0"),
        "I do not know": (0.0, "unparsable", None),
    }
    assert task.grade_all([prompt] * len(cases), list(cases)) == list(cases.values())


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"dataset": "chain_sums"}, "has no data set 'chain_sums'"),
        ({"options": {"no_such_option": 1}}, "refuses the task.options for chain_sum.*no_such_option"),
        ({"options": {"min_terms": 9}}, "refuses the task.options for chain_sum.*max_terms"),
        ({"options": {"seed": 3}}, "cannot hold seed or size"),
        ({"dataset": "number_sorting", "options": {}}, "are not single numbers"),
    ],
)
def test_what_the_package_cannot_do_is_refused(make, changes: dict, remedy: str):
    with pytest.raises(ConfigError, match=remedy):
        make(**changes)


def test_a_missing_package_is_named_with_its_extra(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # what an import finds of a package that is not there
    with pytest.raises(ConfigError, match=r"pip install \"steadyrl\[real\]\""):
        ReasoningGymTask(ReasoningTask(name="reasoning_gym"), tokenizer, 0)
