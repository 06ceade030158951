"""Questions of whole-number arithmetic that a model proposes: how they are read, solved and scored.

Pure Python, knows of no model and no episode.
"""

import ast
import random
import re

_QUESTION = re.compile(r"^[ \t]*question[ \t]*:[ \t]*(?:what is[ \t]+)?([^\n]*)$", re.IGNORECASE | re.MULTILINE)
_EXPRESSION = re.compile(r"[0-9+\-*() ]+")
_INTEGER = re.compile(r"(?<![\d)])-?\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_MOST_CHARACTERS = 100
_MOST_DIGITS = 6
_MOST_NUMBERS = 8


def question_of(text: str) -> str | None:
    """The expression that a proposal asks for, without spaces: `Question: 3 + 4` gives `3+4`; of several, the last.
    None where there is none, or it is no whole-number arithmetic (`+`, `-`, `*`, brackets; 2 to 8 numbers of up to 6
    digits)."""
    found = _QUESTION.findall(text)
    if not found:
        return None
    expression = str(found[-1]).strip().rstrip("?= .").strip()
    return None if value_of(expression) is None else expression.replace(" ", "")


def value_of(expression: str) -> int | None:
    """What an expression comes to; None for anything that `question_of` refuses."""
    if len(expression) > _MOST_CHARACTERS or not _EXPRESSION.fullmatch(expression) or "**" in expression:
        return None
    numbers = re.findall(r"\d+", expression)
    if not 2 <= len(numbers) <= _MOST_NUMBERS or any(len(number) > _MOST_DIGITS for number in numbers):
        return None
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, ValueError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
    raise ValueError(f"{ast.dump(node)} is no whole-number arithmetic")


def answer_of(text: str) -> int | None:
    """The last whole number of an answer; None where there is none."""
    found = _INTEGER.findall(_THOUSANDS.sub("", text))
    return int(found[-1]) if found and len(found[-1]) <= 100 else None


def goldilocks(pass_rate: float, target: float) -> float:
    """1 - 2 |pass_rate - target|: 1 for a question that is neither too easy nor too hard."""
    return 1.0 - 2.0 * abs(pass_rate - target)


def drawn_questions(num: int, rng: random.Random) -> list[str]:
    """`num` different questions of two numbers: sums and differences of up to 20, products of up to 9."""
    if num > _NUM_DRAWABLE:
        raise ValueError(f"{num} different example questions were asked for; there are {_NUM_DRAWABLE}")
    questions: dict[str, None] = {}
    while len(questions) < num:
        operator = rng.choice("+-*")
        most = 9 if operator == "*" else 20
        questions[f"{rng.randint(0, most)}{operator}{rng.randint(0, most)}"] = None
    return list(questions)


_NUM_DRAWABLE = 2 * 21 * 21 + 10 * 10
