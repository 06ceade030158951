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
    ],
)
def test_typography_makes_none(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    "part", ["-", "a-", "aa-", "- ", "\n- ", "- (", "*", "a* ", "!", "a!", "\\a", "/", " \t", "½²"]
)
def test_it_takes_time_that_grows_with_the_text_alone(part: str) -> None:
    begun_s = time.process_time()
    normalised(part * 50_000)
    assert time.process_time() - begun_s < 3.0  # where it grows with the square, it is minutes
