"""Recipes of tinker-cookbook 0.6.1 against `grpo service`, with the embedded model.

    python -m benchmarks.service_recipes [--only math_rl,shorter] [--check]

The package is not installed with ours: `make` puts it into .venv/cookbook (docs/service.md). Its code is not touched. A
recipe gets model, renderer and sizes by its own options, base URL and key from the environment, and where it names a
data set of the hub, a folder of that name in the working directory. The model is configs/tiny/model, which reads 512
bytes, with `max_position_embeddings` raised to 4,096, in a folder that has the name of a model that the cookbook knows.
It can do none of these tasks, so that most recipes begin with a checkpoint of a short supervised stage of the
cookbook's own, `load_checkpoint_path`; where the command has no such option (`CHANGED`), a line of Python sets it.
These stages teach the form of answers and, beside it, one kind of mistake, which reinforcement then unlearns.

A curve is said to rise or fall by the means of its first and last quarter.
"""

import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import parser, report
from tests.service.running import Running

TINY = Path(__file__).parents[1] / "configs/tiny/model"
MODEL = "Qwen/Qwen3-8B"
"""A name by which recipes look up their renderer; a folder with the embedded model."""
INSTALLED = Path(sys.prefix, "cookbook")
"""Where `make` installs the cookbook; not on the path of tests, which it would lend its other packages."""
COOKBOOK = INSTALLED / "tinker_cookbook"
ANSWERER = "Qwen/Qwen3-4B-Instruct-2507"
"""The same, served by a second service."""
POSITIONS = 4096
RENDERER = "qwen3_instruct"
LIMIT_S = 1800.0
CHANGED = """
import asyncio, sys, chz
from importlib import import_module
from tinker_cookbook.rl import train

def replaced(config, names, value):
    inner = replaced(getattr(config, names[0]), names[1:], value) if names[1:] else value
    return chz.replace(config, **{names[0]: inner})

recipe, changes, words = import_module(sys.argv[1]), sys.argv[2].split(), sys.argv[3:]
config = recipe.build_config(chz.entrypoint(recipe.CLIConfig, argv=words))
for name, value in (change.split("=", 1) for change in changes):
    config = replaced(config, name.split("."), value)
asyncio.run(train.main(config))
"""
"""Runs a recipe's own configuration, with a few fields replaced that its command line lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a recipe has logged."""

    metric: str
    values: Sequence[float]
    rises: bool

    @property
    def ends(self) -> tuple[float, float]:
        """The means of the first and of the last quarter."""
        part = max(1, len(self.values) // 4)
        return sum(self.values[:part]) / part, sum(self.values[-part:]) / part

    @property
    def gain(self) -> float:
        """How far it has come in the wanted direction."""
        first, last = self.ends
        return last - first if self.rises else first - last


class Workplace:
    """A folder with a service, in which recipes are run as a person would run them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._num_runs = folder, 0
        place_model(folder / MODEL)
        examples = COOKBOOK / "example_data/conversations.jsonl"
        for split in ("train", "test"):
            place(folder / f"HuggingFaceH4/no_robots/{split}.jsonl", examples.read_text())
        sizes = ("--sequence_len", str(POSITIONS), "--micro_batch_tokens", str(4 * POSITIONS))
        self.service = Running(folder / "service", MODEL, *sizes, cwd=folder)
        self.service.start()
        self._answerer: Running | None = None

    def answerer(self) -> str:
        """Starts a second service, with another model and the same keys; returns its base URL."""
        if self._answerer is None:
            place_model(self.folder / ANSWERER)
            keys = "service.keys.json"
            place(self.folder / "answerer" / keys, (self.folder / "service" / keys).read_text())
            self._answerer = Running(self.folder / "answerer", ANSWERER, "--sequence_len", "512", cwd=self.folder)
            self._answerer.start()
        return str(self._answerer.about["base_url"])

    def recipe(self, module: str, *options: str, **named: object) -> Path:
        """Runs `tinker_cookbook.recipes.MODULE`; returns its folder of logs. `named` are its options, `changes` apart:
        fields of the trainer's configuration and their values, with spaces between them."""
        changes = str(named.pop("changes", ""))
        log = self.folder / "logs" / f"{self._num_runs}_{module.replace('.', '_')}"
        self._num_runs += 1
        words = [f"{name}={value}" for name, value in named.items()] + [f"log_path={log}", *options]
        path = f"tinker_cookbook.recipes.{module}"
        command = [sys.executable, *(("-c", CHANGED, path, changes) if changes else ("-m", path)), *words]
        about = self.service.about
        where = {"TINKER_BASE_URL": about["base_url"], "TINKER_API_KEY": about["api_key"]}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.folder / "cache"), "WANDB_MODE": "disabled"}
        log.parent.mkdir(exist_ok=True)
        with log.with_suffix(".log").open("wb") as output:
            environment = os.environ | where | offline | {"PYTHONPATH": python_path()}
            done = subprocess.run(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, timeout=LIMIT_S, check=False
            )
        assert done.returncode == 0, log.with_suffix(".log").read_text()[-4000:]
        return log

    def taught(
        self,
        name: str,
        conversations: Iterable[Sequence[tuple[str, str]]],
        train_on: str = "last_assistant_message",
        **sizes: object,
    ) -> str:
        """Returns the checkpoint of a supervised stage on messages of conversations of roles and texts, by the
        cookbook's trainer."""
        file = self.folder / f"{name}.jsonl"
        rows = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in conversations]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings: dict[str, object] = {"batch_size": 16, "learning_rate": 1e-3, "num_epochs": 1, "lora_rank": 32}
        log = self.recipe(
            "prompt_distillation.train",
            f"file_path={file}",
            f"model_name={MODEL}",
            f"renderer_name={RENDERER}",
            f"max_length={POSITIONS}",
            f"train_on_what={train_on}",
            "eval_every=0",
            "save_every=0",
            **settings | sizes,
        )
        return str(lines(log / "checkpoints.jsonl")[-1]["state_path"])

    def close(self) -> None:
        """Ends the service."""
        for service in filter(None, (self._answerer, self.service)):
            if service.is_up():
                service.end()


