"""The trainer's need of a device's memory, part by part, from its settings and the model's sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from configs.train import TrainSettings
from deploy.memory.activations import Pass
from deploy.memory.shapes import ModelShape

Device = Literal["cpu", "cuda"]
Shared = Literal["all", "linear", "none"]
"""What of the base the trainer borrows from the server: all of it, the weights of the layers' linear layers (and
embedding, head, norms and biases are its own), or nothing."""

GIB, MIB = 2**30, 2**20
FIXED_BYTES: Mapping[Device, int] = {"cpu": 471 * MIB, "cuda": 2560 * MIB}
"""Without any model. On a CPU what the process takes with its libraries imported (measured, docs/memory.md); on a GPU
CUDA's context, cuDNN's workspace and what the allocator cannot use (assumed: not yet run, needs a GPU)."""
_FLOAT32 = 4
ELEMENT_BYTES: Mapping[str, int] = {"bf16": 2, "fp32": 4}
"""Of the computation, by `recipe`."""
_8BIT_LEAST, _8BIT_BLOCK = 4096, 256
"""bitsandbytes keeps moments of fewer values in float32, and a scale for each block of the others."""


class EstimateError(ValueError):
    """Settings of a trainer that cannot share a device so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the trainer needs of a device, in bytes, estimated or measured."""

    stays: int
    """There from the first step to the last."""
    step: int
    """There only while a step is made: with `sleep_mode` somebody else's between the steps."""

    @property
    def total(self) -> int:
        """In a step."""
        return self.stays + self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes on the device by what they are for.

    Example: Qwen3-0.6B, bf16, 2,048 tokens: 10,092,544 parameters of an adapter of rank 16 are 40,370,176 bytes of
    `adapter`.
    """

    adapter: int
    """Float32 weights of all adapters: the master copy is the only one that is kept."""
    gradients: int
    """Float32, and once more where several losses are added up."""
    optimizer: int
    average: int
    """The moving average of the adapter, for `loss.sdpo.teacher: ema`."""
    kept: int
    """Activations that wait for the backward pass."""
    working: int
    """Tensors that are there for a while: logits, gradients of activations."""
    dequantized: int
    """One weight as it is made of a quantized base."""
    base: int
    """Weights of the base that are the trainer's own."""
    fixed: int
    """What a process with libraries takes."""
    shared: int
    """Weights of the base that the server holds for both: a second copy that is saved."""

    @property
    def step(self) -> int:
        """What a step needs at most above what is loaded before the first: what a dry step measures. All of it is free
        when the step is over: the optimizer's step clears the gradients too."""
        return self.gradients + self.kept + self.working + self.dequantized

    @property
    def loaded(self) -> int:
        """Weights that the trainer has for itself."""
        return self.base + self.adapter

    @property
    def stays(self) -> int:
        """What stays when a step is over."""
        return self.fixed + self.loaded + self.optimizer + self.average

    @property
    def total(self) -> int:
        """The trainer's need."""
        return self.stays + self.step

    @property
    def need(self) -> Need:
        """The same in two parts."""
        return Need(stays=self.stays, step=self.step)


def estimate(settings: TrainSettings, shape: ModelShape, *, device: Device, shared: Shared = "linear") -> Estimate:
    """The need of one rank (with several, at most that: optimizer's state and weights of the adapter are shared out).

    Layers are taken as not compiled, which can only need less. Raises `EstimateError` for `lora: false`.
    """
    if not settings.lora:
        raise EstimateError(
            "lora is false: all weights are trained, and none can be shared with a server; set lora: true, or train on "
            "a device of its own"
        )
    element_bytes, loss = ELEMENT_BYTES[settings.recipe], settings.loss
    num_adapters = max(1, len(settings.lora_adapters))
    sizes = shape.adapter(settings.lora_rank, settings.lora_target_modules) * num_adapters
    weights = _FLOAT32 * sum(sizes)
    one = Pass(
        shape=shape,
        num_tokens=settings.sequence_len,
        element_bytes=element_bytes,
        rank=settings.lora_rank,
        target_modules=settings.lora_target_modules,
        num_adapters=num_adapters,
        quantization=settings.quantization,
        device=device,
        checkpointing=settings.gradient_checkpointing,
        distils=loss.alpha_sdpo > 0,
    )
    num_losses = loss.trains_policy + (loss.alpha_sdpo > 0) + (loss.beta_replay > 0)
    base = shape.base_bytes(settings.quantization, element_bytes)
    borrowed = {"all": base, "linear": shape.linear_bytes(settings.quantization, element_bytes), "none": 0}[shared]
    return Estimate(
        adapter=weights,
        gradients=weights * min(num_losses, 2),
        optimizer=sum(_state_bytes(settings.optimizer, size) for size in sizes),
        average=weights if loss.alpha_sdpo > 0 and loss.sdpo.teacher == "ema" else 0,
        kept=one.kept_bytes,
        working=one.working_bytes,
        dequantized=one.dequantized_bytes,
        base=base - borrowed,
        fixed=FIXED_BYTES[device],
        shared=borrowed,
    )


def _state_bytes(optimizer: str, size: int) -> int:
    """What the optimizer remembers of a matrix of so many elements; paged state as if it were never moved out."""
    if optimizer == "muon":
        return _FLOAT32 * size
    if optimizer == "adamw" or size < _8BIT_LEAST:
        return 2 * _FLOAT32 * size
    return 2 * (size + _FLOAT32 * -(-size // _8BIT_BLOCK))
