"""Makes QeRL's noise on the norm weights of the policy that samples (arXiv:2510.11696), and computes with that noise.

RMSNorm with noise is `(w + z) * x / sqrt(mean(x²) + ε)`, z ~ N(0, σ²) for each channel (equation 10): every linear
layer that reads the normalised hidden state is multiplied row by row by 1 + z / w. σ is 0 in the first stage of the
run and falls geometrically over the others (equation 8).

Only servers sample with it. The trainer computes with it for one purpose: the canary's log-probabilities, by which a
server proves that it has applied the noise. The weights themselves are never touched.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from grpo.configs.train import NoiseSettings
from grpo.trainer.distributed import full_tensor
from grpo.trainer.errors import ModelError
from grpo.transport.weights.store import NOISE_FILE
from safetensors.torch import save

Norms = Mapping[str, torch.nn.Module]
"""RMSNorms by their names in the base's checkpoint, as `model.layers.0.input_layernorm`."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of each head's queries and keys. No linear layer reads them: noise there would be noise on attention's logits,
which the method does not have."""


def sigma_of(settings: NoiseSettings, version: int, *, max_steps: int) -> float:
    """Returns the standard deviation of the noise with which `version` samples; 0 if it has none.

    The versions 0 … max_steps - 1 are divided into `num_stages` stages of equal length; the batch of step n is sampled
    under version n - 1 where nothing lags. Stage 0 has no noise; stage k = 1 … K, K = num_stages - 1, has
    `sigma_start * (sigma_end / sigma_start) ** ((k - 1) / (K - 1))`. The last version, from which no batch is sampled,
    has none.
    """
    if not settings.enabled or version >= max_steps:
        return 0.0
    stage, num_noisy = version * settings.num_stages // max_steps, settings.num_stages - 1
    if stage == 0:
        return 0.0
    start, end = settings.sigma_start, settings.sigma_end
    return float(start * (end / start) ** ((stage - 1) / (num_noisy - 1)))


def noisy_weight(weight: torch.Tensor, *, sigma: float, seed: int, version: int, name: str) -> torch.Tensor:
    """Returns [H] float32: `weight` [H] float32 plus σ times a normal sample that `seed`, `version` and `name`
    determine."""
    digest = hashlib.sha256(f"{seed}/{version}/{name}".encode()).digest()
    sample = np.random.default_rng(int.from_bytes(digest[:8])).standard_normal(len(weight), np.float32)
    return weight + sigma * torch.from_numpy(sample)


def hidden_norms(model: Any) -> dict[str, torch.nn.Module]:
    """Returns the RMSNorms of the hidden state (before attention, before the MLP, and the last), without `HEAD_NORMS`.

    Raises `ModelError` if the model has none, or one with another formula than this module's.
    """
    hidden_size, norms = model.config.get_text_config().hidden_size, {}
    for name, module in model.named_modules():
        own_name = name.rpartition(".")[2]
        if not type(module).__name__.endswith("RMSNorm") or own_name in HEAD_NORMS:
            continue
        if tuple(module.weight.shape) != (hidden_size,):
            continue
        if not hasattr(module, "variance_epsilon"):
            raise ModelError(
                f"noise_scheduler: {name} is a {type(module).__name__}, expected a norm that multiplies by its weight, "
                "as those of Llama and Qwen; set noise_scheduler.enabled: false"
            )
        norms[name] = module
    if not norms:
        raise ModelError(
            f"noise_scheduler: this {model.config.model_type} has no RMSNorm of its hidden size {hidden_size}; "
            "set noise_scheduler.enabled: false"
        )
    return norms


class NormNoise:
    """The noise of every version of one run, none unless `noise_scheduler` is enabled."""

    def __init__(self, norms: Norms, settings: NoiseSettings, *, seed: int, max_steps: int) -> None:
        """Gathers the `norms`' weights. Collective; afterwards each rank can compute every version's noise."""
        self._settings, self._seed, self._max_steps = settings, seed, max_steps
        self._clean = {
            f"{name}.weight": full_tensor(norm.weight).to("cpu", torch.float32, copy=True)  # type: ignore[arg-type]
            for name, norm in norms.items()
        }

    def is_noisy(self, version: int) -> bool:
        """Returns whether servers sample this version with noise."""
        return sigma_of(self._settings, version, max_steps=self._max_steps) != 0.0

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Returns the noisy norm weights by the checkpoint's names, [H] float32 in main memory; empty for a version
        without noise."""
        sigma = sigma_of(self._settings, version, max_steps=self._max_steps)
        if sigma == 0.0:
            return {}
        return {
            name: noisy_weight(weight, sigma=sigma, seed=self._seed, version=version, name=name)
            for name, weight in self._clean.items()
        }

    def metrics(self, version: int) -> dict[str, float]:
        """Returns `policy/noise_sigma`, if noise is enabled."""
        sigma = sigma_of(self._settings, version, max_steps=self._max_steps)
        return {"policy/noise_sigma": sigma} if self._settings.enabled else {}


def noise_files(weights: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Returns the file that tells servers the noise; none for a version without noise."""
    return {NOISE_FILE: save(dict(weights), metadata={"format": "pt"})} if weights else {}


@contextmanager
def with_noise(norms: Norms, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Makes the model compute with these norm weights within the block; its own stay as they are.

    The output of each norm is replaced, so that it does not matter how the weights are held (sharded, or in a
    narrower type). Nothing compiled is used meanwhile: it would not see the replacement.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, norm in norms.items():
            handle = norm.register_forward_hook(_replacing(weights[f"{name}.weight"]))
            stack.callback(handle.remove)
        yield


def _replacing(weight: torch.Tensor) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    def replaced(norm: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return rms_norm(inputs[0], weight.to(output.device), norm.variance_epsilon)

    return replaced


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns [..., H] in the type of x, for a float32 weight [H]: normalised and multiplied in float32 and rounded
    once.

    In 16 bits a weight of 1 + 0.001 is 1, and so is a rounded number times 1.001 that number: rounded on the way, as
    the clean norms do, noise of the later stages would come to nothing.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)
