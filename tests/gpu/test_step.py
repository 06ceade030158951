"""Steps of the trainer on a GPU against the same steps in float32 on the CPU.

Not yet run: needs a GPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.configs.train import LowPrecision
from grpo.trainer.distributed import ONE
from grpo.trainer.errors import ModelError
from grpo.trainer.low_precision import check_device
from grpo.trainer.memory import missing_for_compile
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective
from grpo.trainer.optim import Optimizer
from grpo.trainer.packing import packed_tokens
from grpo.trainer.quantization import QUANTIZE
from grpo.transport.records import MicroBatch, Quantization
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer.models import CPU, VOCAB, save_tiny_model, tiny_batch, tiny_policy, tiny_settings

pytestmark = pytest.mark.gpu

BATCHES = tuple(tiny_batch(lengths) for lengths in ((7, 2, 1, 40, 9), (5, 30, 31), (50,)))
UNMASKED = LossSettings(token_mask_low=0.0, token_mask_high=1e30, geo_mask_low=0.0, geo_mask_high=1e30)
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def policy_on(device: torch.device, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Policy:
    """The same random policy on any device, whose adapter is not zero; compiled only where asked, which takes time."""
    options = {"compile": False} | options
    recipe = options.pop("recipe", "fp32" if dtype == torch.float32 else "bf16")
    policy = tiny_policy(folder, device=device, moved=False, recipe=recipe, **options)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_((torch.randn(parameter.shape, generator=random) * 0.1).to(device))
    return policy


def logprobs_and_gradients(policy: Policy, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """On the CPU: log-probabilities, and all gradients of their weighted sum in one vector."""
    logprobs = policy.logprobs(packed_tokens(batch, policy.device))
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)).to(policy.device)
    gradients = torch.autograd.grad((logprobs * weights).sum(), policy.parameters)
    return logprobs.detach().cpu(), torch.cat([gradient.flatten() for gradient in gradients]).cpu()


def assert_near(ours: Policy, theirs: Policy, *, nats: float, cosine: float) -> None:
    """Mean difference of log-probabilities at most `nats`, cosine of the gradients at least `cosine`."""
    for batch in BATCHES:
        (logprobs, gradients), (expected, exact) = (logprobs_and_gradients(p, batch) for p in (ours, theirs))
        assert (logprobs - expected).abs().mean() <= nats
        assert torch.nn.functional.cosine_similarity(gradients, exact, dim=0) >= cosine


def test_float32_computes_what_the_cpu_does(gpu: torch.device, model: Path) -> None:
    assert_near(policy_on(gpu, model), policy_on(CPU, model), nats=1e-4, cosine=0.9999)


def test_bfloat16_stays_near_float32(gpu: torch.device, model: Path) -> None:
    # On a CPU the mean difference of these is 0.013 nats and the cosine 0.9997.
    ours = policy_on(gpu, model, dtype=torch.bfloat16, compile=missing_for_compile(gpu) is None)
    assert ours.dtype_name == "bfloat16"
    assert {parameter.dtype for parameter in ours.parameters} == {torch.float32}
    assert_near(ours, policy_on(CPU, model), nats=0.04, cosine=0.998)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", QUANTIZE)
def test_a_quantized_base_computes_what_it_does_on_the_cpu(
    gpu: torch.device, model: Path, format: Quantization, dtype: torch.dtype
) -> None:
    ours, theirs = policy_on(gpu, model, dtype=dtype, quantization=format), policy_on(CPU, model, quantization=format)
    exact = dtype == torch.float32
    assert_near(ours, theirs, nats=1e-3 if exact else 0.04, cosine=0.999 if exact else 0.998)


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "nvfp4"])
def test_products_in_few_bits_stay_near_those_in_16(gpu: torch.device, model: Path, recipe: LowPrecision) -> None:
    try:
        check_device(recipe, gpu)
    except ModelError as refused:
        pytest.skip(str(refused))
    # On a CPU the mean differences of these are 0.12 and 0.42 nats and the cosines 0.97 and 0.75.
    nats, cosine = {"fp8_hybrid": (0.2, 0.95), "nvfp4": (0.8, 0.6)}[recipe]
    ours, theirs = (policy_on(gpu, model, dtype=torch.bfloat16, recipe=one) for one in (recipe, "bf16"))
    assert_near(ours, theirs, nats=nats, cosine=cosine)


def test_checkpointed_layers_give_the_same(gpu: torch.device, model: Path) -> None:
    assert_near(policy_on(gpu, model, checkpointing="full"), policy_on(gpu, model), nats=1e-5, cosine=0.99999)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, of its own code
def test_compiled_layers_give_the_same(gpu: torch.device, model: Path) -> None:
    if missing := missing_for_compile(gpu):
        pytest.skip(missing)
    assert_near(policy_on(gpu, model, compile=True), policy_on(gpu, model), nats=1e-4, cosine=0.9999)


def peak_bytes(policy: Policy, batch: MicroBatch) -> int:
    """Above what the policy holds, in one forward and backward pass after another one."""
    logprobs_and_gradients(policy, batch)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs_and_gradients(policy, batch)
    return torch.cuda.max_memory_allocated() - before


def save_wide_model(folder: Path) -> Path:
    """8 layers whose matrices take 208 MiB in bfloat16: 8 · (4 · 1024² + 3 · 1024 · 3072) weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_checkpointed_layers_take_less_memory(gpu: torch.device, tmp_path: Path) -> None:
    folder, batch = save_wide_model(tmp_path), tiny_batch((250,) * 16)
    options = {"dtype": torch.bfloat16, "sequence_len": 4000}
    plain, checkpointed = (
        peak_bytes(policy_on(gpu, folder, checkpointing="full" if on else "none", **options), batch)
        for on in (False, True)
    )
    assert checkpointed < plain / 2