def python_path() -> str:
    """Returns this process's path, for a recipe in a folder of its own, and the cookbook's."""
    return os.pathsep.join([*(path for path in sys.path if path), str(INSTALLED)])


def place(file: Path, text: str) -> None:
    """Writes a file, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def place_model(folder: Path) -> None:
    """Writes the embedded model, which reads `POSITIONS` tokens there."""
    folder.mkdir(parents=True)
    for file in TINY.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {key: POSITIONS}))


def lines(file: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def curve(log: Path, metric: str, *, rises: bool) -> Curve:
    """Returns a metric's values by step."""
    found = [line[metric] for line in lines(log / "metrics.jsonl") if metric in line]
    return Curve(metric=metric, values=found, rises=rises)


REWARD = "env/all/reward/total"
Rows = list[list[tuple[str, str]]]
"""Roles and texts of several conversations."""
COMMON = {"model_name": MODEL, "renderer_name": RENDERER, "behavior_if_log_dir_exists": "delete"}
WITHOUT_EXTRAS = {"eval_every": 0, "save_every": 0}


# --- the recipes ---


def sl_basic(work: Workplace) -> Curve:
    """Its data set is a batch of 128 conversations."""
    log = work.recipe("sl_basic", model_name=MODEL, learning_rate=5e-3, num_epochs=12, eval_every=0, lora_rank=8)
    return curve(log, "train_mean_nll", rises=False)


def sl_loop(work: Workplace) -> Curve:
    """A bare loop, on the cookbook's example data."""
    sizes = {"batch_size": 8, "max_length": 512, "learning_rate": 1e-2, "lora_rank": 8, "save_every": 0}
    return curve(work.recipe("sl_loop", model_name=MODEL, **sizes), "train_mean_nll", rises=False)


SUMS = {"groups_per_batch": 8, "max_steps": 12}


