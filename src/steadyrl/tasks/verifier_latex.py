r"""An expression in the spelling that math-verify's parser reads as it is meant.

Measured with math-verify 0.9.0 and latex2sympy2-extended 1.11.0: the parser adds what stands side by
side where both are numbers (`3(4)` is 7 to it, `3\binom{4}{2}` is 9), reads past marks it does not know
(x' is x), and knows neither `\sqrt(2)` nor `sqrt(2)`. So products are written out, arguments
get their braces, and what is not in the list below is refused. Pure text.
"""

from __future__ import annotations

import re

from steadyrl.tasks.answers import FUNCTIONS, closing
from steadyrl.tasks.verifier_numbers import read_number
from steadyrl.tasks.verifier_structure import Unparsable
from steadyrl.tasks.verifier_units import NOT_UNITS

MAX_CHARACTERS = 500
APPLIED = frozenset("fghFGHPQ")  # f(x) is a function of x, a(x) a product
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi varphi chi psi omega Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell"
)
COMMANDS = frozenset(
    f"{GREEK} frac binom sqrt cdot times div infty lfloor rfloor lceil rceil sum prod int lim to "
    "overline bar vec hat".split()
) | (FUNCTIONS - {"floor", "ceil", "sqrt"})
NEEDS_NUMBERS = frozenset(("gcd", "lcm"))  # with letters in them the parser gives a wrong number
PLAIN_NAMES = {"pi": r"\pi ", "infinity": r"\infty ", "inf": r"\infty "}

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+|[A-Za-z]|\S")
DECIMAL = re.compile(r"(?<![0-9.])(?:[0-9]+\.[0-9]+|\.[0-9]+)(?![0-9.])")
PLAIN_FUNCTION = re.compile(rf"(?<![\\A-Za-z])({'|'.join(sorted(FUNCTIONS))}|sum|prod)(?=[\s(^_]|[0-9]|$)")
PLAIN_NAME = re.compile(rf"(?<![\\A-Za-z])({'|'.join(PLAIN_NAMES)})(?![A-Za-z])")
CHOOSE_CALL = re.compile(r"(?<![\\A-Za-z])C\s*\(\s*([^(),]+)\s*,\s*([^(),]+)\s*\)")
CHOOSE = re.compile(r"\{?\s*([0-9A-Za-z+\- ]+?)\s*\\choose\s+([0-9A-Za-z+\- ]+?)\s*\}?$")
CALL_BRACKETS = {"floor": (r"\lfloor ", r"\rfloor "), "ceil": (r"\lceil ", r"\rceil ")}
INNER_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*\^\\circ")
MIXED = re.compile(r"(?<![0-9A-Za-z^_.}\\])([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}")
LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
ALLOWED = re.compile(r"[0-9A-Za-z+\-*/^_{}()\[\]|!.,=<>\\\s]*")


