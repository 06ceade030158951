"""`critique`: the policy criticises a program, a model beside it revises it, and tests say what that was worth."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo.environments.critique.operators import judgement_of, records, revise_by_rule
from grpo.environments.critique.problems import Problem, load_problems, problem_from_record
from grpo.environments.critique.testing import ProgramScorer, extract_program

from grpo import Environment, EpisodeState, Rubric, SingleTurnEpisode, client_of

PROMPT = """\
{question}

This is a program for it:

```python
{program}
```

Review the program: say what it does, what is wrong with it, and how to mend that. End with one line:
Overall judgment: Correct, or Overall judgment: Incorrect"""
REVISION_PROMPT = """\
{question}

This is a program for it:

```python
{program}
```

A reviewer says:

{critique}

Write the program anew, as the review demands; leave it as it is where the review finds nothing wrong. Answer with the \
whole program in one block that begins with ```python."""
"""The prompt of the model that revises. It says nothing of the tests."""


class Critique(SingleTurnEpisode, Environment):
    """The policy criticises a candidate program; a model beside it revises the program as the critique demands; what
    the revision passes of the problem's tests, run in the sandbox, is the critique's reward.

    A critique without `Overall judgment: Correct` or `Incorrect` gets 0 and is not followed. A revision that fails its
    tests is a low reward; a sandbox or a model that fails costs the rollout.

    The reward is one number for the whole critique, given at its end. With the group's mean as the baseline and no
    discount, every token of the critique has the same advantage as its last one has: to reward the last token and to
    reward the sequence are the same estimate.
    """

    def __init__(
        self,
        *,
        problems: str | None = None,
        eval_problems: str | None = None,
        reviser: str | Mapping[str, Any] = "base",
        reviser_max_tokens: int = 1024,
        counting: Literal["pass_rate", "all_or_nothing"] = "pass_rate",
        sandbox: Literal["local"] | Mapping[str, Any] = "local",
        parallel: int | None = None,
        limits: Mapping[str, Any] | None = None,
        prompt: str = PROMPT,
        seed: int = 0,
    ) -> None:
        """`problems` and `eval_problems`: data files (`grpo docs data`) of records in any style of `problems.py`,
        each with a candidate `program` (null: the small problems of `operators.py`). `reviser`: `base` (the model
        before training), `policy`, `{base_url, model, api_key_var}` of a stronger one, or `rule`, which mends the
        small problems alone. `counting`, `sandbox`, `parallel` and `limits`: as of `ProgramScorer`. `prompt` contains
        `{question}` and `{program}`."""
        super().__init__(rubric=Rubric([self.tests_passed], metrics=[self.judged, self.revised]))
        if reviser == "rule" and problems is not None:
            raise ValueError("reviser='rule' only mends the problems that come with the product; name a model")
        if missing := [name for name in ("{question}", "{program}") if name not in prompt]:
            raise ValueError(f"prompt = {prompt!r} has no {' and no '.join(missing)} in it, where they are put")
        self._reviser = None if reviser == "rule" else client_of(reviser)
        self._reviser_max_tokens, self._prompt = reviser_max_tokens, prompt
        self.scorer = ProgramScorer(counting=counting, sandbox=sandbox, parallel=parallel, limits=limits)
        self.problems = _load_splits(problems, eval_problems, seed)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [
            {"prompt": _filled(self._prompt, problem), "name": problem.name, "split": split, "index": index}
            for index, problem in enumerate(self.problems[split])
        ]

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The problem's name, and once there is one, the revision."""
        return {"problem": state.example["name"], **state.data}

    # --- the rubric ---

    async def tests_passed(self, state: EpisodeState) -> float:
        """The share of tests that the revision passes, or 1 for all and 0 for less; 0 without a judgement."""
        if judgement_of(state.last_text) is None:
            return 0.0
        problem = self.problems[state.example["split"]][state.example["index"]]
        program = state.data["revision"] = await self._revised(problem, state.last_text)
        return await self.scorer.score(program, problem.tests, digest=problem.digest, names=problem.names)

    def judged(self, completion: str) -> float:
        """1 where the critique has an explicit judgement."""
        return float(judgement_of(completion) is not None)

    def revised(self, state: EpisodeState) -> float:
        """1 where there was a revision with a program in it."""
        return float(state.data.get("revision") is not None)

    async def _revised(self, problem: Problem, critique: str) -> str | None:
        """Returns the program as the critique wants it, greedily written; None where the answer had none. Raises where
        the model does not answer."""
        if self._reviser is None:
            return revise_by_rule(problem.program, critique)
        messages = [{"role": "user", "content": _filled(REVISION_PROMPT, problem, critique=critique)}]
        return extract_program(await self._reviser.complete(messages, max_tokens=self._reviser_max_tokens))


def _load_splits(problems: str | None, eval_problems: str | None, seed: int) -> dict[str, list[Problem]]:
    if problems is None and eval_problems is None:
        return {split: [*map(problem_from_record, records(split, seed))] for split in ("train", "eval")}
    if problems is None or eval_problems is None:
        raise ValueError(f"problems={problems!r} and eval_problems={eval_problems!r}: give both files, or neither")
    return {"train": load_problems(problems), "eval": load_problems(eval_problems)}


def _filled(prompt: str, problem: Problem, *, critique: str = "") -> str:
    values = {"question": problem.question, "program": problem.program, "critique": critique}
    return re.sub(r"\{(question|program|critique)\}", lambda found: values[found[1]], prompt)
