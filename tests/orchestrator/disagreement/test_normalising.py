"""What makes a difference between two texts, and what does not."""

import time

import pytest

from orchestrator.disagreement.normalising import normalised


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  The **Answer**: -3.5! ", "the answer -3.5"),
        ("3.5 is not 35.", "3.5 is not 35"),
        ("1/2", "1/2"),
        ("5%", "5%"),
        ("don’t", "dont"),
        ("2 + 3 = 5", "2 + 3 = 5"),
        ("1,000 (one thousand)", "1,000 one thousand"),
        ("STRASSE", "strasse"),
        ("Straße", "strasse"),
        ("x-y, well-known", "x-y well known"),
        ("...", ""),
        ("---", ""),
        ("***", ""),
    ],
)
def test_normalised_text_keeps_what_makes_a_difference(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\boxed{-\frac{1}{2}}", r"\boxed{\frac{1}{2}}"),
        ("x = -y", "x = y"),
        ("- 5", "5"),
        ("- x", "x"),
        ("the answer is - 5", "the answer is 5"),
        ("-$5", "$5"),
        ("$-5$", "$5$"),
        ("(-inf, 3)", "(inf, 3)"),
        ("-sqrt(2)", "sqrt(2)"),
        ("-.5", ".5"),
        ("**-5**", "**5**"),
        ("−5", "5"),
        ("x-y", "x y"),
        (r"\alpha-x", r"\alpha x"),
        ("(2, -5)", "(2 - 5)"),
        ("1e-3", "1e3"),
        ("5/3", "5*3"),
        ("5/3", "5 3"),
        ("2**3", "2*3"),
        ("2^3", "2 3"),
        ("10²", "102"),
        ("2½", "21/2"),
        ("a * (b)", "a (b)"),
        ("x < 3", "x > 3"),
        ("x != y", "x = y"),
        ("!x", "x"),
        ("n!/2", "n/2"),
        ("x - (y + z)", "x - y + z"),
        ("x-(y-z)", "x-y-z"),
        ("(1 + 2) * 3", "1 + 2 * 3"),
        ("(a+b)/c", "a+b/c"),
        ("3*(a + b)", "3*a + b"),
        ("(1 + 2) × 3", "1 + 2 × 3"),
        ("x_1", "x1"),
        ("snake_case_name", "snakecasename"),
        ("x.__len__()", "x.len()"),
        ("~5", "5"),
        ("> 5", "5"),
    ],
)
def test_signs_and_operators_make_a_difference(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("well-known", "well known"),
        ("a 3-year-old", "a 3-year old"),
        ("wait--what -- this", "wait, what, this"),
        ("- Paris\n- **Rome**", "* Paris\n* Rome"),
        ("- a cat", "a cat"),
        ("---\nHi! there", "hi there"),
        ("It is **5**.", "it is 5"),
        ("a *very* big (**red**) one", "a very big red one"),
        ("The answer is 5!", "the answer is 5"),
        ("−5", "-5"),
        ("–5", "-5"),
        ("x²", "x^2"),
        ("½", "1/2"),
        ("The capital is `Paris`.", "The capital is **Paris**."),
        ("``f(x)``", "f(x)"),
        ("`snake_case`", "snake_case"),
        ("The capital is __Paris__.", "The capital is Paris."),
        ("_a very big_ (___red___) one", "a very big red one"),
        ("`-5`", "-5"),
        ("(**x + y**) is the sum", "x + y is the sum"),
        ("**(x + y)**", "x + y"),
        ("Paris - (France)", "Paris - France"),
    ],
)
def test_typography_makes_none(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    "part",
    [
        "-",
        "a-",
        "aa-",
        "- ",
        "\n- ",
        "- (",
        "*",
        "a* ",
        "!",
        "a!",
        "\\a",
        "/",
        " \t",
        "½²",
        "`",
        "`a ",
        " _",
        "_a ",
        "-(+",
        "(+",
        "*(a",
    ],
)
def test_it_takes_time_that_grows_with_the_text_alone(part: str) -> None:
    begun_s = time.process_time()
    normalised(part * 50_000)
    assert time.process_time() - begun_s < 3.0  # where it grows with the square, it is minutes
