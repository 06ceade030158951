"""Critiques that worked, as data for a supervised first stage: `python -m grpo.environments.critique.feedback OUT`.

Of each problem's candidate program a writer, who is told what the tests say of it, writes several critiques; each is
followed by the reviser; and those whose revision passes all tests are kept, with the prompt that the policy will see.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from grpo.environments.critique.critique import Critique
from grpo.environments.critique.operators import OPERATORS
from grpo.environments.critique.problems import Problem

from grpo import InferenceClient, client_of, play

FEEDBACK_PROMPT = """\
{prompt}

The tests were run: {feedback} Do not mention the tests; write the review as if you had found out by reading."""
CONCURRENCY = 16


async def critiques(critique: Critique, writer: InferenceClient | None, num: int) -> list[dict[str, str]]:
    """Returns `prompt` and `answer` for the critiques of the training problems that worked, each once. `writer` writes
    `num` of each program; None: of the small problems, every critique there is.

    Tells on standard error how far it is. Raises what the sandbox, the reviser and the writer raise."""
    slots, num_done = asyncio.Semaphore(CONCURRENCY), 0
    problems = [*zip(critique.dataset("train"), critique.problems["train"], strict=True)]

    async def of_problem(example: Any, problem: Problem) -> list[dict[str, str]]:
        nonlocal num_done
        async with slots:
            texts = await _written(critique, example["prompt"], problem, writer, num)
            worth = [(text, await play(critique, example, [text])) for text in dict.fromkeys(texts)]
        num_done += 1
        if num_done % 10 == 0:
            print(f"{num_done} of {len(problems)} programs", file=sys.stderr, flush=True)
        return [{"prompt": example["prompt"], "answer": text} for text, outcome in worth if outcome.reward >= 1]

    return [row for rows in await asyncio.gather(*(of_problem(*one) for one in problems)) for row in rows]


async def _written(
    critique: Critique, prompt: str, problem: Problem, writer: InferenceClient | None, num: int
) -> list[str]:
    if writer is None:
        return ["Overall judgment: Correct", *(f"Use {one}. Overall judgment: Incorrect" for one in OPERATORS)]
    share = await critique.scorer.score(problem.program, problem.tests, digest=problem.digest, names=problem.names)
    feedback = "the program passes all." if share == 1 else f"the program passes {share:.0%} of them."
    asked = [{"role": "user", "content": FEEDBACK_PROMPT.format(prompt=prompt, feedback=feedback)}]
    return await asyncio.gather(*(writer.complete(asked, temperature=1.0) for _ in range(num)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo.environments.critique.feedback", description=__doc__)
    parser.add_argument("out", help="JSONL file for grpo sft")
    parser.add_argument("--problems", help="data file as critique has it (the small problems)")
    parser.add_argument("--writer", help="{base_url, model, api_key_var} of who writes (all critiques of small ones)")
    parser.add_argument("--reviser", default="rule", help="{base_url, model, api_key_var} of who revises (rule)")
    parser.add_argument("--num", type=int, default=4, help="critiques that are tried of each program (4)")
    parser.add_argument("--args", default="{}", help="other arguments of critique, as YAML")
    options = parser.parse_args()
    if (options.problems is None) != (options.writer is None):
        parser.error("--problems needs --writer, and --writer needs --problems")
    files = {} if options.problems is None else dict.fromkeys(("problems", "eval_problems"), options.problems)
    critique = Critique(**files, reviser=yaml.safe_load(options.reviser), **yaml.safe_load(options.args))
    writer = options.writer and client_of(yaml.safe_load(options.writer))
    rows = asyncio.run(critiques(critique, writer, options.num))
    Path(options.out).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{options.out}: {len(rows)} critiques of {len(critique.problems['train'])} programs")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
