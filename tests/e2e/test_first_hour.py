"""docs/first_run.md as it is typed, with Qwen3, but for its last two runs, which are planned: test_chat_templates.py
trains a model that thinks, and test_start.py one without a preset. `benchmarks.first_hour` types everything with every
family."""

import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from tests.e2e.first_hour import PAGE, Desk, Typed, lines
from tests.e2e.runs import Run

pytestmark = pytest.mark.e2e
QUESTION = "How many eggs are 2 + 3?"
NOT_THINKING = "<think>\n\n</think>\n\n"


def well(typed: Typed) -> str:
    """What a command said that came to a good end."""
    assert typed.code == 0, f"{typed.line}: {typed.said}"
    return typed.said


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("first_hour"), "qwen3")


@pytest.fixture(scope="module")
def typed(desk: Desk) -> dict[str, Typed]:
    """Every command of the page, typed one after the other."""

    def planned(line: str) -> str:
        is_later = "outputs/thinking" in line or line.startswith("grpo --model")
        return f"{line} --dry-run" if is_later else line

    return {line: desk.type(planned(line), said=f"{QUESTION}\n") for line in lines()}


def said(typed: dict[str, Typed], start: str) -> str:
    """What the only command said that begins so."""
    [found] = [one for line, one in typed.items() if line.startswith(start)]
    return well(found)


@pytest.mark.parametrize("line", lines())
def test_the_command_comes_to_a_good_end(typed: dict[str, Typed], line: str) -> None:
    well(typed[line])


def test_the_commands_say_what_the_page_says(typed: dict[str, Typed], desk: Desk) -> None:
    assert "tokens of a prompt" in said(typed, "grpo data")
    assert "finished" in said(typed, "grpo status")
    assert "nothing is broken" in said(typed, "grpo prove")
    assert {"gsm8k", "accuracy"} <= set(said(typed, "grpo evaluate").split())
    chat = said(typed, "grpo chat")
    assert re.search(r"base .*\| +policy", chat)
    assert "no answer" not in chat
    # The servers of evaluate and chat are nothing of the run.
    [_] = (desk.folder / "outputs/first/status").glob("infer.*.json")
    assert "policy/masked" in (desk.folder / "view.html").read_text()


def test_every_metric_of_the_pages_table_is_in_the_first_curve(typed: dict[str, Typed], desk: Desk) -> None:
    names = [row[0].strip("`") for row in PAGE.table("| metric | healthy | if not |")]
    found = set[str]().union(*Run(desk.folder / "outputs/first").metrics)
    assert [name for name in names if name not in found] == []


def asked(desk: Desk, run: str) -> set[str]:
    """What the rollouts of a run's first step began with, in words."""
    tokenizer, rows = AutoTokenizer.from_pretrained(desk.model), grpo.Run(desk.folder / run).rollouts(1)
    return {
        tokenizer.decode(ids[: list(mask).index(True)])
        for ids, mask in zip(rows["token_ids"], rows["loss_mask"], strict=True)
    }


def test_the_model_thinks_only_where_it_is_told_to(typed: dict[str, Typed], desk: Desk) -> None:
    assert all(prompt.endswith(f"<|im_start|>assistant\n{NOT_THINKING}") for prompt in asked(desk, "outputs/first"))
    assert "enable_thinking: true" in said(typed, "grpo qwen3_4b_gsm8k --output_dir outputs/thinking")


@pytest.mark.usefixtures("typed")
def test_the_exported_model_answers_in_transformers_as_it_was_trained(desk: Desk) -> None:
    folder = desk.folder / "first-model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    message = {"role": "user", "content": QUESTION}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(prompt["input_ids"][0]).endswith(NOT_THINKING)
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
