"""The environment `critique`."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from orchestrator.envs.base import Environment
from orchestrator.envs.critique.judging import Counting, Verdict, extract_program, judge, judgement_of
from orchestrator.envs.critique.operators import records, revise_by_rule
from orchestrator.envs.critique.problems import Problem, load_problems, problem_from_record
from orchestrator.rollouts.clients import client_of
from orchestrator.rollouts.episode import SingleTurnEpisode
from orchestrator.rollouts.rubric import Rubric
from orchestrator.rollouts.state import EpisodeState
from orchestrator.sandbox import Limits, LocalSandbox, RemoteSandbox, ResultCache, Sandbox
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
        counting: Counting = "pass_rate",
        sandbox: Literal["local"] | Mapping[str, Any] = "local",
        parallel: int | None = None,
        limits: Mapping[str, Any] | None = None,
        cache: str | None = None,
        prompt: str = PROMPT,
        seed: int = 0,
    ) -> None:
        """`problems` and `eval_problems`: JSONL files of records in any of the styles of `problems.py`, each with a
        candidate `program` (null: the small problems of `operators.py`). `reviser`: `base` (the model before
        training), `policy`, `{base_url, model, api_key_var}` of a stronger one, or `rule`, which mends the small
        problems alone. `counting`: `pass_rate` or `all_or_nothing`. `sandbox`: `local`, or `{url: http://HOST:PORT}`
        of a SandboxFusion service, with `parallel` programs at once (null: its default). `limits`: fields of
        `sandbox.Limits`. `cache`: an SQLite file of verdicts that outlives the run (null: they are kept in memory).
        `prompt` contains `{question}` and `{program}`."""
        super().__init__()
        if counting not in ("pass_rate", "all_or_nothing"):
            raise ValueError(f"counting is {counting!r}, expected pass_rate or all_or_nothing")
        if reviser_max_tokens < 1:
            raise ValueError(f"reviser_max_tokens={reviser_max_tokens}: expected at least 1")
        if (problems is None) != (eval_problems is None):
            raise ValueError(
                f"problems={problems!r} and eval_problems={eval_problems!r}: give both files, or neither for the small "
                "problems that come with the product"
            )
        if reviser == "rule" and problems is not None:
            raise ValueError("reviser='rule' only mends the problems that come with the product; name a model")
        if missing := [name for name in ("{question}", "{program}") if name not in prompt]:
            raise ValueError(f"prompt = {prompt!r} has no {' and no '.join(missing)} in it, where they are put")
        self.rubric = Rubric([self.tests_passed], metrics=[self.judged, self.revised])
        if problems is None or eval_problems is None:
            small = {split: records(split, seed) for split in ("train", "eval")}
            self._problems = {split: [*map(problem_from_record, given)] for split, given in small.items()}
        else:
            self._problems = {"train": load_problems(Path(problems)), "eval": load_problems(Path(eval_problems))}
        self._reviser = None if reviser == "rule" else client_of(reviser)
        self._reviser_max_tokens = reviser_max_tokens
        self._counting: Counting = counting
        self._limits = limits_of(limits or {})
        self.sandbox = make_sandbox(sandbox, parallel)
        """Runs the revisions."""
        self._cache = ResultCache(Verdict, path=None if cache is None else Path(cache))
        self._running: dict[tuple[str, str], asyncio.Task[Verdict]] = {}
        self._prompt = prompt

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [
            {"prompt": _filled(self._prompt, problem), "name": problem.name, "split": split, "index": index}
            for index, problem in enumerate(self._problems[split])
        ]

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The problem's name, and once there is one, the revision."""
        return {"problem": state.example["name"], **state.data}

    async def close(self) -> None:
        """Closes the cache and the connection to a service."""
        await self.sandbox.close()
        self._cache.close()

    # --- the rubric ---

    async def tests_passed(self, state: EpisodeState) -> float:
        """The share of tests that the revision passes, or 1 for all and 0 for less; 0 without a judgement."""
        if judgement_of(state.last_text) is None:
            return 0.0
        problem = self._problems[state.example["split"]][state.example["index"]]
        program = await self._revised(problem, state.last_text)
        state.data["revision"] = program
        return (await self._verdict(problem, program)).reward(self._counting)

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
            return revise_by_rule(problem.program or "", critique)
        asked = _filled(REVISION_PROMPT, problem, critique=critique)
        messages = [{"role": "user", "content": asked}]
        return extract_program(await self._reviser.complete(messages, max_tokens=self._reviser_max_tokens))

    async def _verdict(self, problem: Problem, program: str | None) -> Verdict:
        """Returns it from the cache, or by running it; critiques that led to the same program wait for the same run."""
        key = (problem.digest, program or "")
        if key in self._running:
            with LocalSandbox.waiting():
                return await asyncio.shield(self._running[key])
        judging = judge(problem, program, self.sandbox, limits=self._limits, counting=self._counting, cache=self._cache)
        self._running[key] = asyncio.create_task(judging)
        self._running[key].add_done_callback(lambda run: self._ended(key, run))
        return await asyncio.shield(self._running[key])

    def _ended(self, key: tuple[str, str], run: asyncio.Task[Verdict]) -> None:
        """Looks at the error, too, which is nobody's where all that waited are gone."""
        del self._running[key]
        if not run.cancelled():
            run.exception()


def _filled(prompt: str, problem: Problem, *, critique: str = "") -> str:
    question = f"{problem.question}\n\n{problem.starter_code}".strip()
    values = {"question": question, "program": problem.program or "", "critique": critique}
    return re.sub(r"\{(question|program|critique)\}", lambda found: values[found[1]], prompt)


def limits_of(args: Mapping[str, Any]) -> Limits:
    """Raises ValueError for a name that is no limit."""
    known = [field.name for field in fields(Limits)]
    if unknown := sorted(set(args) - set(known)):
        raise ValueError(f"limits has {', '.join(unknown)}; known are {', '.join(known)}")
    return Limits(**args)


def make_sandbox(where: Literal["local"] | Mapping[str, Any], parallel: int | None) -> Sandbox:
    """Starts nothing before the first program. Raises ValueError for what is no sandbox, and SandboxMissing without
    bubblewrap, which a whole run would find missing one rollout at a time."""
    if where == "local":
        find_bubblewrap()
        return LocalSandbox(parallel=parallel)
    if isinstance(where, Mapping) and set(where) == {"url"}:
        return RemoteSandbox(where["url"]) if parallel is None else RemoteSandbox(where["url"], parallel=parallel)
    raise ValueError(f"sandbox is {where!r}: expected local, or {{url: http://HOST:PORT}} of a service")
