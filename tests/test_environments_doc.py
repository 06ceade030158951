"""The code of docs/environments.md runs as it stands there, and its tables are what the code says."""

import asyncio
import importlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import yaml
from grpo.configs.loading import load
from grpo.configs.orch import OrchSettings
from grpo.configs.run import load_run
from grpo.environments import BUILT_IN
from grpo.orchestrator.advantage import custom_credit
from grpo.orchestrator.rollouts.records import EpisodeResult, Step, Task
from grpo.orchestrator.rollouts.registry import make_environment
from grpo.orchestrator.workers.worker import identity_of
from grpo.transport.http import Choice

from grpo import play
from tests.pages import ROOT, Block, Page, in_backticks

PAGE = Page("docs/environments.md")
FILES = PAGE.files
ENVIRONMENTS = sorted(title for title, text in FILES.items() if "Environment):" in text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader's folder: the page's files, and `configs`."""
    PAGE.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if f"{name.removeprefix('grpo_user_')}.py" in FILES:
            del sys.modules[name]


# --- code ---


@pytest.mark.parametrize("block", PAGE.of("python"), ids=lambda block: f"line_{block.line}")
def test_what_is_asserted_on_the_page_holds(block: Block, folder: Path) -> None:
    exec(compile(block.text, f"docs/environments.md, from line {block.line}", "exec"), {"__name__": "page"})


PLAYED = [
    ("guess", "Guess", ["five", "5", "1"], {"policy": 1.0}),
    ("no_echo", "NoEcho", ["leaf", "cup", "pot", "leaf"], {"first": 1.0, "second": -1.0}),
    ("hint", "HintAndSolve", ["17 + 20 first", "43", "33", "43", "42"], {"helper": 0.5}),
    ("longer", "Longer", ["Hello."], {"policy": 1.0}),
    ("longer", "Longer", ["Hi."], {"policy": 0.0}),
    ("assistant", "Assistant", ["A tea, please."], {"policy": 1.0}),
]
"""File, class, answers and rewards of environments that the page does not play."""


def test_every_environment_of_the_page_is_played_on_it_or_here() -> None:
    played = {name for block in PAGE.of("python") for name in re.findall(r"^from (\w+) import", block.text, flags=re.M)}
    assert {title.removesuffix(".py") for title in ENVIRONMENTS} <= played | {file for file, *_ in PLAYED}
    for block in PAGE.of("python"):
        assert "\nassert " in block.text


@pytest.mark.parametrize(("file", "name", "answers", "rewards"), PLAYED)
def test_an_environment_that_is_not_played_on_the_page_gives_the_rewards_that_it_tells(
    file: str, name: str, answers: list[str], rewards: dict[str, float], folder: Path
) -> None:
    environment = getattr(importlib.import_module(file), name)()
    outcome = asyncio.run(play(environment, environment.dataset("train")[0], answers))
    assert outcome.rewards == rewards
    if file == "guess":
        assert outcome.trajectory[0].error.error_kind == "no_number"
    if file == "no_echo":
        asked = environment.dataset("train")[0]["prompt"]
        assert outcome.trajectory[1].messages[-1] == {"role": "user", "content": f"{asked}\n\nleaf"}
    if file == "hint":
        assert [child.rewards for child in outcome.children] == [{"solver": right} for right in (1.0, 0.0, 1.0, 0.0)]


@pytest.mark.parametrize("title", ENVIRONMENTS)
def test_an_environment_of_the_page_is_found_by_its_file_and_has_examples(title: str, folder: Path) -> None:
    [name] = re.findall(r"^class (\w+)\(.*\bEnvironment\):", FILES[title], flags=re.M)
    environment = make_environment(f"{title}:{name}", {})
    assert all("prompt" in example for split in ("train", "eval") for example in environment.dataset(split))
    keys = OrchSettings.model_fields["buffer"].default.hash_keys
    training = [{"task": name, **example} for example in environment.dataset("train")]
    identities = [identity_of(example, keys, index) for index, example in enumerate(training)]
    assert len(set(identities)) == len(training), "of two alike, one would be left out"


def result(name: str, rewards: Mapping[str, float], *children: EpisodeResult, num_steps: int = 1) -> EpisodeResult:
    """A rollout in which each role acts `num_steps` times."""
    sampled = Choice(token_ids=[2], logprobs=[0.0], finish_reason="stop")
    step = partial(Step, temperature=1.0, completion=sampled, text="", version=0)
    steps = tuple(step(role=role) for role in rewards for _ in range(num_steps))
    task = Task(env="env", split="train", index=0, messages=())
    return EpisodeResult(id=name, task=task, steps=steps, rows=(), rewards=rewards, metrics={}, children=children)


def test_the_credit_of_the_page_learns_from_winners_alone(folder: Path) -> None:
    [block] = [block for block in PAGE.of("yaml") if "advantage" in block.text]
    settings = yaml.safe_load(block.text)["advantage"]
    credit = custom_credit(settings["import_path"], settings["kwargs"], setting="advantage.import_path")
    # Above 0.5: the parent, with two answers, and the first of its children.
    children = (result("a.0", {"solver": 1.0}), result("a.1", {"solver": 0.0}))
    parent = result("a", {"proposer": 0.75}, *children, num_steps=2)
    assert credit([parent]) == {("a", 0): 1.0, ("a", 1): 1.0, ("a.0", 0): 1.0, ("a.1", 0): 0.0}


# --- settings and commands ---


@pytest.mark.parametrize("block", PAGE.of("yaml"), ids=lambda block: f"line_{block.line}")
def test_settings_of_the_page_are_accepted(block: Block, folder: Path) -> None:
    preset = yaml.safe_load((ROOT / "configs/quickstart/run.yaml").read_text())["orch"]
    adapters = ["bold", "brief"] if "adapters:" in block.text else []
    settings = preset | {"model": {"name": "m", "lora_adapters": adapters}} | yaml.safe_load(block.text)
    (folder / "orch.yaml").write_text(yaml.safe_dump(settings))
    checked = load(OrchSettings, file="orch.yaml").settings
    for env in (*checked.env, *checked.eval.env):
        if env.id not in ("verifiers", "my-env"):  # the package that is named is the reader's
            make_environment(env.id, env.args)


@pytest.mark.parametrize("line", PAGE.commands("grpo configs/"))
def test_runs_of_the_page_are_accepted(line: str, folder: Path) -> None:
    _, preset, *arguments = shlex.split(line)
    settings = load_run(preset, arguments).orch.settings
    for env in settings.env:
        environment = make_environment(env.id, env.args)
        assert all(len(environment.dataset(split)) for split in ("train", "eval"))


# --- built-in environments ---


def test_the_list_has_all_that_is_built_in_and_every_preset() -> None:
    section = PAGE.text.partition("## Built-in environments\n")[2].partition("\n## ")[0]
    items = [" ".join(item.split()) for item in re.findall(r"^- (.*(?:\n  .*)*)", section, flags=re.M)]
    named = {item: in_backticks(item.partition(": ")[0]) for item in items}
    assert [env_id for ids in named.values() for env_id in ids] == list(BUILT_IN)
    told = {item: [path for path in in_backticks(item) if path.startswith("configs/")] for item in items}
    presets = {f"configs/{file.parent.name}" for file in (ROOT / "configs").glob("*/run.yaml")}
    assert {path for paths in told.values() for path in paths} == presets - {"configs/arena"}  # it has no environment
    for item, paths in told.items():
        for path in paths:
            settings = yaml.safe_load((ROOT / path / "run.yaml").read_text())["orch"]
            assert [env["id"] for env in settings["env"]] == named[item]