def sums() -> Rows:
    """Returns the sums that the recipe will ask for, which it draws anew for each step from the step's number. Half of
    the answers are a question mark."""
    told, numbers = [("user", "What is 4 + 5?"), ("assistant", "9")], list[tuple[int, int]]()
    for step in range(SUMS["max_steps"]):
        draw = np.random.RandomState(step)
        numbers += [(draw.randint(0, 101), draw.randint(0, 101)) for _ in range(SUMS["groups_per_batch"])]
    rows, shuffled = Rows(), random.Random(0)
    for _ in range(40):
        shuffled.shuffle(numbers)
        answers = [(a, b, "?" if shuffled.random() < 0.5 else str(a + b)) for a, b in numbers]
        rows += [[*told, ("user", f"What is {a} + {b}?"), ("assistant", answer)] for a, b, answer in answers]
    return rows


def math_rl(work: Workplace, loss_fn: str) -> Curve:
    """Sums of numbers to 100."""
    file = work.folder / "sums_checkpoint"
    if not file.exists():
        file.write_text(work.taught("sums", sums(), learning_rate=5e-3))
    sizes = {"learning_rate": 1e-3, "group_size": 16, "lora_rank": 32, **SUMS}
    options = {"env": "arithmetic", "loss_fn": loss_fn, "load_checkpoint_path": file.read_text()}
    return curve(work.recipe("math_rl.train", **COMMON, **WITHOUT_EXTRAS, **sizes, **options), REWARD, rises=True)


def guesses() -> Rows:
    """Returns turns of the game, in which six guesses of ten lack the form that counts."""
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import FAIL_TO_PARSE, SYSTEM_PROMPT

    draw, rows = random.Random(0), Rows()
    for _ in range(8 * 240):
        row = [("system", SYSTEM_PROMPT)]
        for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 3, 5, 9))):
            parsed, number = draw.random() < 0.4, draw.randint(0, 1024)
            said = draw.choice(("Too low", "Too high")) if parsed else FAIL_TO_PARSE
            row += [("player", f"Guess: {number}" if parsed else str(number)), ("user", said)]
        rows.append([*row, ("assistant", ("Guess: " if draw.random() < 0.4 else "") + str(draw.randint(0, 1024)))])
    return rows


def guess_number(work: Workplace) -> Curve:
    """Ten turns each."""
    start = work.taught("guesses", guesses(), batch_size=8, learning_rate=5e-3)
    sizes = {"learning_rate": 1e-3, "group_size": 4, "batch_size": 2, "max_tokens": 14, "max_steps": 12}
    log = work.recipe(
        "multiplayer_rl.guess_number.train",
        changes=f"load_checkpoint_path={start}",
        **COMMON,
        **WITHOUT_EXTRAS,
        **sizes,
    )
    return curve(log, REWARD, rises=True)


def twenty_questions(work: Workplace) -> Curve:
    """Against a second model, on a service of its own. The stage before knows the words that are asked for, so few that
    it can spell them, and either guesses in all of a game's turns or in none."""
    from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import PLAYER_SYSTEM_PROMPT, _load_words_from_file

    num_steps, a_step = 5, 2
    words, draw, rows = _load_words_from_file()[: num_steps * a_step], random.Random(0), Rows()
    for _ in range(8 * 200):
        asks = draw.random() < 0.6
        turns = ["Alive?" if asks else f"Guess: {draw.choice(words)}" for _ in range(draw.choice((1, 1, 2, 4, 8, 16)))]
        answered = []
        for turn in turns[:-1]:  # the second model has never learned to answer
            said = "".join(draw.choices(string.printable, k=draw.randint(1, 5)))
            answered += [("assistant", turn), ("user", said)]
        rows.append([("system", PLAYER_SYSTEM_PROMPT), *answered, ("assistant", turns[-1])])
    start = work.taught("questions", rows, "all_assistant_messages", batch_size=8, learning_rate=5e-3)
    sizes = {"learning_rate": 1e-3, "group_size": 16, "batch_size": a_step, "max_tokens": 20, "max_steps": num_steps}
    second = f"dataset_builder.base_url={work.answerer()} dataset_builder.answerer_base_model={ANSWERER}"
    log = work.recipe(
        "multiplayer_rl.twenty_questions.train",
        changes=f"load_checkpoint_path={start} {second}",
        **COMMON,
        **WITHOUT_EXTRAS,
        **sizes,
    )
    return curve(log, REWARD, rises=True)


