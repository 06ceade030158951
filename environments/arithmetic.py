"""`arithmetic`: sums, differences and products of small whole numbers."""

import hashlib
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.environments.rewards import number

from grpo import Environment, Parser, Rubric

Problem = tuple[int, str, int]
"""`(12, "+", 7)`"""

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LEAST_MAX_OPERAND = 9
"""Smallest allowed `max_operand`: below it, a split might have no problem."""


def split_of(problem: Problem) -> str:
    """Returns the split of a problem: `eval` if a hash of it mod 10 is 0. `3+4` and `4+3` share it."""
    first, operation, second = problem
    if operation != "-" and first > second:
        first, second = second, first
    digest = hashlib.sha256(f"{first}{operation}{second}".encode()).digest()
    return "train" if int.from_bytes(digest) % 10 else "eval"


def problems(seed: int, num: int, operations: Sequence[str], max_operand: int, split: str) -> list[Problem]:
    """Draws `num` problems from one split, with replacement. The same arguments give the same list, and a longer list
    begins with the shorter one."""
    rng, drawn = random.Random(seed), list[Problem]()
    while len(drawn) < num:
        problem = (rng.randint(0, max_operand), rng.choice(operations), rng.randint(0, max_operand))
        if split_of(problem) == split:
            drawn.append(problem)
    return drawn


def prompt(problem: Problem) -> str:
    """Returns the user's message: `Compute: 12+7`."""
    first, operation, second = problem
    return f"Compute: {first}{operation}{second}"


def answer(problem: Problem) -> int:
    """Returns the problem's result: 19."""
    first, operation, second = problem
    return int(OPERATIONS[operation](first, second))


def correct(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the completion's last number is the answer, else 0. A copy of the question does not count."""
    return number(completion.replace(example["prompt"].removeprefix("Compute: "), ""), example)


class Arithmetic(Environment):
    """Asks problems of two whole numbers from 0 to `max_operand`. Training and evaluation share no problem."""

    rubric = Rubric([correct], parser=Parser())

    def __init__(
        self,
        *,
        operations: Sequence[str] = ("+", "-", "*"),
        max_operand: int = 99,
        num_train: int = 10_000,
        num_eval: int = 200,
        seed: int = 0,
    ) -> None:
        """`operations`: some of `+`, `-`, `*`, equally likely. `max_operand`: at least 9. Raises ValueError."""
        if not operations or not set(operations) <= OPERATIONS.keys() or max_operand < LEAST_MAX_OPERAND:
            raise ValueError(
                f"operations = {[*operations]} and max_operand = {max_operand}: expected some of "
                f"{', '.join(OPERATIONS)}, and at least {LEAST_MAX_OPERAND}"
            )
        self._settings = (tuple(operations), max_operand)
        self._num, self._seed = {"train": num_train, "eval": num_eval}, seed

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        drawn = problems(self._seed, self._num[split], *self._settings, split)
        return [{"prompt": prompt(problem), "answer": str(answer(problem))} for problem in drawn]
