"""A policy on a quantized base: what it computes, trains and publishes."""

from pathlib import Path

import pytest
import torch
from grpo.infer.canary import check_effect
from grpo.trainer.lora import FusedLoraLinear
from grpo.trainer.model import Policy
from grpo.trainer.packing import packed_tokens
from grpo.trainer.publishing import canary_ids
from grpo.trainer.quantization import QUANTIZE, QuantizedLinear
from grpo.transport.errors import PolicyRefused
from grpo.transport.records import Quantization

from tests.trainer.models import CPU, TARGETS, canary_of, files_of, tiny_batch, tiny_policy
from tests.trainer.quantization.test_loading import written
from tools.random_models import QUICKSTART_MODEL

RECIPES = [("nf4", torch.float32), ("fp8", torch.bfloat16), ("nvfp4", torch.bfloat16)]


def policy_on(
    folder: Path,
    format: Quantization | None,
    dtype: torch.dtype = torch.float32,
    *,
    moved: bool = False,
    targets: tuple[str, ...] = TARGETS,
) -> Policy:
    recipe = "fp32" if dtype == torch.float32 else "bf16"
    return tiny_policy(folder, recipe=recipe, moved=moved, quantization=format, lora_target_modules=targets)


@pytest.mark.parametrize("format", QUANTIZE)
def test_the_whole_policy_computes_what_one_on_the_base_that_servers_get_does(
    tiny_model: Path, tmp_path: Path, format: Quantization
) -> None:
    plain = written(tiny_model, tmp_path, format)
    ours, theirs = (policy_on(folder, kind, moved=True) for folder, kind in ((tiny_model, format), (plain, None)))
    tokens = packed_tokens(tiny_batch((9, 4, 12)), CPU)
    results = [policy.logprobs(tokens) for policy in (ours, theirs)]
    assert torch.equal(*results)
    for logprobs in results:
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    assert ours.named_parameters.keys() == theirs.named_parameters.keys()
    for one, other in zip(ours.parameters, theirs.parameters, strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert files_of(ours) == files_of(theirs)


def test_layers_without_an_adapter_are_quantized_too_and_hand_the_gradient_on(tiny_model: Path) -> None:
    policy = policy_on(tiny_model, "nf4", moved=True, targets=("q_proj",))
    kinds = [type(module) for module in policy.causal_lm.modules()]
    assert (kinds.count(QuantizedLinear), kinds.count(FusedLoraLinear)) == (7 * 2, 2)
    policy.logprobs(packed_tokens(tiny_batch((8, 5)), CPU)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in policy.parameters)


@pytest.mark.parametrize(("format", "dtype"), [one for one in RECIPES if one[0] != "fp8"])
def test_the_canary_refuses_a_server_that_holds_the_plain_base(format: Quantization, dtype: torch.dtype) -> None:
    trained, served = policy_on(QUICKSTART_MODEL, format, dtype), policy_on(QUICKSTART_MODEL, None, dtype)
    ids = canary_ids(served.causal_lm.config, seed=42)
    canary, there = (canary_of(policy, ids, version=0) for policy in (trained, served))
    with pytest.raises(PolicyRefused) as refused:
        check_effect(canary, there.logprobs, there.logprobs, dtype=served.dtype_name, device="cpu", tolerance=None)
    assert refused.value.reason == "base_mismatch"
    own = canary.base_logprobs
    check_effect(canary, own, own, dtype=trained.dtype_name, device="cpu", tolerance=None)
