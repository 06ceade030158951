"""Build the teacher of the distillation preset: the quickstart's model, taught on by one who is never wrong.

    python -m configs.distillation.make_teacher --output configs/distillation/teacher

Tokenizer, network and first weights are those of `configs/quickstart/model`; supervised steps on the training split of
`reverse_text` follow, now with right answers. What the environment evaluates on is never taught.

The result is committed under `configs/distillation/teacher`; the same seed gives the same model on the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from configs.quickstart.make_model import (
    MAX_LEN,
    MIN_LEN,
    answer_loss,
    build_tokenizer,
    greedy_accuracy,
    measure,
    parse_arguments,
    rounded_to_bfloat16,
    save_and_tell,
)
from orchestrator.envs import _reverse_words as task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PUPIL = Path(__file__).parents[1] / "quickstart" / "model"
NUM_STEPS, BATCH_SIZE = 200, 64
LEARNING_RATE, WARMUP_STEPS = 2e-3, 20
REPORT_INTERVAL = 20
LEAST_ACCURACY = 0.95


def main() -> None:
    args = parse_arguments(__doc__)
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # one order of summation, whatever the machine's load
    tokenizer = build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(PUPIL, dtype=torch.float32)
    started_s = time.monotonic()
    train(model, tokenizer, args.seed)
    report = {"seed": args.seed, "training_s": round(time.monotonic() - started_s, 1)}
    model = rounded_to_bfloat16(model)
    report |= measure(model, tokenizer, args.seed)
    check_accuracy(report["greedy_accuracy"])
    save_and_tell(model, tokenizer, args.output, report)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train `model` in place on right answers."""
    import torch

    held_out = task.words(seed, 100, MIN_LEN, MAX_LEN, "eval")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step, batch in enumerate(taught_batches(seed), start=1):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        loss = answer_loss(model, tokenizer, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % REPORT_INTERVAL == 0:
            accuracy = greedy_accuracy(rounded_to_bfloat16(model), tokenizer, held_out)
            print(f"step {step:3d}  loss {loss.item():.3f}  greedy accuracy {accuracy:.3f}", flush=True)


def learning_rate(step: int) -> float:
    """Linear warm-up, then linear decay to the end."""
    return LEARNING_RATE * min(step / WARMUP_STEPS, (NUM_STEPS - step + 1) / (NUM_STEPS - WARMUP_STEPS))


def taught_batches(seed: int) -> Iterator[list[tuple[str, str]]]:
    """NUM_STEPS batches of (word, right answer)."""
    drawn = task.words(seed, NUM_STEPS * BATCH_SIZE, MIN_LEN, MAX_LEN, "train")
    for start in range(0, len(drawn), BATCH_SIZE):
        yield [(word, task.answer(word)) for word in drawn[start : start + BATCH_SIZE]]


def check_accuracy(accuracy: float) -> None:
    if accuracy < LEAST_ACCURACY:
        raise ValueError(f"greedy accuracy is {accuracy}, expected at least {LEAST_ACCURACY}: try another --seed")


if __name__ == "__main__":
    main()
