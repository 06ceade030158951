"""Qwen3's chat template, thinking on and off: the rows of docs/models.md, and one prompt for rollouts, chat and
exported models."""

from pathlib import Path

import httpx
import pytest
from grpo.orchestrator.renderer import ChatRenderer
from transformers import AutoTokenizer

from grpo.commands.export import export
from grpo.policy_version import open_version
from grpo.server_process import ALIAS, server_process, server_settings
from tests.e2e.runs import trained
from tests.orchestrator.chat_templates import QWEN3, TWICE, model_with

pytestmark = pytest.mark.e2e
OFF, SMALL = '{"enable_thinking": false}', ("--max_steps", 2, "--orch.batch_size", 32, "--orch.eval.num_examples", 4)
QUESTION = [{"role": "user", "content": "2 + 3?"}]


def test_what_is_sampled_served_evaluated_and_exported_thinks_or_does_not(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", QWEN3)
    (tmp_path / "twice.py").write_text(TWICE)
    words = ("--model", model, "--infer.max_model_len", 256, "--env", f"{tmp_path / 'twice.py'}:Twice", *SMALL)
    off = trained("quickstart", tmp_path / "off", *words, "--chat_template_kwargs", OFF)
    # This model has never heard of thinking: only the block that the template itself writes is taken back.
    assert [step["rollout/new_rows"] for step in off.steps] == [1, 1]
    assert off.summary["rollouts_dropped"] == {}

    prompt = ChatRenderer.of_model(model, {"enable_thinking": False}).prompt_ids(tuple(QUESTION))
    version = open_version(off.folder, None)
    with server_process(server_settings(version), tmp_path / "logs/chat.log", version=version) as server:
        for name in (ALIAS, server.base):
            body = {"model": name, "messages": QUESTION, "max_tokens": 1, "return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["prompt_token_ids"] == prompt
            body["chat_template_kwargs"] = {"enable_thinking": True}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["prompt_token_ids"] == ChatRenderer.of_model(model).prompt_ids(tuple(QUESTION))
    exported = AutoTokenizer.from_pretrained(export(version, kind="merged", output=tmp_path / "merged"))
    assert exported.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False) == prompt
