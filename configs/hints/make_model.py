"""Build the model of the hints: a 0.8M-parameter Qwen3 that looks words up carelessly, and heeds hints.

    python -m configs.hints.make_model --output configs/hints/model

Tokenizer, network and method are those of `configs/tiny/make_model.py`: supervised steps on what a careless teacher
says, `configs/hints/teacher.py`, which also tells what is left to learn. What the environment evaluates on is never
taught.

The result is committed under `configs/hints/model`; the same seed gives the same model on the same machine.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from configs.hints.teacher import MAX_VALUE, ROWS_PER_BATCH, hint
from configs.quickstart.make_model import (
    build_model,
    build_tokenizer,
    parse_arguments,
    rounded_to_bfloat16,
    save_and_tell,
)
from configs.tiny.make_model import generate, pretrain
from configs.tiny.teachers import Conversation, user
from orchestrator.envs.zorplex import task
from orchestrator.envs.zorplex.environment import without_zorplex
from orchestrator.episodes.tool_calls import tagged_integer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

NUM_STEPS = 480
NUM_HELD_OUT, MAX_TURNS, MAX_NEW_TOKENS = 100, 6, 24
LEAST_ERROR_RATE, MOST_HINTED_ERROR_RATE = 0.3, 0.1
_LOOKUP = re.compile(r"LOOKUP\[(\w+)\]")


def main() -> None:
    args = parse_arguments(__doc__)
    import torch

    torch.set_num_threads(1)  # one order of summation, whatever the machine's load
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    started_s = time.monotonic()
    pretrain(model, tokenizer, args.seed, rows_per_batch=ROWS_PER_BATCH, num_steps=NUM_STEPS)
    report = {"seed": args.seed, "pretraining_s": round(time.monotonic() - started_s, 1)}
    model = rounded_to_bfloat16(model)
    report |= measure(model, tokenizer, args.seed)
    save_and_tell(model, tokenizer, args.output, report)
    check(report)


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, Any]:
    """On held-out questions: the share of failed calls with and without hints, and of right answers by operation."""
    import torch

    torch.manual_seed(seed)
    questions = task.questions(seed, NUM_HELD_OUT, "medium", "eval")
    report: dict[str, Any] = {}
    for how, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        conversations = played(model, tokenizer, questions, temperature=temperature)
        report[f"error_rate_{how}"] = error_rate(conversations)
        hinted = played(model, tokenizer, questions, temperature=temperature, hinted=True)
        report[f"hinted_error_rate_{how}"] = error_rate(hinted)
        for operation in task.OPERATIONS:
            chosen = [
                (question, said)
                for question, said in zip(questions, conversations, strict=True)
                if question.operation == operation
            ]
            report[f"accuracy_{how} {operation}"] = sum(is_right(*one) for one in chosen) / len(chosen)
    return {name: round(value, 4) for name, value in report.items()}


def played(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[task.Question],
    *,
    temperature: float,
    hinted: bool = False,
) -> list[Conversation]:
    """Whole conversations, as the environment leads them; `hinted`, with a hint before each look-up."""
    rng = random.Random(0)
    conversations = [[user(task.prompt(question))] for question in questions]
    running = list(range(len(questions)))
    for _ in range(MAX_TURNS):
        for index in running if hinted else ():
            if unknown := words_left(questions[index], conversations[index]):
                conversations[index].append(user(hint(unknown[0], rng)))
        asked = [conversations[index] for index in running]
        texts = (
            generate(model, tokenizer, asked, max_new_tokens=MAX_NEW_TOKENS, temperature=temperature) if asked else []
        )
        for index, text in zip(running, texts, strict=True):
            conversations[index].append({"role": "assistant", "content": text})
            conversations[index] += [{"role": "tool", "content": told} for told in results(text)]
        running = [index for index in running if conversations[index][-1]["role"] == "tool"]
    return conversations


def words_left(question: task.Question, conversation: Conversation) -> tuple[str, ...]:
    """Those whose value is not known yet."""
    return question.words[sum(said["role"] == "tool" and said["content"].isdigit() for said in conversation) :]


def results(answer: str) -> list[str]:
    """What the tool says to each call."""
    return [
        str(task.zorplex(word, 0, MAX_VALUE)) if word in task.WORDS else without_zorplex(word)
        for word in _LOOKUP.findall(answer)
    ]


def error_rate(conversations: Sequence[Conversation]) -> float:
    """Share of calls that failed."""
    told = [said["content"] for conversation in conversations for said in conversation if said["role"] == "tool"]
    return sum(not one.isdigit() for one in told) / max(1, len(told))


def is_right(question: task.Question, conversation: Conversation) -> bool:
    """Whether it ends with the right `[ANSWER]`."""
    return tagged_integer(conversation[-1]["content"]) == task.answer(question, 0, MAX_VALUE)


def check(report: dict[str, Any]) -> None:
    """Raises ValueError for a model that has nothing to learn, or that hints do not teach."""
    rate, hinted = report["error_rate_sampled"], report["hinted_error_rate_sampled"]
    if rate < LEAST_ERROR_RATE or hinted > MOST_HINTED_ERROR_RATE:
        raise ValueError(
            f"{rate} of calls fail, and {hinted} of those with a hint, expected at least {LEAST_ERROR_RATE} and at "
            f"most {MOST_HINTED_ERROR_RATE}: try another --seed"
        )


if __name__ == "__main__":
    main()
