"""Where an answer is found, and how it is spelled afterwards."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.tasks.answers import clean, closing, extract_answer, last_number
from steadyrl.tasks.verifier_policy import Policy

DEFAULT = Policy()


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{204}.", "204"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"So \boxed{\left\{x \right\}", None),
        (r"\boxed{1} but \boxed{2", "1"),
        (r"\boxed{1 \boxed{2}", "2"),
        (r"\boxed{\boxed{2}}", r"\boxed{2}"),
        (r"\fbox{$2$}", "$2$"),
        (r"\\boxed{2}", "2"),
        (r"So \boxedfoo{2}", None),
        (r"{{{ \boxed{2}", "2"),
        (r"}}} \boxed{2}", "2"),
        (r"\boxed{2} or \boxed{3}", "2, 3"),
        (r"$\boxed{2}$, $\boxed{3}$ and $\boxed{4}$", "2, 3, 4"),
        (r"\boxed{2} \text{ or } \boxed{3}", "2, 3"),
        (r"\boxed{1}. It is \boxed{2} or \boxed{3}", "2, 3"),
        (r"\boxed{2}. Or \boxed{3}?", "2, 3"),
        (r"\boxed{2} \boxed{3}", "3"),
        (r"\boxed{2}. \boxed{3}", "3"),
        (r"\boxed{2} orange \boxed{3}", "3"),
        (r"\boxed{2} or \boxed{2}", "2"),
    ],
)
def test_the_last_complete_box(response, answer):
    assert extract_answer(response, DEFAULT) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Hence the answer is 204.", "204"),
        ("The final answer is: 3.5", "3.5"),
        ("the answer to the second question is 7", "7"),
        ("**Answer:** $x = 2$", "x = 2"),
        ("Answer:\n\n\\[ 7 \\]", " 7 "),
        ("First, the answer is 1.\nNo, the answer is 2.", "2"),
        ("The answer is $5$ because it fits.", "5"),
        ("The answer is $5$ or $6$.", "$5$ or $6$"),
        ("#### 12", "12"),
        ("The answer is 1.\n\nBut let me check.", None),
        ("Is this an answer? 204", None),
        ("The answers differ: 204", None),
        ("204", "204"),
        (" $\\frac{1}{2}$. ", "$\\frac{1}{2}$."),
        ("$1$ and $2$", "$1$ and $2$"),
        ("\\sin 30", "\\sin 30"),
        ("Yes", "Yes"),
        ("(B)", "(B)"),
        ("It is 204", None),
        ("204 candidates", None),
        ("There are 30 problems in 2023", None),
        ("7\n8", None),
        ("", None),
        ("   ", None),
    ],
)
def test_without_a_box_an_answer_is_stated_or_stands_alone(response, answer):
    assert extract_answer(response, DEFAULT) == answer


@pytest.mark.parametrize(("without_box", "answer"), [("unparsable", None), ("stated", "7"), ("last_number", "7")])
def test_what_counts_without_a_box_is_an_option(without_box, answer):
    assert extract_answer("The answer is 7.", Policy(without_box=without_box)) == answer


def test_the_last_number_counts_only_by_option():
    response = "There are 30 problems in 2,023."
    assert extract_answer(response, DEFAULT) is None
    assert extract_answer(response, Policy(without_box="last_number")) == "2023"
    assert extract_answer("none at all here", Policy(without_box="last_number")) is None


@pytest.mark.parametrize(
    ("response", "after_thinking", "whole"),
    [
        (r"<think>\boxed{1}</think> \boxed{2}", "2", "2"),
        (r"<think>\boxed{1}</think> I give up here.", None, "1"),
        (r"<think>\boxed{1}", None, "1"),
        (r"\boxed{1}</think> nothing more here", None, "1"),
        (r"\boxed{1}", "1", "1"),
        (r"<think>a</think> \boxed{1} <think>b</think> \boxed{2}", "2", "2"),
    ],
)
def test_where_an_answer_may_stand(response, after_thinking, whole):
    assert extract_answer(response, DEFAULT) == after_thinking
    assert extract_answer(response, Policy(answer_part="whole")) == whole


@given(st.text(alphabet="ab{}\\ $1,.", max_size=30), st.text(alphabet="ab1+ \\frac", max_size=12))
def test_a_boxed_text_is_found_whatever_stands_before_it(before, content):
    content = content.replace("\\", "")
    found = extract_answer(f"{before} . So it is: \\boxed{{{content}}}", DEFAULT)
    assert found == content.strip()


@given(st.text())
def test_no_text_breaks_extraction_or_cleaning(text):
    for policy in (DEFAULT, Policy(without_box="last_number", answer_part="whole")):
        found = extract_answer(text, policy)
        assert found is None or isinstance(clean(found), str)


@given(st.text(alphabet="\\{}()[]$123x,. textboxedfrac^*", max_size=40))
def test_cleaning_twice_changes_nothing_more(text):
    once = clean(clean(text))
    assert clean(once) == clean(clean(once))


@pytest.mark.parametrize(
    "piece",
    [
        "{", "}", "\\boxed{", "\\boxed{}", "$", "the answer is ", "answer", "#### ", "<think>", "\\text{", "1,", " ",
        "\n", "or \\boxed{1}",
    ],
)  # fmt: skip
def test_a_long_response_is_read_in_time_about_linear_in_its_length(piece):
    start = time.process_time()
    extract_answer(piece * (200_000 // len(piece)), Policy(without_box="last_number"))
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("$204$", "204"),
        (r"\(204\)", "204"),
        (r"\[ 204 \]", "204"),
        ("204.", "204"),
        (" 204 , ", "204"),
        ("5!", "5!"),
        (r"\text{13}", "13"),
        (r"\textbf{(B)}", "(B)"),
        (r"\boxed{204}", "204"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 1, 2 \right)", "( 1, 2 )"),
        (r"1{,}234", "1,234"),
        (r"1,\!234", "1,234"),
        (r"\$12", "12"),
        ("90\N{DEGREE SIGN}", r"90^\circ"),
        ("2\N{GREEK SMALL LETTER PI}", r"2\pi"),
        ("\N{VULGAR FRACTION ONE HALF}", r"\frac{1}{2}"),
        ("x\N{SUPERSCRIPT TWO}", "x^{2}"),
        ("\N{MINUS SIGN}5", "-5"),
        ("\N{FULLWIDTH DIGIT FIVE}", "5"),
        ("**204**", "204"),
        (r"x \leq 3", r"x \le  3"),
        (r"\mathrm{e}^2", "e^2"),
        (r"\operatorname{lcm}(4,6)", r"\lcm (4,6)"),
    ],
)
def test_an_answer_in_one_spelling(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "opening", "end"),
    [("(a(b)c)d", 0, 6), (r"{\}}", 0, 3), (r"\{a\}b", 0, 3), ("(a", 0, None), ("[(]", 0, 2)],
)
def test_where_a_bracket_is_closed(text, opening, end):
    assert closing(text, opening) == end


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12.", "12"),
        ("about -1,234.50", "-1234.50"),
        ("7-5", "5"),
        ("= -5", "-5"),
        ("007", "7"),
        ("-0", "0"),
        ("x2", None),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number
