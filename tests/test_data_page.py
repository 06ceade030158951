"""docs/data.md and docs/from_csv.md, held to the product; `grpo data` runs as it stands there."""

import inspect
import json
import re
from pathlib import Path

import pytest
from grpo.environments.data.dataset import KNOWN, Dataset
from grpo.environments.data.files import READERS
from grpo.environments.rewards import PARSERS, REWARDS
from grpo.orchestrator.run import orchestrate

from tests.grpo.run_folder import grpo
from tests.orchestrator.chat_templates import QWEN3, model_with
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from tests.pages import ROOT, Page, in_backticks

PAGE, FIRST = Page("docs/data.md"), Page("docs/from_csv.md")


@pytest.fixture
def codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's file, in the working directory."""
    FIRST.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "codes.csv"


def test_the_page_tells_of_every_argument_kind_of_file_reward_and_known_data_set() -> None:
    known = {
        name
        for cell in re.findall(r"^(?:\| (?=.* \|)|- )(.*?)(?: \||: )", PAGE.text, re.M)
        for name in in_backticks(cell)
    }
    assert {*KNOWN, *inspect.signature(Dataset).parameters} - known <= {"path", "subset", "split", "seed"}
    assert all(f"`{suffix}`" in PAGE.text for suffix in set(READERS) - {".ndjson"})
    assert all(f"`{name}`" in PAGE.text or f"`{{{name}:" in PAGE.text for name in (*REWARDS, *PARSERS))


def test_the_first_look_shows_what_is_asked_its_length_and_what_is_wrong(
    codes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [*FIRST.command("grpo data codes.csv"), "--model", str(ROOT / "configs/quickstart/model")]
    done = grpo(*command)
    assert done.returncode == 0, done.stderr
    assert "<|im_start|>user\nCode: " in done.stdout
    assert re.search(r"tokens of a prompt: median \d+, longest \d+", done.stdout)
    codes.write_text(codes.read_text() + "apple\ngarden,nedr\n")
    done = grpo(*command, "--max_prompt_length", "5")
    assert done.returncode == 1
    assert "codes.csv:26: 1 cells, expected 2" in done.stdout
    assert "codes.csv:27: says the same as codes.csv:2" in done.stdout
    assert "24 have more than max_prompt_length = 5" in done.stdout
    assert not caplog.records  # the rows are told once
    assert grpo("data", "codes.csv").returncode == 2


def test_the_first_look_shows_what_the_chat_template_makes_of_its_arguments(codes: Path, tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", QWEN3)
    command = [*FIRST.command("grpo data codes.csv"), "--chat_template_kwargs", '{"enable_thinking": false}']
    assert "assistant\n<think>\n\n</think>\n\n" in grpo(*command, "--model", model).stdout
    assert grpo(*command).returncode == 2
    refused = grpo(*command, "--model", ROOT / "configs/quickstart/model")
    assert (refused.returncode, "enable_thinking" in refused.stderr) == (2, True)


def test_the_data_of_a_run_are_found_in_its_settings(codes: Path) -> None:
    [settings] = PAGE.of("yaml")
    (codes.parent / "run.yaml").write_text(f"model: {ROOT}/configs/quickstart/model\nmax_steps: 1\n{settings.text}")
    done = grpo("data", ".")
    assert done.returncode == 0, done.stderr
    assert "0 have more than max_prompt_length = 512" in done.stdout


def test_template_arguments_of_a_run_are_those_of_its_own_model(codes: Path, tmp_path: Path) -> None:
    [settings] = PAGE.of("yaml")
    thinks, plain = model_with(tmp_path / "model", QWEN3), ROOT / "configs/quickstart/model"
    shared = f"model: {thinks}\nmax_steps: 1\nchat_template_kwargs: {{enable_thinking: false}}\n"
    (codes.parent / "run.yaml").write_text(shared + settings.text)
    assert "assistant\n<think>\n\n</think>\n\n" in grpo("data", ".").stdout
    for_another = grpo("data", ".", "--model", plain)
    assert for_another.returncode == 0, for_another.stderr
    assert "assistant\n" in for_another.stdout


async def test_a_run_trains_and_evaluates_on_the_rows(codes: Path) -> None:
    environments = json.loads(FIRST.command("grpo quickstart")[-1])
    server = await FakeServer(lambda prompt, version: prompt.partition("Code: ")[2].partition("\n")[0][:-5:-1]).start()
    FakeTrainer(codes.parent / "run").start()
    settings = settings_for(codes.parent / "run", server, env=environments)
    summary = await orchestrate(settings)
    await server.stop()
    assert (summary.accuracy_after, summary.reward_last, summary.rollouts_dropped) == (1.0, 1.0, {})
