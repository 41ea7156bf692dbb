"""Prompts: rendered in one place, with the beginning-of-sequence token exactly once or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from steadyrl.tasks.render import render_prompt

WORDS = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "one", "two"]
ID = {word: i for i, word in enumerate(WORDS)}
TURNS = (
    "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(adds: str = "$A", template: str | None = None) -> PreTrainedTokenizerFast:
    """Whitespace words; `adds` is what the tokenizer puts around a text, such as "<s> $A"."""
    backend = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", 1), ("</s>", 2)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    made.chat_template = template
    return made


def words(ids: np.ndarray) -> list[str]:
    return [WORDS[i] for i in ids]


def test_plain_text_stays_plain():
    ids = render_prompt(tokenizer(), "one two")
    assert ids.dtype == np.int32
    assert words(ids) == ["one", "two"]


@pytest.mark.parametrize("text", ["one two", "<s> one two"])
def test_a_tokenizer_that_adds_bos_adds_it_once(text: str):
    assert words(render_prompt(tokenizer(adds="<s> $A"), text)) == ["<s>", "one", "two"]


@pytest.mark.parametrize("adds", ["$A", "<s> $A", "<s> $A </s>"])
def test_template_and_tokenizer_together_give_one_bos(adds: str):
    made = tokenizer(adds, template="{{ bos_token }} " + TURNS)
    assert words(render_prompt(made, "one two")) == ["<s>", "<user>", "one", "two", "<assistant>"]


def test_a_template_that_writes_bos_twice_is_mended():
    made = tokenizer(template="{{ bos_token }} {{ bos_token }} " + TURNS)
    assert words(render_prompt(made, "one")) == ["<s>", "<user>", "one", "<assistant>"]


@pytest.mark.parametrize("adds", ["$A", "<s> $A"])
def test_a_template_without_bos_decides(adds: str):
    assert words(render_prompt(tokenizer(adds, template=TURNS), "one")) == ["<user>", "one", "<assistant>"]


def test_bos_as_a_turn_marker_is_left_where_it_belongs():
    template = "{% for m in messages %}<s> <user> {{ m['content'] }} </s> {% endfor %}<s> <assistant>"
    rendered = words(render_prompt(tokenizer(template=template), "one"))
    assert rendered == ["<s>", "<user>", "one", "</s>", "<s>", "<assistant>"]


def test_a_prompt_does_not_end_with_an_end_token_that_the_tokenizer_added():
    assert words(render_prompt(tokenizer(adds="<s> $A </s>"), "one two")) == ["<s>", "one", "two"]


def test_rendering_changes_nothing_and_repeats():
    made = tokenizer(adds="<s> $A", template=TURNS)
    first = render_prompt(made, "one two")
    assert np.array_equal(first, render_prompt(made, "one two"))
    assert words(np.asarray(made.encode("one"))) == ["<s>", "one"]
