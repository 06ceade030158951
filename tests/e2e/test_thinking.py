"""Qwen3's chat template, thinking off: the prompt of a run's server is that of its rollouts, unless a request says
otherwise.

Rollouts: test_chat_templates.py, and test_first_hour.py on real vLLM; exported models: test_sft.py."""

from pathlib import Path

import httpx
import pytest
from grpo.configs.run import load_run
from grpo.orchestrator.renderer import ChatRenderer
from grpo.transport.ports import free_port

from grpo.server_process import server_process
from tests.orchestrator.chat_templates import QWEN3, model_with

pytestmark = pytest.mark.e2e
QUESTION = [{"role": "user", "content": "2 + 3?"}]


def test_what_is_served_thinks_or_does_not(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", QWEN3)
    words = ["--model", str(model), "--chat_template_kwargs", '{"enable_thinking": false}']
    settings = load_run("quickstart", [*words, "--infer.max_model_len", "256"]).infer.settings.model_dump(mode="json")
    with server_process(settings | {"port": free_port()}, tmp_path / "logs/chat.log") as server:
        for arguments in ({"enable_thinking": False}, {"enable_thinking": True}):
            body = {"model": server.base, "messages": QUESTION, "max_tokens": 1, "return_token_ids": True}
            if arguments["enable_thinking"]:
                body["chat_template_kwargs"] = arguments
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["prompt_token_ids"] == ChatRenderer.of_model(model, arguments).prompt_ids(tuple(QUESTION))
