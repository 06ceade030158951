"""Makes the embedded models: Qwen3 with 0.8M parameters and a byte-level tokenizer, which do their tasks carelessly.

    python -m tools.make_tiny_models quickstart --output configs/quickstart/model

`quickstart` reverses words, `tiny` does each built-in task a little, `hints` looks words up and heeds hints, and
`distillation` is the quickstart's model taught on by one who is never wrong. Supervised steps on what careless teachers
say (`tools/teachers.py`) make models that can do a task and do it right in a third or half of the cases, greedily or
sampled; rewards bring out the rest. (A model that merely stops half-way through learning has the same accuracy and is
of no use: it finds no right answers to hard questions in any number of samples that a demonstration can afford.)

A model that is made anew is as good as the committed one, and has not the same bytes. `grpo evaluate` tells how good:
`quickstart` should have 0.25 to 0.5 on reverse-text and `distillation` 0.95, `tiny` 0.25 to 0.6 on arithmetic and 0.15
to 0.6 on zorplex, and of the calls of `hints` 0.3 or more should fail; if not, try another --seed. The tokenizer, whose
ids are the bytes of UTF-8 and three special tokens, and the chat template are those of the committed quickstart.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import teachers
from tools.random_models import QUICKSTART_MODEL, TINY, TOKENIZER_FILES, make_random
from tools.teachers import Conversation, Teacher

LEARNING_RATE, MUON_LEARNING_RATE, WARMUP_STEPS = 2e-3, 0.02, 20


class Recipe(NamedTuple):
    """The recipe of one of the models."""

    rows: Sequence[tuple[Teacher, int]]
    """Teachers, and how many of each one's conversations are in a batch."""
    num_steps: int
    decay_share: float = 0.4
    """The learning rate falls to 0 over the last steps, this share of all."""
    muon: bool = False
    """Muon takes the matrices, with which adding is learnt in half of the steps."""
    start: Path | None = None
    """The model to begin with; None for random weights."""


RECIPES = {
    "quickstart": Recipe(teachers.REVERSING, 400),
    "distillation": Recipe(teachers.REVERSING_RIGHT, 200, decay_share=0.9, start=QUICKSTART_MODEL),
    "tiny": Recipe(teachers.ALL_TASKS, 900, muon=True),
    "hints": Recipe(teachers.LOOK_UPS, 480, muon=True),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="of weights and conversations")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation, whatever the machine's load
    recipe, tokenizer = RECIPES[args.name], AutoTokenizer.from_pretrained(QUICKSTART_MODEL)
    with TemporaryDirectory() as folder:
        start = recipe.start or make_random(Path(folder), TINY, seed=args.seed)
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    train(model, tokenizer, recipe, args.seed)
    save(model, args.output)


def train(model: Any, tokenizer: Any, recipe: Recipe, seed: int) -> None:
    """Trains `model` in place on what the teachers say."""
    rng = random.Random(seed)
    optimizers = build_optimizers(model, muon=recipe.muon)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in range(1, recipe.num_steps + 1):
        told = [answer_loss(model, tokenizer, [teach(rng) for _ in range(rows)]) for teach, rows in recipe.rows]
        loss = torch.stack([loss for loss, _ in told]).sum() / sum(num for _, num in told)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        left = (recipe.num_steps - step + 1) / (recipe.decay_share * recipe.num_steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, step / WARMUP_STEPS, left)
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)


def build_optimizers(model: Any, *, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW, for embeddings and norms alone where Muon takes the matrices."""
    if not muon:
        return [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)]
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0),
    ]


def answer_loss(model: Any, tokenizer: Any, conversations: Sequence[Conversation]) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy of the assistant's bytes and their <|im_end|>, and how many these are."""
    rows = [encoded(tokenizer, conversation) for conversation in conversations]
    longest, pad = max(len(ids) for ids, _ in rows), tokenizer.pad_token_id
    inputs = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([taught + [-100] * (longest - len(taught)) for _, taught in rows])
    logits = model(input_ids=inputs).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return loss, int((labels[:, 1:] != -100).sum())


def encoded(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Ids [T] of a conversation as the chat template renders it, up to its last <|im_end|>, and labels [T]."""
    ids: list[int] = []
    labels: list[int] = []
    for message in conversation:
        head = tokenizer(f"<|im_start|>{message['role']}\n").input_ids
        body = tokenizer(f"{message['content']}<|im_end|>").input_ids
        end = tokenizer("\n").input_ids
        taught = body if message["role"] == "assistant" else [-100] * len(body)
        ids += head + body + end
        labels += [-100] * len(head) + taught + [-100] * len(end)
    return ids[:-1], labels[:-1]


def save(model: Any, output: Path) -> None:
    """Stores the weights as bfloat16, half the size, and names float32 as the type to run in."""
    model.bfloat16().save_pretrained(output)
    config = output / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n"
    )
    for name in TOKENIZER_FILES:
        (output / name).write_bytes((QUICKSTART_MODEL / name).read_bytes())


if __name__ == "__main__":
    main()
