"""`grpo sft`: prompts and answers from a file, learned by the trainer itself."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from grpo.configs.errors import SettingsError
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.supervised import end_token, examples_of, fitting, rollouts_of, sample_of
from grpo.trainer.weights import AdapterWeights
from grpo.transport.errors import UserError
from grpo.transport.traces import FOLDER, SCHEMA, VOCABULARY_FILE, make_table, trace_path, write_table
from grpo.transport.witness import TOLERANCE
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo.cli import _command
from grpo.commands.export import export
from grpo.commands.sft import rows_of, supervised_settings
from grpo.commands.status import run_status
from grpo.policy_version import open_version
from grpo.proofs import prove
from grpo.view.data import curves
from tests.orchestrator.chat_templates import QWEN3, model_with
from tests.trainer.models import is_zero, tiny_policy

MODEL = Path("configs/quickstart/model")
ARGUMENTS = ["--model", str(MODEL), "--recipe", "fp32", "--optimizer", "adamw", "--num_threads", "1"]


def written(folder: Path, rows: list[Any]) -> Path:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "pairs.jsonl"


def test_rows_are_no_longer_than_what_the_model_reads_unless_that_is_set() -> None:
    assert supervised_settings(None, ARGUMENTS, data=Path("x.csv")).sequence_len == 512
    assert supervised_settings(None, [*ARGUMENTS, "--sequence_len", "600"], data=Path("x.csv")).sequence_len == 600


def test_the_loss_is_on_the_answer_and_on_the_token_that_ends_it(tmp_path: Path) -> None:
    rows = rows_of(written(tmp_path, [{"q": [{"role": "user", "content": "Hi"}], "a": "Ho"}]), prompt="q", answer="a")
    [example] = examples_of(rows, ChatRenderer.of_model(MODEL), end_token(MODEL))
    sample, renderer = sample_of(example, step=3, number=0), ChatRenderer.of_model(MODEL)
    assert renderer.raw_text(sample.token_ids[~sample.loss_mask].tolist()).count("Hi") == 1
    trained = sample.token_ids[sample.loss_mask]
    assert renderer.texts([type("C", (), {"token_ids": trained})]) == ["Ho"]
    assert renderer.is_special(int(trained[-1]))
    assert sample.policy_versions == ((2, len(sample.token_ids)),)


def test_the_prompt_is_written_with_the_templates_arguments_which_exported_models_have_too(tmp_path: Path) -> None:
    model, output = model_with(tmp_path / "model", QWEN3), tmp_path / "sft"
    file = written(tmp_path, [{"prompt": "Hi", "answer": "Ho"}] * 2)
    command = [
        "sft",
        str(file),
        "--output_dir",
        str(output),
        "--model",
        str(model),
        *ARGUMENTS[2:],
        "--batch_size",
        "2",
    ]
    assert _command([*command, "--chat_template_kwargs", '{"enable_thinking": false}']) == 0
    renderer = ChatRenderer.of_model(model, {"enable_thinking": False})
    [row, _] = examples_of(rows_of(file, prompt="prompt", answer="answer"), renderer, end_token(model))
    assert renderer.raw_text(row.token_ids).endswith("assistant\n<think>\n\n</think>\n\nHo<|im_end|>")
    with pytest.raises(SystemExit):  # other arguments than before
        _command([*command, "--max_steps", "2"])
    for kind in ("adapter", "merged"):
        folder = export(open_version(output, None), kind=kind, output=tmp_path / kind)
        exported = AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": "Hi"}]
        prompt = exported.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert renderer.ids_of(f"{prompt}Ho<|im_end|>") == row.token_ids
        card = (folder / "README.md").read_text()
        assert ("--default-chat-template-kwargs" in card) == (kind == "adapter")
        assert '{"enable_thinking": false}' in card


def test_a_row_that_is_too_long_is_left_out_and_all_of_them_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, [{"prompt": "Hi", "answer": answer} for answer in ("Ho", "Ho" * 100)])
    rows = rows_of(file, prompt="prompt", answer="answer")
    examples = examples_of(rows, ChatRenderer.of_model(MODEL), end_token(MODEL))
    assert len(fitting(examples, sequence_len=64)) == 1
    assert "1 of 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="sequence_len"):
        fitting(examples[1:], sequence_len=64)


def test_the_best_rollouts_of_a_run_are_learned_each_once(tmp_path: Path) -> None:
    renderer = ChatRenderer.of_model(MODEL)
    rows = [([72, 105], 1.0), ([72, 105], 1.0), ([72, 111], 0.5), ([72, 112], 1.5)]
    table = [{"reward": reward, "token_ids": ids, "loss_mask": [False, True]} for ids, reward in rows]
    write_table(make_table(table, SCHEMA), trace_path(tmp_path, 1))
    texts = renderer.vocabulary()
    with pytest.raises(UserError, match="traces"):
        rollouts_of(tmp_path, renderer, min_reward=1.0)
    write_table(pa.table({"id": list(range(len(texts))), "text": texts}), tmp_path / FOLDER / VOCABULARY_FILE)
    found = rollouts_of(tmp_path, renderer, min_reward=1.0)
    assert [(one.token_ids, one.loss_mask) for one in found] == [([72, 105], [False, True]), ([72, 112], [False, True])]
    with pytest.raises(UserError, match="min_reward"):
        rollouts_of(tmp_path, renderer, min_reward=2.0)
    write_table(pa.table({"id": [0], "text": ["other"]}), tmp_path / FOLDER / VOCABULARY_FILE)
    with pytest.raises(UserError, match="tokenizer"):
        rollouts_of(tmp_path, renderer, min_reward=1.0)


@pytest.mark.parametrize(("row", "says"), [({"prompt": "Hi"}, "answer"), ({"prompt": "Hi", "answer": ""}, "text")])
def test_a_row_without_a_prompt_or_an_answer_is_named(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(UserError, match=rf"pairs\.jsonl:2.*{says}"):
        rows_of(written(tmp_path, [{"prompt": "Hi", "answer": "Ho"}, row]), prompt="prompt", answer="answer")


@pytest.mark.parametrize("given", [["--loss.kl_tau", "0.1"], ["--noise_scheduler.enabled", "--max_steps", "20"]])
def test_settings_that_a_supervised_stage_ignores_are_refused(given: list[str]) -> None:
    with pytest.raises(SettingsError, match="no effect"):
        supervised_settings(None, [*ARGUMENTS, *given], data=Path("pairs.jsonl"))


def test_a_stage_without_a_folder_gets_one_of_its_own() -> None:
    settings = supervised_settings(None, ["--model", "org/Model"], data=Path("data/pairs.jsonl"))
    assert settings.output_dir == "outputs/pairs-sft-Model"


def test_a_supervised_stage_has_learning_rates_of_its_own() -> None:
    whole = ["--lora", "false", "--weight_broadcast.format", "full"]
    for given, rate in (([], 2e-4), (whole, 2e-5), (["--learning_rate", "3e-3"], 3e-3)):
        assert supervised_settings(None, ["--model", "m", *given], data=Path("rows.jsonl")).learning_rate == rate


def test_a_stage_learns_goes_on_and_gives_a_run_its_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sft"
    words = [f"{chr(97 + n % 26)}{chr(97 + n * 7 % 26)}b" for n in range(96)]
    file = written(tmp_path, [{"prompt": f"Reverse: {word}", "answer": word[::-1]} for word in words])
    command = ["sft", str(file), *ARGUMENTS, "--output_dir", str(output), "--batch_size", "32"]
    command += ["--epochs", "2", "--learning_rate", "1e-3", "--lora_rank", "4", "--lora_alpha", "8"]
    assert _command([*command, "--max_steps", "3"]) == 0
    assert _command(command) == 0
    losses = curves(output)["train"]["loss/total"]
    assert curves(output)["train"]["progress/step"] == [1, 2, 3, 4, 5, 6]
    assert losses[-1] < 0.7 * losses[0]
    assert "step 6/6" in capsys.readouterr().out
    assert run_status(output).state == "finished"
    page = prove(output)
    parts = {part.name: part for part in page.parts}
    assert page.broken == []
    assert parts["gradients"].facts["again"] == sorted(map(int, parts["batches"].facts["files"])) != []
    assert max(parts["gradients"].facts["gaps"].values()) < TOLERANCE
    assert parts["tokens"].unproved + parts["rollouts"].unproved + parts["files"].unproved == []
    assert page.step == 6
    assert (export(open_version(output, None), output=tmp_path / "exported") / "README.md").exists()
    policy = tiny_policy(MODEL, moved=False)
    assert isinstance(policy.weights, AdapterWeights)
    policy.weights.load(output / "broadcasts" / "step_000006")
    saved = load_file(output / "broadcasts" / "step_000006" / "adapter_model.safetensors")
    snapshot = policy.weights.snapshot()
    assert all(torch.equal(snapshot[name], tensor) for name, tensor in saved.items())
    assert not is_zero(policy)
