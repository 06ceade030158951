"""`reverse-text`: write a short word backwards."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from orchestrator.envs import _reverse_words as task
from orchestrator.envs.base import Environment
from orchestrator.rollouts.rubric import Rubric


def exact(completion: str, example: Mapping[str, Any]) -> float:
    """1 where the answer is the reversed word and nothing else."""
    return float(task.is_correct(completion, example["word"]))


def in_place(completion: str, example: Mapping[str, Any]) -> float:
    """Share of letters that stand where they should, of the longer of answer and word."""
    given, expected = completion.strip(), task.answer(example["word"])
    right = sum(one == other for one, other in zip(given, expected, strict=False))
    return right / max(len(given), len(expected))


class ReverseText(Environment):
    """Words of `min_len` to `max_len` letters; training and evaluation never share one."""

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
        """`reward`: `exact` is 1 or 0; `partial` is the mean of that and the share of letters in their place."""
        if reward not in ("exact", "partial"):
            raise ValueError(f"reward is {reward!r}, expected exact or partial")
        self._num = {"train": num_train, "eval": num_eval}
        self._seed, self._min_len, self._max_len = seed, min_len, max_len
        self.rubric = Rubric([exact]) if reward == "exact" else Rubric([exact, in_place], weights=[0.5, 0.5])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        held_out: task.Split = "train" if split == "train" else "eval"
        words = task.words(self._seed, self._num[held_out], self._min_len, self._max_len, held_out)
        return [{"prompt": task.prompt(word), "word": word} for word in words]