def to_latex(text: str) -> str:
    """Rewrite one expression for the parser.

    Raises:
        Unparsable: it holds a command or a mark that the parser would misread.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unparsable(f"it is longer than {MAX_CHARACTERS} characters")
    text = CHOOSE.sub(r"\\binom{\1}{\2}", CHOOSE_CALL.sub(r"\\binom{\1}{\2}", text))
    text = PLAIN_NAME.sub(lambda found: PLAIN_NAMES[found[1]], PLAIN_FUNCTION.sub(r"\\\1", text))
    text = INNER_DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180})", text)
    text = _brace_arguments(text)
    text = MIXED.sub(_mixed, text)
    text = DECIMAL.sub(_as_fraction, text)
    _check(text)
    return _written_out_products(text)


def _check(text: str) -> None:
    if any(len(word) >= 5 or word in NOT_UNITS for word in LETTERS.findall(text)):
        raise Unparsable("it holds words")  # to the parser, a product of their letters
    for command in re.findall(r"\\([A-Za-z]+)", text):
        if command not in COMMANDS:
            raise Unparsable(f"\\{command} is not read here")
    if not ALLOWED.fullmatch(text):
        raise Unparsable("it holds a sign that is not read here")
    if re.search(r"[0-9]\s+[0-9]|!\s*!|\.\.|[0-9]\.(?![0-9])|\\[^A-Za-z\s]|[0-9]_", text):
        raise Unparsable("its notation is ambiguous")
    for call in re.finditer(r"\\(?:" + "|".join(NEEDS_NUMBERS) + r")\s*\(([^()]*)\)?", text):
        if re.search("[A-Za-z]", call[1]):
            raise Unparsable("gcd and lcm are read for numbers only")


def _brace_arguments(text: str) -> str:
    r"""Braces around each argument: \frac12, \sqrt2, \sqrt(2), x^10, x^(n-1), floor(x)."""
    out, i = [], 0
    while i < len(text):
        found = re.compile(r"\\([A-Za-z]+)|[\^_]").match(text, i)
        if not found:
            out.append(text[i])
            i += 1
            continue
        name, i = found[1], found.end()
        if name in CALL_BRACKETS:
            start, stop = CALL_BRACKETS[name]
            content, i = _argument(text, i, whole_number=True)
            out.append(f"{start}{_brace_arguments(content)}{stop}")
        elif name in ("frac", "binom", "sqrt") or name is None:
            out.append(found.group())
            index = re.compile(r"\s*\[[^\]]*\]").match(text, i) if name == "sqrt" else None
            if index:
                out.append(index.group().strip())
                i = index.end()
            for _ in range(2 if name in ("frac", "binom") else 1):
                content, i = _argument(text, i, whole_number=name is None or name == "sqrt")
                out.append("{" + _brace_arguments(content) + "}")
        else:
            out.append(found.group())
    return _wrapped("".join(out))


def _argument(text: str, i: int, whole_number: bool) -> tuple[str, int]:
    """The argument at a position, and where it ends; a bare number is one, not its first digit, where asked."""
    while i < len(text) and text[i].isspace():
        i += 1
    if i < len(text) and text[i] in "{(":
        end = closing(text, i)
        if end is None:
            raise Unparsable("its brackets do not match")
        return text[i + 1 : end], end + 1
    pattern = r"[+-]?\s*(?:[0-9]+(?:\.[0-9]+)?|\\[A-Za-z]+|[A-Za-z])" if whole_number else r"[0-9]|\\[A-Za-z]+|[A-Za-z]"
    found = re.compile(pattern).match(text, i)
    if not found:
        raise Unparsable("an argument is missing")
    end = found.end()
    if found.group()[1:] in FUNCTIONS and text[end : end + 1] == "(":  # 2^floor(n/2)
        end = (closing(text, end) or len(text)) + 1
    return text[i:end], end


def _wrapped(text: str) -> str:
    """A group of braces that belongs to no command is a group of parentheses."""
    out, i = [], 0
    while i < len(text):
        if text[i] == "{" and not re.search(r"(?:\\[A-Za-z]+|[\^_\]}])\s*$", text[:i]):
            end = closing(text, i)
            if end is None:
                raise Unparsable("its brackets do not match")
            text = f"{text[:i]}({text[i + 1 : end]}){text[end + 1 :]}"
        out.append(text[i])
        i += 1
    return "".join(out)


def _mixed(found: re.Match[str]) -> str:
    whole, top, bottom = found.groups()
    if int(top) >= int(bottom):
        return found.group()
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})"


def _as_fraction(found: re.Match[str]) -> str:
    """Decimals are exact: the parser would make them floats."""
    number = read_number(found.group())
    assert number is not None
    return rf"(\frac{{{number.value.numerator}}}{{{number.value.denominator}}})"


def _written_out_products(text: str) -> str:
    tokens = TOKEN.findall(text)
    out: list[str] = []
    fraction_ends = _fraction_ends(tokens)
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else ""
        ends_factor = before.isdigit() or before in (")", "!") or i - 1 in fraction_ends
        ends_name = (len(before) == 1 and before.isalpha() and before not in APPLIED) or (
            before[1:] in GREEK.split() and before[:1] == "\\"
        )
        starts_factor = token == "(" or token in (r"\frac", r"\binom", r"\sqrt", r"\lfloor", r"\lceil")
        if (ends_factor and (starts_factor or token.isdigit())) or (ends_name and token == "("):
            out.append(r"\cdot")
        out.append(token)
    return " ".join(out)


def _fraction_ends(tokens: list[str]) -> set[int]:
    r"""Where the last argument of a \frac or \binom is closed."""
    ends, opened, pending = set(), [], []
    for i, token in enumerate(tokens):
        if token in (r"\frac", r"\binom"):
            pending.append([len(opened), 2])
        elif token == "{":
            opened.append(i)
        elif token == "}" and opened:
            opened.pop()
            if pending and pending[-1][0] == len(opened):
                pending[-1][1] -= 1
                if pending[-1][1] == 0:
                    pending.pop()
                    ends.add(i)
    return ends