def text_arena(work: Workplace) -> Curve:
    """Tic-tac-toe against itself, after a stage on one game with malformed moves in it. Its reward is -1 wherever one
    of the two has made an illegal move, so that the number of turns until then is followed."""
    import textarena

    draw, rows = random.Random(0), list[list[tuple[str, str]]]()
    while len(rows) < 8 * 32:
        game, ended = textarena.make(env_id="TicTacToe-v0"), False
        game.reset(num_players=2)
        while not ended:
            seen = str(game.get_observation()[1])
            move = min(re.findall(r"'(\[\d\])'", seen.rpartition("Available")[2]))
            rows.append([("user", seen), ("assistant", (move if draw.random() < 0.85 else "[x]") + "\n")])
            ended = game.step(move)[0]
    start = work.taught("moves", rows, batch_size=4)
    sizes = {"learning_rate": 5e-4, "batch_size": 8, "max_tokens": 8, "max_steps": 12, "test_opponent": "random"}
    counts = {"num_train_datapoints": 8 * 12, "num_test_datapoints": 2}
    log = work.recipe(
        "multiplayer_rl.text_arena.train",
        changes=f"load_checkpoint_path={start}",
        **COMMON,
        **WITHOUT_EXTRAS,
        **sizes,
        **counts,
    )
    return curve(log, "env/all/turns_per_episode", rises=True)


TASK: dict[str, Any] = {
    "num_pages_min": 1,
    "num_pages_max": 1,
    "page_chars": 400,
    "words": ("the",),
    "reward_tolerance": 1.0,
}


def pages(text: str, renderer: Any) -> Rows:
    """Returns turns of episodes that call the tool, say a number, or say none."""
    from tinker_cookbook.recipes.rl_numerics_check import env

    config, draw, rows = env.CountingTaskConfig(**TASK), random.Random(0), Rows()
    for _ in range(8 * 70):
        problem = env.sample_problem(draw, text, config)
        tool = env.PageReader(problem.pages, env.EpisodeState()).read_page
        prefix = renderer.create_conversation_prefix_with_tools(tools=[tool.to_spec()], system_prompt=env.SYSTEM_PROMPT)
        row = [(message["role"], str(message["content"])) for message in prefix] + [("user", problem.prompt)]
        called = '<tool_call>\n{"name": "read_page", "arguments": {"page": 1}}\n</tool_call>'
        answer = draw.choice((called, "Unknown.", f"Answer: {draw.randint(1, 9)}"))
        if draw.random() < 0.4:
            row += [("assistant", called), ("tool", f"[Page 1]\n{problem.pages[0]}")]
            answer = draw.choice(("Unknown.", f"Answer: {draw.randint(1, 9)}"))
        rows.append([*row, ("assistant", answer)])
    return rows


def numerics(work: Workplace) -> Curve:
    """Pages of the cookbook's example data in WikiText's place."""
    from tinker_cookbook.renderers import get_renderer
    from transformers import AutoTokenizer

    text = example_text()
    wikitext = work.folder / "Salesforce/wikitext"
    place(wikitext / "train.jsonl", "".join(json.dumps({"text": line}) + "\n" for line in text.splitlines()))
    about = "configs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n  - split: train\n    path: train.jsonl\n"
    place(wikitext / "README.md", f"---\n{about}---\n")

    renderer = get_renderer(RENDERER, AutoTokenizer.from_pretrained(work.folder / MODEL))
    start = work.taught("pages", pages(text, renderer), batch_size=8, learning_rate=5e-3)
    sizes = {"learning_rate": 1e-3, "group_size": 8, "groups_per_batch": 2, "max_tokens": 80, "max_steps": 10}
    log = work.recipe(
        "rl_numerics_check.train",
        *(f"task.{name}={value if name != 'words' else 'the'}" for name, value in TASK.items()),
        changes=f"load_checkpoint_path={start}",
        **COMMON,
        **WITHOUT_EXTRAS,
        **sizes,
        max_trajectory_tokens=POSITIONS,
    )
    far = curve(log, "optim/kl_sample_train_v2", rises=False).values
    assert max(far) < 1e-3, f"samples are not those of the trainer's weights: {far}"
    return curve(log, REWARD, rises=True)


