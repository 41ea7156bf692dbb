r"""From a response to the text of its answer, and from that text to one spelling: strict, without guessing.

The answer is, in this order: the last complete box of the final answer part; what the last paragraph
states as "the answer is ..."; the response itself, where it is nothing but an answer; by option, the
last number. docs/verifier.md has examples. It runs in the trainer's process on whatever a model writes,
so every step is about linear in the length of the response.
"""

from __future__ import annotations

import re
import unicodedata

from steadyrl.tasks.verifier_policy import Policy

THINKING_STARTS, THINKING_ENDS = "<think>", "</think>"
MAX_BARE = 200  # characters of a response that may be an answer as it stands

BRACE_TOKEN = re.compile(r"\\+(?:boxed|fbox|dbox)(?![a-zA-Z])\s*\{|\\.|[{}]", re.DOTALL)
BETWEEN_NOISE = re.compile(r"[\s$~]|\\[()\[\],;!]|\\q?quad|\\text\s*\{|\}")
STATED = re.compile(
    r"\banswer\b[ \t*_]*(?:to [^.\n]{0,60}? )?(?:is|are|:|=)(?![a-z])[\s*_:]*|^[ \t]*#{4}[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
MATH_ENDS = {"$$": "$$", "$": "$", r"\[": r"\]", r"\(": r"\)"}
# a sign counts only where no operand stands before it: "7-5" holds 7 and 5, "= -5" holds -5
NUMBER = re.compile(r"(?<!\w)[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)(?:\.[0-9]+)?")

NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt floor ceil gcd lcm max min"
FUNCTIONS = frozenset(NAMES.split())

SUPERSCRIPTS = str.maketrans({c: f"^{{{d}}}" for c, d in zip("⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "0123456789n", strict=True)})
SUBSCRIPTS = str.maketrans({c: f"_{{{d}}}" for c, d in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)})
SIGNS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{DOT OPERATOR}": r"\cdot ",
    "\N{DIVISION SIGN}": r"\div ",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{INFINITY}": r"\infty ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ",
    "\N{ALMOST EQUAL TO}": r"\approx ",
    "\N{IDENTICAL TO}": r"\equiv ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{UNION}": r"\cup ",
    "\N{INTERSECTION}": r"\cap ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{MINUS-OR-PLUS SIGN}": r"\mp ",
    "\N{DEGREE SIGN}": r"^\circ ",
    "\N{SQUARE ROOT}": r"\sqrt ",
    "\N{EMPTY SET}": r"\emptyset ",
    "\N{DOUBLE-STRUCK CAPITAL R}": r"\mathbb{R}",
    "\N{DOUBLE-STRUCK CAPITAL Z}": r"\mathbb{Z}",
    "\N{DOUBLE-STRUCK CAPITAL N}": r"\mathbb{N}",
    "\N{DOUBLE-STRUCK CAPITAL Q}": r"\mathbb{Q}",
    "\N{GREEK SMALL LETTER THETA}": r"\theta ",
    "\N{GREEK SMALL LETTER ALPHA}": r"\alpha ",
    "\N{GREEK SMALL LETTER BETA}": r"\beta ",
    "\N{LEFT FLOOR}": r"\lfloor ",
    "\N{RIGHT FLOOR}": r"\rfloor ",
    "\N{LEFT CEILING}": r"\lceil ",
    "\N{RIGHT CEILING}": r"\rceil ",
}

# one spelling for what LaTeX and its writers spell in several ways; in this order
SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in [
        (r"\{\s*,\s*\}", ","),  # a separator of thousands
        (r"(?<=[0-9]),\\!\s*(?=[0-9])", ","),
        (r"\\!", ""),
        (r"\\(?:left|right)(?![a-zA-Z])\.?", ""),
        (r"\\(?:[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|(?<!\\)~", " "),
        (r"\\\$|\\[()]|[$€£¥]|(?<!\\)\\[\[\]]", ""),
        (r"\\(?:[dtc]frac)(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\[lr]?vert(?![a-zA-Z])|\\mid(?![a-zA-Z])", "|"),
        (r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:cdotp|ast)(?![a-zA-Z])|(?<!\*)\*(?!\*)", r"\\cdot "),
        (r"\*\*", "^"),
        (r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:mathbf|mathit|boldsymbol|bm|bold)\s*\{([^{}]*)\}", r"{\1}"),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([eid])\s*\}", r"\1"),
        (r"\\(?:mathrm|textbf|textit|textrm|textsf|textnormal|mbox|hbox|mathsf)(?=\s*\{)", r"\\text"),
        (r"\\(?:operatorname\*?|text)\s*\{(" + "|".join(sorted(FUNCTIONS)) + r")\}", r"\\\1 "),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![a-zA-Z])\s*\}?|\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\\dots[cbmio]?(?![a-zA-Z])|\\[lc]dots(?![a-zA-Z])", "..."),
    ]
]
INNER_BOX = re.compile(r"\\(?:boxed|fbox|dbox)(?![a-zA-Z])\s*(?=\{)")


