"""Several adapters in one model: against one model for each, and alone in a step."""

import functools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import counts_of
from grpo.trainer.checkpoint import restore, state_parts
from grpo.trainer.distributed import ONE, Ranks
from grpo.trainer.errors import ModelError, ResumeError
from grpo.trainer.metrics import numbers_of
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective
from grpo.trainer.optim import Optimizer
from grpo.trainer.packing import packed_tokens
from grpo.transport.records import Canary, MicroBatch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from tests.trainer.bench import UNMASKED, Bench
from tests.trainer.models import (
    CPU,
    TARGETS,
    canary_of,
    files_of,
    hint_for,
    only,
    pair_of,
    save_tiny_model,
    tiny_batch,
    tiny_policy,
    tiny_settings,
    write_files,
)
from tests.trainer.test_attention import one_by_one
from tests.trainer.test_memory import ignores_its_own_warnings, needs_compiler

NAMES = ("solver", "proposer")
LENGTHS = (6, 9, 4, 7)
OF_SAMPLES = (1, 0, 0, 1)
ALL_ON = {"alpha_sdpo": 0.7, "beta_replay": 0.4}


def joint_and_single(folder: Path, *, compile_layers: bool = False, **options: Any) -> tuple[Policy, list[Policy]]:
    """A policy with two adapters, both moved, and for each of them one that has it alone, which is never compiled."""
    joint = tiny_policy(folder, lora_adapters=NAMES, moved=False, compile=compile_layers, **options)
    singles = [tiny_policy(folder, moved=False, **options) for _ in NAMES]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for adapter, single in enumerate(singles):
            own = joint.weights.parameters(adapter)
            for parameter, alone in zip(own, single.weights.parameters(0), strict=True):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
                alone.copy_(parameter)
    return joint, singles


def mixed_batch() -> MicroBatch:
    """Samples of both adapters, of which the first two have the same prompt; hints and pairs of both."""
    batch = tiny_batch(LENGTHS)
    batch.token_ids[6:9] = batch.token_ids[:3]
    batch.loss_mask[[1, 2, 7, 8]] = False
    hints = tuple((s, hint_for(batch, s, places=(3, 4), before=2)) for s in (0, 1))
    pairs = (replace(pair_of([5, 6], [7], [8, 9]), adapter=1), pair_of([5, 6], [10], [11, 12]))
    return replace(batch, adapters=np.array(OF_SAMPLES, np.int32), hints=hints, pairs=pairs)


def alone(batch: MicroBatch, adapter: int) -> MicroBatch:
    """The samples, hints and pairs of one adapter, as for a trainer that has no other."""
    samples = [sample for sample, own in enumerate(OF_SAMPLES) if own == adapter]
    pairs = tuple(replace(pair, adapter=0) for pair in batch.pairs if pair.adapter == adapter)
    return only(batch, samples, adapters=None, pairs=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted(Ranks):
    """Other ranks have the rest of a batch."""

    whole: MicroBatch

    def all_reduce_sum(self, numbers: Sequence[int]) -> list[int]:
        return list(counts_of([self.whole]))


def accumulated(policy: Policy, batch: MicroBatch, ranks: Ranks = ONE, **loss: Any) -> dict[str, float]:
    """Gradients of the step, in the parameters."""
    objective = Objective(policy, LossSettings.model_validate(loss), ranks, pack_tokens=128)
    return numbers_of(objective.accumulate([batch], step=1))


def assert_same_logprobs(joint: Policy, singles: Sequence[Policy]) -> None:
    """Each token's are those of the model that has its adapter alone."""
    batch = mixed_batch()
    of_tokens = np.repeat(OF_SAMPLES, LENGTHS)[batch.loss_mask]
    with torch.no_grad():
        logprobs = joint.logprobs(packed_tokens(batch, CPU))
        for adapter, single in enumerate(singles):
            expected = single.logprobs(packed_tokens(alone(batch, adapter), CPU))
            torch.testing.assert_close(logprobs[of_tokens == adapter], expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"checkpointing": "full"}, {"quantization": "nf4"}], ids=["plain", "checkpointed", "quantized"]
)
def test_each_token_gets_its_own_adapter_and_trains_it_as_if_it_were_alone(
    tiny_model: Path, options: dict[str, Any]
) -> None:
    """Log-probabilities and the gradients of all three streams are those of separate models."""
    joint, singles = joint_and_single(tiny_model, **options)
    batch = mixed_batch()
    assert_same_logprobs(joint, singles)
    accumulated(joint, batch, **ALL_ON, **UNMASKED)
    for adapter, single in enumerate(singles):
        accumulated(single, alone(batch, adapter), Counted(whole=batch), **ALL_ON, **UNMASKED)
        for ours, theirs in zip(joint.weights.parameters(adapter), single.parameters, strict=True):
            assert theirs.grad is not None
            assert theirs.grad.any()
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-6)


