"""One optimizer step: a check that it is finite, clipping, torch's or bitsandbytes' optimizers, their state, and the
schedule of the learning rate."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.distributed import ONE, Ranks, full_tensor, host_copies, local_tensor, shard_like
from grpo.trainer.errors import ModelError, NonFiniteError
from grpo.trainer.witness import whole_gradient
from safetensors.torch import load, save

Named = Mapping[str, torch.nn.Parameter]
_VOCABULARY = ("embed", "wte", "lm_head")
_WITNESS = "witness"
_EIGHT_BIT = "adamw_8bit"
_EIGHT_BIT_STATE = ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2")


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Returns whether a parameter maps vectors to vectors, as Muon needs. Embedding and head are tables with a row for
    each token, of which a step touches few."""
    return parameter.ndim == 2 and not any(word in name for word in _VOCABULARY)


class Optimizer:
    """Steps parameters, which may be sharded over the ranks. All ranks must then call its methods alike.

    `adamw` is torch's in one fused kernel with float32 state; `adamw_8bit` and `adamw_8bit_paged` bitsandbytes' with
    codes of 8 bits and a scale for each 256 values (arXiv:2110.02861), of which the paged one (not yet run on a GPU)
    moves them out where the GPU runs full; `muon` torch's, whose updates have the size of AdamW's (arXiv:2502.16982),
    with `adamw` for what is no matrix.
    """

    def __init__(
        self,
        settings: TrainSettings,
        parameters: Named,
        ranks: Ranks = ONE,
        *,
        witness: torch.nn.Parameter | None = None,
    ) -> None:
        """Takes `parameters` by names that are the same in each start of a run, and the `witness` of their gradients
        (docs/proofs.md), whose own comes and goes with theirs and is never applied. Raises `ModelError` for a kind that
        the parameters' device does not support."""
        self._parameters, self._ranks, self._max_grad_norm = dict(parameters), ranks, settings.max_grad_norm
        if witness is not None:
            self._parameters[_WITNESS] = witness
        self.witnessed: torch.Tensor | None = None
        """[2, 64] f64 the witness's gradient in the newest step, of all ranks."""
        self._optimizers: dict[str, tuple[Any, dict[str, torch.nn.Parameter]]] = {}
        """Each kind's optimizer, and the parameters that it steps by name."""
        self.without_gradient: frozenset[str] = frozenset()
        """Parameters whose gradient in the newest step was exactly zero, while that of one of the same kind was not:
        the same matrix of an adapter at another layer or module, or the same tensor of another layer."""
        kind, decay, betas = settings.optimizer, settings.weight_decay, (settings.adam_beta1, settings.adam_beta2)
        adam: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": settings.adam_epsilon, "weight_decay": decay}
        if kind in ("adamw_8bit", "adamw_8bit_paged"):
            # Its kernels take plain tensors: views on the shards' memory. A rank may have nothing of a small parameter.
            shards = {name: local_tensor(p) for name, p in parameters.items()}
            held = {name: torch.nn.Parameter(shard) for name, shard in shards.items() if shard.numel()}
            self._optimizers[_EIGHT_BIT] = _eight_bit(held, paged=kind == "adamw_8bit_paged", **adam), held
            return
        matrices = {name: p for name, p in parameters.items() if kind == "muon" and is_matrix(name, p)}
        if matrices:
            options: Any = {"lr": 0.0, "momentum": settings.muon_momentum, "weight_decay": decay}
            muon = torch.optim.Muon(list(matrices.values()), adjust_lr_fn="match_rms_adamw", **options)
            self._optimizers["muon"] = muon, matrices
        if rest := {name: p for name, p in parameters.items() if name not in matrices}:
            self._optimizers["adamw"] = torch.optim.AdamW(list(rest.values()), fused=True, **adam), rest

    def step(self, *, learning_rate: float) -> float:
        """Clips and applies the gradients, and clears them. Returns their norm before clipping. Collective.

        Raises `NonFiniteError` on all ranks, before anything is changed, if the norm is not finite.
        """
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        witness = gradients.pop(_WITNESS, None)
        self.witnessed = None if witness is None else whole_gradient(witness)
        parameters = [self._parameters[name] for name in gradients]
        norms = full_tensor(torch.stack(torch._foreach_norm(list(gradients.values())))) if gradients else torch.zeros(1)
        norm = torch.linalg.vector_norm(norms)
        each: list[float] = norms.tolist()
        value = float(norm)
        if not math.isfinite(value):
            wrong = [name for name, one in zip(gradients, each, strict=False) if not math.isfinite(one)]
            named = f", of {', '.join(wrong[:3])}" if 0 < len(wrong) < len(each) else ""
            more = f" and {len(wrong) - 3} more" if named and len(wrong) > 3 else ""
            raise NonFiniteError(f"the gradient's norm is {value}{named}{more}")
        self.without_gradient = _without(dict(zip(gradients, each, strict=False)), self._parameters)
        if self._max_grad_norm < math.inf:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        for optimizer, held in self._optimizers.values():
            for name, parameter in held.items():
                gradient = self._parameters[name].grad
                if parameter is not self._parameters[name]:
                    parameter.grad = None if gradient is None else local_tensor(gradient)
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        self.clear()
        return value

    def clear(self) -> None:
        """Clears the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def configure(self, *, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float) -> None:
        """Sets AdamW's figures for the steps that follow; its state stays."""
        self._max_grad_norm = max_grad_norm
        for optimizer, _ in self._optimizers.values():
            optimizer.param_groups[0].update(betas=betas, eps=eps, weight_decay=weight_decay)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns copies in main memory of the state, named `adamw/NAME/exp_avg` and so on; empty on ranks other than
        the main one. Collective. 8-bit state is named `adamw_8bit/rank_0/NAME/…`, because each rank's shard has codes
        of its own."""
        tensors: dict[str, torch.Tensor] = {}
        for kind, (optimizer, held) in self._optimizers.items():
            state = {
                f"{name}/{key}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
                for name, parameter in held.items()
                for key, value in optimizer.state.get(parameter, {}).items()
                if kind != _EIGHT_BIT or key in (*_EIGHT_BIT_STATE, "step")
            }
            if kind == _EIGHT_BIT:
                local = save({key: value.to("cpu", copy=True) for key, value in state.items()})
                parts = [load(data) for data in self._ranks.gather(local)]
                copies = {f"rank_{rank}/{key}": value for rank, part in enumerate(parts) for key, value in part.items()}
            else:
                copies = host_copies(state, self._ranks)
            tensors |= {f"{kind}/{key}": value for key, value in copies.items()}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores what `state_tensors` returned on the main rank of an optimizer of the same kind and parameters, and,
        for 8-bit state, the same number of ranks."""
        for kind, (optimizer, held) in self._optimizers.items():
            prefix = f"{kind}/rank_{self._ranks.rank}/" if kind == _EIGHT_BIT else f"{kind}/"
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            for position, (name, parameter) in enumerate(held.items()):
                state = {
                    key.removeprefix(f"{name}/"): value for key, value in own.items() if key.startswith(f"{name}/")
                }
                if kind == _EIGHT_BIT and state:
                    _load_eight_bit(optimizer, parameter, position, state)
                elif state:
                    optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in state.items()}

    def num_steps(self, tensors: Mapping[str, torch.Tensor] | None = None) -> int:
        """Returns how many steps the state counts, summed over parameters; with `tensors`, what `state_tensors` has
        returned counts for this rank."""
        if tensors is None:
            states = [state for optimizer, _ in self._optimizers.values() for state in optimizer.state.values()]
            return sum(int(state.get("step", 0)) for state in states)
        others = f"{_EIGHT_BIT}/", f"{_EIGHT_BIT}/rank_{self._ranks.rank}/"
        own = {key: n for key, n in tensors.items() if not key.startswith(others[0]) or key.startswith(others[1])}
        return sum(int(number) for key, number in own.items() if key.endswith("/step"))


