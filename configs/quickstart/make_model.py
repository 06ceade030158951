"""Build the quickstart's model: a 0.8M-parameter Qwen3 that reverses words, carelessly.

    python -m configs.quickstart.make_model --output configs/quickstart/model

A byte-level tokenizer, random weights, then supervised steps on the training split of
`reverse_text`, with answers by a careless teacher: he often gives up on long words after
four letters and sometimes swaps two neighbouring letters. So the model can reverse, but
does it right in a third of the cases, greedily or sampled; a reward for right answers
brings out the rest. (A model that merely stops half-way through learning to reverse has
the same accuracy and is of no use here: it does not find right answers to long words in
any number of samples that a demonstration can afford.)

The result is committed under `configs/quickstart/model`; the same seed gives the same
model on the same machine.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.envs import _reverse_words as task

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

MIN_LEN, MAX_LEN = 3, 8
MAX_NEW_TOKENS = MAX_LEN + 1  # the answer and <|im_end|>

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

# The teacher's faults. Greedy decoding follows the majority: it gives up wherever the
# teacher mostly does, and so is right on words of up to GIVE_UP_AFTER letters only.
GIVE_UP_AFTER, GIVE_UP_RATE = 4, 0.7
SWAP_RATE = 0.4
ACCURACY_BAND = (0.25, 0.5)

NUM_STEPS, BATCH_SIZE = 400, 64
LEARNING_RATE, WARMUP_STEPS, DECAY_STEPS = 2e-3, 20, 160
EVALUATION_INTERVAL = 40


def main() -> None:
    args = parse_arguments()
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
    check_accuracy(report["greedy_accuracy"], args.seed)
    save_and_tell(model, tokenizer, args.output, report)


def parse_arguments(description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sampling")
    return parser.parse_args()


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


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

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


def rounded_to_bfloat16(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The float32 model whose weights are what the stored bfloat16 file will hold."""
    return copy.deepcopy(model).bfloat16().float()


# --- pre-training ---


def pretrain(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train `model` in place on what the careless teacher answers."""
    import torch

    held_out = task.words(seed, 200, MIN_LEN, MAX_LEN, "eval")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step, batch in enumerate(taught_batches(seed), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = answer_loss(model, tokenizer, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVALUATION_INTERVAL == 0:
            accuracy = greedy_accuracy(rounded_to_bfloat16(model), tokenizer, held_out)
            print(f"step {step:3d}  loss {loss.item():.3f}  greedy accuracy {accuracy:.3f}")


def learning_rate(step: int) -> float:
    """Linear warm-up, then flat, then linear decay over the last DECAY_STEPS."""
    return LEARNING_RATE * min(1.0, step / WARMUP_STEPS, (NUM_STEPS - step + 1) / DECAY_STEPS)


def taught_batches(seed: int) -> Iterator[list[tuple[str, str]]]:
    """NUM_STEPS batches of (word, the teacher's answer)."""
    rng = random.Random(seed)
    drawn = task.words(seed, NUM_STEPS * BATCH_SIZE, MIN_LEN, MAX_LEN, "train")
    for start in range(0, len(drawn), BATCH_SIZE):
        batch = drawn[start : start + BATCH_SIZE]
        yield [(word, careless_answer(word, rng)) for word in batch]


def careless_answer(word: str, rng: random.Random) -> str:
    answer = task.answer(word)
    if rng.random() < GIVE_UP_RATE:
        answer = answer[:GIVE_UP_AFTER]
    if rng.random() < SWAP_RATE:
        at = rng.randrange(len(answer) - 1)
        answer = answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]
    return answer


def answer_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: list[tuple[str, str]]
) -> torch.Tensor:
    """Mean cross-entropy of the answers' bytes and their <|im_end|>; prompts carry no loss."""
    prompts = chat_prompts(tokenizer, [word for word, _ in batch])
    answers = [answer + EOS_TOKEN for _, answer in batch]
    inputs = tokenizer(
        [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        padding=True,
        return_tensors="pt",
    )
    labels = inputs.input_ids.clone()
    for row, answer_ids in zip(labels, tokenizer(answers).input_ids, strict=True):
        row[: -len(answer_ids)] = -100  # padding is on the left
    loss: torch.Tensor = model(**inputs, position_ids=positions(inputs.attention_mask), labels=labels).loss
    return loss


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions [B, T] that start at 0 behind the padding on the left."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


# --- evaluation ---


def chat_prompts(tokenizer: PreTrainedTokenizerFast, batch: list[str]) -> list[str]:
    conversations = [[{"role": "user", "content": task.prompt(word)}] for word in batch]
    prompts: list[str] = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    return prompts


def generate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: list[str],
    **sampling: Any,
) -> list[str]:
    """The model's answer to each word, decoded as far as its <|im_end|>."""
    import torch

    inputs = tokenizer(chat_prompts(tokenizer, batch), padding=True, return_tensors="pt")
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **sampling)
    answers = outputs[:, inputs.input_ids.shape[1] :]
    texts: list[str] = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return texts


def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: list[str]) -> float:
    texts = generate(model, tokenizer, batch, do_sample=False)
    return sum(map(task.is_correct, texts, batch)) / len(batch)


def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, Any]:
    """Figures on 200 held-out words.

    `mean_reward` is the share of right answers at temperature 1, `pass_at_16` the share
    of words with a right answer among 16, `mixed_groups` that of words with right and
    wrong ones: only these give a group-relative advantage that is not zero.
    """
    import torch

    torch.manual_seed(seed)
    held_out = task.words(seed + 1, 200, MIN_LEN, MAX_LEN, "eval")
    num_right = []
    for word in held_out:
        texts = generate(model, tokenizer, [word] * 16, do_sample=True, temperature=1.0, top_k=0)
        num_right.append(sum(task.is_correct(text, word) for text in texts))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "greedy_accuracy": greedy_accuracy(model, tokenizer, held_out),
        "mean_reward": round(sum(num_right) / (16 * len(num_right)), 4),
        "pass_at_16": sum(n > 0 for n in num_right) / len(num_right),
        "mixed_groups": sum(0 < n < 16 for n in num_right) / len(num_right),
    }


def check_accuracy(accuracy: float, seed: int) -> None:
    low, high = ACCURACY_BAND
    if not low <= accuracy <= high:
        raise ValueError(
            f"seed {seed} gave greedy accuracy {accuracy}, expected between {low} and {high}: try another --seed"
        )


# --- output ---


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Store the weights as bfloat16, half the size, and name float32 as the type to run in."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)
    edit_json(output / "config.json", dtype="float32")
    # The class name that transformers 4 and 5 both know.
    edit_json(output / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def save_and_tell(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path, report: dict[str, Any]
) -> None:
    """Store the model, and print `report` and what it takes on disk, as a table and as one JSON object."""
    save(model, tokenizer, output)
    report["size_bytes"] = sum(file.stat().st_size for file in output.iterdir())
    for name, value in report.items():
        print(f"{name:>16}  {value}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
