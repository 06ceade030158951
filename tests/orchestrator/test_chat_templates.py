"""Chat templates of public models, in our own words: first and second turn, tools, thinking on and off, and the
arguments that they take."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.conversation import Conversation
from grpo.orchestrator.rollouts.templates import ChatTemplate, TemplateRefused
from grpo.transport.errors import UserError
from grpo.transport.traces import trace_path
from grpo.transport.weights.chat_template import known_arguments, with_arguments

from tests.orchestrator import made
from tests.orchestrator.chat_templates import GEMMA, LFM2, LLAMA32, PHI3, PLAIN, QWEN3, TWICE, model_with, renderer
from tests.orchestrator.fakes import END_OF_TURN, MODEL, FakeServer
from tests.orchestrator.running import run

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = [{"role": "user", "content": "x"}]
OFF = {"enable_thinking": False}
LLAMA_SYSTEM = "Cutting Knowledge Date: December 2023\nToday Date: 1 Jan 2026\n\n<|eot_id|>"
FORMATS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    # template, its arguments, what stands before the question, the opening, what ends an answer
    "qwen3": (QWEN3, {}, "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3 off": (QWEN3, OFF, "<|im_start|>user\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>"),
    "llama": (
        LLAMA32,
        {"date_string": "1 Jan 2026"},
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{LLAMA_SYSTEM}"
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "gemma": (GEMMA, {}, "<bos><start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>"),
    "phi": (PHI3, {}, "<|user|>\n", "<|assistant|>\n", "<|end|>"),
    "lfm2": (LFM2, {}, "<|startoftext|><|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"),
}
THOUGHT = "<think>\n2 + 3\n</think>\n\n5"


def talked(name: str, answer: str, *, role: str, tools: Any = None) -> list[int]:
    """Answers, hears something more from `role`, and answers again. Returns the number of turns of each row, whose
    tokens are exactly what the server was sent and sampled."""
    source, arguments, _, opening, end = FORMATS[name]
    template = ChatTemplate.of(renderer(source, **arguments), tools)
    assert template.opening == opening
    assert template.renderer.raw_text([template.end_id or 0]) == end
    ids_of = template.renderer.ids_of
    conversation = Conversation(template, [{"role": "user", "content": "2 + 3?"}])
    asked, sampled = [], [ids_of(answer + end), ids_of("6" + end)]
    for number, ids in enumerate(sampled):
        asked.append(list(conversation.prompt_ids()))
        conversation.answer(made.completion(ids), version=number, temperature=1.0)
        conversation.add({"role": role, "content": "and 1?"})
    rows = conversation.rows()
    for row in rows:
        for turn in row.turns:
            assert row.token_ids[: turn.ends].tolist() == asked[turn.index] + sampled[turn.index]
    if len(rows) == 1:  # then the row is what the template would write, and nothing else
        messages = conversation.messages[:3]
        assert asked[1] == ids_of(template.render(messages))
    return [len(row.turns) for row in rows]


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_prompt_is_the_templates_own(name: str) -> None:
    source, arguments, before, opening, end = FORMATS[name]
    ids = renderer(source, **arguments).prompt_ids(({"role": "user", "content": "2 + 3?"},))
    between = "" if name == "llama" else "\n"
    assert ids == renderer(source).ids_of(f"{before}2 + 3?{end}{between}{opening}")


@pytest.mark.parametrize(
    ("name", "answer", "rows"),
    [
        ("qwen3", THOUGHT, [1, 1]),  # the template takes older thinking away
        ("qwen3", "5", [2]),
        ("qwen3 off", "5", [1, 1]),  # and the empty block that it has opened itself
        *((name, "5", [2]) for name in ("llama", "gemma", "phi", "lfm2")),
        ("llama", "5 ", [1, 1]),  # the template trims
        ("gemma", "5\n", [1, 1]),
    ],
)
def test_a_second_question_goes_on_with_the_row_or_begins_another(name: str, answer: str, rows: list[int]) -> None:
    assert talked(name, answer, role="user") == rows


@pytest.mark.parametrize(
    ("name", "answer", "rows"),
    [
        ("qwen3", f"{THOUGHT}<tool_call>", [2]),
        ("qwen3", "<tool_call>", [2]),
        ("qwen3 off", "<tool_call>", [1, 1]),
        ("llama", "5", [2]),
        ("lfm2", "5", [2]),
    ],
)
def test_a_tools_result_goes_on_with_the_row_or_begins_another(name: str, answer: str, rows: list[int]) -> None:
    assert talked(name, answer, role="tool", tools=TOOLS) == rows
    source, arguments, *_ = FORMATS[name]
    written = renderer(source, **arguments).render(QUESTION, tools=TOOLS, opened=True)
    assert "<|eot_id|>" in written or json.dumps(TOOLS[0]) in written


@pytest.mark.parametrize("roles", [["system", "user"], ["user", "user"]])
def test_roles_that_gemma_does_not_take_are_named(roles: list[str]) -> None:
    template = ChatTemplate.of(renderer(GEMMA))
    with pytest.raises(TemplateRefused, match=str(roles).replace("[", r"\[")):
        Conversation(template, [{"role": role, "content": "x"} for role in roles]).prompt_ids()


# --- arguments ---


def test_what_a_template_takes_is_told_and_anything_else_is_refused(tmp_path: Path) -> None:
    known = {name: known_arguments([source]) for name, (source, *_) in FORMATS.items()}
    assert (known["qwen3"], known["llama"]) == (["enable_thinking"], ["date_string"])
    assert known["gemma"] == known["phi"] == known["lfm2"] == known_arguments([PLAIN]) == []
    marked = "{% generation %}{% if loud is undefined %}{% set loud = x | default(1) %}{% endif %}{% endgeneration %}"
    assert known_arguments([marked + "{{ bos_token }}{% set y = 1 %}{{ y }}"]) == ["loud", "x"]
    folder = model_with(tmp_path, QWEN3)
    assert ChatRenderer.of_model(folder, OFF).render(QUESTION, opened=True).endswith("</think>\n\n")
    with pytest.raises(UserError, match=r"enable_thinkin,.*enable_thinking"):
        ChatRenderer.of_model(folder, {"enable_thinkin": False})


@pytest.mark.parametrize("kind", ["a file", "in the configuration", "one of several"])
def test_files_with_arguments_render_as_if_they_were_given(tmp_path: Path, kind: str) -> None:
    """As transformers renders them, without a word on it."""
    text = "{{ enable_thinking }}|{{ style }}|{{ words | join(',') }}|{{ 'x' if never is defined else 'y' }}"
    folder, arguments = (
        model_with(tmp_path, text),
        {"enable_thinking": False, "style": '"it\'s" \\n 🙂', "words": ["a", "ü"]},
    )
    if kind != "a file":
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        several = [{"name": "default", "template": text}, {"name": "tool_use", "template": f"T{text}"}]
        config["chat_template"] = text if kind == "in the configuration" else several
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    expected = ChatRenderer.of_model(folder, arguments).render(QUESTION, opened=True)
    assert expected == 'False|"it\'s" \\n 🙂|a,ü|y'
    for name, data in with_arguments(files, arguments).items():
        (folder / name).write_bytes(bytes(data) if isinstance(data, bytes | memoryview) else b"")
    assert ChatRenderer.of_model(folder).render(QUESTION, opened=True) == expected
    assert ChatRenderer.of_model(folder, {"style": "own"}).render(QUESTION, opened=True) == "False|own|a,ü|y"
    assert with_arguments(files, {}) == files


# --- a whole run ---


@pytest.mark.parametrize(
    ("arguments", "answer", "num_rows"), [({}, THOUGHT, 2), ({}, "5", 1), (OFF, "5", 2)], ids=["thinks", "could", "off"]
)
async def test_a_run_with_qwen3_keeps_what_was_sent_and_counts_the_rows_that_begin_anew(
    tmp_path: Path, arguments: dict[str, Any], answer: str, num_rows: int
) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    folder = model_with(tmp_path / "model", QWEN3)
    model = {"name": str(folder), "chat_template_kwargs": arguments}
    async with FakeServer(lambda prompt, version: answer) as server:
        done = await run(
            tmp_path / "run",
            server,
            trainer={"settings": {"sequence_len": 256}},
            env=[{"id": f"{tmp_path}/twice.py:Twice"}],
            model=model,
            seq_len=256,
            max_steps=1,
            sampling={"max_tokens": 64},
            eval={"num_examples": 2},
        )
    [step] = done.steps
    assert step["reward/mean"] == done.summary.accuracy_after == 1.0
    assert (step["rollout/num_rows"], step["rollout/new_rows"]) == (num_rows, num_rows - 1)
    asked = {tuple(request["prompt_token_ids"]) for request in server.requests}
    think = ChatRenderer.of_model(folder).ids_of("<think>\n\n</think>\n\n")
    assert all((list(prompt[-len(think) :]) == think) == bool(arguments) for prompt in asked)
    rows = pq.read_table(trace_path(tmp_path / "run", 1)).to_pylist()
    assert len(rows) == 16 * num_rows
    for row in rows:
        ends = [n for n, (one, after) in enumerate(pairwise([*row["loss_mask"], False]), 1) if one and not after]
        begins = [n for n, (one, after) in enumerate(pairwise([False, *row["loss_mask"]])) if after and not one]
        for first, last in zip(begins, ends, strict=True):
            assert tuple(row["token_ids"][:first]) in asked
            assert row["token_ids"][first:last] == [*answer.encode(), END_OF_TURN]


async def test_a_run_with_an_argument_that_the_template_does_not_use_does_not_begin(tmp_path: Path) -> None:
    async with FakeServer() as server:
        model = {"name": str(MODEL), "chat_template_kwargs": OFF}
        with pytest.raises(UserError, match="enable_thinking"):
            await run(tmp_path / "run", server, model=model)
    assert server.requests == []
