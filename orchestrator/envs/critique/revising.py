"""Who writes the revision that a critique asks for, and what it is asked."""

from collections.abc import Mapping
from typing import Any

from orchestrator.envs.critique.judging import extract_program
from orchestrator.envs.critique.operators import revise_by_rule
from orchestrator.envs.critique.problems import Problem
from orchestrator.episodes.clients import client_of

_PROMPT = """\
{question}

This is a program for it:

```python
{program}
```

A reviewer says:

{critique}

Write the program anew, as the review demands; leave it as it is where the review finds nothing wrong. Answer with the \
whole program in one block that begins with ```python."""


def revision_prompt(problem: Problem, critique: str) -> str:
    """What a model is asked that revises: the question, the program and the critique, and nothing of the tests."""
    question = f"{problem.question}\n\n{problem.starter_code}".strip()
    values = {"question": question, "program": problem.program or "", "critique": critique}
    return _PROMPT.format(**values)


class Reviser:
    """Makes a program of a candidate and its critique, greedily: a model, or the rule of `operators`."""

    def __init__(self, args: str | Mapping[str, Any], *, max_tokens: int) -> None:
        """`args` as for `Critique`'s `reviser`."""
        self._model = None if args == "rule" else client_of(args)
        self._max_tokens = max_tokens

    async def revise(self, problem: Problem, critique: str) -> str | None:
        """The revised program; None where the answer had none. Raises where the model does not answer."""
        if self._model is None:
            return revise_by_rule(problem.program or "", critique)
        messages = [{"role": "user", "content": revision_prompt(problem, critique)}]
        return extract_program(await self._model.complete(messages, max_tokens=self._max_tokens))
