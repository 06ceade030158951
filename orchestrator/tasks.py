"""Which example comes next: all environments in turn, each in a seeded order that changes with every epoch."""

import random
from collections.abc import Mapping, Sequence

from orchestrator.episodes.types import Messages, Task


class TaskSource:
    """Endless training tasks. The same prompts and seed give the same order."""

    def __init__(self, prompts: Mapping[str, Sequence[Messages]], *, seed: int, split: str = "train") -> None:
        """`prompts` of each environment by its label."""
        self._prompts, self._seed, self._split = prompts, seed, split
        self._labels = list(prompts)
        self._num_taken = dict.fromkeys(self._labels, 0)
        self._orders: dict[str, list[int]] = {}
        self._turn = 0

    def next(self) -> Task:
        """The next task."""
        label = self._labels[self._turn % len(self._labels)]
        self._turn += 1
        prompts = self._prompts[label]
        epoch, position = divmod(self._num_taken[label], len(prompts))
        if position == 0:
            order = list(range(len(prompts)))
            random.Random(f"{self._seed}/{label}/{epoch}").shuffle(order)
            self._orders[label] = order
        self._num_taken[label] += 1
        index = self._orders[label][position]
        return Task(env=label, split=self._split, index=index, messages=prompts[index])

    def num_examples(self, label: str) -> int:
        """Size of an environment's split."""
        return len(self._prompts[label])
