"""`dataset`: prompts and answers from data that people bring, with a reward by name. No code."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.environments.critique.problems import problem_from_record
from grpo.environments.data.files import Refused, Row, check_refused, find_files, parse_rows, plain_value, shown
from grpo.environments.rewards import make_parser, make_reward, wrong_answer

from grpo import Environment, Rubric, messages_of

log = logging.getLogger(__name__)
MAX_CHARS = 1_000_000
"""Characters of a prompt."""
_HASH_BYTES = 8
_PLACE = re.compile(r"\{\{|\}\}|\{([\w.]+)\}")
"""Finds what a template replaces: a brace that is written twice, and a column. Any other brace is itself."""

MATH_PROMPT = "{problem}\n\nReason step by step, and put the final answer within \\boxed{}."
KNOWN: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {
        "subset": "main",
        "eval_split": "test",
        "prompt": "{question}\n\nReason step by step, and end with the number.",
        "answer": "answer",
        "answer_after": "####",
        "reward": "number",
    },
    "EleutherAI/hendrycks_math": {
        "subset": "algebra",
        "eval_split": "test",
        "prompt": MATH_PROMPT,
        "answer": "solution",
        "reward": "math",
    },
    "HuggingFaceH4/MATH-500": {"split": "test", "prompt": MATH_PROMPT, "answer": "answer", "reward": "math"},
    "google-research-datasets/mbpp": {
        "subset": "full",
        "eval_split": "test",
        "prompt": "{text}\n\nThe program should pass these tests:\n\n{test_list}\n\nAnswer with one block of Python.",
        "reward": "unit_tests",
    },
}
"""Arguments of data sets of the Hub, where they are not given."""


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The rows that were read: examples, rows that cannot be used, and duplicates."""

    examples: dict[str, list[Mapping[str, Any]]]
    """Examples by split."""
    refused: list[Refused] = field(default_factory=list)
    duplicates: list[Refused] = field(default_factory=list)
    """Rows that say what another one says, and rows of training that are evaluated on; they are left out."""


