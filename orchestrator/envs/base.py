"""The base class of environments."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.episodes.rubric import Rubric


class Environment(ABC):
    """Prompts and what an answer to them is worth. Lives in a process of its own.

    Example::

        def exact(completion, example):
            return float(completion.strip() == example["answer"])

        class Shout(Environment):
            rubric = Rubric([exact])

            def dataset(self, split):
                words = {"train": ["hello", "world"], "eval": ["moin"]}[split]
                return [{"prompt": f"Shout: {word}", "answer": word.upper()} for word in words]
    """

    rubric: Rubric
    """Scores `(completion, example)`; a class attribute, or set in `__init__`."""

    @abstractmethod
    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """The examples of `train` or `eval`, the same at every call. Each has a `prompt`: a text, which becomes the
        user's message, or a list of chat messages. Whatever else it has is for the reward functions."""
