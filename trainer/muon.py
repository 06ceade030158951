"""Muon: momentum whose matrices are orthogonalized before they are applied.

Keller Jordan, https://kellerjordan.github.io/posts/muon/; its size is matched to AdamW's as in arXiv:2502.16982.
"""

import math
from collections.abc import Mapping

import torch

from trainer.checkpoints.snapshots import copies
from trainer.parallel import ONE, Ranks
from trainer.sharded import sharded_like, whole_of

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPSILON = 1e-7
_VOCABULARY = ("embed", "wte", "lm_head")


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter maps vectors to vectors. Embedding and head are tables with a row for each token, of which a
    step touches few: Muon is not for them."""
    return parameter.ndim == 2 and not any(word in name for word in _VOCABULARY)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """[M, N] with the singular vectors of `matrix` and singular values near 1 (from 0.6 to 1.3, but for those that are
    small beside the largest).

    Five Newton–Schulz iterations X ← aX + b(XXᵀ)X + c(XXᵀ)²X on `matrix` / (its Frobenius norm + 1e-7), in bfloat16
    on a GPU and in float32 on a CPU. The coefficients make small singular values grow fastest, at the price that none
    comes to 1 exactly.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    scaled = matrix.float() / (matrix.float().norm() + _EPSILON)
    x = (scaled.T if tall else scaled).to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: torch.Tensor = x.T if tall else x
    return result.to(matrix.dtype)


def update_scale(num_rows: int, num_columns: int) -> float:
    """0.2 · sqrt(max(rows, columns)): the entries of an orthogonal matrix have the root mean square 1 / sqrt(max(rows,
    columns)), and AdamW's updates one of about 0.2 (arXiv:2502.16982, section 2.2). So one learning rate and one weight
    decay serve both."""
    return 0.2 * math.sqrt(max(num_rows, num_columns))


class Muon:
    """Shrinks matrices by 1 - lr · weight_decay and subtracts lr · update_scale · orthogonalized(g + μ(B - g)), where
    B ← μB + (1 - μ)g: Nesterov's momentum.

    Of a sharded matrix the update is gathered, and every rank orthogonalizes it for itself.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        momentum: float,
        weight_decay: float,
        ranks: Ranks = ONE,
    ) -> None:
        self._parameters, self._ranks = dict(parameters), ranks
        self._momentum, self._weight_decay = momentum, weight_decay
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Applies the gradients that there are. Collective."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if name not in self._buffers:
                self._buffers[name] = torch.zeros_like(parameter)
            buffer = self._buffers[name].lerp_(parameter.grad, 1 - self._momentum)
            update = parameter.grad.lerp(buffer, self._momentum)
            update = sharded_like(orthogonalized(whole_of(update)), parameter)
            parameter.mul_(1 - learning_rate * self._weight_decay)
            parameter.add_(update, alpha=-learning_rate * update_scale(*parameter.shape))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """A copy of B by `name/momentum`; on other ranks than the main one nothing. Collective."""
        return copies({f"{name}/momentum": buffer for name, buffer in self._buffers.items()}, self._ranks)

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes up what `state_tensors` gave."""
        for key, tensor in tensors.items():
            name = key.removesuffix("/momentum")
            self._buffers[name] = sharded_like(tensor, self._parameters[name]).clone()
