"""`jsonl`: prompts and answers from a file, with a reward by name. No code."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo import Environment, Rubric
from orchestrator.envs.data_files import read_records
from orchestrator.envs.rewards import REWARDS, wrong_answer
from orchestrator.rollouts.messages import messages_of, plain

_HASH_BYTES = 8


class Jsonl(Environment):
    """One example a line: ``{"prompt": "What is 2+2?", "answer": "4"}``, or a row of a Parquet file; the prompt may be
    a list of chat messages. Other fields are kept."""

    def __init__(
        self,
        *,
        path: str,
        reward: str = "exact",
        prompt_key: str = "prompt",
        eval_path: str | None = None,
        eval_fraction: float | None = None,
    ) -> None:
        """Evaluation is on the records of `eval_path`, or else on `eval_fraction` of the prompts of `path` (default a
        tenth), which a hash of the prompt chooses and which are not trained on. `prompt_key`: the field that has the
        prompt. `reward`: one of `orchestrator.envs.rewards`. Raises ValueError."""
        if reward not in REWARDS:
            raise ValueError(f"unknown reward {reward!r}; there are {', '.join(REWARDS)}")
        if (eval_path is not None and eval_fraction is not None) or not 0 < (eval_fraction or 0.1) < 1:
            raise ValueError(
                f"eval_path is {eval_path!r} and eval_fraction {eval_fraction}: expected one of them, and a fraction "
                "between 0 and 1"
            )
        self.rubric = Rubric([REWARDS[reward]])
        self._path, self._reward, self._prompt_key = path, reward, prompt_key
        self._splits: dict[str, list[Mapping[str, Any]]] = {"train": [], "eval": []}
        for example in read_records(Path(path), self._example):
            is_eval = eval_path is None and is_held_out(example["prompt"], eval_fraction or 0.1)
            self._splits["eval" if is_eval else "train"].append(example)
        if eval_path is not None:
            self._splits["eval"] = read_records(Path(eval_path), self._example)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        if not self._splits[split]:
            raise ValueError(f"nothing of {self._path} is for {split}; give more, another eval_fraction, or eval_path")
        return self._splits[split]

    def _example(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises ValueError for a record without a prompt and an answer that the reward can compare with."""
        if "answer" not in record or not record.get(self._prompt_key):
            raise ValueError(f"expected {self._prompt_key} and answer, got the keys {sorted(record)}")
        example: Mapping[str, Any] = plain({**record, "prompt": record[self._prompt_key]}, "the record")
        messages_of(example)
        if (wrong := wrong_answer(self._reward, example["answer"])) is not None:
            raise ValueError(wrong)
        return example


def is_held_out(prompt: Any, fraction: float) -> bool:
    """Whether a hash of the prompt puts it among the share of `fraction` that is evaluated on."""
    digest = hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) < fraction * float(256**_HASH_BYTES)
