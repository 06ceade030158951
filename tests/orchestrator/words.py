"""An environment for the core's tests: words to be written backwards. Workers import this file."""

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

from grpo import Environment, Rubric


def exact(completion: str, example: Mapping[str, Any]) -> float:
    return float(completion.strip() == example["word"][::-1])


def in_place(completion: str, example: Mapping[str, Any]) -> float:
    """The share of letters that stand where they should."""
    given, expected = completion.strip(), example["word"][::-1]
    right = sum(one == other for one, other in zip(given, expected, strict=False))
    return right / max(len(given), len(expected))


class Words(Environment):
    rubric = Rubric([exact, in_place], weights=[0.5, 0.5])

    def __init__(self, *, num_train: int = 50, num_eval: int = 5, min_len: int = 3, max_len: int = 8) -> None:
        self._num, self._lengths = {"train": num_train, "eval": num_eval}, (min_len, max_len)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        rng = random.Random(split)
        lengths = [rng.randint(*self._lengths) for _ in range(self._num[split])]
        words = ["".join(rng.choices(string.ascii_lowercase, k=length)) for length in lengths]
        return [{"prompt": f"Reverse: {word}", "word": word} for word in words]