@pytest.mark.parametrize("format", QUANTIZE)
def test_a_quantized_base_is_never_held_twice(gpu: torch.device, tmp_path: Path, format: Quantization) -> None:
    folder, batch = save_wide_model(tmp_path), tiny_batch((20,))
    held = {}
    for name in (None, format):
        before = torch.cuda.memory_allocated()
        policy = policy_on(gpu, folder, dtype=torch.bfloat16, quantization=name)
        held[name] = torch.cuda.memory_allocated() - before, peak_bytes(policy, batch)
        del policy
    (plain, plain_peak), (quantized, quantized_peak) = held[None], held[format]
    # at most 9 of 16 bits a weight are held, and in a pass no more than one matrix of 6 MiB is dequantized at a time,
    # with what it is made of in float32
    assert plain - quantized > 0.4 * 208 * MIB
    assert quantized_peak - plain_peak < 40 * MIB


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "adamw_8bit_paged", "muon"])
def test_an_optimizer_steps_as_on_the_cpu(gpu: torch.device, model: Path, kind: str) -> None:
    # paging exists on GPUs only; its numbers are those of adamw_8bit
    cpu_kind: str = "adamw_8bit" if kind == "adamw_8bit_paged" else kind
    moved = []
    for device, rule in ((gpu, kind), (CPU, cpu_kind)):
        policy = policy_on(device, model)
        objective = Objective(policy, UNMASKED, ONE, pack_tokens=128)
        optimizer = Optimizer(tiny_settings(model, optimizer=rule), policy.named_parameters)
        start = torch.cat([parameter.detach().flatten().cpu() for parameter in policy.parameters])
        for _ in range(3):
            objective.accumulate([BATCHES[0]], step=1)
            optimizer.step(learning_rate=1e-3)
        end = torch.cat([parameter.detach().flatten().cpu() for parameter in policy.parameters])
        moved.append(end - start)
    ours, expected = moved
    assert expected.norm() > 0
    # the signs of tiny gradients may differ, and muon iterates in bfloat16 on a GPU
    assert torch.nn.functional.cosine_similarity(ours, expected, dim=0) > 0.95