def extract_answer(response: str, policy: Policy) -> str | None:
    """The text of the answer that a response gives, or None where it gives none."""
    part = answer_part(response, policy)
    if part is None:
        return None
    boxed = _last_boxes(part)
    if boxed is not None or policy.without_box == "unparsable":
        return boxed
    stated = _stated(part) or _bare(part)
    if stated is None and policy.without_box == "last_number":
        return last_number(part)
    return stated


def answer_part(response: str, policy: Policy) -> str | None:
    """Where an answer may stand: after the thinking; None while the model still thinks."""
    if policy.answer_part == "whole":
        return response
    before, ends, after = response.rpartition(THINKING_ENDS)
    if ends:
        return after
    return None if THINKING_STARTS in before + after else response


def last_number(text: str) -> str | None:
    """The last number in a text, without sign "+", thousands separators and leading zeros; None if none.

    "7 + 5 = 12." gives "12", "about -1,234.50" gives "-1234.50", "x2" gives None.
    """
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    whole, point, decimals = found[-1].replace(",", "").partition(".")
    sign = "-" if whole.startswith("-") and found[-1].strip("-+0.,") else ""
    return sign + (whole.lstrip("-+0") or "0") + point + decimals


def clean(text: str) -> str:
    """An answer in one spelling: without delimiters, spacing commands, wrappers and trailing punctuation."""
    text = _ascii(text)
    text = INNER_BOX.sub("", text)
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    return strip_ends(text)


def strip_ends(text: str) -> str:
    """Drop what surrounds an expression without changing it: spaces, punctuation, emphasis, whole braces."""
    before = None
    while before != text:
        before = text
        text = text.strip()
        text = re.sub(r"(?:[\s.,;:]|\\\\)+$", "", text)
        text = text.lstrip(",;:")
        if len(text) > 4 and text[:2] == text[-2:] and text[:2] in ("^^", "__"):  # ** was read as a power
            text = text[2:-2]
        if text[:1] == text[-1:] == "^":
            text = text[1:-1]
        for opening in ("{", r"\text{", r"\text {"):
            if text.startswith(opening) and closing(text, len(opening) - 1) == len(text) - 1:
                text = text[len(opening) : -1]
    return text


def closing(text: str, opening: int) -> int | None:
    """Where the bracket at `opening` is closed by its own kind, or None. Escaped braces are a kind of their own."""
    if text[opening] == "\\":  # \{
        pair, start = (r"\{", r"\}"), opening
    else:
        pair, start = (text[opening], {"{": "}", "(": ")", "[": "]"}[text[opening]]), opening
    depth, i = 0, start
    while i < len(text):
        token = text[i : i + 2] if text[i] == "\\" else text[i]
        if token == pair[0]:
            depth += 1
        elif token == pair[1]:
            depth -= 1
            if depth == 0:
                return i
        i += len(token)
    return None


