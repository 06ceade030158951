"""Full fine-tuning on one rank: gradients, master weights, published weights."""

from pathlib import Path

import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.checkpoint import restore, state_parts
from grpo.trainer.distributed import ONE, full_tensor
from grpo.trainer.errors import ModelError
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective
from grpo.trainer.optim import Optimizer
from grpo.trainer.packing import packed_tokens
from grpo.transport.weights.shards import Weight
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.trainer.bench import settings_for
from tests.trainer.models import CPU, canary_of, save_tiny_model, tiny_batch, tiny_policy
from tests.trainer.test_attention import one_by_one

IDS = (3, 9, 27, 17, 51, 25, 11, 33)


def full_policy(folder: Path, dtype: torch.dtype = torch.float32) -> Policy:
    return tiny_policy(folder, recipe="fp32" if dtype == torch.float32 else "bf16", moved=False, lora=False)


def values(weights: list[Weight]) -> dict[str, torch.Tensor]:
    return {weight.name: weight.tensor().clone() for weight in weights}


def published(policy: Policy) -> dict[str, torch.Tensor]:
    return values(policy.weights.make(policy.weights.snapshot(), merged=False)[1])


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradients_of_all_weights_are_those_of_hugging_face(tmp_path: Path, tied: bool) -> None:
    folder, batch = save_tiny_model(tmp_path, tie_word_embeddings=tied), tiny_batch((6, 9, 4))
    policy = full_policy(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    weights = torch.randn(16, generator=torch.Generator().manual_seed(3))  # of the 16 tokens with loss
    (policy.logprobs(packed_tokens(batch, CPU)) * weights).sum().backward()
    (one_by_one(model, batch) * weights).sum().backward()
    theirs = dict(model.named_parameters())
    assert policy.named_parameters.keys() == theirs.keys()
    assert ("lm_head.weight" in theirs) != tied
    for name, parameter in policy.named_parameters.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_version_0_is_the_checkpoint_and_the_canary_says_so(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=True)
    policy = full_policy(folder, dtype)
    stored, ours = load_file(folder / "model.safetensors"), published(policy)
    assert ours.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(ours[name], tensor.to(dtype), atol=0, rtol=0)
    canary = canary_of(policy, IDS, version=0)
    base = canary.base_logprobs
    assert (canary.is_zero, canary.logprobs, canary.dtype) == (True, base, policy.dtype_name)
    assert not canary_of(policy, IDS, version=1).is_zero


def test_bfloat16_is_computed_as_the_server_does_and_trained_in_float32(tiny_model: Path) -> None:
    """As by an adapter's base, which is held in bfloat16."""
    tokens, policy = packed_tokens(tiny_batch((6, 9)), CPU), full_policy(tiny_model, torch.bfloat16)
    with torch.no_grad():
        expected = tiny_policy(tiny_model, recipe="bf16", moved=False).logprobs(tokens)
        torch.testing.assert_close(policy.logprobs(tokens), expected, atol=0, rtol=0)
    assert {p.dtype for p in policy.parameters} == {torch.float32}
    policy.sync_gradients(last=True)
    policy.logprobs(tokens).sum().backward()
    assert {p.grad.dtype for p in policy.parameters if p.grad is not None} == {torch.float32}


def test_passes_of_one_step_add_up_in_float32(tiny_model: Path) -> None:
    policy = full_policy(tiny_model, torch.bfloat16)
    batches = [packed_tokens(tiny_batch((6, 9), seed=seed), CPU) for seed in (1, 2)]
    alone = []
    for tokens in batches:
        policy.sync_gradients(last=True)
        policy.logprobs(tokens).sum().backward()
        alone.append([full_tensor(p.grad) for p in policy.parameters if p.grad is not None])
        for parameter in policy.parameters:
            parameter.grad = None
    for last, tokens in zip((False, True), batches, strict=True):
        policy.sync_gradients(last=last)
        policy.logprobs(tokens).sum().backward()
    for parameter, first, second in zip(policy.parameters, *alone, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(full_tensor(parameter.grad), first + second, atol=0, rtol=0)


def test_a_snapshot_stays_what_it_was_when_training_goes_on(tiny_model: Path) -> None:
    policy = full_policy(tiny_model)
    snapshot, before = policy.weights.snapshot(), published(policy)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(1.0)
    now = values(policy.weights.make(snapshot, merged=False)[1])
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert not any(torch.equal(published(policy)[name], tensor) for name, tensor in before.items())


def test_tied_weights_are_published_under_every_name_that_the_checkpoint_has(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=True)
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    policy = full_policy(folder)
    assert len(policy.weights.snapshot()) == len(stored)
    ours = published(policy)
    torch.testing.assert_close(ours["lm_head.weight"], ours["model.embed_tokens.weight"], atol=0, rtol=0)


def test_a_checkpoint_with_names_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.mtp.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model.mtp\.weight"):
        full_policy(folder)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_kept_in_main_memory_is_trained_to_the_same_weights(tiny_model: Path, optimizer: str) -> None:
    """On a CPU both are main memory: what differs is FSDP's way."""
    results = []
    for offload in (False, True):
        policy = tiny_policy(tiny_model, recipe="bf16", moved=False, lora=False, offload=offload)
        objective = Objective(policy, LossSettings(name="reinforce"), ONE, pack_tokens=128)
        settings = settings_for(tiny_model, lora=False, weight_broadcast={"format": "full"}, optimizer=optimizer)
        stepper = Optimizer(settings, policy.named_parameters)
        norms = []
        for step in (1, 2):
            objective.accumulate([tiny_batch((6, 9), seed=step)], step=step)
            norms.append(stepper.step(learning_rate=1e-3))
        assert min(norms) > 0
        saved = state_parts(policy, stepper, None, ONE)
        again = tiny_policy(tiny_model, recipe="bf16", moved=False, lora=False, offload=offload)
        restore(saved, again, its := Optimizer(settings, again.named_parameters), None)
        assert all(torch.equal(one, its.state_tensors()[name]) for name, one in saved["optimizer"].items())
        results.append(published(again))
    assert all(torch.equal(one, results[1][name]) for name, one in results[0].items())
