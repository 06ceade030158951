"""`jsonl`: prompts and answers from a file, with a reward by name. No code."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo import Environment, Rubric
from orchestrator.envs.rewards import REWARDS, wrong_answer
from orchestrator.rollouts.messages import messages_of, plain

_HASH_BYTES = 8


class WrongLine(ValueError):
    """A file that cannot be trained on; says which line, and why."""


class Jsonl(Environment):
    """One example a line: ``{"prompt": "What is 2+2?", "answer": "4"}``; the prompt may be a list of chat messages.
    Other fields are kept. Empty lines are skipped."""

    def __init__(
        self, *, path: str, reward: str = "exact", eval_path: str | None = None, eval_fraction: float | None = None
    ) -> None:
        """Evaluation is on the lines of `eval_path`, or else on `eval_fraction` of the prompts of `path` (default a
        tenth), which a hash of the prompt chooses and which are not trained on.

        `reward`: one of `orchestrator.envs.rewards`. Raises WrongLine and ValueError.
        """
        if reward not in REWARDS:
            raise ValueError(f"unknown reward {reward!r}; there are {', '.join(REWARDS)}")
        if (eval_path is not None and eval_fraction is not None) or not 0 < (eval_fraction or 0.1) < 1:
            raise ValueError(
                f"eval_path is {eval_path!r} and eval_fraction {eval_fraction}: expected one of them, and a fraction "
                "between 0 and 1"
            )
        self.rubric = Rubric([REWARDS[reward]])
        self._path, examples = path, read(Path(path), reward)
        if eval_path is not None:
            self._splits = {"train": examples, "eval": read(Path(eval_path), reward)}
        else:
            self._splits = {"train": [], "eval": []}
            for example in examples:
                self._splits["eval" if is_held_out(example["prompt"], eval_fraction or 0.1) else "train"].append(
                    example
                )

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        if not self._splits[split]:
            raise ValueError(f"no line of {self._path} is for {split}; give more, another eval_fraction, or eval_path")
        return self._splits[split]


def read(path: Path, reward: str) -> list[Mapping[str, Any]]:
    """The examples of a file, each with a prompt and an answer that the reward can compare with. Raises WrongLine."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WrongLine(f"{path.absolute()} cannot be read: {error.strerror or error}") from None
    examples = []
    for number, line in enumerate(lines, start=1):
        try:
            examples += [_example(line, reward)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise WrongLine(f"{path}:{number}: {error}") from None
    if not examples:
        raise WrongLine(f"{path} has no examples, expected one JSON object a line")
    return examples


def is_held_out(prompt: Any, fraction: float) -> bool:
    """Whether a hash of the prompt puts it among the share of `fraction` that is evaluated on."""
    digest = hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) < fraction * float(256**_HASH_BYTES)


def _example(line: bytes, reward: str) -> Mapping[str, Any]:
    """Raises ValueError."""
    example = json.loads(line)
    if not isinstance(example, dict) or not {"prompt", "answer"} <= example.keys() or not example["prompt"]:
        raise ValueError(f"expected an object with prompt and answer, got {str(example)[:200]}")
    messages_of(example)
    plain(example, "the line")
    if (wrong := wrong_answer(reward, example["answer"])) is not None:
        raise ValueError(wrong)
    return example
