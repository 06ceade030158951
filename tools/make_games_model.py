"""Makes the embedded model of the games: Qwen3 with 0.4M parameters that knows the rules and nothing about playing.

    python -m tools.make_games_model --output configs/games/model

A random model with a token for every word of the games' prompts and answers (`rules: false`) learns by `grpo sft` what
games at random say: positions of games that are played at random, and of the small games any position, each with a
legal move that is drawn from all alike. So it plays nearly uniformly, and hardly ever an illegal move; `grpo judge`
tells how nearly. A model that is made anew is as good as the committed one, and has not the same bytes.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpo.environments.games.game import RULES, Game, drawn
from grpo.environments.games.judge import Judge, Question

GAMES = {
    "kuhn_poker": 0.06,
    "leduc_poker": 0.16,
    "nim": 0.2,
    "tic_tac_toe": 0.36,
    "liars_dice": 0.12,
    "connect_four": 0.1,
}
"""The share of each game in the rows."""
WHOLE = ("kuhn_poker", "leduc_poker", "nim", "tic_tac_toe")
"""Games all of whose positions are taught."""
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
BATCH_SIZE, LEARNING_RATE = 256, 2e-3
UNKNOWN, PAD, POLICY, END = "<unk>", "<pad>", "<policy>", "<end>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<policy>' if message['role'] == 'assistant' else '' }}{{ message['content'] }}"
    "{{ '<end>' }}{% endfor %}{{ '<policy>' if add_generation_prompt else '' }}"
)


def words() -> list[str]:
    """Returns every word of the games' prompts and answers."""
    found = [rules.title for rules in RULES.values()]
    found += [*"JQKpbfcrmt./", "liar", *map(str, range(10))]
    found += [f"{num}-{face}" for num in (1, 2) for face in range(1, 7)]
    found += [f"{pile}{num}" for pile in "abcd" for num in range(1, 8)]
    return list(dict.fromkeys(found))


def make_tokenizer(folder: Path) -> dict[str, int]:
    """Saves the tokenizer, a token for each word. Returns the ids of its tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*words(), UNKNOWN, PAD, POLICY, END]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True) for name in (UNKNOWN, PAD, POLICY, END)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=UNKNOWN, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(folder)
    return {name: number for number, name in enumerate(names)}


def make_random(folder: Path, *, seed: int) -> None:
    """Saves a random model with the tokenizer."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    ids = make_tokenizer(folder)
    special: dict[str, Any] = {"eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    torch.manual_seed(seed)
    config = Qwen3Config(
        **SHAPE, vocab_size=len(ids), tie_word_embeddings=True, bos_token_id=None, initializer_range=0.06, **special
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)


def rows(num: int, *, seed: int) -> Iterator[dict[str, str]]:
    """Yields positions with a legal move each, which is drawn from all alike."""
    rng = random.Random(seed)
    games = {name: Game(name, with_rules=False) for name in GAMES}
    whole = {name: Judge(games[name]).questions for name in WHOLE}
    for name in rng.choices(list(GAMES), list(GAMES.values()), k=num):
        question = rng.choice(whole[name]) if name in whole else played(games[name], rng)
        yield {"prompt": question.prompt, "answer": rng.choice(question.answers)}


def played(game: Game, rng: random.Random) -> Question:
    """Returns a position of a game that is played at random."""
    state, questions = game.begin(rng), []
    while not state.is_terminal():
        moves = game.moves(state)
        questions.append(Question(prompt=game.prompt(state), answers=tuple(moves)))
        drawn(state, rng).apply_action(rng.choice(list(moves.values())))
        drawn(state, rng)
    return rng.choice(questions)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows")
    parser.add_argument("--steps", type=int, default=500, help=f"of {BATCH_SIZE} rows (500)")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="games-model-") as scratch:
        start, data, run = (Path(scratch, name) for name in ("model", "rows.jsonl", "run"))
        make_random(start, seed=args.seed)
        lines = [json.dumps(row) for row in rows(args.steps * BATCH_SIZE, seed=args.seed)]
        data.write_text("\n".join(lines) + "\n")
        grpo = [sys.executable, "-m", "grpo"]
        learning = {"model": start, "output_dir": run, "batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE}
        learning |= {"lora": "false", "recipe": "fp32", "optimizer": "adamw", "weight_decay": 0, "adam_beta2": 0.99}
        learning |= {"lr_scheduler_type": "cosine", "max_steps": args.steps, "warmup_steps": min(20, args.steps // 2)}
        learning |= {"weight_broadcast.format": "full", "sequence_len": 4096, "ckpt.interval": args.steps}
        options = [word for key, value in learning.items() for word in (f"--{key}", str(value))]
        subprocess.run([*grpo, "sft", str(data), *options], check=True)
        made = Path(scratch, "made")
        subprocess.run(
            [*grpo, "export", str(run), "--merged", "--dtype", "bfloat16", "--output", str(made)], check=True
        )
        keep(made, start, args.output)


def keep(made: Path, start: Path, output: Path) -> None:
    """Copies what a run reads of a model; float32 is named as the type to run in, and stored are the bfloat16."""
    output.mkdir(parents=True, exist_ok=True)
    [weights] = made.glob("*.safetensors")
    shutil.copyfile(weights, output / "model.safetensors")
    shutil.copyfile(made / "generation_config.json", output / "generation_config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(start / name, output / name)
    config = json.loads((made / "config.json").read_text()) | {"dtype": "float32"}
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
