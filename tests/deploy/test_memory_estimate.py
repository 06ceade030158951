"""The trainer's need, part by part, against what its code holds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.memory_estimates import CONFIGS
from configs.train import TrainSettings
from deploy.memory.activations import Pass
from deploy.memory.estimate import Estimate, EstimateError, estimate
from deploy.memory.shapes import ModelShape
from tests.trainer.models import CPU, save_tiny_model, tiny_batch
from trainer.batch import packed_tokens
from trainer.model import Policy, load_policy
from trainer.optim import Optimizer
from trainer.quantization.linear import Quantization
from transport.records import MicroBatch

TOKENS, RANK = 96, 4
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def shape(folder: Path) -> ModelShape:
    return ModelShape.of_folder(folder)


def a_pass(shape: ModelShape, **changes: Any) -> Pass:
    values = {
        "shape": shape,
        "num_tokens": TOKENS,
        "element_bytes": 4,
        "rank": RANK,
        "target_modules": ALL,
        "num_adapters": 1,
        "quantization": None,
        "device": "cpu",
        "checkpointing": False,
        "distils": False,
    }
    return Pass(**(values | changes))


def policy_of(folder: Path, one: Pass, quantization: Quantization | None = None) -> Policy:
    return load_policy(
        folder,
        name="tiny",
        device=CPU,
        dtype=DTYPES[one.element_bytes],
        seed=0,
        rank=one.rank,
        alpha=8,
        target_modules=tuple(one.target_modules),
        sequence_len=one.num_tokens,
        gradient_checkpointing=one.checkpointing,
        quantization=quantization,
        adapters=tuple(f"number_{number}" for number in range(one.num_adapters)) if one.num_adapters > 1 else (),
    )


def bytes_kept_between(policy: Policy, batch: MicroBatch) -> int:
    """Of all distinct tensors that a forward pass keeps for its backward pass, but for the model's own."""
    model = policy._model
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        policy.logprobs(packed_tokens(batch, CPU))
        return sum(storage.nbytes() for storage in kept.values())


def settings(**changes: Any) -> TrainSettings:
    return TrainSettings(model="tiny", **({"sequence_len": TOKENS, "lora_rank": RANK, "recipe": "fp32"} | changes))


def of_8b(**changes: Any) -> Estimate:
    return estimate(settings(**changes), ModelShape.of_config(CONFIGS["8B"]), device="cuda")


@pytest.mark.parametrize(("element_bytes", "num_adapters"), [(2, 1), (4, 1), (2, 3), (4, 3)])
@pytest.mark.parametrize(
    "target_modules", [ALL, ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("q_proj", "down_proj", "o_proj")]
)
def test_what_is_kept_for_the_backward_pass_is_what_the_trainer_keeps(
    folder: Path, shape: ModelShape, element_bytes: int, num_adapters: int, target_modules: tuple[str, ...]
) -> None:
    one = a_pass(shape, element_bytes=element_bytes, target_modules=target_modules, num_adapters=num_adapters)
    kept = bytes_kept_between(policy_of(folder, one), tiny_batch((TOKENS,)))
    # The slopes of the log-probabilities are counted with the LM head.
    slopes = (TOKENS - 1) * shape.hidden_size * element_bytes
    assert one.kept_bytes == pytest.approx(kept - slopes, rel=0.03)


def test_the_estimate_grows_with_the_layers_without_checkpointing_and_hardly_with_it(shape: ModelShape) -> None:
    double = replace(shape, num_layers=2 * shape.num_layers)
    plain, checkpointed = (
        (a_pass(one) for one in (shape, double)),
        (a_pass(one, checkpointing=True) for one in (shape, double)),
    )
    few, many = (one.kept_bytes for one in plain)
    rotary = 2 * TOKENS * shape.head_dim * 4
    assert many - rotary == 2 * (few - rotary)
    few, many = (one.kept_bytes for one in checkpointed)
    assert many - few == shape.num_layers * TOKENS * shape.hidden_size * 4


@pytest.mark.parametrize(("kind", "names"), [("adamw", ()), ("adamw_8bit", ()), ("muon", ()), ("adamw_8bit", "abc")])
def test_the_optimizers_state_is_what_it_holds_after_a_step(
    folder: Path, shape: ModelShape, kind: Any, names: Sequence[str]
) -> None:
    rank = 96  # matrices of 3,072 and 4,608 elements: below and above what has 8-bit state
    policy = policy_of(folder, a_pass(shape, rank=rank, num_adapters=max(1, len(names))))
    optimizer = Optimizer(
        policy.named_parameters,
        kind=kind,
        betas=(0.9, 0.999),
        epsilon=1e-8,
        weight_decay=0.0,
        muon_momentum=0.95,
        max_grad_norm=1.0,
    )
    for parameter in policy.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(learning_rate=1e-3)
    # A step's number and the map of 256 values are of no size.
    state = {key: t for key, t in optimizer.state_tensors().items() if not key.endswith(("step", "qmap1", "qmap2"))}
    need = estimate(settings(lora_rank=rank, optimizer=kind, lora_adapters=tuple(names)), shape, device="cpu")
    assert need.optimizer == sum(tensor.nbytes for tensor in state.values())
    assert need.adapter == sum(parameter.nbytes for parameter in policy.parameters)
    assert need.gradients == need.adapter