@needs_compiler
@ignores_its_own_warnings
def test_each_token_gets_its_own_adapter_in_compiled_layers(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    assert_same_logprobs(*joint_and_single(tiny_model, compile_layers=True))


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_a_step_without_tokens_of_an_adapter_leaves_it_and_what_the_optimizer_remembers_of_it_alone(
    tiny_model: Path, kind: str
) -> None:
    """Neither weight decay nor the momentum of earlier steps moves it."""
    joint, _ = joint_and_single(tiny_model)
    optimizer = Optimizer(tiny_settings(tiny_model, optimizer=kind, weight_decay=0.1), joint.named_parameters)
    metrics = accumulated(joint, mixed_batch(), **UNMASKED)
    # 3 + 3 of the proposer's, whose first sample has a prompt of 3, 8 + 3 - 2 of the solver's: 15 in all
    assert (metrics["policy/adapter_tokens_solver"], metrics["policy/adapter_tokens_proposer"]) == (9, 9)
    optimizer.step(learning_rate=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in joint.named_parameters.items()}
    remembered = optimizer.state_tensors()

    metrics = accumulated(joint, tiny_batch((6, 9), seed=3), **UNMASKED)
    assert metrics["policy/adapter_tokens_proposer"] == 0
    assert all(parameter.grad is None for parameter in joint.weights.parameters(1))
    optimizer.step(learning_rate=1e-2)
    for name, parameter in joint.named_parameters.items():
        assert torch.equal(parameter, before[name]) == ("adapter_1" in name), name
    for name, tensor in optimizer.state_tensors().items():
        if "adapter_1" in name:
            assert torch.equal(tensor, remembered[name]), name


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_a_checkpoint_before_an_adapters_first_step_continues_both_bit_for_bit(tiny_model: Path, kind: str) -> None:
    def begun() -> tuple[Policy, Optimizer]:
        policy = tiny_policy(tiny_model, lora_adapters=NAMES)
        settings = tiny_settings(tiny_model, optimizer=kind, weight_decay=0.1)
        return policy, Optimizer(settings, policy.named_parameters)

    def step(policy: Policy, optimizer: Optimizer, batch: MicroBatch) -> None:
        accumulated(policy, batch, **UNMASKED)
        optimizer.step(learning_rate=1e-2)

    policy, optimizer = begun()
    step(policy, optimizer, tiny_batch((6, 9), seed=3))
    parts = state_parts(policy, optimizer, None, ONE)
    assert not any("adapter_1" in name for name in parts["optimizer"])
    resumed, its_optimizer = begun()
    restore(parts, resumed, its_optimizer, None)
    for one, own in ((policy, optimizer), (resumed, its_optimizer)):
        step(one, own, mixed_batch())
    for name, parameter in policy.named_parameters.items():
        assert torch.equal(parameter, resumed.named_parameters[name]), name


def test_the_files_and_the_canary_of_each_adapter_are_those_of_a_model_that_has_it_alone(tiny_model: Path) -> None:
    joint, singles = joint_and_single(tiny_model)
    files, folders = files_of(joint), ("", "adapters/proposer/")
    names = ("adapter_model.safetensors", "adapter_config.json")
    assert files.keys() == {f"{folder}{name}" for folder in folders for name in names}
    ids = (3, 9, 27, 17, 51)
    base = canary_of(tiny_policy(tiny_model, moved=False), ids, version=0).logprobs
    for adapter, (folder, single) in enumerate(zip(folders, singles, strict=True)):
        assert {name: files[f"{folder}{name}"] for name in names} == files_of(single)
        canary = canary_of(joint, ids, version=1, adapter=adapter)
        assert canary.logprobs == pytest.approx(canary_of(single, ids, version=1).logprobs, abs=1e-5)
        assert canary.base_logprobs == pytest.approx(base, abs=1e-6), "the base's are without what has been trained"


def test_a_trainer_publishes_both_and_trains_the_one_that_has_tokens(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=1, lora_adapters=NAMES, loss=UNMASKED)
    bench.train(tiny_batch((6, 9), adapters=np.array([1, 1], np.int32)))
    manifest, before = bench.policies.versions[0]
    after = bench.files(1)
    assert manifest.spec.adapters == NAMES
    weights, canary, folder = "adapter_model.safetensors", "canary.json", "adapters/proposer/"
    assert before[weights] == after[weights]
    assert before[f"{folder}{weights}"] != after[f"{folder}{weights}"]
    assert load(after[f"{folder}{weights}"]).keys() == load(after[weights]).keys()
    untrained, trained = (Canary.from_json(after[f"{own}{canary}"]) for own in ("", folder))
    assert (untrained.is_zero, trained.is_zero) == (True, False)
    assert untrained.logprobs == untrained.base_logprobs == trained.base_logprobs != trained.logprobs
    metrics = json.loads(after["metrics.json"])
    assert (metrics["policy/adapter_tokens_solver"], metrics["policy/adapter_tokens_proposer"]) == (0, 13)


@pytest.mark.filterwarnings("ignore:.*LoRA tensor.*:peft.utils.warning.PeftWarning")  # of biases
@pytest.mark.parametrize(
    ("refused", "options"),
    [
        ("", {}),
        ("", {"target_modules": "all-linear"}),
        ("", {"target_modules": r".*\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj"}),
        ("", {"init_lora_weights": "gaussian"}),
        ("use_rslora", {"use_rslora": True}),
        ("alpha_pattern", {"alpha_pattern": {"q_proj": 64}}),
        ("rank_pattern", {"rank_pattern": {"q_proj": 2}}),
        ("bias", {"bias": "all"}),
        ("bias", {"bias": "lora_only"}),
        ("lora_bias", {"lora_bias": True, "target_modules": ["q_proj"]}),
        ("use_dora", {"use_dora": True}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("layers_to_transform", {"layers_to_transform": [0]}),
        ("init_lora_weights", {"init_lora_weights": "pissa"}),
    ],
)
def test_an_adapter_that_peft_has_saved_is_computed_as_peft_does_or_refused(
    tmp_path: Path, refused: str, options: dict[str, Any]
) -> None:
    folder = save_tiny_model(tmp_path / "model", attention_bias=True)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM"} | options
    )
    theirs = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    policy = tiny_policy(folder)
    with pytest.raises(ModelError, match=refused) if refused else nullcontext():
        policy.weights.load(tmp_path / "adapter")  # type: ignore[union-attr]
    if not refused:
        batch = tiny_batch((9, 12))
        with torch.no_grad():
            ours, expected = policy.logprobs(packed_tokens(batch, CPU)), one_by_one(theirs, batch)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_a_file_of_another_method_is_not_gone_on_with(tiny_model: Path, tmp_path: Path) -> None:
    policy = tiny_policy(tiny_model)
    write_files(files_of(policy), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_bytes())
    for key, value in {"fan_in_fan_out": True, "peft_type": "IA3"}.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ModelError, match=key):
            policy.weights.load(tmp_path)  # type: ignore[union-attr]


