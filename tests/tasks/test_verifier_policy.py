"""What a policy decides, and what a policy file may hold."""

from __future__ import annotations

import pytest

from steadyrl.errors import ConfigError
from steadyrl.tasks.verifier_policy import Policy, make_policy, read_policy

judge = pytest.importorskip("steadyrl.tasks.verifier_equality", reason="needs the extra real").judge


@pytest.mark.parametrize(
    ("policy", "gold", "answer", "is_right"),
    [
        (Policy(), r"28\%", "28", True),
        (Policy(), r"28\%", "0.28", False),
        (Policy(percent="converted"), r"28\%", "28", False),
        (Policy(percent="converted"), r"28\%", "0.28", True),
        (Policy(percent="converted"), "0.28", r"28\%", True),
        (Policy(percent="converted"), "80", r"80\%", False),
        (Policy(percent="either"), r"28\%", "28", True),
        (Policy(percent="either"), r"28\%", "0.28", True),
        (Policy(percent="either"), r"28\%", "2.8", False),
        (Policy(), "80", r"80\%", True),
        (Policy(), r"\frac{\pi}{2}", r"90^\circ", False),
        (Policy(), "90", r"90^\circ", True),
        (Policy(degrees="converted"), r"\frac{\pi}{2}", r"90^\circ", True),
        (Policy(degrees="converted"), "90", r"90^\circ", False),
        (Policy(degrees="either"), r"90^\circ", r"\frac{\pi}{2}", True),
        (Policy(degrees="either"), r"90^\circ", "90", True),
        (Policy(), "204", r"204 \approx 204.3", True),
        (Policy(), "204.3", r"204 \approx 204.3", False),
        (Policy(approximation="either"), "204.3", r"204 \approx 204.3", True),
        (Policy(), "3.14", r"x \approx 3.14", True),
        (Policy(), r"\pi", r"\pi \approx 3.14", True),
        (Policy(), r"\sqrt{17}", "4.123106", True),
        (Policy(), r"\sqrt{17}", "4.123", False),
        (Policy(digits=4), r"\sqrt{17}", "4.123", True),
        (Policy(digits=4), r"\sqrt{17}", "4.125", False),
        (Policy(), "9.81", "9.8", False),
        (Policy(tolerance=0.01), "9.81", "9.8", True),
        (Policy(tolerance=0.01), "9.81", "9.7", False),
        (Policy(tolerance=0.01), "981", "980", False),  # no decimal point: exact
        (Policy(tolerance=0.01), r"\pi", "3.14", True),
        (Policy(), "(0, 1)", "0 < x < 1", True),
        (Policy(intervals="strict"), "(0, 1)", "0 < x < 1", False),
        (Policy(intervals="strict"), "0 < x < 1", "1 > x > 0", True),
        (Policy(intervals="strict"), "(0, 1)", "(0, 1.0)", True),
        (Policy(), r"\{1, 2\}", "2, 1", True),
        (Policy(sets="strict"), r"\{1, 2\}", "2, 1", False),
        (Policy(sets="strict"), r"\{1, 2\}", r"\{2, 1\}", True),
        (Policy(), r"\{1\}", "1", True),
        (Policy(sets="strict"), r"\{1\}", "1", False),
    ],
)
def test_what_a_policy_decides(policy, gold, answer, is_right):
    assert judge(gold, answer, policy)[0] == ("right" if is_right else "wrong")


def test_an_approximation_can_be_refused():
    assert judge("204", r"204 \approx 204.3", Policy(approximation="refuse"))[0] == "unparsable"


def test_a_policy_file_sets_what_it_names_and_keeps_the_rest(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text('percent = "either"\ntolerance = 0.01\n', encoding="utf-8")
    assert read_policy(file) == Policy(percent="either", tolerance=0.01)
    file.write_text("", encoding="utf-8")
    assert read_policy(file) == Policy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('percents = "either"', "did you mean 'percent'"),
        ('percent = "both"', "number, converted, either"),
        ("percent = 3", "number, converted, either"),
        ("tolerance = -1", "from 0"),
        ('tolerance = "0"', "from 0"),
        ("tolerance = true", "from 0"),
        ("tolerance = nan", "from 0"),
        ("digits = 0", "at least 1"),
        ("digits = 2.5", "at least 1"),
        ("digits =", "cannot be read"),
    ],
)
def test_a_wrong_policy_file_is_refused_with_the_remedy(tmp_path, text, message):
    file = tmp_path / "policy.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_policy(file)


def test_a_missing_policy_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no verifier policy"):
        read_policy(tmp_path / "policy.toml")


def test_a_table_of_a_policy():
    assert make_policy({"sets": "strict"}) == Policy(sets="strict")
