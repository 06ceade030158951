"""Build the tiny model: a 0.8M-parameter Qwen3 that does each of the built-in tasks a little, and carelessly.

    python -m configs.tiny.make_model --output configs/tiny/model

Tokenizer and network are those of `configs/quickstart/make_model.py`, and so is the method: supervised steps on what
careless teachers say (`configs/tiny/teachers.py`), here on whole conversations about arithmetic, look-ups, debates,
proposals and critiques. The model can do the tasks, and does them right in about half of the cases; rewards bring out
the rest. What environments evaluate on is never taught.

The result is committed under `configs/tiny/model`; the same seed gives the same model on the same machine.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from configs.quickstart.make_model import (
    EOS_TOKEN,
    build_model,
    build_tokenizer,
    parse_arguments,
    rounded_to_bfloat16,
    save_and_tell,
)
from configs.tiny.teachers import ROWS_PER_BATCH, Conversation, Teacher, user
from orchestrator.envs import arithmetic
from orchestrator.envs.zorplex import task as zorplex
from orchestrator.episodes.tool_calls import tagged_integer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

NUM_STEPS = 900
LEARNING_RATE, MUON_LEARNING_RATE, WARMUP_STEPS, DECAY_SHARE = 2e-3, 0.02, 20, 0.4
TOKENS_PER_BATCH = 600
"""Roughly, of answers: what the summed loss of a batch is divided by."""
REPORT_INTERVAL = 100

ARITHMETIC_OPERATIONS, MAX_OPERAND = "+-", 50
MAX_VALUE, MAX_TURNS = 9, 6
NUM_HELD_OUT = 200
ACCURACY_BAND = (0.25, 0.6)
_LOOKUP = re.compile(r"LOOKUP\[(\w+)\]")


def main() -> None:
    args = parse_arguments(__doc__)
    import torch

    torch.set_num_threads(1)  # one order of summation, whatever the machine's load
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    started_s = time.monotonic()
    pretrain(model, tokenizer, args.seed)
    report = {"seed": args.seed, "pretraining_s": round(time.monotonic() - started_s, 1)}
    model = rounded_to_bfloat16(model)
    report |= measure(model, tokenizer, args.seed)
    save_and_tell(model, tokenizer, args.output, report)
    check_accuracy(report)


# --- pre-training ---


def pretrain(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    *,
    rows_per_batch: Sequence[tuple[Teacher, int]] = ROWS_PER_BATCH,
    num_steps: int = NUM_STEPS,
) -> None:
    """Train `model` in place on what the careless teachers say."""
    import torch

    rng = random.Random(seed)
    optimizers = build_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(1, num_steps + 1):
        losses = {}
        for teacher, num_rows in rows_per_batch:
            loss, num_tokens = answer_loss(model, tokenizer, [teacher(rng) for _ in range(num_rows)])
            (loss / TOKENS_PER_BATCH).backward()
            losses[teacher.__name__.removeprefix("teach_")] = loss.item() / num_tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, num_steps)
            optimizer.step()
            optimizer.zero_grad()
        if step % REPORT_INTERVAL == 0:
            told = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"step {step:4d}  loss of {told}", flush=True)


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, with which adding is learnt in half of the steps, and AdamW for embeddings and norms."""
    import torch

    matrices = [
        parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and "embed" not in name
    ]
    known = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0),
    ]


def schedule(step: int, num_steps: int) -> float:
    """Share of the learning rate: linear warm-up, then flat, then linear decay over the last DECAY_SHARE of steps."""
    return min(1.0, step / WARMUP_STEPS, (num_steps - step + 1) / (DECAY_SHARE * num_steps))


def answer_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Conversation]
) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy of the assistant's bytes and their <|im_end|>, and how many these are; all else carries no
    loss."""
    import torch

    rows = [encoded(tokenizer, conversation) for conversation in conversations]
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    inputs = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([taught + [-100] * (longest - len(taught)) for _, taught in rows])
    logits = model(input_ids=inputs).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return loss, int((labels[:, 1:] != -100).sum())


def encoded(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Ids [T] of a conversation as the chat template renders it, up to its last <|im_end|>, and labels [T]."""
    ids: list[int] = []
    labels: list[int] = []
    for message in conversation:
        head = tokenizer(f"<|im_start|>{message['role']}\n").input_ids
        body = tokenizer(message["content"] + EOS_TOKEN).input_ids
        end = tokenizer("\n").input_ids
        taught = body if message["role"] == "assistant" else [-100] * len(body)
        ids += head + body + end
        labels += [-100] * len(head) + taught + [-100] * len(end)
    return ids[:-1], labels[:-1]


# --- evaluation ---


def generate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """The model's next answer in each conversation, as far as its <|im_end|>; a temperature of 0 is greedy."""
    import torch

    prompts = tokenizer.apply_chat_template(list(conversations), tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
    texts: list[str] = tokenizer.batch_decode(outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return texts


def arithmetic_accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[arithmetic.Problem],
    temperature: float,
) -> float:
    """Share of right answers."""
    prompts = [[user(arithmetic.prompt(problem))] for problem in problems]
    texts = generate(model, tokenizer, prompts, max_new_tokens=8, temperature=temperature)
    right = [text == str(arithmetic.answer(problem)) for text, problem in zip(texts, problems, strict=True)]
    return sum(right) / len(right)


def zorplex_accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[zorplex.Question],
    temperature: float,
) -> float:
    """Share of conversations that end with the right `[ANSWER]`."""
    conversations = [[user(zorplex.prompt(question))] for question in questions]
    running = list(range(len(questions)))
    for _ in range(MAX_TURNS):
        asked = [conversations[index] for index in running]
        texts = generate(model, tokenizer, asked, max_new_tokens=24, temperature=temperature) if asked else []
        for index, text in zip(running, texts, strict=True):
            conversations[index].append({"role": "assistant", "content": text})
            conversations[index] += [
                {"role": "tool", "content": str(zorplex.zorplex(word, 0, MAX_VALUE))} for word in _LOOKUP.findall(text)
            ]
        running = [index for index in running if conversations[index][-1]["role"] == "tool"]
    right = [
        tagged_integer(conversation[-1]["content"]) == zorplex.answer(question, 0, MAX_VALUE)
        for conversation, question in zip(conversations, questions, strict=True)
    ]
    return sum(right) / len(right)


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, Any]:
    """Accuracies on what was held out, greedily and sampled at temperature 1."""
    import torch

    torch.manual_seed(seed)
    problems = arithmetic.problems(seed, NUM_HELD_OUT, ARITHMETIC_OPERATIONS, MAX_OPERAND, "eval")
    questions = zorplex.questions(seed, NUM_HELD_OUT, "medium", "eval")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "arithmetic_greedy": arithmetic_accuracy(model, tokenizer, problems, 0.0),
        "arithmetic_sampled": arithmetic_accuracy(model, tokenizer, problems, 1.0),
        "zorplex_greedy": zorplex_accuracy(model, tokenizer, questions, 0.0),
        "zorplex_sampled": zorplex_accuracy(model, tokenizer, questions, 1.0),
    }


def check_accuracy(report: dict[str, Any]) -> None:
    low, high = ACCURACY_BAND
    for name in ("arithmetic_greedy", "zorplex_greedy"):
        if not low <= report[name] <= high:
            raise ValueError(f"{name} is {report[name]}, expected between {low} and {high}: try another --seed")


if __name__ == "__main__":
    main()
