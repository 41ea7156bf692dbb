"""Stop strings: where a response ends because of what its text says.

A stop string may end in the middle of a token. The text is cut right behind the stop string, the tokens are kept
as they were sampled: the last one carried the stop string, and what it carried beyond is not in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

MARGIN = 8  # tokens more than a stop string can have: text at the cut edge of a window may decode otherwise


def stopped_text(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> str | None:
    """The response's text up to and with the stop string that its last token completed; None if it completed none.

    Where the last token completed several, the one that ends first counts. A stop string in earlier tokens does not.

    Args:
        token_ids: of the response.
        stop: strings, none of them empty.
        decode: token ids to text.
    """
    window = token_ids[-(max(len(string.encode()) for string in stop) + MARGIN) :]  # a token is at least one byte
    if _stop_end(window, stop, decode) is None:  # the whole response is decoded only on a hit
        return None
    end = _stop_end(token_ids, stop, decode)
    return None if end is None else decode(token_ids)[:end]


def _stop_end(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    """Where the first stop string ends that reaches into the text of the last token."""
    text = decode(token_ids)
    before = decode(token_ids[:-1])
    known = next((i for i, (old, new) in enumerate(zip(before, text, strict=False)) if old != new), len(before))
    ends = [_first_end(text, string, known) for string in stop]
    return min((end for end in ends if end is not None), default=None)


def _first_end(text: str, string: str, known: int) -> int | None:
    start = text.find(string, max(0, known - len(string) + 1))
    return None if start < 0 else start + len(string)