def _last_boxes(part: str) -> str | None:
    """The last complete box; boxes before it that "or", "and" or a comma tie to it belong to the answer."""
    boxes = _boxes(part)
    if not boxes:
        return None
    start, inner, end = boxes[-1]
    answers = [part[inner:end]]
    for earlier_start, earlier_inner, earlier_end in reversed(boxes[:-1]):
        if earlier_end > start:  # inside the later one
            continue
        if not _connects(part[earlier_end + 1 : start]):
            break
        answers.insert(0, part[earlier_inner:earlier_end])
        start = earlier_start
    return ", ".join(dict.fromkeys(answer.strip() for answer in answers))


def _boxes(part: str) -> list[tuple[int, int, int]]:
    """Complete boxes by their end: where the command, the content and the closing brace stand."""
    boxes, opened = [], []
    for token in BRACE_TOKEN.finditer(part):
        if token.group().endswith("{") and len(token.group()) != 2:  # a brace or a box, not \{
            opened.append((token.start(), token.end(), len(token.group()) > 1))
        elif token.group() == "}" and opened:
            start, inner, is_box = opened.pop()
            if is_box:
                boxes.append((start, inner, token.start()))
    return boxes


def _connects(between: str) -> bool:
    if len(between) > 40:
        return False
    rest = BETWEEN_NOISE.sub("", between).lower()
    return re.fullmatch(r"[.,;]*(?:and|or)?[,:]?", rest) is not None and rest.strip(".:") != ""


def _stated(part: str) -> str | None:
    """What "the answer is", "Answer:" or "####" announce last, if it reaches into the last paragraph."""
    part = part.rstrip()
    places = list(STATED.finditer(part))
    if not places:
        return None
    found = places[-1]
    rest = part[found.end() :]
    answer, end = _leading_math(rest) or _sentence(rest)
    in_last_paragraph = found.end() + end > part.rfind("\n\n")
    return answer if in_last_paragraph and answer.strip() else None


def _leading_math(text: str) -> tuple[str, int] | None:
    """The formula that a text begins with and its end, unless the sentence goes on with another value."""
    for start, stop in MATH_ENDS.items():
        if text.startswith(start):
            end = text.find(stop, len(start))
            tail, _ = _sentence(text[end + len(stop) :])
            if end < 0 or re.search(r"[0-9$\\]", tail):
                return None
            return text[len(start) : end], end + len(stop)
    return None


def _sentence(text: str) -> tuple[str, int]:
    end = SENTENCE_END.search(text)
    stop = end.start() if end else len(text)
    return text[:stop].strip(" \t*_"), stop


def _bare(part: str) -> str | None:
    """The whole response, where it is one formula, one number or one word."""
    text = part.strip()
    if not 0 < len(text) <= MAX_BARE:
        return None
    for start, stop in MATH_ENDS.items():
        if text.startswith(start) and text.rstrip(".").endswith(stop) and text.count(stop) <= 1 + (start == stop):
            return text
    if "\n" in text:
        return None
    if re.fullmatch(r"\(?[A-Za-z]{1,20}\)?[.!]?", text):
        return text
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+", " ", text))
    return text if all(word in FUNCTIONS or word in ("or", "and") for word in words) else None


def _ascii(text: str) -> str:
    """Mathematical signs as LaTeX, look-alikes as what they look like."""
    for sign, spelling in SIGNS.items():
        text = text.replace(sign, spelling)
    text = text.translate(SUPERSCRIPTS).translate(SUBSCRIPTS)
    return "".join(_compatible(c) if ord(c) > 127 else c for c in text)


def _compatible(c: str) -> str:
    plain = unicodedata.normalize("NFKC", c)
    numerator, slash, denominator = plain.partition("\N{FRACTION SLASH}")
    return rf"\frac{{{numerator}}}{{{denominator}}}" if slash else plain
