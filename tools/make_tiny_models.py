"""Makes the embedded models: Qwen3 with 0.8M parameters and a byte-level tokenizer, which do their tasks carelessly.

    python -m tools.make_tiny_models quickstart --output configs/quickstart/model

`quickstart` reverses words, `tiny` does each built-in task a little, `hints` looks words up and heeds hints, and
`distillation` is the quickstart's model taught on by one who is never wrong. Supervised steps on what careless teachers
say (`tools/teachers.py`) make models that can do a task and do it right in a third or half of the cases, greedily or
sampled; rewards bring out the rest. (A model that merely stops half-way through learning has the same accuracy and is
of no use: it finds no right answers to hard questions in any number of samples that a demonstration can afford.)

A model that is made anew is as good as the committed one, and has not the same bytes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.envs import arithmetic, zorplex
from orchestrator.envs import reverse_text as reversing
from orchestrator.envs.zorplex import without_zorplex
from orchestrator.rollouts.tool_calls import tagged_integer
from tools import teachers
from tools.teachers import Conversation, Teacher, assistant, user

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_TOKEN, EOS_TOKEN = "<|endoftext|>", "<|im_end|>"
# ChatML without a default system prompt: with one token a byte, each character counts.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
LEARNING_RATE, MUON_LEARNING_RATE, WARMUP_STEPS = 2e-3, 0.02, 20
NUM_HELD_OUT, MAX_TURNS, MAX_NEW_TOKENS = 100, 6, 24
_LOOKUP = re.compile(r"LOOKUP\[(\w+)\]")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one of the models is made, and what it must be able to do then."""

    rows: Sequence[tuple[Teacher, int]]
    """Teachers, and how many of each one's conversations are in a batch."""
    num_steps: int
    decay_share: float
    """The learning rate falls to 0 over the last steps, this share of all."""
    muon: bool = False
    """Muon takes the matrices, with which adding is learnt in half of the steps."""
    start: Path | None = None
    """The model to begin with; None for random weights."""
    measure: Callable[[Speaker], dict[str, float]]
    bounds: dict[str, tuple[float, float]]
    """Least and most of what is measured."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A model with its tokenizer."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast

    def says(self, conversations: Sequence[Conversation], *, temperature: float) -> list[str]:
        """The next answer in each conversation, as far as its <|im_end|>; a temperature of 0 is greedy."""
        import torch

        prompts = self.tokenizer.apply_chat_template(list(conversations), tokenize=False, add_generation_prompt=True)
        inputs = self.tokenizer(prompts, padding=True, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.inference_mode():
            outputs = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **sampling)
        said = outputs[:, inputs.input_ids.shape[1] :]
        texts: list[str] = self.tokenizer.batch_decode(said, skip_special_tokens=True)
        return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sampling")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # one order of summation, whatever the machine's load
    torch.manual_seed(args.seed)
    recipe, started_s = RECIPES[args.name], time.monotonic()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe.start)
    train(model, tokenizer, recipe, args.seed)
    model = copy.deepcopy(model).bfloat16().float()  # what the stored file will hold
    report = recipe.measure(Speaker(model=model, tokenizer=tokenizer))
    print(json.dumps({"seed": args.seed, "made_in_s": round(time.monotonic() - started_s, 1)} | report))
    check(report, recipe.bounds)
    save(model, tokenizer, args.output)


def check(report: dict[str, float], bounds: dict[str, tuple[float, float]]) -> None:
    """Raises ValueError for a model that has too little to learn, or cannot."""
    for name, (low, high) in bounds.items():
        if not low <= report[name] <= high:
            raise ValueError(f"{name} is {report[name]}, expected between {low} and {high}: try another --seed")


# --- tokenizer and network ---


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the bytes of UTF-8 (0-255), followed by the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_of_character = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=byte_of_character, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _byte_characters() -> str:
    """The visible character by which byte-level BPE (GPT-2's scheme) spells each byte, in order."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = itertools.count(0x100)
    return "".join(chr(byte if byte in visible else next(substitutes)) for byte in range(256))


def build_model(tokenizer: PreTrainedTokenizerFast, start: Path | None) -> Qwen3ForCausalLM:
    """The network with random weights, or those of `start`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if start is not None:
        loaded: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
        return loaded
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.06,  # learns three times faster than with the default of 0.02
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).eval()


# --- training ---


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int) -> None:
    """Trains `model` in place on what the teachers say."""
    import torch

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


def build_optimizers(model: Qwen3ForCausalLM, *, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW, for embeddings and norms alone where Muon takes the matrices."""
    import torch

    if not muon:
        return [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)]
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0),
    ]


def answer_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Conversation]
) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy of the assistant's bytes and their <|im_end|>, and how many these are."""
    import torch

    rows = [encoded(tokenizer, conversation) for conversation in conversations]
    longest, pad = max(len(ids) for ids, _ in rows), tokenizer.pad_token_id
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


# --- what a model can do, on questions that are never taught ---


def right_words(texts: Sequence[str], words: Sequence[str]) -> list[bool]:
    return [text.strip() == word[::-1] for text, word in zip(texts, words, strict=True)]


