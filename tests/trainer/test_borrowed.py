"""A trainer on weights that another process holds: the same numbers, nothing copied, nothing changed, and everything
that is not the checkpoint's refused by name."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.lent import lent
from tests.trainer.models import CPU, save_tiny_model, tiny_batch, tiny_policy
from trainer.batch import PackedTokens, packed_tokens
from trainer.errors import ModelError
from trainer.model import Policy
from trainer.quantization import nf4
from trainer.quantization.linear import FORMATS, Quantization, QuantizedLinear
from transport.shared_base.lending import Borrowed
from transport.shared_base.usage import usage_of

STORED: dict[Quantization, dict[str, Any]] = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
DOWN, Q0, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=request.param)


def stored_checkpoint(plain: Path, folder: Path, format: Quantization) -> Path:
    """A copy of a checkpoint whose decoder's layers are stored quantized, as servers read them."""
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors.pop(name)
        own = FORMATS[format].quantize(weight)
        match format:
            case "nf4":
                levels, state = nf4.levels(), {"shape": list(weight.shape), "blocksize": nf4.BLOCK}
                said = {"nested_blocksize": nf4.NESTED_BLOCK, "nested_offset": float(own["offset"])}
                tensors |= {name: own["codes"][:, None], f"{name}.absmax": own["absmax"], f"{name}.quant_map": levels}
                tensors |= {f"{name}.nested_absmax": own["nested_absmax"]}
                tensors |= {f"{name}.nested_quant_map": nf4.nested_levels()}
                said_bytes = torch.frombuffer(bytearray(json.dumps(state | said).encode()), dtype=torch.uint8)
                tensors[f"{name}.quant_state.bitsandbytes__nf4"] = said_bytes
            case "fp8":
                tensors |= {name: own["codes"], f"{name}_scale_inv": own["scale"]}
            case "nvfp4":
                tensors |= {name: own["codes"], f"{name}_scale": own["scale"], f"{name}_scale_2": own["global_scale"]}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_bytes()) | {"quantization_config": STORED[format]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed() -> PackedTokens:
    return packed_tokens(tiny_batch((20, 13)), CPU)


def test_log_probabilities_and_gradients_are_those_of_a_model_of_its_own(folder: Path) -> None:
    own, other = tiny_policy(folder), tiny_policy(folder, borrowed=lent(folder))
    for policy in (own, other):
        policy.logprobs(packed()).sum().backward()
    with torch.no_grad():
        assert torch.equal(own.logprobs(packed()), other.logprobs(packed()))
    assert own.named_parameters.keys() == other.named_parameters.keys()
    for name, parameter in own.named_parameters.items():
        grad = other.named_parameters[name].grad
        assert parameter.grad is not None
        assert grad is not None
        assert torch.equal(parameter.grad, grad), name


def test_a_server_in_bfloat16_lends_to_a_trainer_in_bfloat16(folder: Path) -> None:
    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}

    own = tiny_policy(folder, dtype=torch.bfloat16)
    other = tiny_policy(folder, dtype=torch.bfloat16, borrowed=lent(folder, rounded, dtype="bfloat16"))
    with torch.no_grad():
        assert torch.equal(own.logprobs(packed()), other.logprobs(packed()))


def test_the_base_is_the_borrowed_memory_itself_and_a_step_leaves_it_as_it_is(folder: Path) -> None:
    borrowed = lent(folder)
    policy = tiny_policy(folder, borrowed=borrowed)
    places = {tensor.data_ptr() for tensor in borrowed.tensors.values()}
    frozen = [p for p in policy._model.parameters() if not p.requires_grad]
    assert {parameter.data_ptr() for parameter in frozen} == places
    before = {name: tensor.clone() for name, tensor in borrowed.tensors.items()}
    optimizer = torch.optim.AdamW(policy.parameters, lr=0.1, weight_decay=0.1)
    logprobs = policy.logprobs(packed())
    (-logprobs.sum()).backward()
    optimizer.step()
    assert not torch.equal(policy.logprobs(packed()), logprobs)
    for name, tensor in borrowed.tensors.items():
        assert torch.equal(tensor, before[name]), name


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def flipped(tensors: dict[str, torch.Tensor]) -> None:
    """Of the same shape, and laid out otherwise."""
    tensors[Q0] = tensors[Q0].T.contiguous()


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN][:-1].clone()