class Dataset(Environment):
    """Has one prompt a row, of a file (JSONL, JSON, CSV, Parquet, Arrow), a folder, or a data set of the Hugging Face
    Hub that was downloaded before. Other columns are kept, for a reward function of one's own.

    Example: ``env: [{id: dataset, args: {path: sums.csv, prompt: "What is {sum}?", answer: result, reward: number}}]``
    """

    def __init__(
        self,
        *,
        path: str,
        subset: str | None = None,
        split: str | None = None,
        prompt: str | None = None,
        system_prompt: str | None = None,
        answer: str | None = None,
        answer_after: str | None = None,
        reward: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
        parser: str | Mapping[str, Any] = "thinking",
        eval_path: str | None = None,
        eval_split: str | None = None,
        eval_fraction: float | None = None,
        seed: int = 0,
        skip_refused: bool = False,
    ) -> None:
        """`path`: of the data. `subset` and `split`: of a folder or a data set (`train`). `prompt`: a column (`prompt`)
        or a template with columns in braces; a column within a column is `outer.inner`. `system_prompt`: a message
        before it. `answer`: a column (`answer`). `answer_after`: the answer is what stands behind the last of these
        words. `reward`: `exact`, `number`, `math`, `{regex: PATTERN}`, `judge`, `unit_tests`, or `my_rewards.py:score`;
        of a list of these the sum.
        `parser`: the completion that the reward gets is what follows the thinking (`thinking`), the last `\\boxed{}`
        in it (`boxed`), the rest of the line behind a marker (`{marker: "####"}`), the text in a tag (`{xml: answer}`),
        or all of the text (`text`).

        Evaluation is on `eval_path`, or on `eval_split` of `path`, or else on `eval_fraction` of the rows (a tenth, one
        at least), which a hash of the prompt and `seed` chooses and which are not trained on. A row that cannot be used
        is an error, unless `skip_refused`, which leaves it out and counts it. Raises ValueError."""
        known = dict(KNOWN.get(path, {}))
        if eval_path is not None or eval_fraction is not None:
            known.pop("eval_split", None)
        subset, split = subset or known.get("subset"), split or known.get("split", "train")
        eval_split = eval_split or known.get("eval_split")
        evaluation, fraction = [eval_path, eval_split, eval_fraction], 0.1 if eval_fraction is None else eval_fraction
        if sum(one is not None for one in evaluation) > 1 or not 0 < fraction < 1:
            raise ValueError(
                f"eval_path, eval_split and eval_fraction are {evaluation}: expected one of them, and a fraction "
                "between 0 and 1"
            )
        given = reward or known.get("reward", "exact")
        made = [make_reward(one) for one in ([given] if isinstance(given, str | Mapping) else given)]
        self._rewards, self._compared = [name for name, *_ in made], [name for name, _, compares in made if compares]
        self.rubric = Rubric([function for _, function, _ in made], parser=make_parser(parser))
        self._answer = answer or known.get("answer") or ("answer" if self._compared else None)
        self._after = answer_after or known.get("answer_after")
        if self._after is not None and self._answer is None:
            raise ValueError(f"answer_after = {self._after!r} has no effect without answer, the column that has it")
        self._prompt, self._system_prompt = prompt or known.get("prompt", "prompt"), system_prompt
        self._path, self._seed = path, seed
        files = find_files(path, subset=subset, split=split)
        evaluated = _evaluated(path, eval_path, subset, eval_split)
        self.loaded = self._load(files, evaluated, fraction, at_least_one=eval_fraction is None)
        if not skip_refused:
            check_refused(self.loaded.refused, sum(map(len, self.loaded.examples.values())))
        elif self.loaded.refused:
            log.warning("%s: %d rows are left out; grpo data tells which", path, len(self.loaded.refused))

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        if not self.loaded.examples[split]:
            raise ValueError(f"nothing of {self._path} is for {split}; give more, another eval_fraction, or eval_path")
        return self.loaded.examples[split]

    def _load(self, files: Any, evaluated: Any, fraction: float, *, at_least_one: bool) -> Loaded:
        loaded = Loaded(examples={"train": [], "eval": []})
        seen: dict[bytes, tuple[str, str, Any]] = {}
        digests = list[bytes]()  # of the examples to train on
        for split, paths in (("eval", evaluated), ("train", files)):
            rows, refused = parse_rows(paths, lambda row, place: (place, self._example(row))) if paths else ([], [])
            loaded.refused += refused
            for place, example in rows:
                said = f"{self._seed}/" * (self._seed != 0) + json.dumps(example["prompt"], sort_keys=True)
                digest = hashlib.blake2b(said.encode(), digest_size=_HASH_BYTES).digest()
                first, first_split, answer = seen.setdefault(digest, (place, split, example.get("answer")))
                if first == place:
                    is_eval = evaluated is None and int.from_bytes(digest) < fraction * float(256**_HASH_BYTES)
                    loaded.examples["eval" if is_eval else split].append(example)
                    digests += [] if is_eval or split == "eval" else [digest]
                elif first_split != split or answer == example.get("answer"):
                    why = "is evaluated on, as" if first_split != split else "says the same as"
                    loaded.duplicates.append(Refused(place=place, why=f"{why} {first}"))
                else:
                    why = f"the prompt is that of {first}, with another answer"
                    loaded.refused.append(Refused(place=place, why=why))
        if evaluated is None and at_least_one and not loaded.examples["eval"] and len(digests) > 1:
            loaded.examples["eval"].append(loaded.examples["train"].pop(digests.index(min(digests))))
        return loaded

    def _example(self, row: Row) -> Mapping[str, Any]:
        """Raises ValueError for a row without a prompt and an answer that the reward can compare with."""
        row = {str(key): plain_value(value) for key, value in row.items()}
        template = "{" in self._prompt
        prompt = self._filled(row) if template else _column(row, self._prompt)
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise ValueError("the prompt is empty")
        messages = messages_of({"prompt": prompt}, None)
        if (num := sum(len(message["content"]) for message in messages)) > MAX_CHARS:
            raise ValueError(f"the prompt has {num:,} characters, expected at most {MAX_CHARS:,}")
        if self._system_prompt is not None:
            prompt = [{"role": "system", "content": self._system_prompt}, *messages]
        example = {**row, "prompt": prompt}
        if self._answer is not None:
            example["answer"] = self._read_answer(_column(row, self._answer))
        if "unit_tests" in self._rewards:
            example = {**row, "question": _text(prompt), **example}
            problem_from_record(example)
        return example

    def _read_answer(self, answer: Any) -> Any:
        if self._after is not None:
            before, found, answer = str(answer).rpartition(self._after)
            if not found:
                raise ValueError(f"answer is {shown(before or answer)}, in which there is no {self._after!r}")
            answer = answer.strip()
        for name in self._compared:
            if (wrong := wrong_answer(name, answer)) is not None:
                raise ValueError(wrong)
        return answer

    def _filled(self, row: Row) -> str:
        def value(found: re.Match[str]) -> str:
            return found[0][0] if found[1] is None else _text(_column(row, found[1]))

        return _PLACE.sub(value, self._prompt)


def _evaluated(path: str, eval_path: str | None, subset: str | None, eval_split: str | None) -> Any:
    """The files to evaluate on; None where they are a fraction of the others."""
    if eval_path is not None:
        return find_files(eval_path, subset=None, split="train")
    return None if eval_split is None else find_files(path, subset=subset, split=eval_split)


def _column(row: Row, name: str) -> Any:
    """Raises ValueError where there is none of this name."""
    found: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise ValueError(f"there is no column {name!r}; there are {', '.join(row) or 'none'}")
        found = found[part]
    return found


def _text(value: Any) -> str:
    """Returns a value as it stands in a prompt: a list has a line for each of its items."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if value is None:
        raise ValueError("a column of the template has no value")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