def _without(norms: Mapping[str, float], parameters: Named) -> frozenset[str]:
    """Returns the names of norm 0 that have one of their kind with another norm; and all A of an adapter whose B have
    one, or the other way round, unless what would lead the gradient there is zero itself."""
    if 0.0 not in norms.values():
        return frozenset()
    alive = {_kind(name) for name, norm in norms.items() if norm}
    return frozenset(
        name
        for name, norm in norms.items()
        if not norm
        and (_kind(name) in alive or (_kind(other := _partner(name)) in alive and _is_set(parameters.get(other))))
    )


def _partner(name: str) -> str:
    """Returns the name of the B that belongs to an A, and of the A that belongs to a B; any other name as it is."""
    one, other = ("lora_A", "lora_B") if "lora_A" in name else ("lora_B", "lora_A")
    return name.replace(one, other)


def _is_set(parameter: torch.nn.Parameter | None) -> bool:
    return parameter is not None and bool(local_tensor(parameter).any())


def _kind(name: str) -> str:
    """Returns what a parameter has in common with its siblings. Examples: `lora_B.default` of
    `layers.3.mlp.up_proj.lora_B.default.weight`, `layers.norm.weight` of `layers.3.norm.weight`."""
    parts = name.split(".")
    if "lora_" in name:
        return ".".join(parts[-3:-1])
    return ".".join(part for part in parts if not part.isdecimal())