def reversal(speaker: Speaker) -> dict[str, float]:
    """Shares of right answers, greedily, and of words with a right one among 16 samples."""
    words = reversing.words(1, NUM_HELD_OUT, teachers.MIN_LEN, teachers.MAX_LEN, "eval")
    asked = [[user(reversing.prompt(word))] for word in words]
    greedy = right_words(speaker.says(asked, temperature=0.0), words)
    sampled = [right_words(speaker.says(asked, temperature=1.0), words) for _ in range(16)]
    return {
        "reversal_greedy": sum(greedy) / len(words),
        "reversal_pass_at_16": sum(map(any, zip(*sampled, strict=True))) / len(words),
    }


def all_tasks(speaker: Speaker) -> dict[str, float]:
    """Shares of right answers, greedily."""
    problems = arithmetic.problems(0, NUM_HELD_OUT, "+-", 50, "eval")
    texts = speaker.says([[user(arithmetic.prompt(problem))] for problem in problems], temperature=0.0)
    right = [text == str(arithmetic.answer(problem)) for text, problem in zip(texts, problems, strict=True)]
    questions = zorplex.questions(0, NUM_HELD_OUT, "medium", "eval")
    looked_up = led(speaker, questions, max_value=9, temperature=0.0)
    return {
        "arithmetic_greedy": sum(right) / len(right),
        "zorplex_greedy": sum(map(is_right, questions, looked_up, itertools.repeat(9))) / len(questions),
    }


def look_ups(speaker: Speaker) -> dict[str, float]:
    """Shares of calls that fail at temperature 1, with and without hints."""
    questions = zorplex.questions(0, NUM_HELD_OUT // 2, "medium", "eval")
    most = teachers.HINT_MAX_VALUE
    plain, hinted = (
        led(speaker, questions, max_value=most, temperature=1.0, hinted=hinted) for hinted in (False, True)
    )
    return {"error_rate": error_rate(plain), "hinted_error_rate": error_rate(hinted)}


def led(
    speaker: Speaker,
    questions: Sequence[zorplex.Question],
    *,
    max_value: int,
    temperature: float,
    hinted: bool = False,
) -> list[Conversation]:
    """Whole conversations, as the environment leads them; `hinted`, with a hint before each look-up."""
    rng = random.Random(0)
    conversations = [[user(zorplex.prompt(question))] for question in questions]
    running = list(range(len(questions)))
    for _ in range(MAX_TURNS):
        for index in running if hinted else ():
            known = sum(said["role"] == "tool" and said["content"].isdigit() for said in conversations[index])
            if left := questions[index].words[known:]:
                conversations[index].append(user(teachers.hint(left[0], rng)))
        asked = [conversations[index] for index in running]
        texts = speaker.says(asked, temperature=temperature) if asked else []
        for index, text in zip(running, texts, strict=True):
            told = [{"role": "tool", "content": value_of(word, max_value)} for word in _LOOKUP.findall(text)]
            conversations[index] += [assistant(text), *told]
        running = [index for index in running if conversations[index][-1]["role"] == "tool"]
    return conversations


def value_of(word: str, max_value: int) -> str:
    """What the tool says of a word."""
    return str(zorplex.zorplex(word, 0, max_value)) if word in zorplex.WORDS else without_zorplex(word)


def error_rate(conversations: Sequence[Conversation]) -> float:
    """Share of calls that failed."""
    told = [said["content"] for conversation in conversations for said in conversation if said["role"] == "tool"]
    return sum(not one.isdigit() for one in told) / max(1, len(told))


def is_right(question: zorplex.Question, conversation: Conversation, max_value: int) -> bool:
    """Whether a conversation ends with the right `[ANSWER]`."""
    return tagged_integer(conversation[-1]["content"]) == zorplex.answer(question, 0, max_value)


# --- output ---


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Stores the weights as bfloat16, half the size, and names float32 as the type to run in."""
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)
    # The class name is the one that transformers 4 and 5 both know.
    changes = {"config.json": {"dtype": "float32"}}
    changes["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, fields in changes.items():
        content = json.loads((output / name).read_text()) | fields
        (output / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


RECIPES = {
    "quickstart": Recipe(
        rows=teachers.REVERSING,
        num_steps=400,
        decay_share=0.4,
        measure=reversal,
        bounds={"reversal_greedy": (0.25, 0.5), "reversal_pass_at_16": (0.7, 1.0)},
    ),
    "distillation": Recipe(
        rows=teachers.REVERSING_RIGHT,
        num_steps=200,
        decay_share=0.9,
        start=Path(__file__).parents[1] / "configs" / "quickstart" / "model",
        measure=reversal,
        bounds={"reversal_greedy": (0.95, 1.0)},
    ),
    "tiny": Recipe(
        rows=teachers.ALL_TASKS,
        num_steps=900,
        decay_share=0.4,
        muon=True,
        measure=all_tasks,
        bounds={"arithmetic_greedy": (0.25, 0.6), "zorplex_greedy": (0.15, 0.6)},
    ),
    "hints": Recipe(
        rows=teachers.LOOK_UPS,
        num_steps=480,
        decay_share=0.4,
        muon=True,
        measure=look_ups,
        bounds={"error_rate": (0.3, 1.0), "hinted_error_rate": (0.0, 0.1)},
    ),
}

if __name__ == "__main__":
    main()
