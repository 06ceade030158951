"""`reverse-text`: write a short word backwards."""

import hashlib
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo import Environment, Parser, Rubric


def split_of(word: str) -> str:
    """Returns the split of a word: `eval` if SHA-256(word) mod 10 is 0 (a tenth of all words)."""
    return "train" if int.from_bytes(hashlib.sha256(word.encode()).digest()) % 10 else "eval"


def words(seed: int, num: int, min_len: int, max_len: int, split: str) -> list[str]:
    """Draws `num` words of lower-case letters from one split, with replacement: lengths uniform in [min_len, max_len],
    letters in a-z. The same arguments give the same list, and a longer list begins with the shorter one."""
    rng, drawn = random.Random(seed), list[str]()
    while len(drawn) < num:
        length = rng.randint(min_len, max_len)
        word = "".join(rng.choices(string.ascii_lowercase, k=length))
        if split_of(word) == split:
            drawn.append(word)
    return drawn


def prompt(word: str) -> str:
    """Returns the user's message: `Reverse: hello`."""
    return f"Reverse: {word}"


def exact(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the completion, without white space around it, is the reversed word, else 0."""
    return float(completion.strip() == example["word"][::-1])


def in_place(completion: str, example: Mapping[str, Any]) -> float:
    """Returns the number of letters in the right place, divided by the length of answer or word, the longer one."""
    given, expected = completion.strip(), example["word"][::-1]
    right = sum(one == other for one, other in zip(given, expected, strict=False))
    return float(right / max(len(given), len(expected)))


class ReverseText(Environment):
    """Asks for words of `min_len` to `max_len` letters backwards. Training and evaluation share no word."""

    def __init__(
        self,
        *,
        seed: int = 0,
        num_train: int = 10_000,
        num_eval: int = 200,
        min_len: int = 3,
        max_len: int = 8,
        reward: Literal["exact", "partial"] = "exact",
    ) -> None:
        """`reward`: `exact` is 1 or 0; `partial` is the mean of it and of `in_place`. Raises ValueError."""
        if reward not in ("exact", "partial") or not 2 <= min_len <= max_len:
            raise ValueError(
                f"reward = {reward!r}, min_len={min_len}, max_len={max_len}: expected exact or partial, and "
                "2 <= min_len <= max_len"
            )
        self._lengths, self._seed = (min_len, max_len), seed
        self._num = {"train": num_train, "eval": num_eval}
        functions, weights = ([exact], None) if reward == "exact" else ([exact, in_place], [0.5, 0.5])
        self.rubric = Rubric(functions, weights, parser=Parser())

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        drawn = words(self._seed, self._num[split], *self._lengths, split)
        return [{"prompt": prompt(word), "word": word, "answer": word[::-1]} for word in drawn]