def halved(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].to(torch.bfloat16)


def more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.more"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(DOWN), f"the server lends all but {DOWN}"),
        (flipped, f"the server lends {Q0} with other values than"),
        (cut, rf"lends {DOWN} as torch.float32 of shape \[31, 48\], expected torch.float32 of shape \[32, 48\]"),
        (halved, rf"lends {DOWN} as torch.bfloat16 of shape \[32, 48\], expected torch.float32"),
        (more, "the server lends what Qwen3ForCausalLM has no place for: model.layers.9.more"),
    ],
)
def test_a_tensor_that_is_not_the_checkpoints_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        tiny_policy(folder, borrowed=lent(folder, change))


def test_another_model_and_another_type_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"the server lends the base 0000, and the model in .* give both programs"):
        tiny_policy(folder, borrowed=lent(folder, base_model="0000"))
    with pytest.raises(ModelError, match=r"of type bfloat16, and the trainer computes in float32; set .* recipe: bf16"):
        tiny_policy(folder, borrowed=lent(folder, dtype="bfloat16"))


def test_what_the_server_leaves_is_read_from_disk_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    borrowed = lent(folder, without(NORM), left={NORM: "the server has its own"})
    with caplog.at_level("INFO", logger="trainer.borrowed"):
        policy = tiny_policy(folder, borrowed=borrowed)
    assert f"1 (128 bytes) were read from disk: {NORM}" in caplog.text
    own = tiny_policy(folder)
    with torch.no_grad():
        assert torch.equal(own.logprobs(packed()), policy.logprobs(packed()))


