"""One optimizer step: a check that it is finite, clipping, the rule that was chosen, its state for checkpoints."""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch

from configs.train import TrainSettings
from trainer.checkpoints.snapshots import copies
from trainer.eight_bit import AdamW8bit
from trainer.errors import NonFiniteError
from trainer.muon import Muon, is_matrix
from trainer.parallel import ONE, Ranks
from trainer.sharded import sharded_like

Kind = Literal["adamw", "adamw_8bit", "adamw_8bit_paged", "muon"]
Named = Mapping[str, torch.nn.Parameter]


class Rule(Protocol):
    """How parameters follow from gradients that are finite and clipped."""

    def step(self, learning_rate: float) -> None:
        """Applies the gradients that there are. Collective."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """A copy of what it remembers, in main memory, by names that hold the parameters'; on other ranks than the main
        one nothing. Collective."""

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes up what `state_tensors` gave on the main rank."""


class AdamW:
    """torch's AdamW with float32 state, as one kernel that passes over memory once."""

    def __init__(
        self,
        parameters: Named,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        ranks: Ranks = ONE,
    ) -> None:
        self._parameters, self._ranks = dict(parameters), ranks
        # The learning rate is given with each step.
        self._adamw = torch.optim.AdamW(
            list(parameters.values()), lr=0.0, betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True
        )

    def step(self, learning_rate: float) -> None:
        """Applies the gradients that there are."""
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Both moments and the number of steps, by `name/exp_avg` and so on."""
        states = {name: self._adamw.state.get(p, {}) for name, p in self._parameters.items()}
        live = {f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.items()}
        return copies(live, self._ranks)

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes up what `state_tensors` gave."""
        for key, tensor in tensors.items():
            name, _, part = key.rpartition("/")
            parameter = self._parameters[name]
            # The number of steps is one number, the moments are as the parameter.
            value = sharded_like(tensor, parameter) if tensor.ndim else tensor.to(parameter.device)
            self._adamw.state[parameter][part] = value.clone()


def optimizer_of(settings: TrainSettings, parameters: Named, ranks: Ranks) -> "Optimizer":
    """The optimizer that the settings name. Raises `ModelError`."""
    return Optimizer(
        parameters,
        kind=settings.optimizer,
        betas=(settings.adam_beta1, settings.adam_beta2),
        epsilon=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        muon_momentum=settings.muon_momentum,
        max_grad_norm=settings.max_grad_norm,
        ranks=ranks,
    )


class Optimizer:
    """Steps parameters, which may be sharded over the ranks; then all ranks must call its methods alike."""

    def __init__(
        self,
        parameters: Named,
        *,
        kind: Kind,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        muon_momentum: float,
        max_grad_norm: float,
        ranks: Ranks = ONE,
    ) -> None:
        """`parameters` by names that stay the same from start to start. Raises `ModelError` for a kind that the
        parameters' device cannot have."""
        self._parameters, self._ranks, self._max_grad_norm = list(parameters.values()), ranks, max_grad_norm
        self._rules: dict[str, Rule] = {}
        matrices = {name: p for name, p in parameters.items() if kind == "muon" and is_matrix(name, p)}
        if matrices:
            self._rules["muon"] = Muon(matrices, momentum=muon_momentum, weight_decay=weight_decay, ranks=ranks)
        rest = {name: p for name, p in parameters.items() if name not in matrices}
        if kind in ("adamw_8bit", "adamw_8bit_paged"):
            paged = kind == "adamw_8bit_paged"
            self._rules["adamw_8bit"] = AdamW8bit(
                rest, betas=betas, epsilon=epsilon, weight_decay=weight_decay, paged=paged, ranks=ranks
            )
        elif rest:
            self._rules["adamw"] = AdamW(rest, betas=betas, epsilon=epsilon, weight_decay=weight_decay, ranks=ranks)

    def step(self, *, learning_rate: float) -> float:
        """Clips and applies the gradients, and clears them. Returns their norm before clipping. Collective.

        Raises `NonFiniteError` where the norm is not finite, on all ranks; then nothing has changed.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        norm = self._ranks.whole(norm)
        if not bool(torch.isfinite(norm)):
            raise NonFiniteError(f"the gradient's norm is {float(norm)}")
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        for rule in self._rules.values():
            rule.step(learning_rate)
        for parameter in self._parameters:
            parameter.grad = None
        return float(norm)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """A copy of what continues it bit for bit, in main memory; on other ranks than the main one nothing.
        Collective."""
        states = {kind: rule.state_tensors() for kind, rule in self._rules.items()}
        return {f"{kind}/{key}": tensor for kind, state in states.items() for key, tensor in state.items()}

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes up what `state_tensors` gave on the main rank of an optimizer of the same kind and parameters."""
        for kind, rule in self._rules.items():
            of_rule = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{kind}/")}
            rule.load_state_tensors({key.removeprefix(f"{kind}/"): tensor for key, tensor in of_rule.items()})
