"""Trains adapters of several tenants on one frozen base, each with gradients, an optimizer and checkpoints of its own.

All is done by the trainer's own packing, model, losses and optimizer. A forward_backward is a generator that asks for
one pass after the other. Passes that several ask for are computed as one, in which each has a segment and numbers that
do not depend on the others' to the bit.
"""

import itertools
import json
import logging
import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from grpo.configs.train import TrainSettings
from grpo.service.errors import Refused
from grpo.service.losses import check_config, loss_and_values
from grpo.service.steps import Computed, Expected, Step, computed, witness_sums
from grpo.service.wire import Datum, ForwardBackward, forward_backward_answer
from grpo.trainer.attention import VECTORS, whole_vectors
from grpo.trainer.errors import NonFiniteError
from grpo.trainer.model import Policy, load_policy
from grpo.trainer.optim import Optimizer
from grpo.trainer.packing import PackedTokens, first_fit, joined, pack, to_device
from grpo.trainer.publishing import CanaryMaker, canary_ids
from grpo.trainer.weights import AdapterWeights
from grpo.trainer.witness import GradientWitness
from grpo.transport.folders import write_folder
from grpo.transport.records import Canary, Float32
from grpo.transport.weights.store import ADAPTER_FILE, CANARY_FILE
from safetensors.torch import load, load_file, save

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
ALPHA = 32
"""LoRA alpha of every adapter, as recipes for the protocol expect."""
WITNESS = "witness"
_SHARED = 1 << 15
"""Elements from which on its threads share a tensor."""
CANARY_SEED = 0
_DEFAULT_ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """What a model is created with. Example: ``AdapterShape(rank=32, seed=0, attn=True, mlp=True)``"""

    rank: int
    seed: int
    attn: bool
    mlp: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> "AdapterShape":
        """Returns the shape of a request's `lora_config`. Raises `Refused`."""
        rank, seed = config.get("rank"), config.get("seed")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise Refused(f"lora_config.rank is {rank!r:.40}, expected a whole number from 1 on")
        if seed is not None and (not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
            raise Refused(f"lora_config.seed is {seed!r:.40}, expected a whole number of 64 bits")
        attn, mlp = bool(config.get("train_attn", True)), bool(config.get("train_mlp", True))
        if not (attn or mlp):
            raise Refused("lora_config has train_attn and train_mlp off, and the unembedding gets no adapter here")
        return AdapterShape(rank=rank, seed=0 if seed is None else seed, attn=attn, mlp=mlp)


class OtherRanks(Protocol):
    """The other ranks, as rank 0 has them."""

    def compute(self, passes: "Sequence[Pass]") -> list["Results"]:
        """Does what `Base.compute` does, with all ranks. Raises `RankGone`."""

    def forget(self, model: int) -> None:
        """Has the copies of a model freed."""

    def keep(self) -> None:
        """Tells the others now and then that rank 0 is there. Raises `RankGone`."""

    def end(self) -> None:
        """Ends the others."""


class Base:
    """The frozen base model, which all adapters share."""

    def __init__(
        self, settings: TrainSettings, folder: Path, device: torch.device, *, max_rank: int, num_ranks: int = 1
    ) -> None:
        """Loads the base model in `folder`, for adapters of at most this rank. Raises `ModelError`."""
        self.settings, self._max_rank, self.num_ranks = settings, max_rank, num_ranks
        self.others: OtherRanks | None = None
        """The other ranks, where this is rank 0 of several."""
        self._resting = load_policy(settings, folder, device)
        assert isinstance(self._resting.weights, AdapterWeights)
        self._weights: AdapterWeights = self._resting.weights
        self._numbers = itertools.count()
        self._in_use: AdapterWeights | None = self._weights
        ids = canary_ids(self._resting.causal_lm.config, seed=CANARY_SEED)
        self.canaries = CanaryMaker(self._resting, ids)
        self._joins = self._resting.can_join and self._has_whole_vectors()
        if not self._joins:
            log.warning("models are computed one after the other: not every size of %s is whole vectors", folder)
        self.vocab_size = self._resting.vocab_size
        self.max_tokens = settings.sequence_len - 1
        """Tokens of a datum at most: the last target comes besides."""

    @property
    def resting(self) -> Policy:
        """The policy with an adapter that nobody trains, which is the base itself."""
        return self._resting

    def targets(self, shape: AdapterShape) -> tuple[str, ...]:
        """Returns the names of the linear layers that get an adapter of this shape."""
        kinds: dict[str, set[bool]] = {}
        for name in self._weights.named_parameters():
            path = name.split(".")
            kinds.setdefault(path[-3], set()).add(any("attn" in part or "attention" in part for part in path))
        wanted = {True: shape.attn, False: shape.mlp}
        return tuple(sorted(name for name, of in kinds.items() if any(wanted[kind] for kind in of)))

    def add(self, shape: AdapterShape) -> tuple[int, Policy]:
        """Returns a policy with a new adapter, and its number. Raises `Refused` for a rank that is too high."""
        if shape.rank > self._max_rank:
            raise Refused(f"lora_config.rank is {shape.rank}, expected at most {self._max_rank} (--max_rank)")
        number, targets = next(self._numbers), self.targets(shape)
        options: Any = {"rank": shape.rank, "alpha": ALPHA, "targets": targets, "seed": shape.seed}
        return number, self._resting.beside(self._weights.beside(f"tenant_{number}", **options))

    def compute(self, passes: "Sequence[Pass]") -> list["Results"]:
        """Computes passes, all with gradients or all without, as one. Gradients are added to those that the parameters
        have."""
        return self.compute_parts(passes, 0) if self.others is None else self.others.compute(passes)

    def compute_parts(self, passes: "Sequence[Pass]", rank: int) -> list["Results"]:
        """Computes this rank's part of passes, which all have one."""
        packs = [packed(one.parts[rank], one.model.policy.device) for one in passes]
        segments: list[tuple[AdapterWeights, int]] = []
        for one, tokens in zip(passes, packs, strict=True):
            assert isinstance(one.model.policy.weights, AdapterWeights)
            segments.append((one.model.policy.weights, len(tokens.token_ids)))
            for parameter in one.model.policy.parameters:
                parameter.requires_grad_()
        started_s, forward_only = time.perf_counter(), passes[0].request.forward_only
        results, total = [], None
        with self._weights.in_segments(segments), torch.set_grad_enabled(not forward_only):
            whole = self._resting.logprobs(joined(packs))
            each = whole.split([len(tokens.targets) for tokens in packs])
            for one, tokens, logprobs in zip(passes, packs, each, strict=True):
                loss, values = one.loss(one.parts[rank], tokens, logprobs)
                total = loss if total is None else total + loss
                results.append((logprobs.detach().cpu().numpy(), values.cpu().numpy()))
            if not forward_only and total is not None:
                total.backward()
        each_s = (time.perf_counter() - started_s) / sum(one.num_tokens for one in passes)
        return [(*result, each_s * one.num_tokens) for one, result in zip(passes, results, strict=True)]

    def can_join(self, passes: "Sequence[Pass]", another: "Pass") -> bool:
        """Returns whether a pass can be computed with these: they fit into a micro-batch together."""
        alike, capacity = another.request.forward_only == passes[0].request.forward_only, self.settings.pack_tokens
        fits = all(sum(one.tokens_of(rank) for one in (*passes, another)) <= capacity for rank in range(self.num_ranks))
        return self._joins and alike and fits

    def _has_whole_vectors(self) -> bool:
        """Returns whether no element's place decides how it is computed. On a CPU torch computes the last ones of a
        tensor that do not fill its vectors, and of each thread's share of it, by other instructions than the rest."""
        config = self._resting.causal_lm.config.get_text_config()
        widths = [getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads]
        widths += [config.hidden_size, config.intermediate_size]
        return self._resting.device.type != "cpu" or all(
            not width % (VECTORS if width * self.settings.pack_tokens < _SHARED else whole_vectors())
            for width in widths
        )

    def use(self, policy: Policy) -> None:
        """Makes this policy's adapter the one that is computed with."""
        assert isinstance(policy.weights, AdapterWeights)
        if self._in_use is not policy.weights:
            policy.weights.use()
            self._in_use = policy.weights

    def remove(self, number: int, policy: Policy) -> None:
        """Frees this policy's adapter."""
        if self.others is not None:
            self.others.forget(number)
        assert isinstance(policy.weights, AdapterWeights)
        self.use(self._resting)
        policy.weights.remove()


Results = tuple[Any, Any, float]
"""[K] log-probabilities and [K] losses of a pass, and its seconds, by its tokens where others shared it."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch of a model for each rank, or for the first ones, that waits to be computed."""

    model: "TrainedModel"
    parts: Sequence[Sequence[Datum]]
    """By rank."""
    request: ForwardBackward

    def tokens_of(self, rank: int) -> int:
        """Returns the tokens of a rank's part as they are packed, prompts in common included."""
        return sum(map(_size, self.parts[rank])) if rank < len(self.parts) else 0

    @property
    def num_tokens(self) -> int:
        """Those of all ranks."""
        return sum(map(self.tokens_of, range(len(self.parts))))

    def loss(
        self, batch: Sequence[Datum], pack: PackedTokens, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss [] of a part, with what it adds to the witness, and the protocol's losses [K]."""
        first, device = batch[0], logprobs.device
        inputs = {
            name: to_device(np.concatenate([datum.inputs[name] for datum in batch]), device) for name in first.inputs
        }
        lengths = np.array([len(datum.targets) for datum in batch])
        datum_ids = to_device(np.repeat(np.arange(len(lengths)), lengths), device)
        loss, values = loss_and_values(self.request.loss_fn, logprobs, inputs, self.request.config, datum_ids)
        if not self.request.forward_only:
            loss = loss + self.model.witness(witness_sums(batch, pack, inputs))
        return loss, values


Work = Generator[Pass, Results, bytes]
"""A piece of work that asks for passes, one after the other, and returns its answer."""


class TrainedModel:
    """One tenant's adapter in training."""

    def __init__(self, base: Base, shape: AdapterShape) -> None:
        self.base, self.shape = base, shape
        self.number, self.policy = base.add(shape)
        self.revision = 0
        """Changes with the weights."""
        self._optimizer = self._new_optimizer()
        self.witness = GradientWitness(self.policy.device)
        self._gradients: dict[str, torch.Tensor] = {}
        """The sums of the gradients since the last step, by parameter; none of parameters that had none."""
        self._expected = Expected()
        self._computed: list[Computed] = []
        """Both of what is in these gradients."""
        self.num_steps = 0
        self.last_step: Step | None = None
        """What the last `optim_step` has applied."""

    @property
    def differentiated(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, and the witness of their gradients, which goes all their ways."""
        return {**self.policy.named_parameters, WITNESS: self.witness.zeros}

    @property
    def computed(self) -> Sequence[Computed]:
        """The requests whose gradients the next step applies."""
        return self._computed

    def drop_gradients(self) -> None:
        """Drops the gradients since the last step."""
        self._gradients, self._expected, self._computed = {}, Expected(), []

    def _new_optimizer(self) -> Optimizer:
        return Optimizer(self.base.settings, self.policy.named_parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for the next step, which are in no checkpoint."""
        return bool(self._gradients)

    def close(self) -> None:
        """Frees the adapter."""
        self.base.remove(self.number, self.policy)

    # --- gradients ---

    def forward_backward(self, request: ForwardBackward) -> Work:
        """Computes the loss of each datum, and adds the gradient of their sum to what the next `optim_step` applies;
        nothing is added if the loss or the gradient is not finite, which raises `Refused`, or if the generator is
        closed early."""
        check_config(request.loss_fn, request.config)
        data, capacity = request.data, self.base.settings.pack_tokens
        logprobs: list[Any] = [None] * len(data)
        losses: list[Any] = [None] * len(data)
        seconds = 0.0
        for parameter in self.differentiated.values():
            parameter.grad = None
        try:
            for bins in for_ranks([_size(datum) for datum in data], self.base.num_ranks, capacity=capacity):
                chosen = [index for one in bins for index in one]
                ends = np.cumsum([len(data[index].targets) for index in chosen])[:-1]
                *both, own_s = yield Pass(self, [[data[index] for index in one] for one in bins], request)
                seconds += own_s
                for whole, parts in zip(both, (logprobs, losses), strict=True):
                    for index, part in zip(chosen, np.split(whole, ends), strict=True):
                        parts[index] = part
            total = float(sum(part.sum(dtype=np.float64) for part in losses))
            found = {name: p.grad for name, p in self.differentiated.items() if p.grad is not None}
            if not math.isfinite(total) or not _are_finite(found.values()):
                raise Refused(f"the loss is {total} or its gradient is not finite; the gradient was not added")
            for name, gradient in found.items():
                earlier = self._gradients.get(name)
                self._gradients[name] = gradient if earlier is None else earlier.add_(gradient)
            if found:
                self._expected.add(data)
                self._computed.append(computed(request, logprobs, loss=total, seconds=seconds, before=self._computed))
        finally:
            for parameter in self.differentiated.values():
                parameter.grad = None
        outputs = {"logprobs": logprobs}
        if request.loss_fn == "cross_entropy":
            outputs["elementwise_loss"] = losses
        return forward_backward_answer(outputs, {"loss:sum": total}, candidates=data[0].candidates)

    def optim_step(self, given: Mapping[str, Any]) -> dict[str, float]:
        """Applies the gradients since the last step by AdamW and drops them; without any it changes nothing. Returns
        metrics. Raises `Refused`, the gradients being dropped and the weights unchanged, if their norm is not
        finite, or they are not those of just the datums since the last step."""
        self.last_step, started_s = None, time.perf_counter()
        adam = adam_params(given)
        gradients, expected, parts = self._gradients, self._expected, self._computed
        self.drop_gradients()
        if not gradients:
            return {"grad_norm": 0.0}
        witnesses = expected.checked(gradients.pop(WITNESS).to("cpu", torch.float64))
        for name, parameter in self.policy.named_parameters.items():
            parameter.grad = gradients.get(name)
        clip = adam["grad_clip_norm"]
        self._optimizer.configure(
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
            max_grad_norm=clip if clip > 0 else math.inf,
        )
        try:
            norm = self._optimizer.step(learning_rate=adam["learning_rate"])
            self.revision += 1
        except NonFiniteError as error:
            raise Refused(f"{error}; the gradient was dropped, and the weights are as before") from error
        finally:
            for parameter in self.policy.parameters:
                parameter.grad = None
        self.num_steps += 1
        self.last_step = Step(
            parts=parts,
            expected=witnesses[0],
            witness=witnesses[1],
            grad_norm=norm,
            learning_rate=adam["learning_rate"],
            seconds=time.perf_counter() - started_s,
        )
        return {"grad_norm": norm}

    @torch.no_grad()
    def logprobs_under(self, adapter: Path, data: Sequence[Datum]) -> list[Float32]:
        """Returns the log-probabilities of each datum's targets with the weights of an earlier version of this model,
        in the file `adapter`. Its own are the same afterwards, bit for bit."""
        own = {name: parameter.clone() for name, parameter in self.policy.named_parameters.items()}
        found: list[Any] = [None] * len(data)
        self.base.use(self.policy)
        try:
            self._put(load_file(adapter))
            sizes, capacity = [_size(datum) for datum in data], self.base.settings.pack_tokens
            for chosen in first_fit(sizes, capacity=capacity):
                batch = [data[index] for index in chosen]
                values = self.policy.logprobs(packed(batch, self.policy.device)).cpu().numpy()
                ends = np.cumsum([len(datum.targets) for datum in batch])[:-1]
                for index, part in zip(chosen, np.split(values, ends), strict=True):
                    found[index] = part
        finally:
            self._put(own)
        return found

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.policy.named_parameters.items():
            parameter.copy_(tensors[name])
        self.revision += 1

    def weights(self) -> bytes:
        """Returns the adapter for `put`."""
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.policy.named_parameters.items()}
        return bytes(save(tensors))

    @torch.no_grad()
    def put(self, weights: bytes) -> None:
        """Replaces the weights."""
        self._put(load(weights))

    # --- checkpoints ---

    def files(self) -> dict[str, bytes]:
        """Returns the adapter in PEFT's format."""
        assert isinstance(self.policy.weights, AdapterWeights)
        return self.policy.weights.files(self.policy.weights.snapshot())

    def canary(self, *, version: int = 0) -> Canary:
        """Returns the trainer's log-probabilities of the canary, by which others see whether they compute the same. Its
        adapter must be in use."""
        begun = self.base.canaries.beside(self.policy).begin(version=version, noise={})
        return begun(self.policy.weights.snapshot())

    def save(self, folder: Path, *, seq: int, canary: bool = False, optimizer: bool = True) -> int:
        """Writes the adapter, and optimizer and canary if asked for, whole or not at all, over what was there. `seq` is
        the last command that is in them. Returns the bytes."""
        state = {"seq": seq, "num_steps": self.num_steps, **shape_record(self.shape)}
        files: dict[str, Any] = {
            **self.files(),
            STATE_FILE: json.dumps(state).encode(),
        }
        if optimizer:
            files[OPTIMIZER_FILE] = save(self._optimizer.state_tensors())
        if canary:
            files[CANARY_FILE] = self.canary().to_json()
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, files, msgspec.json.encode, replace=True)
        return sum(map(len, files.values()))

    @torch.no_grad()
    def load(self, folder: Path, *, optimizer: bool) -> int:
        """Replaces the weights, and with `optimizer` its state, which is new otherwise, by those in `folder`; drops the
        gradients. Returns the `seq` they were saved with. Raises `Refused` for an adapter of another shape."""
        state = json.loads((folder / STATE_FILE).read_text())
        if (shape := saved_shape(folder)) != replace(self.shape, seed=shape.seed):
            raise Refused(f"the checkpoint has {shape}, and this model {self.shape}; create a model from its state")
        if optimizer and not (folder / OPTIMIZER_FILE).exists():
            raise Refused("a sampler's checkpoint has no optimizer state; load it without, or one of save_state's")
        self._put(load_file(folder / ADAPTER_FILE))
        self.drop_gradients()
        self._optimizer = self._new_optimizer()
        if optimizer:
            self._optimizer.load_state_tensors(load_file(folder / OPTIMIZER_FILE))
            self.num_steps = state["num_steps"]
        return int(state["seq"])


def _size(datum: Datum) -> int:
    """Returns a datum's tokens as they are packed."""
    return len(datum.token_ids) + 1


def for_ranks(sizes: Sequence[int], num_ranks: int, *, capacity: int) -> list[list[list[int]]]:
    """Returns indices by pass and rank: bins of `first_fit`, or, where their number is not one of whole passes, runs of
    about equal size, which keep what comes together and shares its beginning."""
    bins = first_fit(sizes, capacity=capacity)
    if num_even := min(len(sizes), num_ranks * math.ceil(len(bins) / num_ranks)) if len(bins) % num_ranks else 0:
        middles = np.cumsum(sizes) - np.array(sizes) / 2
        of_run = (middles * num_even / sum(sizes)).astype(int)
        even = [run for run in ([*np.flatnonzero(of_run == number).tolist()] for number in range(num_even)) if run]
        if max(sum(sizes[index] for index in run) for run in even) <= capacity:
            bins = even
    return [bins[start : start + num_ranks] for start in range(0, len(bins), num_ranks)]


def _are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Returns whether all values are finite."""
    found = [gradient.flatten() for gradient in gradients]
    return not found or bool(torch.cat(found).isfinite().all())


def shape_record(shape: AdapterShape) -> dict[str, Any]:
    """Returns the shape as the protocol's `lora_config`."""
    return {"rank": shape.rank, "seed": shape.seed, "train_attn": shape.attn, "train_mlp": shape.mlp}


def saved_shape(folder: Path) -> AdapterShape:
    """Returns the shape of the adapter that `TrainedModel.save` has written."""
    return AdapterShape.of(json.loads((folder / STATE_FILE).read_text()))


def packed(batch: Sequence[Datum], device: torch.device) -> PackedTokens:
    """Returns datums as the trainer packs samples: their tokens and the last target, all but the first token targets,
    which are then the datums' own."""
    ids = np.concatenate([np.append(datum.token_ids, datum.targets[-1:]) for datum in batch])
    lengths = np.array([len(datum.token_ids) + 1 for datum in batch], np.int32)
    mask = np.ones(len(ids), np.bool_)
    mask[np.cumsum(lengths) - lengths] = False
    targets = np.concatenate([datum.targets for datum in batch])
    return pack(ids, lengths, loss_mask=mask, targets=targets.reshape(-1), device=device)


def adam_params(given: Mapping[str, Any]) -> dict[str, float]:
    """Returns AdamW's figures with the protocol's defaults. Raises `Refused`."""
    if unknown := sorted(given.keys() - _DEFAULT_ADAM.keys()):
        raise Refused(f"adam_params has {unknown[0]}, expected {', '.join(_DEFAULT_ADAM)}")
    adam = {**_DEFAULT_ADAM, **given}
    for name, value in adam.items():
        below = 1.0 if name.startswith("beta") else math.inf
        if not isinstance(value, int | float) or not 0 <= value < below:
            raise Refused(f"adam_params.{name} is {value!r:.40}, expected a number from 0 to below {below:g}")
    return {name: float(value) for name, value in adam.items()}