@pytest.mark.parametrize("format", ["nf4", "fp8", "nvfp4"])
def test_a_checkpoint_that_is_stored_quantized_is_borrowed_with_its_scales(
    tmp_path: Path, format: Quantization
) -> None:
    folder = stored_checkpoint(save_tiny_model(tmp_path / "plain"), tmp_path / format, format)
    own, borrowed = tiny_policy(folder, quantization=format), lent(folder)
    other = tiny_policy(folder, quantization=format, borrowed=borrowed)
    with torch.no_grad():
        assert torch.equal(own.logprobs(packed()), other.logprobs(packed()))
    places = {tensor.data_ptr() for tensor in borrowed.tensors.values()}
    layers = [module for module in other._model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14
    assert {layer.packed[0].data_ptr() for layer in layers} <= places  # the codes, which are nearly all


def test_a_scale_that_the_server_does_not_lend_is_named(tmp_path: Path) -> None:
    folder = stored_checkpoint(save_tiny_model(tmp_path / "plain"), tmp_path / "fp8", "fp8")
    scale = Q0.replace(".weight", ".weight_scale_inv")
    with pytest.raises(ModelError, match=rf"lends {Q0} as torch.float8_e4m3fn .* expected torch.float32"):
        tiny_policy(folder, quantization="fp8", borrowed=lent(folder, without(scale)))


def test_a_plain_base_is_not_borrowed_to_be_quantized(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"lends the plain weights of .*, and qlora_fp8 would hold a copy of them"):
        tiny_policy(folder, quantization="fp8", borrowed=lent(folder))


def places_of(borrowed: Borrowed) -> set[int]:
    return {tensor.data_ptr() for tensor in borrowed.tensors.values()}


def frozen_of(policy: Policy) -> dict[str, torch.Tensor]:
    """What is not trained, but for the adapters' own."""
    return {name: p for name, p in policy._model.named_parameters() if not p.requires_grad}


def borrowers_mappings() -> set[int]:
    """The lent memories that this process maps only to read."""
    gc.collect()
    return {use.inode for use in usage_of(os.getpid()) if not use.writable}


@pytest.mark.parametrize(
    "options",
    [{}, {"adapters": ("a", "b")}, {"gradient_checkpointing": True}],
    ids=["plain", "adapters", "checkpointed"],
)
def test_what_is_borrowed_anew_takes_the_place_of_all_that_was_borrowed(folder: Path, options: dict[str, Any]) -> None:
    others = borrowers_mappings()
    first, second = lent(folder), lent(folder)
    policy = tiny_policy(folder, borrowed=first, **options)
    before = policy.logprobs(packed())
    before.sum().backward()
    gradients = [p.grad for p in policy.parameters]
    before = before.detach()
    assert {p.data_ptr() for p in frozen_of(policy).values()} == places_of(first)
    policy.borrow_anew(second, compare=True)
    assert {p.data_ptr() for p in frozen_of(policy).values()} == places_of(second)
    del first
    assert len(borrowers_mappings() - others) == 1  # nothing else holds the earlier memory
    for parameter in policy.parameters:
        parameter.grad = None
    after = policy.logprobs(packed())
    after.sum().backward()
    assert torch.equal(after, before)
    for parameter, gradient in zip(policy.parameters, gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert parameter.grad is None or torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("format", ["nf4", "fp8", "nvfp4"])
def test_a_stored_quantized_checkpoint_is_borrowed_anew_with_its_scales(tmp_path: Path, format: Quantization) -> None:
    folder = stored_checkpoint(save_tiny_model(tmp_path / "plain"), tmp_path / format, format)
    others = borrowers_mappings()
    first, second = lent(folder), lent(folder)
    policy = tiny_policy(folder, quantization=format, borrowed=first)
    with torch.no_grad():
        before = policy.logprobs(packed())
        policy.borrow_anew(second, compare=True)
        del first
        assert len(borrowers_mappings() - others) == 1
        assert torch.equal(policy.logprobs(packed()), before)
    layers = [module for module in policy._model.modules() if isinstance(module, QuantizedLinear)]
    assert {layer.packed[0].data_ptr() for layer in layers} <= places_of(second)


def changed_within(tensors: dict[str, torch.Tensor]) -> None:
    """In a row that is neither the first nor the last."""
    tensors[DOWN][7, 3] += 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_within, "the server that was started again lends .*down_proj.weight otherwise than the one before"),
        (flipped, f"the server lends {Q0} with other values than"),
        (without(DOWN), f"the server lends all but {DOWN}"),
    ],
)
def test_weights_that_are_others_are_not_borrowed_anew_and_leave_what_there_is(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    first = lent(folder)
    policy = tiny_policy(folder, borrowed=first)
    with pytest.raises(ModelError, match=message):
        policy.borrow_anew(lent(folder, change), compare=True)
    assert {p.data_ptr() for p in frozen_of(policy).values()} == places_of(first)


def test_a_memory_that_may_be_gone_is_not_read_to_compare(folder: Path) -> None:
    policy, other = tiny_policy(folder, borrowed=lent(folder)), lent(folder, changed_within)
    policy.borrow_anew(other, compare=False)
    assert {p.data_ptr() for p in frozen_of(policy).values()} == places_of(other)


@pytest.mark.parametrize("format", [None, "fp8"])
def test_what_was_borrowed_can_be_let_go_before_other_weights_are_borrowed(
    tmp_path: Path, format: Quantization | None
) -> None:
    folder = save_tiny_model(tmp_path / "plain")
    if format is not None:
        folder = stored_checkpoint(folder, tmp_path / format, format)
    others = borrowers_mappings()
    borrowed = lent(folder)
    policy = tiny_policy(folder, quantization=format, borrowed=borrowed)
    with torch.no_grad():
        before = policy.logprobs(packed())
        del borrowed
        policy.let_go()
        assert not borrowers_mappings() - others
        policy.borrow_anew(lent(folder), compare=False)
        assert torch.equal(policy.logprobs(packed()), before)