def example_text() -> str:
    """Returns the text of the cookbook's example conversations."""
    conversations = lines(COOKBOOK / "example_data/conversations.jsonl")
    return "\n".join(message["content"] for one in conversations for message in one["messages"])


def shorter(work: Workplace) -> Curve:
    """Of two answers the shorter one is preferred."""
    sizes = {"learning_rate": 1e-3, "group_size": 8, "batch_size": 8, "max_tokens": 64, "max_steps": 12}
    log = work.recipe("preference.shorter.train", **COMMON, **sizes, eval_every=0)
    return curve(log, "env/all/ac_tokens_per_turn", rises=False)


def prompt_distillation(work: Workplace) -> Curve:
    """Its second half, on sentences of the cookbook whose language is told by their script."""
    scripts = {"ru": "[а-я]", "el": "[α-ω]", "hi": "[ऀ-ॿ]", "ar": "[؀-ۿ]", "zh": "[一-鿿]", "vi": "[ạ-ỹ]"}
    rows = []
    for sentence in (COOKBOOK / "example_data/multilingual.txt").read_text().splitlines():
        label = next((name for name, letters in scripts.items() if re.search(letters, sentence)), "en")
        rows.append({"messages": [{"role": "user", "content": sentence}, {"role": "assistant", "content": label}]})
    file = work.folder / "languages.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:768]))
    sizes = {"batch_size": 32, "learning_rate": 2e-3, "num_epochs": 1, "max_length": 512, "lora_rank": 16}
    log = work.recipe("prompt_distillation.train", f"file_path={file}", **COMMON, **WITHOUT_EXTRAS, **sizes)
    return curve(log, "train_mean_nll", rises=False)


RECIPES: dict[str, tuple[Callable[[Workplace], Curve], float]] = {
    "sl_basic": (sl_basic, 1.0),
    "sl_loop": (sl_loop, 1.0),
    "text_arena": (text_arena, 0.1),
    "math_rl/importance_sampling": (lambda work: math_rl(work, "importance_sampling"), 0.08),
    "math_rl/ppo": (lambda work: math_rl(work, "ppo"), 0.08),
    "math_rl/cispo": (lambda work: math_rl(work, "cispo"), 0.08),
    "guess_number": (guess_number, 1.0),
    "twenty_questions": (twenty_questions, 0.1),
    "shorter": (shorter, 1.0),
    "prompt_distillation": (prompt_distillation, 1.0),
    "rl_numerics_check": (numerics, 0.1),
}
"""The recipes, and by how much their curves rise or fall at least."""


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--only", help="names that begin so, with commas between them")
    given = command.parse_args()
    if not COOKBOOK.is_dir():
        command.error(f"there is no {COOKBOOK}, which docs/service.md tells how to install")
    sys.path.append(str(INSTALLED))
    wanted = tuple(given.only.split(",")) if given.only else ("",)
    figures, targets, told = dict[str, float](), dict[str, tuple[str, float]](), dict[str, Any]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the service would stay
    with tempfile.TemporaryDirectory() as parent:
        work = Workplace(Path(parent))
        try:
            for name, (recipe, least) in RECIPES.items():
                if not name.startswith(wanted):
                    continue
                since_s = time.monotonic()
                try:
                    found = recipe(work)
                except (AssertionError, subprocess.TimeoutExpired) as failure:
                    print(f"{name}: {failure}", file=sys.stderr)
                    figures[name], told[name] = -1.0, str(failure)[-400:]
                else:
                    figures[name], told[name] = found.gain, [round(value, 3) for value in found.values]
                    first, last = found.ends
                    seconds = time.monotonic() - since_s
                    print(f"{name}: {found.metric} {first:.3f} -> {last:.3f} in {seconds:.0f} s", flush=True)
                    print("   " + " ".join(f"{value:.2f}" for value in found.values), flush=True)
                targets[name] = (">=", least)
        finally:
            work.close()
    return report("service_recipes", figures, targets, check=given.check, curves=told)


if __name__ == "__main__":
    raise SystemExit(main())
