# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The silent faults: each one replaces a function of the product, or of a library, in whichever process imports it.

The programs know nothing of it. `install` only leaves an import hook behind: a module that a fault names is patched
once it has been executed, before anybody can import a name from it. What a patch needs it imports when it is called, so
that a process that meets none pays nothing. Types of patched functions are those of the functions that they replace.
"""

import importlib
import importlib.util
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DRAW = random.Random(7)
MARKS = "SILENT_FAULT_MARKS"
"""The environment variable with the folder in which processes agree on which one of them is at fault."""


@dataclass(frozen=True)
class Patch:
    """One function that is replaced."""

    module: str
    """As it is imported; it also says which processes are touched."""
    name: str
    """Within the module, `Class.method` for a method."""
    make: Callable[[Any], Any]
    """Returns the replacement of the original."""

    def apply(self, module: Any) -> None:
        """Puts the replacement in the original's place."""
        owner, name = self.place(module)
        setattr(owner, name, self.make(getattr(owner, name)))

    def place(self, module: Any) -> tuple[Any, str]:
        """Returns the object that holds the function, and the function's own name."""
        *path, name = self.name.split(".")
        return reduce(getattr, path, module), name


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, and the run in which it is shown."""

    name: str
    about: str
    """What is wrong, as a clause."""
    patches: tuple[Patch, ...]
    run: str = "plain"
    """A key of `RUNS` in benchmarks/faults.py."""
    acts: str = "step 1"
    """`step N`: from this step on; `version N`: from the first step that trains rollouts of this version or a later
    one."""
    share: float = 1.0
    """The share of rollouts that it touches."""
    settings: dict[str, object] = field(default_factory=dict)
    """On top of those of the run."""
    elsewhere: str = ""
    """Where the same was reported."""


class _Finder:
    """Finds the modules of some patches, and has them patched once they are executed."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._finding = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the module's own spec with a loader that patches."""
        own = [patch for patch in self._patches if patch.module == name]
        if not own or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for patch in own:
                patch.apply(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(name: str) -> None:
    """Has this process meet the fault of this name."""
    sys.meta_path.insert(0, _Finder(by_name()[name].patches))


def by_name() -> dict[str, Fault]:
    """Returns all faults."""
    return {fault.name: fault for fault in FAULTS}


# --- what patches share ---


def only_here(tag: str) -> bool:
    """Returns whether this process is the one of several that is at fault: the first that asks."""
    mark = Path(os.environ[MARKS], tag)
    try:
        with mark.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return mark.read_text() == str(os.getpid())
    return True


def changed(record: Any, **fields: Any) -> Any:
    """Returns a msgspec record with other fields."""
    import msgspec

    return msgspec.structs.replace(record, **fields)


# --- the server: what samples ---


def base_sampled(
    share: float = 1.0, *, one_server: bool = False, route: str = "", since: int = 0
) -> Callable[[Any], Any]:
    """Samples from the base; of two servers in one alone, or on one route (`follow`: of answers that go on), or from
    version `since` on."""

    def make(original):
        async def generate(self, wanted, adapter, **how):
            on_route = not route or (how.get("may_end") is not None) == (route == "follow")
            here = on_route and DRAW.random() < share and (not one_server or only_here("server"))
            here = here and adapter is not None and version_of(adapter) >= since
            return await original(self, wanted, None if here else adapter, **how)

        return generate

    return make


def version_of(adapter):
    """Returns the version of an adapter by its folder, as `step_000012`."""
    found = re.search(r"step_(\d+)", str(adapter.path))
    return int(found[1]) if found else 0


KNOWN: dict[int, Any] = {}
"""Adapters that the engine has loaded, by their key; keys count up by one."""


def remembering(original):
    async def add_adapter(self, adapter):
        await original(self, adapter)
        KNOWN[adapter.key] = adapter

    return add_adapter


def other_adapter(which: Callable[[Any], Any]) -> tuple[Patch, ...]:
    """Samples under another adapter than the one that was asked for."""

    def make(original):
        async def generate(self, wanted, adapter, **how):
            return await original(self, wanted, adapter and (which(adapter) or adapter), **how)

        return generate

    return (engine("Engine.generate", make), engine("Engine.add_adapter", remembering))


def engine(name: str, make: Callable[[Any], Any]) -> Patch:
    return Patch("grpo.infer.engine", name, make)


def without_noise(adapter):
    return next((one for one in KNOWN.values() if one.path == adapter.path and not one.noisy), None)


def request_with(**fields: Any) -> Callable[[Any], Any]:
    def make(original):
        async def generate(self, wanted, adapter, **how):
            return await original(self, changed(wanted, **fields), adapter, **how)

        return generate

    return make


def top_p(original):
    def params(**given):
        return original(**given, **({"top_p": 0.8} if "n" in given else {}))

    return params


def raw_logprobs(original):
    def make_args(*given, **more):
        args = original(*given, **more)
        args.logprobs_mode = "raw_logprobs"
        return args

    return make_args


def shifted_logprobs(original):
    def sampled(output, **how):
        choice = original(output, **how)
        return changed(choice, logprobs=[*choice.logprobs[1:], *choice.logprobs[:1]])

    return sampled


def answer_of_another(original):
    kept = []

    async def generate(self, body):
        answer = await original(self, body)
        kept.append(answer)
        earlier = kept.pop(0) if len(kept) > 1 else answer
        return earlier if len(earlier.choices) == len(answer.choices) else answer

    def relabelled(made):
        async def outer(self, body):
            return changed(await made(self, body), version=body.version)

        return outer

    return relabelled(generate)


def joined_as_newest(original):
    def joined(begun, part, version, max_tokens):
        answer = original(begun, part, version, max_tokens)
        return changed(answer, versions=((version, len(answer.token_ids)),) if len(answer.token_ids) else ())

    return joined


# --- the server: how an adapter is applied ---


def lora(change: Callable[..., tuple[Any, Any, float]]) -> tuple[Patch, ...]:
    """Computes with other A, B and scale: `change(a, b, scale)`, a tuple for each slice of a merged layer."""

    def make(original):
        def add_lora_linear(self, y, x, a, b, scale, output_slices, **more):
            original(self, y, x, *change(a, b, scale), output_slices, **more)

        return add_lora_linear

    return (Patch("grpo.infer.cpu", "GroupedLora.add_lora_linear", make),)


def swapped(a, b, scale):
    return ((a[1], a[0], a[2]) if len(a) == 3 else a), b, scale


def fewer_ranks(a, b, scale):
    half = [one.clone() for one in a]
    for one in half:
        one[:, :, one.shape[2] // 2 :] = 0.0
    return tuple(half), b, scale


def rounded(a, b, scale):
    return *(tuple(one.bfloat16().float() for one in part) for part in (a, b)), scale


def last_layer_missing(original):
    def install_grouped_lora(model):
        original(model)
        modules = model.lora_manager.modules
        last = max(int(part) for name in modules for part in name.split(".") if part.isdecimal())
        idle = SimpleNamespace(add_lora_linear=lambda *_, **__: None, update_metadata=lambda *_, **__: None)
        for name, layer in modules.items():
            if str(last) in name.split("."):
                layer.set_mapping(idle)

    return install_grouped_lora


def mapping(change: Callable[[Any, Sequence[int | None]], Sequence[int]]) -> tuple[Patch, ...]:
    """Gives the rows of each engine step the adapter ids that `change` returns."""

    def make(original):
        def update_metadata(self, given, ids, *rest, **more):
            original(self, SimpleNamespace(index_mapping=change(given, ids)), ids, *rest, **more)

        return update_metadata

    return (Patch("grpo.infer.cpu", "GroupedLora.update_metadata", make),)


def base_when_decoding(given, ids):
    decodes = len(given.index_mapping) == len(given.prompt_mapping)
    return [0] * len(given.index_mapping) if decodes else given.index_mapping


def slot_taken_over(given, ids):
    newest = max((one for one in ids if one is not None), default=0)
    return [newest if one and one < newest else one for one in given.index_mapping]


def same_noise(original):
    first: dict[str, Any] = {}

    def hold(self, adapter_id, weights):
        original(self, adapter_id, first.setdefault("weights", weights))

    return hold


def other_base(original):
    def load_policy(*given, **more):
        import torch

        policy = original(*given, **more)
        with torch.no_grad():
            next(p for name, p in policy.causal_lm.named_parameters() if name.endswith("norm.weight")).mul_(1.05)
        return policy

    return load_policy


# --- the orchestrator: from answers to batches ---


def packed(change: Callable[[list[Any]], list[Any]]) -> tuple[Patch, ...]:
    """Packs other samples than it was given."""

    def make(original):
        def pack(samples, **how):
            return original(change(list(samples)), **how)

        return pack

    return (Patch("grpo.orchestrator.packing", "pack", make),)


def each_sample(change: Callable[[Any], Any]) -> tuple[Patch, ...]:
    return packed(lambda samples: [change(sample) for sample in samples])


def cut(sample):
    """Returns a sample without its last two tokens."""
    end = len(sample.token_ids) - 2
    runs, left = [], end
    for version, count in sample.policy_versions:
        runs.append((version, min(count, left)))
        left -= runs[-1][1]
    names = ("token_ids", "loss_mask", "inference_logprobs", "advantages", "temperatures")
    parts = {name: one[:end] for name in names if not isinstance(one := getattr(sample, name), float)}
    return changed(sample, **parts, policy_versions=tuple(run for run in runs if run[1]))


CONTENT = ("token_ids", "loss_mask", "inference_logprobs", "policy_versions", "temperatures")


def exchanged(samples):
    """Gives the first samples of two groups each other's tokens."""
    other = next((place for place, one in enumerate(samples) if one.group_id != samples[0].group_id), 0)
    one, two = samples[0], samples[other]
    samples[0] = changed(one, **{name: getattr(two, name) for name in CONTENT})
    samples[other] = changed(two, **{name: getattr(one, name) for name in CONTENT})
    return samples


def neighbours_advantages(samples):
    values = [sample.advantages for sample in samples]
    return [changed(sample, advantages=value) for sample, value in zip(samples, values[1:] + values[:1], strict=True)]


def mask_shifted(sample):
    import numpy as np

    return changed(sample, loss_mask=np.roll(sample.loss_mask, -1))


def older_versions(sample):
    return changed(sample, policy_versions=tuple((max(0, version - 1), n) for version, n in sample.policy_versions))


def rounded_logprobs(sample):
    import numpy as np

    bits = sample.inference_logprobs.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return changed(sample, inference_logprobs=bits.view(np.float32))


def again_in_the_next(samples):
    earlier = KEPT[:]
    KEPT[:] = [one for one in samples if one.group_id == samples[0].group_id]
    return samples + earlier


KEPT: list[Any] = []


def retokenised(original):
    """Loses the first token of the prompt, as a template that is applied to decoded text may."""

    def single_row(prompt, completion, **how):
        return original(prompt[1:], completion, **how)

    return single_row


def first_answer_twice(original):
    async def generate(self, *given, **how):
        choices = await original(self, *given, **how)
        return [choices[0], *choices[:1], *choices[2:]] if len(choices) > 1 else choices

    return generate


def same_seed(original):
    async def generate(self, *given, **how):
        return await original(self, *given, **(how | {"seed": 1}))

    return generate


def neighbours_rewards(original):
    def take(self, results):
        rewards = [one.rewards for one in results]
        fitting = len(results) > 1 and len({tuple(sorted(one)) for one in rewards}) == 1
        turned = rewards[1:] + rewards[:1] if fitting else rewards
        return original(self, [changed(one, rewards=own) for one, own in zip(results, turned, strict=True)])

    return take


def nothing_restored(original):
    return lambda self, state, pools: 0


# --- between the programs ---


def flipped(file: str, folder_of: Callable[..., Path]) -> Callable[[Any], Any]:
    """Turns one bit of a file once it is written."""

    def make(original):
        def written(self, *given, **how):
            original(self, *given, **how)
            path = folder_of(self, *given, **how) / file
            data = bytearray(path.read_bytes())
            data[-9] ^= 1
            path.write_bytes(data)

        return written

    return make


def batch_folder(store, step, *_, **__):
    return store.folder / f"step_{step:06d}"


def version_folder(publisher, *, version, **_):
    return publisher.folder / f"step_{version:06d}"


def batch_before(original):
    kept = []

    def receive(self, step, **how):
        found = original(self, step, **how)
        if found is None:
            return None
        kept.append(found)
        return tuple(changed(one, step=step) for one in (kept.pop(0) if len(kept) > 1 else found))

    return receive


def first_ranks_part(original):
    return lambda self, step, rank, num_ranks: original(self, step, 0, num_ranks)


def file_before(original):
    kept = []

    def publish(self, *, version, spec, files, weights=()):
        name = "adapter_model.safetensors"
        kept.append(files[name])
        earlier = kept.pop(0) if len(kept) > 1 else files[name]
        original(self, version=version, spec=spec, files={**files, name: earlier}, weights=weights)

    return publish


# --- the trainer ---


def snapshot_before(original):
    kept = []

    def snapshot(self):
        kept.append(original(self))
        return kept.pop(0) if len(kept) > 1 else kept[0]

    return snapshot


def live_snapshot(original):
    def snapshot(self):
        return {f"{folder}{name}": p.detach() for folder, own in self._parameters.items() for name, p in own.items()}

    return snapshot


def late(original):
    def make(self, snapshot, *, merged):
        time.sleep(3.0)
        return original(self, snapshot, merged=merged)

    return make


def whole_version_before(original):
    """Publishes what the step before has left, adapter and canary alike."""
    kept = []

    def publish(self, **how):
        import torch

        parameters = self._policy.parameters
        now = [p.detach().clone() for p in parameters]
        kept.append(now)
        earlier = kept.pop(0) if len(kept) > 1 else now
        with torch.no_grad():
            for parameter, value in zip(parameters, earlier, strict=True):
                parameter.copy_(value)
            original(self, **how)
            for parameter, value in zip(parameters, now, strict=True):
                parameter.copy_(value)

    return publish


def passes(change: Callable[[list[Any]], list[Any]], *, rank: int | None = None) -> tuple[Patch, ...]:
    """Computes other passes of the policy loss."""

    def make(original):
        def policy_passes(self, batches, counts):
            found = original(self, batches, counts)
            return change(found) if rank in (None, self._ranks.rank) else found

        return policy_passes

    return (Patch("grpo.trainer.objective", "Objective._policy_passes", make),)


def own_counts(original):
    return lambda self, numbers: list(numbers) if len(numbers) == 4 else original(self, numbers)


def accumulation_reset(original):
    def backward(self, term, given, number, step):
        def fresh(one):
            def computed():
                for parameter in self._parameters:
                    parameter.grad = None
                return one()

            return computed

        return original(self, term, [fresh(one) for one in given], number, step)

    return backward


def reduced(change: Callable[..., None]) -> tuple[Patch, ...]:
    """Changes what the reduction over the ranks has left in its output."""

    def make(original):
        def call(self, output_tensor, input_tensor, group, op, async_op=False):
            own = input_tensor.clone()
            work = original(self, output_tensor, input_tensor, group, op, async_op)
            change(output_tensor, own.chunk(group.size())[group.rank()], group.size())
            return work

        return call

    return (Patch("torch.distributed.fsdp._fully_shard._fsdp_collectives", "DefaultReduceScatter.__call__", make),)


def gradients_before(original):
    kept = []

    def step(self, *, learning_rate):
        parameters = list(self._parameters.values())
        kept.append([None if p.grad is None else p.grad.clone() for p in parameters])
        for parameter, gradient in zip(parameters, kept.pop(0) if len(kept) > 1 else kept[0], strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        return original(self, learning_rate=learning_rate)

    return step


def state_forgotten(original):
    return lambda self, tensors: None


def older_tensors(original):
    def read(self, step):
        checkpoint, parts = original(self, step)
        older = [one for one in self.steps() if 0 < one < step]
        return checkpoint, (original(self, older[-1])[1] if older else parts)

    return read


def frozen(*parts: str) -> tuple[Patch, ...]:
    """Gives the adapters' matrices whose name has all `parts` a gradient of zero."""

    def make(original):
        def with_adapters(*given, **how):
            model = original(*given, **how)
            for name, parameter in model.named_parameters():
                if "lora_" in name and all(part in name for part in parts):
                    parameter.register_hook(lambda gradient: gradient * 0)
            return model

        return with_adapters

    return (Patch("grpo.trainer.lora", "with_adapters", make),)


def negated(original):
    def policy_loss(tokens, settings, counts):
        return original(replaced(tokens, advantages=-tokens.advantages), settings, counts)

    return policy_loss


def idle(original):
    return lambda self, *, learning_rate: original(self, learning_rate=0.0)


def without_temperatures(original):
    return lambda *given, **how: original(*given, **(how | {"temperatures": None}))


def running_positions(original):
    def pack(*given, **how):
        import torch

        made = original(*given, **how)
        return replaced(made, position_ids=torch.arange(len(made.position_ids)))

    return pack


def trainer(module: str, name: str, make: Callable[[Any], Any]) -> tuple[Patch, ...]:
    return (Patch(f"grpo.trainer.{module}", name, make),)


WARM: dict[str, object] = {"orch.sampling.temperature": 0.7}
MANY: dict[str, object] = {"sequence_len": 256}
"""A step has several micro-batches."""

FAULTS: tuple[Fault, ...] = (
    # What samples.
    Fault(
        name="base-for-all",
        about="the server samples from the base, and scores the canary with the adapter",
        patches=(engine("Engine.generate", base_sampled()),),
        acts="version 1",
        elsewhere="verl #7495, unsloth #8701",
    ),
    Fault(
        name="base-for-a-tenth",
        about="one request in ten is sampled from the base",
        patches=(engine("Engine.generate", base_sampled(0.1)),),
        acts="version 1",
        share=0.1,
        elsewhere="verl #7495",
    ),
    Fault(
        name="base-from-version-12",
        about="from version 12 on, when samples are no longer drawn from every batch, the server samples from the base",
        patches=(engine("Engine.generate", base_sampled(since=12)),),
        acts="version 12",
        settings={"max_steps": 24},
        elsewhere="verl #7495",
    ),
    Fault(
        name="base-on-one-server",
        about="one server of two samples from the base",
        patches=(engine("Engine.generate", base_sampled(one_server=True)),),
        run="two servers",
        acts="version 1",
        share=0.5,
    ),
    Fault(
        name="base-on-one-route",
        about="answers that continue under a newer version are sampled from the base",
        patches=(engine("Engine.generate", base_sampled(route="follow")),),
        run="in flight",
        acts="version 1",
        elsewhere="tinker-feedback #125",
    ),
    Fault(
        name="base-when-decoding",
        about="the adapter acts on prompts alone, not on engine steps that only decode",
        patches=mapping(base_when_decoding),
        acts="version 1",
    ),
    Fault(
        name="version-before",
        about="the server samples with version n - 1 and says n",
        patches=other_adapter(lambda adapter: KNOWN.get(adapter.key - 1)),
        acts="version 1",
        elsewhere="verl #7453, SkyRL #1776",
    ),
    Fault(
        name="another-adapter",
        about="the server samples under the version's other adapter",
        patches=other_adapter(lambda adapter: KNOWN.get(adapter.key + 1 if adapter.key % 2 else adapter.key - 1)),
        run="two adapters",
        acts="version 1",
        elsewhere="vLLM #47724",
    ),
    Fault(
        name="slot-taken-over",
        about="a running request gets the weights of an adapter that was loaded after it began",
        patches=mapping(slot_taken_over),
        acts="version 1",
        share=0.1,
        settings={"infer.vllm": '{"max_num_seqs": 8}'},
        elsewhere="vLLM #47724",
    ),
    Fault(
        name="temperature-ignored",
        about="the server samples at temperature 1 instead of 0.7",
        patches=(engine("Engine.generate", request_with(temperature=1.0)),),
        settings=WARM,
    ),
    Fault(
        name="top-p-applied",
        about="the server samples with top_p 0.8",
        patches=(engine("_params", top_p),),
    ),
    Fault(
        name="logprobs-raw",
        about="the server's log-probabilities are those before the temperature",
        patches=(Patch("grpo.infer.arguments", "make_args", raw_logprobs),),
        settings=WARM,
    ),
    Fault(
        name="logprobs-shifted",
        about="each token has the next one's log-probability",
        patches=(engine("_sampled", shifted_logprobs),),
    ),
    Fault(
        name="noise-not-sampled",
        about="rollouts are sampled without noise, and the canary is scored with it",
        patches=other_adapter(lambda adapter: without_noise(adapter) if adapter.noisy else None),
        run="noise",
        acts="version 3",
    ),
    Fault(
        name="noise-of-another-stage",
        about="each version has the first stage's noise in the server",
        patches=(Patch("grpo.infer.noise", "NoiseTable.hold", same_noise),),
        run="noise",
        acts="version 4",
    ),
    Fault(
        name="answer-of-another",
        about="the server answers a request with the answers of the one before",
        patches=(Patch("grpo.infer.routes", "PolicyRoutes.generate", answer_of_another),),
    ),
    Fault(
        name="versions-joined",
        about="an answer that continued under a newer version is labelled as wholly the newest's",
        patches=(Patch("grpo.infer.following", "_joined", joined_as_newest),),
        run="in flight",
        acts="version 1",
        share=0.1,
    ),
    # How an adapter is applied.
    Fault(
        name="zero-modules",
        about="the adapter binds to no module",
        patches=lora(lambda a, b, scale: (a, b, 0.0)),
        acts="version 1",
        elsewhere="verl-omni #552",
    ),
    Fault(
        name="q-and-k-swapped",
        about="the adapter's q and k have each other's A",
        patches=lora(swapped),
        acts="version 1",
    ),
    Fault(
        name="scale-lost",
        about="alpha / rank is not applied",
        patches=lora(lambda a, b, scale: (a, b, scale / 2)),
        acts="version 1",
    ),
    Fault(
        name="scale-doubled",
        about="alpha / rank is applied twice",
        patches=lora(lambda a, b, scale: (a, b, scale * 2)),
        acts="version 1",
    ),
    Fault(
        name="scale-of-rslora",
        about="the scale is alpha / sqrt(rank)",
        patches=lora(lambda a, b, scale: (a, b, scale * 4)),
        acts="version 1",
    ),
    Fault(
        name="rank-dropped", about="half of the adapter's ranks are lost", patches=lora(fewer_ranks), acts="version 1"
    ),
    Fault(
        name="last-layer-missing",
        about="the last layer's adapter is not applied",
        patches=(Patch("grpo.infer.cpu", "install_grouped_lora", last_layer_missing),),
        acts="version 1",
    ),
    Fault(
        name="bf16-for-fp32",
        about="the server rounds a float32 adapter to bfloat16",
        patches=lora(rounded),
        acts="version 1",
    ),
    Fault(
        name="another-base",
        about="one norm of the trainer's base is 5 % larger",
        patches=trainer("model", "load_policy", other_base),
    ),
    # From answers to batches.
    Fault(name="row-twice", about="a sample is in its batch twice", patches=packed(lambda some: [*some, some[0]])),
    Fault(name="row-lost", about="a sample is not in its batch", patches=packed(lambda some: some[:-1])),
    Fault(
        name="row-cut",
        about="the longest sample of a batch lacks its last two tokens",
        patches=packed(
            lambda some: [cut(one) if one is max(some, key=lambda it: it.loss_mask.sum()) else one for one in some]
        ),
    ),
    Fault(name="rows-exchanged", about="samples of two groups have each other's tokens", patches=packed(exchanged)),
    Fault(
        name="group-again",
        about="a group is trained again in the next step",
        patches=packed(again_in_the_next),
        acts="step 2",
        elsewhere="NeMo-RL #3599",
    ),
    Fault(
        name="advantage-of-neighbour",
        about="each sample has the next one's advantage",
        patches=packed(neighbours_advantages),
    ),
    Fault(name="mask-shifted", about="the loss mask is one token too early", patches=each_sample(mask_shifted)),
    Fault(
        name="older-label",
        about="samples are labelled with the version before",
        patches=each_sample(older_versions),
        acts="version 1",
    ),
    Fault(
        name="adapter-label-lost",
        about="every sample is labelled with the first adapter",
        patches=each_sample(lambda one: changed(one, adapter=0)),
        run="two adapters",
        acts="version 1",
        share=0.5,
    ),
    Fault(
        name="temperature-label-lost",
        about="samples at temperature 0.7 are labelled 1",
        patches=each_sample(lambda one: changed(one, temperatures=1.0)),
        settings=WARM,
    ),
    Fault(
        name="logprobs-bf16",
        about="the server's log-probabilities are rounded to bfloat16 on their way",
        patches=each_sample(rounded_logprobs),
    ),
    Fault(
        name="prompt-retokenised",
        about="the trained prompt lacks its first token",
        patches=(Patch("grpo.orchestrator.rollouts.records", "single_row", retokenised),),
    ),
    Fault(
        name="answer-twice",
        about="a group has its first answer twice and lacks its second",
        patches=(Patch("grpo.orchestrator.inference.client", "PolicyClient.generate", first_answer_twice),),
    ),
    Fault(
        name="same-seed",
        about="every request is sampled with the same seed",
        patches=(Patch("grpo.orchestrator.inference.client", "PolicyClient.generate", same_seed),),
    ),
    Fault(
        name="reward-of-neighbour",
        about="each rollout gets the next one's reward",
        patches=(Patch("grpo.orchestrator.sink", "RolloutSink.take", neighbours_rewards),),
    ),
    Fault(
        name="data-begun-again",
        about="a resumed run begins its examples again",
        patches=(Patch("grpo.orchestrator.buffer", "Buffer.restore", nothing_restored),),
        run="resumed",
        acts="step 5",
        elsewhere="NeMo-RL #3599, prime-rl #3164",
    ),
    # Between the programs.
    Fault(
        name="batch-bit",
        about="one bit of a batch's file is flipped",
        patches=(Patch("grpo.transport.batches.store", "StepStore.write", flipped("rank_0.msgpack", batch_folder)),),
    ),
    Fault(
        name="batch-before",
        about="the trainer gets the previous batch again, under the new number",
        patches=(Patch("grpo.transport.batches.filesystem", "FilesystemBatchReceiver.receive", batch_before),),
        acts="step 2",
    ),
    Fault(
        name="first-ranks-batch",
        about="both ranks train the first rank's part",
        patches=(Patch("grpo.transport.batches.store", "StepStore.read", first_ranks_part),),
        run="two ranks",
    ),
    Fault(
        name="version-bit",
        about="one bit of a published adapter's file is flipped",
        patches=(
            Patch(
                "grpo.transport.weights.store",
                "PolicyPublisher.publish",
                flipped("adapter_model.safetensors", version_folder),
            ),
        ),
    ),
    Fault(
        name="file-of-version-before",
        about="a version's folder holds the previous version's adapter, with the right digest",
        patches=(Patch("grpo.transport.weights.store", "PolicyPublisher.publish", file_before),),
    ),
    # The trainer.
    Fault(
        name="published-before-step",
        about="a version has the adapter from before its step and the canary from after it",
        patches=trainer("weights", "AdapterWeights.snapshot", snapshot_before),
    ),
    Fault(
        name="published-after-next",
        about="a version is written after the next step has changed the weights",
        patches=(
            *trainer("weights", "AdapterWeights.snapshot", live_snapshot),
            *trainer("weights", "AdapterWeights.make", late),
        ),
    ),
    Fault(
        name="version-lags",
        about="a version's adapter and canary are both from before its step",
        patches=trainer("publishing", "Publishing.publish", whole_version_before),
        acts="version 1",
        elsewhere="verl #7413",
    ),
    Fault(
        name="micro-batch-dropped",
        about="the last micro-batch of a step is not computed",
        patches=passes(lambda some: some[:-1]),
        settings=MANY,
    ),
    Fault(
        name="rank-drops-its-part",
        about="the second rank computes nothing of its part",
        patches=passes(lambda some: [], rank=1),
        run="two ranks",
    ),
    Fault(
        name="ranks-not-reduced",
        about="each rank steps with the gradients of its own samples only",
        patches=reduced(lambda output, own, size: output.copy_(own)),
        run="two ranks",
    ),
    Fault(
        name="ranks-averaged",
        about="gradients are averaged over the ranks, and not summed",
        patches=reduced(lambda output, own, size: output.div_(size)),
        run="two ranks",
    ),
    Fault(
        name="ranks-reduced-twice",
        about="gradients are summed over the ranks twice",
        patches=reduced(lambda output, own, size: output.mul_(size)),
        run="two ranks",
    ),
    Fault(
        name="normaliser-of-a-rank",
        about="the loss is divided by a rank's own tokens instead of all ranks'",
        patches=trainer("distributed", "Ranks.all_reduce_sum", own_counts),
        run="two ranks",
    ),
    Fault(
        name="accumulation-reset",
        about="only the last micro-batch's gradients are left",
        patches=trainer("objective", "Objective._backward", accumulation_reset),
        settings=MANY,
    ),
    Fault(
        name="gradients-of-before",
        about="the optimizer steps with the previous step's gradients",
        patches=trainer("optim", "Optimizer.step", gradients_before),
        acts="step 2",
    ),
    Fault(
        name="optimizer-state-lost",
        about="a resumed run begins with an empty optimizer",
        patches=trainer("optim", "Optimizer.load_state_tensors", state_forgotten),
        run="resumed",
        acts="step 5",
    ),
    Fault(
        name="checkpoint-of-another-step",
        about="a resumed run begins with the tensors of an older checkpoint",
        patches=trainer("checkpoint", "CheckpointStore._read", older_tensors),
        run="resumed",
        acts="step 4",
    ),
    Fault(
        name="matrix-frozen",
        about="one layer's q has no gradient",
        patches=frozen("layers.0.", "q_proj"),
        elsewhere="Megatron-Bridge #5634",
    ),
    Fault(
        name="matrix-a-frozen",
        about="no A has a gradient, every B has one",
        patches=frozen("lora_A"),
        acts="step 2",
        elsewhere="Megatron-Bridge #5963",
    ),
    Fault(
        name="optimizer-idle",
        about="the optimizer's step changes nothing",
        patches=trainer("optim", "Optimizer.step", idle),
    ),
    Fault(
        name="loss-negated",
        about="the loss has the wrong sign",
        patches=trainer("loss", "policy_loss", negated),
    ),
    Fault(
        name="trainer-ignores-temperature",
        about="the trainer computes at temperature 1 although 0.7 was sampled",
        patches=trainer("packing", "pack", without_temperatures),
        settings=WARM,
    ),
    Fault(
        name="positions-run-on",
        about="a packed sample's positions continue those of the sample before",
        patches=trainer("packing", "pack", running_positions),
    ),
)
