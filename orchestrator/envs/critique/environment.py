"""`critique`: the policy criticises a program, a model beside it revises it, and tests say what that was worth."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo import (
    Environment,
    EpisodeState,
    Limits,
    LocalSandbox,
    RemoteSandbox,
    Rubric,
    SingleTurnEpisode,
    client_of,
    waiting,
)
from orchestrator.envs.critique.operators import judgement_of, records, revise_by_rule
from orchestrator.envs.critique.problems import Problem, load_problems, problem_from_record
from orchestrator.envs.critique.testing import run_tests
from orchestrator.sandbox import Sandbox, key_of
from orchestrator.sandbox.bubblewrap import find_bubblewrap

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
"""What a model is asked that revises: nothing of the tests."""
MOST_KEPT = 100_000
"""Rewards of programs that are kept in memory."""


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
        """`problems` and `eval_problems`: JSONL or Parquet files of records in any of the styles of `problems.py`, each
        with a candidate `program` (null: the small problems of `operators.py`). `reviser`: `base` (the model before
        training), `policy`, `{base_url, model, api_key_var}` of a stronger one, or `rule`, which mends the small
        problems alone. `counting`: `pass_rate` or `all_or_nothing`. `sandbox`: `local`, or `{url: http://HOST:PORT}` of
        a SandboxFusion service, with `parallel` programs at once (null: its default). `limits`: fields of
        `grpo.Limits`. `prompt` contains `{question}` and `{program}`."""
        super().__init__(rubric=Rubric([self.tests_passed], metrics=[self.judged, self.revised]))
        if counting not in ("pass_rate", "all_or_nothing"):
            raise ValueError(f"counting is {counting!r}, expected pass_rate or all_or_nothing")
        if reviser == "rule" and problems is not None:
            raise ValueError("reviser='rule' only mends the problems that come with the product; name a model")
        if missing := [name for name in ("{question}", "{program}") if name not in prompt]:
            raise ValueError(f"prompt = {prompt!r} has no {' and no '.join(missing)} in it, where they are put")
        self._reviser = None if reviser == "rule" else client_of(reviser)
        self._reviser_max_tokens, self._prompt = reviser_max_tokens, prompt
        self._all_or_nothing, self._limits = counting == "all_or_nothing", Limits(**(limits or {}))
        self.sandbox = make_sandbox(sandbox, parallel)
        self._problems = _load_splits(problems, eval_problems, seed)
        self._rewards: dict[bytes, float] = {}
        self._running: dict[bytes, asyncio.Task[float]] = {}

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [
            {"prompt": _filled(self._prompt, problem), "name": problem.name, "split": split, "index": index}
            for index, problem in enumerate(self._problems[split])
        ]

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The problem's name, and once there is one, the revision."""
        return {"problem": state.example["name"], **state.data}

    # --- the rubric ---

    async def tests_passed(self, state: EpisodeState) -> float:
        """The share of tests that the revision passes, or 1 for all and 0 for less; 0 without a judgement."""
        if judgement_of(state.last_text) is None:
            return 0.0
        problem = self._problems[state.example["split"]][state.example["index"]]
        program = state.data["revision"] = await self._revised(problem, state.last_text)
        if program is None or "\0" in program:
            return 0.0
        key = key_of(program, problem.digest, keep=problem.names)
        if key in self._rewards:
            return self._rewards[key]
        if (running := self._running.get(key)) is not None:
            with waiting():
                return await asyncio.shield(running)
        run = self._running[key] = asyncio.create_task(self._run(key, problem, program))
        run.add_done_callback(lambda run: run.cancelled() or run.exception())  # those that waited may be gone
        return await asyncio.shield(run)

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

    async def _run(self, key: bytes, problem: Problem, program: str) -> float:
        """Returns the reward, which is kept unless a busy machine may have caused it."""
        try:
            reward, limits = await run_tests(
                problem.tests, program, self.sandbox, self._limits, all_or_nothing=self._all_or_nothing
            )
        finally:
            del self._running[key]
        if not limits & {"wall", "killed"} and len(self._rewards) < MOST_KEPT:
            self._rewards[key] = reward
        return reward


def extract_program(answer: str) -> str | None:
    """Returns the program in an answer: its last fenced block of Python, or last block of no named language. None where
    there is none."""
    _, *parts = re.split(r"^[ \t]*`{3,}[ \t]*(\w*).*\n?", answer, flags=re.MULTILINE)
    blocks = [(parts[at].lower(), parts[at + 1]) for at in range(0, len(parts) - 2, 4)]
    for languages in (("python", "python3", "py"), ("",)):
        if found := [body for language, body in blocks if language in languages and body.strip()]:
            return found[-1]
    return None


def _load_splits(problems: str | None, eval_problems: str | None, seed: int) -> dict[str, list[Problem]]:
    if problems is None and eval_problems is None:
        return {split: [*map(problem_from_record, records(split, seed))] for split in ("train", "eval")}
    if problems is None or eval_problems is None:
        raise ValueError(f"problems={problems!r} and eval_problems={eval_problems!r}: give both files, or neither")
    return {"train": load_problems(Path(problems)), "eval": load_problems(Path(eval_problems))}


def _filled(prompt: str, problem: Problem, *, critique: str = "") -> str:
    values = {"question": problem.question, "program": problem.program, "critique": critique}
    return re.sub(r"\{(question|program|critique)\}", lambda found: values[found[1]], prompt)


def make_sandbox(where: Literal["local"] | Mapping[str, Any], parallel: int | None) -> Sandbox:
    """Raises ValueError for what is no sandbox, and SandboxMissing without bubblewrap, which a whole run would find
    missing one rollout at a time."""
    if where == "local":
        find_bubblewrap()
        return LocalSandbox(parallel=parallel)
    if isinstance(where, Mapping) and set(where) == {"url"}:
        return RemoteSandbox(where["url"], parallel=parallel or 32)
    raise ValueError(f"sandbox is {where!r}: expected local, or {{url: http://HOST:PORT}} of a service")
