"""Self-play at small games, judged exactly: the embedded model, trained in one process without servers.

    python -m benchmarks.games leduc
    python -m benchmarks.games kuhn --logits --arms plain,uniform,pfsp,exploiter,average,annealed --seeds 1,2,3,4,5

Positions are tables, so that all games of a step are played at once, and each position that games have met is computed
once. The loss is REINFORCE with a baseline by seat or by prompt and an entropy that falls, as the presets have it. It
chooses settings; what counts is what `grpo judge` says of a run.

The arms differ from `annealed` (the preset's settings) in what keeps self-play from circling. `plain` has nothing, and
the usual optimizer. `uniform` and `pfsp`: 80% of the games are against a snapshot, of every fifth step, the newest 16.
`exploiter`: half of the games are against a second adapter, which trains against the newest main. `start` and
`average`: the KL to the model before training, or to the mean of all policies so far, instead of the entropy.
`annealed_uniform`, `annealed_pfsp` and `annealed_exploiter` have opponents beside the preset's settings.
"""

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.environments.games.game import Game
from grpo.environments.games.judge import Judge
from grpo.orchestrator.ratings import pfsp_weights
from grpo.trainer.optim import is_matrix

MODEL = Path(__file__).parents[1] / "configs/games/model"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "kuhn": (
        "kuhn_poker",
        {"illegal_reward": -10, "entropy_tau": 0.5, "entropy_tau_end": 0.05, "games": 1024, "steps": 512},
    ),
    "leduc": ("leduc_poker", {"illegal_reward": -26, "entropy_tau": 2.0, "entropy_tau_end": 0.3}),
    "tictactoe": (
        "tic_tac_toe",
        {
            "illegal_reward": -3,
            "entropy_tau": 0.5,
            "entropy_tau_end": 0.03,
            "steps": 1024,
            "random_moves": 6,
            "adam_beta1": 0.9,
            "optimizer": "muon",
            "learning_rate": 2e-3,
        },
    ),
    "nim": (
        "nim(pile_sizes=1;2;3;4)",
        {
            "illegal_reward": -3,
            "entropy_tau": 0.5,
            "entropy_tau_end": 0.1,
            "games": 512,
            "steps": 512,
            "random_moves": 3,
            "adam_beta1": 0.9,
            "optimizer": "muon",
            "learning_rate": 2e-3,
        },
    ),
}
ARMS: dict[str, dict[str, Any]] = {
    "annealed": {},
    "plain": {"entropy_tau": 0, "lr_scheduler_type": "constant", "adam_beta1": 0.9},
    "uniform": {"entropy_tau": 0, "lr_scheduler_type": "constant", "adam_beta1": 0.9, "pool": "uniform"},
    "pfsp": {"entropy_tau": 0, "lr_scheduler_type": "constant", "adam_beta1": 0.9, "pool": "pfsp"},
    "exploiter": {"entropy_tau": 0, "lr_scheduler_type": "constant", "adam_beta1": 0.9, "pool": "exploiter"},
    "annealed_uniform": {"pool": "uniform"},
    "annealed_pfsp": {"pool": "pfsp"},
    "annealed_exploiter": {"pool": "exploiter"},
    "start": {"magnet": "start"},
    "average": {"magnet": "average"},
}
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
}
"""What is left of the learning rate when a share of the steps is over."""
CHANCE, OVER = -1, -2


