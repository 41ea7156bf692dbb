"""Stop strings, with tokens that are pieces of text, single bytes, or nothing."""

from __future__ import annotations

import pytest

from steadyrl.engines.stop_strings import stopped_text

PIECES = [b"a", b"b", b"ab", b"</", b"s>", b"s>x", b"\n\n", b"", b"\xc3", b"\xa9", b" Q: next", b"\n"]
A, B, AB, OPEN, CLOSE, CLOSE_X, BLANK, NOTHING, HALF, OTHER_HALF, LONG, NEWLINE = range(len(PIECES))


def decode(token_ids) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        ([A, OPEN, CLOSE], ["</s>"], "a</s>"),
        ([A, OPEN, CLOSE_X], ["</s>"], "a</s>"),  # it ends inside the token
        ([A, OPEN], ["</s>"], None),
        ([A, OPEN, CLOSE, B], ["</s>"], None),  # an earlier token completed it
        ([A, OPEN, CLOSE, OPEN, CLOSE], ["</s>"], "a</s></s>"),
        ([A, B], ["ab"], "ab"),
        ([AB], ["b", "ab", "a"], "a"),  # the one that ends first
        ([A, LONG], ["Q:", "Q"], "a Q"),
        ([A, NEWLINE, NEWLINE], ["\n\n"], "a\n\n"),
        ([NEWLINE, NEWLINE, NEWLINE], ["\n\n"], "\n\n\n"),  # the last two
        ([A, HALF, OTHER_HALF], ["é"], "aé"),  # two tokens, one character
        ([A, HALF], ["é"], None),
        ([A, OPEN, NOTHING, CLOSE], ["</s>"], "a</s>"),
        ([A] * 100 + [B], ["ab"], "a" * 100 + "b"),
        ([A] * 300, ["a" * 200], "a" * 300),
        ([B], ["</s>", "b"], "b"),
    ],
)
def test_text_ends_behind_the_stop_string_that_the_last_token_completed(tokens, stop, text):
    assert stopped_text(tokens, stop, decode) == text


def test_a_long_response_is_not_decoded_again_for_every_token():
    lengths = []

    def counting(token_ids) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    assert stopped_text([A] * 5000, ["</s>"], counting) is None
    assert max(lengths) <= 16
