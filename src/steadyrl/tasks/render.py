"""From the text of a problem to prompt tokens: the one place where a chat template is applied."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase


def render_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> NDArray[np.int32]:
    """Prompt token ids, int32 [p], that end where the response begins.

    With a chat template `text` becomes one user message followed by the opening of the assistant's
    turn; without one it is taken as it is. A beginning-of-sequence token comes at most once: both a
    template and a tokenizer may add it, and the second one is dropped.
    """
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # the template already wrote the special tokens it wants, so the tokenizer must not add its own
        ids = tokenizer.encode(rendered, add_special_tokens=False)
    else:
        ids = _without_eos(tokenizer, tokenizer.encode(text))
    return np.asarray(_with_one_bos(tokenizer, ids), np.int32)


def _with_one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def _without_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """A tokenizer that closes every text with EOS would close the prompt before its response."""
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1:] == [eos] and tokenizer.encode("")[-1:] == [eos]:
        return ids[:-1]
    return ids
