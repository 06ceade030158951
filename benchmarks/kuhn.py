"""What keeps self-play from circling, at Kuhn poker: the embedded model with LoRA, trained without servers.

    python -m benchmarks.kuhn
    python -m benchmarks.kuhn --entropy_tau 0 --seeds 1,2,3

The policy's probabilities at the 12 prompts are computed in one forward pass, games are drawn from them, and the loss
is REINFORCE with the mean reward of each seat as baseline and an entropy that falls, as `grpo kuhn` has it. A run takes
a fraction of a minute. Every 32 steps the exact judge says what the best opponent would win. It chooses settings; what
counts is what `grpo judge` says of a run.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.environments.games.game import Game
from grpo.environments.games.judge import Judge

MODEL = Path(__file__).parents[1] / "configs/games/model"
JUDGE = Judge(Game("kuhn_poker", with_rules=False))
ILLEGAL = -10.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROWS = {question.prompt: row for row, question in enumerate(JUDGE.questions)}


def rows_after(moves: str) -> Any:
    """Returns [3] the row of each card's question after these moves."""
    return np.array([ROWS[" ".join(["kuhn", card, *moves])] for card in "JQK"])


FIRST, PASSED, BET, FACED = (rows_after(moves) for moves in ("", "p", "b", "pb"))


def play(probs: Any, num: int, rng: np.random.Generator) -> list[tuple[Any, Any, Any, Any]]:
    """Plays games with probabilities [12, V] of answers. Returns for each turn of a game: who has it [G] bool, the rows
    [G], the tokens [G], and the advantages [G]."""
    cards = np.array([rng.permutation(3)[:2] for _ in range(num)])
    p, b = LEGAL

    def sampled(rows: Any) -> Any:
        return (probs[rows].cumsum(1) > rng.random((len(rows), 1)) * probs[rows].sum(1, keepdims=True)).argmax(1)

    rows = [FIRST[cards[:, 0]]]
    tokens = [sampled(rows[0])]
    rows.append(np.where(tokens[0] == p, PASSED[cards[:, 1]], BET[cards[:, 1]]))
    tokens.append(sampled(rows[1]))
    rows.append(FACED[cards[:, 0]])
    tokens.append(sampled(rows[2]))
    wrong = [~np.isin(one, LEGAL) for one in tokens]
    has_second = ~wrong[0]
    has_third = (tokens[0] == p) & (tokens[1] == b)
    wins = np.where(cards[:, 0] > cards[:, 1], 1.0, -1.0)
    after_pass = np.where(tokens[1] == p, wins, np.where(tokens[2] == p, -1.0, 2 * wins))
    first = np.where(tokens[0] == p, after_pass, np.where(tokens[1] == p, 1.0, 2 * wins))
    second = -first
    for turn, has in enumerate((np.ones(num, bool), has_second, has_third)):
        ends = has & wrong[turn]
        first = np.where(ends, ILLEGAL if turn != 1 else 0.0, first)
        second = np.where(ends, ILLEGAL if turn == 1 else 0.0, second)
    of_first, of_second = first - first.mean(), second - second[has_second].mean()
    turns = zip((np.ones(num, bool), has_second, has_third), rows, tokens, (of_first, of_second, of_first), strict=True)
    return list(turns)


def load() -> tuple[Any, Any, list[int]]:
    """Returns the prompts' ids [12, L], the places of their last tokens, and the ids of `p` and `b`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.prompt}], tokenize=False, add_generation_prompt=True
        )
        for question in JUDGE.questions
    ]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    longest = max(map(len, ids))
    padded = torch.tensor([[*one, *[0] * (longest - len(one))] for one in ids])
    last = torch.tensor([len(one) - 1 for one in ids])
    return padded, last, tokenizer.convert_tokens_to_ids(["p", "b"])


PROMPTS, LAST, LEGAL = load()


def train(options: argparse.Namespace, seed: int) -> list[float]:
    """Returns the NashConv before the first step, every 32 steps and at the end."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (options.adam_beta1, 0.99)
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=betas, weight_decay=0.0)
    figures = []
    for step in range(options.steps + 1):
        logprobs = torch.log_softmax(model(input_ids=PROMPTS).logits[torch.arange(len(LAST)), LAST].float(), -1)
        probs = logprobs.exp().detach().double().numpy()
        if step % 32 == 0 or step == options.steps:
            policy = {question.prompt: probs[row, LEGAL].tolist() for row, question in enumerate(JUDGE.questions)}
            figures.append(round(JUDGE.judge(policy).nash_conv, 3))
        if step == options.steps:
            return figures
        share = step / options.steps
        weights, visits = np.zeros(probs.shape), np.zeros(len(probs))
        for has, rows, tokens, advantages in play(probs, options.games, rng):
            np.add.at(weights, (rows[has], tokens[has]), advantages[has])
            np.add.at(visits, rows[has], 1.0)
        loss = -(torch.tensor(weights, dtype=torch.float32) * logprobs).sum()
        if options.entropy_tau:
            tau = options.entropy_tau * (options.entropy_tau_end / options.entropy_tau) ** share
            entropies = -(logprobs.exp() * logprobs).sum(1)
            loss = loss - tau * (torch.tensor(visits, dtype=torch.float32) * entropies).sum()
        optimizer.zero_grad()
        (loss / visits.sum()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = options.learning_rate * (1 - share if options.falls else 1.0)
        optimizer.step()
    raise AssertionError("the last step has returned")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3", help="one run each (1,2,3)")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--games", type=int, default=512, help="games of a step (512)")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--falls", type=json.loads, default=True, help="the learning rate falls to 0 (true)")
    parser.add_argument("--adam_beta1", type=float, default=0.0)
    parser.add_argument("--entropy_tau", type=float, default=0.5)
    parser.add_argument("--entropy_tau_end", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in map(int, options.seeds.split(",")):
        print(json.dumps({"seed": seed, "nash_conv": train(options, seed)}), flush=True)


if __name__ == "__main__":
    main()