class Table:
    """A game as arrays: `N` positions, `A` moves at most, `Q` prompts, `V` tokens. Position 0 is the first."""

    def __init__(self, name: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self.game = Game(name, with_rules=False)
        self.judge = Judge(self.game)
        self._numbers: dict[str, int] = {}
        self._rows = {question.prompt: row for row, question in enumerate(self.judge.questions)}
        nodes: list[Any] = []
        self._add(self.game.spiel.new_initial_state(), nodes)
        longest = max(len(node[2]) for node in nodes)
        self.player = np.array([node[0] for node in nodes])
        self.row = np.array([node[1] for node in nodes])
        self.children = np.array([[*node[2], *[0] * (longest - len(node[2]))] for node in nodes])
        self.chances = np.array([[*node[3], *[0.0] * (longest - len(node[3]))] for node in nodes])
        self.returns = np.array([node[4] for node in nodes])
        tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
        policy, vocabulary = tokenizer.convert_tokens_to_ids("<policy>"), len(tokenizer)
        ids = [
            [*tokenizer(f"{one.prompt} <end>", add_special_tokens=False).input_ids, policy]
            for one in self.judge.questions
        ]
        self.last = torch.tensor([len(one) - 1 for one in ids])
        self.ids = torch.tensor([[*one, *[0] * (int(max(self.last)) + 1 - len(one))] for one in ids])
        self.tokens = [tokenizer.convert_tokens_to_ids(list(one.answers)) for one in self.judge.questions]
        self.move = np.full((len(ids), vocabulary), -1)
        """[Q, V] which move a token is, or -1."""
        for row, tokens in enumerate(self.tokens):
            self.move[row, tokens] = np.arange(len(tokens))

    def _add(self, state: Any, nodes: list[Any]) -> int:
        """Returns the number of a position: of a history, or with perfect information of what is seen."""
        seen = self.game.known(state, max(0, state.current_player())) if self.game.has_perfect_information else ""
        key = f"{state.current_player()} {seen}" if seen else str(state.history())
        if key in self._numbers:
            return self._numbers[key]
        number = self._numbers[key] = len(nodes)
        nodes.append(None)
        if state.is_terminal():
            nodes[number] = OVER, 0, [], [], float(state.returns()[0])
        elif state.is_chance_node():
            moves, chances = zip(*state.chance_outcomes(), strict=True)
            nodes[number] = CHANCE, 0, [self._add(state.child(one), nodes) for one in moves], list(chances), 0.0
        else:
            children = [self._add(state.child(one), nodes) for one in self.game.moves(state).values()]
            player, row = state.current_player(), self._rows[self.game.prompt(state)]
            nodes[number] = player, row, children, [1 / len(children)] * len(children), 0.0
        return number


class Policy:
    """An adapter, or a table of logits, with its optimizer, and its probabilities at the prompts that were asked since
    its last step."""

    def __init__(self, table: Table, options: argparse.Namespace, seed: int) -> None:
        torch.manual_seed(seed)
        self.table, self.options = table, options
        if options.logits:
            self.logits = torch.tensor(np.where(table.move >= 0, 0.0, -1e3), dtype=torch.float32, requires_grad=True)
            self.trained = [self.logits]
        else:
            self.model = loaded_model(0 if options.optimizer == "muon" else options.lora_rank)
            self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        matrices, others = list[Any](), self.trained
        if options.optimizer == "muon" and not options.logits:
            matrices = [one for name, one in self.model.named_parameters() if is_matrix(name, one)]
            others = [one for name, one in self.model.named_parameters() if not is_matrix(name, one)]
        self.optimizers: list[Any] = [torch.optim.AdamW(others, betas=(options.adam_beta1, 0.99), weight_decay=0.0)]
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        self.known = np.full(table.move.shape, np.nan)
        self.total, self.num = np.zeros(self.known.shape), 0
        self.start = np.log(np.maximum(1e-30, self.at(np.arange(len(self.known)))))

    def logprobs(self, rows: Any) -> Any:
        """Returns [R, V]."""
        if self.options.logits:
            return torch.log_softmax(self.logits[rows], -1)
        last = self.table.last[rows]
        logits = self.model(input_ids=self.table.ids[rows, : int(last.max()) + 1]).logits
        return torch.log_softmax(logits[torch.arange(len(rows)), last].float(), -1)

    def at(self, rows: Any) -> Any:
        """Returns the probabilities [R, V] at these prompts."""
        if len(new := np.unique(rows[np.isnan(self.known[rows, 0])])):
            with torch.no_grad():
                self.known[new] = self.logprobs(new).exp().double().numpy()
        return self.known[rows]

    def magnet(self, rows: Any) -> Any:
        """Returns the log-probabilities [R, V] to which the policy is drawn."""
        if self.options.magnet == "start":
            return self.start[rows]
        self.total, self.num = self.total + self.at(np.arange(len(self.known))), self.num + 1
        return np.log(np.maximum(1e-30, self.total[rows] / self.num))

    def step(self, share: float, rows: Any, tokens: Any, advantages: Any) -> None:
        """Trains on moves. `share` of the steps are over."""
        options = self.options
        met, place = np.unique(rows, return_inverse=True)
        weights, visits = np.zeros((len(met), self.known.shape[1])), np.bincount(place)
        np.add.at(weights, (place, tokens), advantages)
        logprobs = self.logprobs(met)
        loss = -(torch.tensor(weights, dtype=torch.float32) * logprobs).sum()
        if options.entropy_tau:
            tau = options.entropy_tau * (options.entropy_tau_end / options.entropy_tau) ** share
            towards = torch.tensor(self.magnet(met), dtype=torch.float32) if options.magnet else 0.0
            divergence = (logprobs.exp() * (logprobs - towards)).sum(1)
            loss = loss + tau * (torch.tensor(visits, dtype=torch.float32) * divergence).sum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (loss / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = options.learning_rate * SCHEDULES[options.lr_scheduler_type](share)
            optimizer.step()
        self.known[:] = np.nan


def loaded_model(rank: int) -> Any:
    """Returns the embedded model with LoRA, or with rank 0 all of it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS)) if rank else base


def sampled(chances: Any, rng: Any) -> Any:
    """Returns one of each row of chances [R, V]."""
    sums = chances.cumsum(1)
    return (sums > rng.random((len(sums), 1)) * sums[:, -1:]).argmax(1)


def play(table: Table, seats: Any, players: list[Any], options: argparse.Namespace, rng: Any) -> Any:
    """Plays games `G`, whose seats [G, 2] have these players (functions of rows). Returns of all moves the game, the
    seat, the row, the token, the player and the position, and the rewards [G, 2]."""
    at, moves = np.zeros(len(seats), int), []
    rewards = np.full((len(seats), 2), np.nan)
    opening = rng.integers(0, options.random_moves + 1, len(seats))
    for _ in range(100):
        kind = table.player[at]
        ended = (kind == OVER) & np.isnan(rewards[:, 0])
        rewards[ended] = table.returns[at[ended], None] * np.array([1, -1])
        on = np.isnan(rewards[:, 0])
        if not on.any():
            break
        given = on & ((kind == CHANCE) | (opening > 0))
        at[given] = table.children[at[given], sampled(table.chances[at[given]], rng)]
        opening[given & (kind >= 0)] -= 1
        for number, player in enumerate(players):
            [games] = np.nonzero(on & ~given & (seats[np.arange(len(at)), np.maximum(kind, 0)] == number))
            if len(games):
                rows, seat = table.row[at[games]], kind[games]
                chances = player(rows)
                if number:  # an opponent's illegal answer becomes a legal move
                    chances = np.where(table.move[rows] >= 0, chances, 0)
                tokens = sampled(chances, rng)
                chosen = table.move[rows, tokens]
                moves.append((games, seat, rows, tokens, np.full(len(games), number), at[games]))
                wrong = chosen < 0
                rewards[games[wrong]] = 0.0
                rewards[games[wrong], seat[wrong]] = options.illegal_reward
                at[games[~wrong]] = table.children[at[games[~wrong]], chosen[~wrong]]
    return [np.concatenate(one) for one in zip(*moves, strict=True)], rewards


def advantages_of(rewards: Any, levels: tuple[Any, ...], prior: float) -> Any:
    """Returns each move's reward less a baseline: the mean over its seat, over its prompt, over its position, by the
    `levels`, into which the mean of the level before goes as if it had been met `prior` times more."""
    left = rewards
    for number, level in enumerate(levels):
        _, place, counts = np.unique(level, return_inverse=True, return_counts=True)
        left = left - (np.bincount(place, left) / (counts + (prior if number else 0)))[place]
    return left


def train(table: Table, options: argparse.Namespace, seed: int) -> list[dict[str, float]]:
    """Returns what the judge says before the first step and after each eighth of the steps."""
    rng = np.random.default_rng(seed)
    main = Policy(table, options, seed)
    rival = Policy(table, options, seed + 1000) if options.pool == "exploiter" else None
    past: deque[Any] = deque(maxlen=16)
    """Probabilities [Q, V] of snapshots, with the games won and played against them."""
    figures, every_row = [], np.arange(len(table.last))
    for step in range(options.steps + 1):
        if step % max(1, options.steps // 8) == 0 or step == options.steps:
            probs = main.at(every_row)
            policy = {
                question.prompt: probs[row, tokens].tolist()
                for row, (question, tokens) in enumerate(zip(table.judge.questions, table.tokens, strict=True))
            }
            since_s = time.perf_counter()
            judged = table.judge.judge(policy).figures()
            figures.append(judged | {"judge_s": time.perf_counter() - since_s, "step": step})
        if step == options.steps:
            return figures
        share = step / options.steps
        if options.pool in ("uniform", "pfsp") and step % 5 == 0:
            past.append([main.at(every_row).copy(), 1.0, 2.0])
        seats, others = np.zeros((options.games, 2), int), []
        met = rng.random(options.games) < (0.5 if rival else 0.8)
        if rival is not None:
            others, drawn = [rival.at], np.ones(options.games, int)
        elif past:
            weights = np.ones(len(past))
            if options.pool == "pfsp":
                weights = np.array(pfsp_weights([won / num for _, won, num in past]))
            others = [partial(np.take, one[0], axis=0) for one in past]
            drawn = 1 + rng.choice(len(past), options.games, p=weights / weights.sum())
        if others:
            chosen = rng.integers(0, 2, options.games)
            seats[np.arange(options.games)[met], chosen[met]] = drawn[met]
        (games, seat, rows, tokens, number, places), rewards = play(table, seats, [main.at, *others], options, rng)
        for one, (_, won, num) in enumerate(past):
            [against] = np.nonzero((seats == one + 1).any(1))
            own = rewards[against, (seats[against, 0] == one + 1).astype(int)]
            past[one][1:] = [31 / 32 * won + (own > 0).sum() + (own == 0).sum() / 2, 31 / 32 * num + len(own)]
        for policy_number, policy_ in enumerate([main, rival]):
            own = number == policy_number
            if policy_ is not None and own.any():
                levels = (seat[own], rows[own], places[own])[: options.levels]
                received = advantages_of(rewards[games[own], seat[own]], levels, options.prior)
                policy_.step(share, rows[own], tokens[own], received)
    raise AssertionError("the last step has returned")


def picture(lines: list[dict[str, Any]], path: Path) -> None:
    """Draws each arm's NashConv over the steps: the seeds' median, and what lies between lowest and highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for arm in dict.fromkeys(line["arm"] for line in lines):
        some = [line for line in lines if line["arm"] == arm]
        values, steps = np.array([line["nash_conv"] for line in some]), some[0]["step"]
        [drawn] = axes.plot(steps, np.median(values, 0), label=arm)
        axes.fill_between(steps, values.min(0), values.max(0), color=drawn.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="NashConv (0: nobody wins against it)", ylim=(0, None))
    figure.legend(loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=list(GAMES))
    parser.add_argument("--arms", default="annealed", help=f"of {', '.join(ARMS)} (annealed)")
    parser.add_argument("--seeds", default="1,2,3", help="one run each (1,2,3)")
    parser.add_argument("--steps", type=int, default=256, help="256, kuhn and nim: 512, tictactoe: 1024")
    parser.add_argument("--games", type=int, default=256, help="games of a step (256, kuhn: 1024, nim: 512)")
    parser.add_argument("--logits", action="store_true", help="train a table of logits, not the model: a second a run")
    parser.add_argument("--learning_rate", type=float, help="default: 1e-3, tictactoe and nim 2e-3; with --logits 0.05")
    parser.add_argument("--lr_scheduler_type", choices=SCHEDULES, default="linear", help="linear")
    parser.add_argument("--adam_beta1", type=float, default=0.0)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon trains all weights")
    parser.add_argument("--lora_rank", type=int, default=16)
    parser.add_argument("--entropy_tau", type=float)
    parser.add_argument("--entropy_tau_end", type=float)
    parser.add_argument("--illegal_reward", type=float)
    parser.add_argument("--random_moves", type=int, default=0, help="up to so many first moves are random")
    parser.add_argument("--levels", type=int, default=3, help="baseline by seat (1), prompt (2), position (3)")
    parser.add_argument("--prior", type=float, default=8.0)
    parser.add_argument("--picture", type=Path, help="where to draw the arms")
    parser.set_defaults(pool=None, magnet=None)
    name, settings = GAMES[parser.parse_args().game]
    parser.set_defaults(**settings)
    parser.set_defaults(learning_rate=0.05 if parser.parse_args().logits else settings.get("learning_rate", 1e-3))
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    table, lines = Table(name), list[dict[str, Any]]()
    for arm in given["arms"].split(","):
        for seed in map(int, given["seeds"].split(",")):
            started = time.perf_counter()
            figures = train(table, argparse.Namespace(**given | ARMS[arm]), seed)
            line: dict[str, Any] = {"arm": arm, "seed": seed, "s": round(time.perf_counter() - started, 1)}
            line |= {key: [round(one[key], 3) for one in figures] for key in figures[0] if key != "num_questions"}
            print(json.dumps(line), flush=True)
            lines.append(line)
    if given["picture"]:
        picture(lines, given["picture"])


if __name__ == "__main__":
    main()
