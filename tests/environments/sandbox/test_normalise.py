"""Programs that say the same have one key."""

import pytest
from grpo.environments.sandbox.normalise import key_of, normalised

PLAIN = "def double(x):\n    return 2 * x\n"
DRESSED = '''"""A module."""
# a comment
def double( number ):
    """Twice a number."""
    return (2*number)   # so
'''


def test_comments_documentation_formatting_and_the_names_of_variables_make_no_difference() -> None:
    assert normalised(DRESSED) == normalised(PLAIN) == "def double(v_0):\n    return 2 * v_0"
    assert key_of(DRESSED, "tests") == key_of(PLAIN, "tests")
    assert normalised('class A:\n    """Doc."""\n') == "class A:\n    pass"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, PLAIN.replace("2", "3")),
        ("a = 1\nb = 2\nprint(a)", "a = 1\nb = 2\nprint(b)"),
        ("def f(a): pass\nf(a=1)", "def f(b): pass\nf(a=1)"),  # a keyword
        ("x = 1\nprint(f'{x=}')", "y = 1\nprint(f'{y=}')"),  # a text
        ("print(sum([1]))\nsum = 3", "print(max([1]))\nmax = 3"),  # what Python has
        ("class P:\n    a = 1\nprint(P.a)", "class P:\n    b = 1\nprint(P.a)"),  # attributes
    ],
)
def test_programs_that_may_behave_differently_differ(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_names_that_the_tests_may_use_stay_and_other_tests_are_another_key() -> None:
    other = PLAIN.replace("x", "y")
    assert key_of(PLAIN, "t") == key_of(other, "t")
    assert key_of(PLAIN, "t", keep=frozenset({"x"})) != key_of(other, "t", keep=frozenset({"x"}))
    assert key_of(PLAIN, "a") != key_of(PLAIN, "b")
    assert key_of("print(1)", "2") != key_of("print(12)", "")


@pytest.mark.parametrize("text", ["def f(:", "a\0b", "(" * 5000, "\ud800", "x=1\n" * 50_000])
def test_any_text_has_a_key_and_stays_as_it_is(text: str) -> None:
    assert key_of(text, "t") == key_of(text, "t")
    assert normalised(text) == text
