"""Rewards by name, for environments that bring no code: each compares a completion with `example["answer"]`."""

import functools
import re
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

MATH_TIMEOUT_S = 2
"""For math-verify to read one text, and to compare two."""
MAX_MATH_CHARS = 10_000
"""An answer stands at the end; what is before that many characters is not read."""

_NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?>(?>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?>(?:e[+-]?[0-9]+)?)"
    r"(?![.,]?[0-9]|[^\W\d_]*[\d_])",
    re.IGNORECASE,
)
"""Letters may follow, as a unit; digits may not, nor may a shorter number be found within a longer one."""


def exact(completion: str, example: Mapping[str, Any]) -> float:
    """1 where the completion is the answer and nothing else; white space around it is ignored."""
    return float(completion.strip() == str(example["answer"]).strip())


def number(completion: str, example: Mapping[str, Any]) -> float:
    """1 where the last number in the completion equals the answer: `1,000` is `1000.0`, and `1.5kg` is `1.5`."""
    found = _NUMBER.findall(completion.replace("\u2212", "-"))
    return float(bool(found) and _decimal(found[-1]) == _decimal(str(example["answer"])))


def math(completion: str, example: Mapping[str, Any]) -> float:
    """1 where math-verify takes the completion's result, boxed or not, for the answer: `\\frac{1}{2}` is `0.5`. Any
    expression that equals it counts, even one that was asked for: `2+3` is `5`."""
    from math_verify import parse, verify  # type: ignore[import-untyped, unused-ignore]

    given = parse(completion.strip()[-MAX_MATH_CHARS:], parsing_timeout=_limit_s())
    return float(verify(_parsed_answer(str(example["answer"]).strip()), given, timeout_seconds=_limit_s()))


REWARDS: dict[str, Callable[[str, Mapping[str, Any]], float]] = {
    function.__name__: function for function in (exact, number, math)
}


def wrong_answer(name: str, answer: Any) -> str | None:
    """Why `answer` cannot be what the reward `name` compares with; None where it can."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"answer is {answer!r}, expected a text or a number"
    text = str(answer).strip()
    if not text and name != "exact":
        return "answer is empty"
    if name == "number" and _decimal(text) is None:
        return f"answer is {answer!r}, which is no number"
    if name == "math" and not _parsed_answer(text):
        return f"answer is {answer!r}, which math-verify cannot read"
    return None


def _decimal(text: str) -> Decimal | None:
    try:
        value = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


@functools.lru_cache(maxsize=4096)
def _parsed_answer(expected: str) -> Any:
    """As math-verify reads it: as LaTeX where it is that, and as plain text otherwise. Empty where it cannot."""
    from math_verify import parse  # type: ignore[import-untyped, unused-ignore]

    return parse(f"${expected}$", parsing_timeout=_limit_s()) or parse(expected, parsing_timeout=_limit_s())


def _limit_s() -> int | None:
    """math-verify keeps its deadlines by signals, which only a process's main thread gets. Elsewhere, and in steps that
    no signal interrupts, the deadline of the whole reward holds."""
    return MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
