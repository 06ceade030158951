"""Critiques that worked, as data for a supervised first stage: `python -m orchestrator.envs.critique.feedback OUT`.

Of each problem's candidate program a writer, who is told what the tests say of it, writes several critiques; each is
followed by the reviser; and those whose revision passes all tests are kept, with the prompt that the policy will see.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import yaml

from grpo import InferenceClient, client_of, play
from orchestrator.envs.critique.environment import Critique
from orchestrator.envs.critique.operators import OPERATORS
from orchestrator.envs.critique.problems import Problem

FEEDBACK_PROMPT = """\
{prompt}

The tests were run: {feedback} Do not mention the tests; write the review as if you had found out by reading."""
CONCURRENCY = 16


async def critiques(critique: Critique, writer: InferenceClient | None, num: int) -> AsyncIterator[dict[str, Any]]:
    """Yields, problem by problem, `prompt` and `answer` for the critiques of the training problems that worked, each
    once. `writer` writes `num` of each program; None: of the small problems, every critique there is.

    Raises what the sandbox, the reviser and the writer raise."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def worked(example: Any, text: str) -> bool:
        return (await play(critique, example, [text])).reward >= 1

    async def of_problem(example: Any, problem: Problem) -> list[dict[str, Any]]:
        async with slots:
            texts = await _written(critique, example["prompt"], problem, writer, num)
            kept = [text for text in dict.fromkeys(texts) if await worked(example, text)]
        return [{"prompt": example["prompt"], "answer": text} for text in kept]

    tasks = [
        asyncio.create_task(of_problem(example, problem))
        for example, problem in zip(critique.dataset("train"), critique.problems["train"], strict=True)
    ]
    for task in tasks:
        for row in await task:
            yield row


async def _written(
    critique: Critique, prompt: str, problem: Problem, writer: InferenceClient | None, num: int
) -> Sequence[str]:
    if writer is None:
        mended = [f"Use {operator}. Overall judgment: Incorrect" for operator in OPERATORS]
        return ["Overall judgment: Correct", *mended]
    share = await critique.scorer.score(problem.program, problem.tests, digest=problem.digest, names=problem.names)
    feedback = "the program passes all." if share == 1 else f"the program passes {share:.0%} of them."
    asked = [{"role": "user", "content": FEEDBACK_PROMPT.format(prompt=prompt, feedback=feedback)}]
    return await asyncio.gather(*(writer.complete(asked, temperature=1.0) for _ in range(num)))


async def _write(options: argparse.Namespace) -> int:
    model = options.writer and client_of(yaml.safe_load(options.writer))
    files = {} if options.problems is None else dict.fromkeys(("problems", "eval_problems"), options.problems)
    critique = Critique(**files, reviser=yaml.safe_load(options.reviser), **yaml.safe_load(options.args))
    num_rows = 0
    with open(options.out, "w", encoding="utf-8") as file:  # noqa: ASYNC230, PTH123 (nothing else runs here)
        async for row in critiques(critique, model, options.num):
            num_rows += 1
            print(json.dumps(row), file=file)
    print(f"{options.out}: {num_rows} critiques of {len(critique.problems['train'])} programs")
    return 0 if num_rows else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.envs.critique.feedback", description=__doc__)
    parser.add_argument("out", help="JSONL file for grpo sft")
    parser.add_argument("--problems", help="data file as critique has it (the small problems)")
    parser.add_argument(
        "--writer", help="{base_url, model, api_key_var} of who writes (every critique of the small ones)"
    )
    parser.add_argument("--reviser", default="rule", help="{base_url, model, api_key_var} of who revises (rule)")
    parser.add_argument("--num", type=int, default=4, help="critiques that are tried of each program (4)")
    parser.add_argument("--args", default="{}", help="other arguments of critique, as YAML")
    options = parser.parse_args()
    if (options.problems is None) != (options.writer is None):
        parser.error("--problems needs --writer, and --writer needs --problems")
    return asyncio.run(_write(options))


if __name__ == "__main__":
    sys.exit(main())
