"""`arithmetic`: sums, differences and products of small whole numbers."""

import hashlib
import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from orchestrator.envs.base import Environment
from orchestrator.envs.rewards import number
from orchestrator.rollouts.rubric import Rubric

Split = Literal["train", "eval"]
Problem = tuple[int, str, int]
"""`(12, "+", 7)`"""

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LEAST_MAX_OPERAND = 9
"""With fewer problems, a split might have none."""


def split_of(problem: Problem) -> Split:
    """The split a problem belongs to: "eval" where a hash of it mod 10 is 0. `3+4` and `4+3` share theirs."""
    first, operation, second = problem
    if operation != "-" and first > second:
        first, second = second, first
    digest = int.from_bytes(hashlib.sha256(f"{first}{operation}{second}".encode()).digest())
    return "eval" if digest % 10 == 0 else "train"


def problems(seed: int, num: int, operations: Sequence[str], max_operand: int, split: Split) -> list[Problem]:
    """Draw `num` problems from one split, with replacement. The same arguments give the same list, and a longer list
    begins with the shorter one."""
    rng = random.Random(seed)
    drawn: list[Problem] = []
    while len(drawn) < num:
        problem = (rng.randint(0, max_operand), rng.choice(operations), rng.randint(0, max_operand))
        if split_of(problem) == split:
            drawn.append(problem)
    return drawn


def prompt(problem: Problem) -> str:
    """The user's message: `Compute: 12+7`."""
    first, operation, second = problem
    return f"Compute: {first}{operation}{second}"


def answer(problem: Problem) -> int:
    """The result: 19."""
    first, operation, second = problem
    return int(OPERATIONS[operation](first, second))


def correct(completion: str, example: Mapping[str, Any]) -> float:
    """1 where the last number in the completion is the answer; the question's own `0+7`, copied, is none."""
    return number(completion.replace(example["prompt"].removeprefix("Compute: "), ""), example)


class Arithmetic(Environment):
    """Problems of two whole numbers from 0 to `max_operand`; training and evaluation never share one."""

    def __init__(
        self,
        *,
        operations: Sequence[str] = ("+", "-", "*"),
        max_operand: int = 99,
        num_train: int = 10_000,
        num_eval: int = 200,
        seed: int = 0,
    ) -> None:
        """`operations`: of `+`, `-` and `*`, drawn with equal chances."""
        if not operations or (unknown := sorted(set(operations) - OPERATIONS.keys())):
            received = unknown if operations else "[]"
            raise ValueError(f"operations has {received}, expected some of {', '.join(OPERATIONS)}")
        if max_operand < LEAST_MAX_OPERAND:
            raise ValueError(f"max_operand is {max_operand}, expected at least {LEAST_MAX_OPERAND}")
        self._operations, self._max_operand = tuple(operations), max_operand
        self._num = {"train": num_train, "eval": num_eval}
        self._seed = seed
        self.rubric = Rubric([correct])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        held_out: Split = "train" if split == "train" else "eval"
        drawn = problems(self._seed, self._num[held_out], self._operations, self._max_operand, held_out)
        return [{"prompt": prompt(problem), "answer": str(answer(problem))} for problem in drawn]
