"""Qwen3's chat template, thinking off: the rows of docs/models.md, and one prompt for training, chat and exports.

What rollouts send and keep: test_chat_templates.py, and test_first_hour.py on real vLLM."""

import json
from pathlib import Path

import httpx
import pytest
from grpo.configs.run import load_run
from grpo.orchestrator.renderer import ChatRenderer
from grpo.transport.ports import free_port
from transformers import AutoTokenizer

from grpo.cli import _command
from grpo.commands.export import export
from grpo.policy_version import open_version
from grpo.server_process import ALIAS, server_process
from tests.orchestrator.chat_templates import QWEN3, model_with

pytestmark = pytest.mark.e2e
OFF = '{"enable_thinking": false}'
QUESTION = [{"role": "user", "content": "2 + 3?"}]
TRAINING = ("--recipe", "fp32", "--optimizer", "adamw", "--batch_size", "2", "--lora_rank", "16", "--lora_alpha", "32")


def test_what_is_served_and_exported_thinks_or_does_not(tmp_path: Path) -> None:
    model, rows, output = model_with(tmp_path / "model", QWEN3), tmp_path / "rows.jsonl", tmp_path / "off"
    rows.write_text("\n".join([json.dumps({"prompt": "Hi", "answer": "Ho"})] * 2))
    words = ("--model", str(model), "--output_dir", str(output), "--chat_template_kwargs", OFF)
    assert _command(["sft", str(rows), *words, *TRAINING]) == 0
    settings = load_run("quickstart", [*words, "--infer.max_model_len", "256"]).infer.settings.model_dump(mode="json")

    prompt = ChatRenderer.of_model(model, {"enable_thinking": False}).prompt_ids(tuple(QUESTION))
    version = open_version(output, None)
    with server_process(settings | {"port": free_port()}, tmp_path / "logs/chat.log", version=version) as server:
        for name in (ALIAS, server.base):
            body = {"model": name, "messages": QUESTION, "max_tokens": 1, "return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["prompt_token_ids"] == prompt
            body["chat_template_kwargs"] = {"enable_thinking": True}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["prompt_token_ids"] == ChatRenderer.of_model(model).prompt_ids(tuple(QUESTION))
    exported = AutoTokenizer.from_pretrained(export(version, kind="merged", output=tmp_path / "merged"))
    assert exported.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False) == prompt