@pytest.mark.parametrize("quantization", [None, "nf4", "fp8", "nvfp4"])
def test_base_weights_are_what_the_loaded_model_holds(
    folder: Path, shape: ModelShape, quantization: Quantization | None
) -> None:
    policy = policy_of(folder, a_pass(shape, element_bytes=2), quantization)
    trained = {id(parameter) for parameter in policy.parameters}
    model = policy._model
    held = sum(p.nbytes for p in model.parameters() if id(p) not in trained)
    held += sum(buffer.nbytes for name, buffer in model.named_buffers() if "inv_freq" not in name)
    key = {"nf4": "qlora_bnb", "fp8": "qlora_fp8", "nvfp4": "qlora_fp4"}
    options = {key[quantization]: True} if quantization else {}
    assert estimate(settings(recipe="bf16", **options), shape, device="cpu", shared="none").base == held


def test_what_is_shared_is_not_the_trainers_own() -> None:
    shape = ModelShape.of_config(CONFIGS["8B"])
    needs = [estimate(settings(), shape, device="cuda", shared=shared) for shared in ("all", "linear", "none")]
    assert [need.base + need.shared for need in needs] == [4 * 8_190_735_360] * 3
    assert needs[0].base == needs[2].shared == 0
    # Embedding and head of 151,936 by 4,096; norms of the hidden state, 2 in each of 36 layers and the last, and of
    # queries and keys, 128 elements each.
    assert needs[1].base == 4 * (2 * 151_936 * 4096 + 73 * 4096 + 72 * 128)
    assert [need.total + need.shared for need in needs] == [needs[2].total] * 3


def test_the_total_is_all_parts() -> None:
    need = of_8b()
    parts = need.adapter + need.gradients + need.optimizer + need.kept + need.working + need.dequantized
    assert need.total == parts + need.average + need.base + need.fixed
    assert need.fixed == 2.5 * 2**30


def test_each_of_several_adapters_is_kept_and_trained() -> None:
    one, three = of_8b(), of_8b(lora_adapters=("a", "b", "c"))
    assert three.stays - one.stays == 2 * (one.adapter + one.optimizer)
    assert three.gradients == 3 * one.gradients
    # Of 36 layers each keeps for 96 tokens 8 values more of 4 bytes for each of 7 targets, and the three adapters' A
    # and B side by side, which one adapter has not; all together keep a byte for each token and adapter.
    assert three.kept - one.kept == 36 * 96 * 8 * 7 * 4 + three.adapter + 96 * 3


def test_what_a_step_needs_is_free_when_it_is_over() -> None:
    need = of_8b(loss={"alpha_sdpo": 0.5, "sdpo": {"teacher": "ema"}}, recipe="bf16", qlora_bnb=True)
    assert need.need.step == need.gradients + need.kept + need.working + need.dequantized
    assert need.need.stays == need.base + need.adapter + need.optimizer + need.average + need.fixed
    assert need.need.total == need.total


def test_losses_that_are_on_cost_what_they_hold() -> None:
    alone = of_8b()
    pairs = of_8b(loss={"beta_replay": 0.1})
    assert pairs.gradients == 2 * alone.gradients  # those of one loss wait for the other's
    hints = of_8b(loss={"adv_tau": 0.0, "alpha_sdpo": 1.0, "sdpo": {"teacher": "ema"}})
    assert (hints.gradients, hints.average) == (alone.gradients, alone.adapter)
    assert hints.working >= 8 * 4 * TOKENS * 151_936  # eight tensors of all these logits, which fit one chunk


def test_a_quantized_base_needs_one_weight_at_a_time() -> None:
    assert of_8b().dequantized == 0
    largest = 12_288 * 4096
    for key, besides in (("qlora_fp8", 0), ("qlora_bnb", largest // 16), ("qlora_fp4", 2 * largest + largest // 4)):
        assert of_8b(recipe="bf16", **{key: True}).dequantized == 2 * largest + besides


def test_a_gpu_keeps_attention_in_the_type_of_the_computation(shape: ModelShape) -> None:
    on_cpu, on_gpu = (a_pass(shape, element_bytes=2, device=device) for device in ("cpu", "cuda"))
    # Padded queries, keys, values and output (32 + 16 + 16 + 32 wide) have 4 bytes on a CPU, and 2 on a GPU, where
    # o_proj's input is the output itself.
    assert on_cpu.layer_bytes - on_gpu.layer_bytes == TOKENS * (2 * (32 + 16 + 16 + 32) + 2 * 32)


def test_training_all_weights_is_refused() -> None:
    whole = TrainSettings(model="tiny", lora=False, weight_broadcast={"format": "full"})
    with pytest.raises(EstimateError, match=r"lora is false.*set lora: true"):
        estimate(whole, ModelShape.of_config(CONFIGS["8B"]), device="cuda")