def test_an_adapter_is_taken_up_as_it_is_and_one_of_other_sizes_refused_with_the_keys_to_set(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=1)
    bench.train(tiny_batch((6, 9)))
    write_files(bench.files(1), tmp_path)
    same = tiny_policy(tiny_model)
    same.weights.load(tmp_path)  # type: ignore[union-attr]
    assert files_of(same)["adapter_model.safetensors"] == bench.files(1)["adapter_model.safetensors"]
    others = ({"lora_target_modules": TARGETS[:2]}, {"lora_alpha": 16})
    for change, folder in (*((change, tmp_path) for change in others), ({}, tmp_path / "nothing")):
        with pytest.raises(ModelError, match="init_adapter"):
            tiny_policy(tiny_model, **change).weights.load(folder)  # type: ignore[union-attr, arg-type]


def test_a_checkpoint_whose_optimizer_state_is_lost_on_its_way_is_refused(tiny_model: Path) -> None:
    policy, other = tiny_policy(tiny_model), Optimizer(tiny_settings(tiny_model, optimizer="adamw"), {})
    optimizer = Optimizer(tiny_settings(tiny_model, optimizer="adamw"), policy.named_parameters)
    accumulated(policy, tiny_batch((6, 9)), **UNMASKED)
    optimizer.step(learning_rate=1e-2)
    parts = state_parts(policy, optimizer, None, ONE)
    restore(parts, policy, optimizer, None)
    with pytest.raises(ResumeError, match="counts 0 steps"):
        restore(parts, policy, other, None)