def _placed(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a state tensor on this rank: the number of steps as it is, moments sharded like the parameter."""
    return (shard_like(value, parameter) if value.ndim else value.to(parameter.device)).clone()


def _eight_bit(parameters: Named, *, paged: bool, **options: Any) -> Any:
    if paged and any(p.device.type == "cpu" for p in parameters.values()):
        raise ModelError(
            "optimizer: adamw_8bit_paged pages its state out of a GPU's memory, and the trainer runs on a CPU; "
            "use adamw_8bit"
        )
    from bitsandbytes.optim.adamw import AdamW8bit, PagedAdamW8bit

    return (PagedAdamW8bit if paged else AdamW8bit)(list(parameters.values()), **options)


def _load_eight_bit(optimizer: Any, parameter: torch.Tensor, position: int, saved: Mapping[str, torch.Tensor]) -> None:
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, position)  # in paged memory where due
    state = optimizer.state[parameter]
    state["step"] = int(saved["step"])
    for key in (key for key in _EIGHT_BIT_STATE if key in state):
        if key.startswith("qmap"):  # shared by all parameters
            state[key] = saved[key].to(parameter.device)
        else:
            state[key].copy_(saved[key])


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Returns the learning rate of `step` (1…).

    Rises as step / warmup_steps to the peak at step = warmup_steps. What falls after that, falls over the last
    `steps` of `max_steps`, with progress = (step - 1 - (max_steps - steps)) / steps: from the peak, in the first of
    them, to 0 just after `max_steps`, so that no step is without effect. Linear and cosine fall over all steps after
    the warm-up; wsd (warm-up, stable, decay; arXiv:2404.06395) stays at the peak and falls linearly over the last
    `decay_steps`, by default a tenth of `max_steps` and at least one.
    """
    peak, warmup_steps, max_steps = settings.learning_rate, settings.warmup_steps, settings.max_steps
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if settings.lr_scheduler_type == "constant":
        return peak
    steps = max_steps - warmup_steps
    if settings.lr_scheduler_type == "wsd":
        steps = min(steps, settings.decay_steps or max(1, max_steps // 10))
    progress = min(1.0, max(0.0, (step - 1 - (max_steps - steps)) / steps))
    factor = (1 + math.cos(math.pi * progress)) / 2 if settings.lr_scheduler_type == "cosine" else 1 - progress
    return peak * factor


def signal_factor(signal: float, little: float) -> float:
    """Returns what the learning rate of a batch is multiplied by of which the share `signal` has anything to teach:
    min(1, sqrt(signal / little)).

    Adam moves the weights as far for a gradient of few samples as for one of many, with more noise in the step. By the
    square root rule (Malladi et al. 2022, arXiv:2205.10287) its rate goes with the root of the number of samples, of
    which those that teach nothing are none.
    """
    return min(1.0, math.sqrt(signal / little)) if little else 1.0
