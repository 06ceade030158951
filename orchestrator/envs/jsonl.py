"""`jsonl`: prompts and answers from a file, with a reward by name. No code."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.envs.base import Environment
from orchestrator.envs.rewards import named_reward, wrong_answer
from orchestrator.rollouts.rubric import Rubric

EVAL_FRACTION = 0.1
_HASH_BYTES = 8


class WrongLine(ValueError):
    """A file that cannot be trained on; says which line, and why."""


class Jsonl(Environment):
    """One example a line: ``{"prompt": "What is 2+2?", "answer": "4"}``; the prompt may be a list of chat messages.
    Other fields are kept. Empty lines are skipped."""

    def __init__(
        self,
        *,
        path: str,
        reward: str = "exact",
        eval_path: str | None = None,
        eval_fraction: float | None = None,
    ) -> None:
        """Evaluation is on the lines of `eval_path`, or else on `eval_fraction` of the prompts of `path` (default a
        tenth), which a hash of the prompt chooses and which are not trained on.

        `reward`: one of `orchestrator.envs.rewards`. Raises WrongLine, UnknownReward and ValueError.
        """
        if eval_path is not None and eval_fraction is not None:
            raise ValueError("eval_path and eval_fraction are both given; remove one")
        fraction = EVAL_FRACTION if eval_fraction is None else eval_fraction
        if not 0 < fraction < 1:
            raise ValueError(f"eval_fraction is {fraction}, expected more than 0 and less than 1")
        self.rubric = Rubric([named_reward(reward)])
        examples = read(Path(path), reward)
        if eval_path is not None:
            self._splits = {"train": examples, "eval": read(Path(eval_path), reward)}
        else:
            held_out = [is_held_out(example["prompt"], fraction) for example in examples]
            self._splits = {
                split: [example for example, out in zip(examples, held_out, strict=True) if out == (split == "eval")]
                for split in ("train", "eval")
            }
        self._told = f"of the {len(examples)} lines of {path}"

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        examples = self._splits["train" if split == "train" else "eval"]
        if not examples:
            raise ValueError(f"none {self._told} is for {split}; give more lines, another eval_fraction, or eval_path")
        return examples


def read(path: Path, reward: str) -> list[Mapping[str, Any]]:
    """The examples of a file, each with a prompt and an answer that the reward can compare with. Raises WrongLine."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WrongLine(f"{path.absolute()} cannot be read: {error.strerror or error}") from None
    examples = [
        _example(line, f"{path}:{number}", reward) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not examples:
        raise WrongLine(f"{path} has no examples, expected one JSON object a line")
    return examples


def is_held_out(prompt: Any, fraction: float) -> bool:
    """Whether a hash of the prompt puts it among the share of `fraction` that is evaluated on."""
    digest = hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) < fraction * float(256**_HASH_BYTES)


def _example(line: bytes, place: str, reward: str) -> Mapping[str, Any]:
    try:
        example = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WrongLine(f"{place}: no JSON ({error}); expected one object a line") from None
    if not isinstance(example, dict):
        raise WrongLine(f"{place}: a {type(example).__name__}, expected an object with prompt and answer")
    if missing := [key for key in ("prompt", "answer") if key not in example]:
        raise WrongLine(f"{place}: no {missing[0]}; it has {', '.join(sorted(example)) or 'nothing'}")
    if not _is_prompt(example["prompt"]):
        raise WrongLine(f"{place}: prompt is {example['prompt']!r}, expected a text or messages with role and content")
    if (half := next((key for key in example if not _is_text(key, example[key])), None)) is not None:
        raise WrongLine(f"{place}: {half!r} has half a character (a lone surrogate such as \\ud83d), which is no text")
    if (wrong := wrong_answer(reward, example["answer"])) is not None:
        raise WrongLine(f"{place}: {wrong}")
    return example


def _is_text(key: str, value: Any) -> bool:
    """Whether all texts of a field can be written in UTF-8: JSON's escapes can name halves of characters."""
    try:
        json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in prompt
        )
    )
