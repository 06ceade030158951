"""An engine that serves what it is told, a base model of two layers, and versions for it in real folders."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from grpo.infer.checks import BaseModel
from grpo.infer.engine import Adapter, EngineError
from grpo.infer.versions import VersionTable
from grpo.transport.errors import PolicyRefused
from grpo.transport.folders import Content
from grpo.transport.http import Choice, GenerateRequest, Scored, ServerLoad, Top
from grpo.transport.records import Canary, PolicySpec
from grpo.transport.run import RunFolder
from grpo.transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement, Rendezvous
from grpo.transport.weights.shards import Weight, shard_files
from grpo.transport.weights.store import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CANARY_FILE, NOISE_FILE, PolicyPublisher
from msgspec import structs

SHAPES: dict[str, tuple[int, ...]] = {
    "model.layers.0.q_proj.weight": (6, 4),
    "model.layers.0.up_proj.weight": (8, 4),
    "model.norm.weight": (4,),
}
NORMS = {"model.norm.weight": 4}
BASE = BaseModel(identity="base", shapes=SHAPES, vocab_size=10, max_model_len=8, max_rank=8, dtype=torch.float32)
TOKENS = (5, 6, 7)
NOISE_EFFECT = 0.25
"""Nats that noise takes from every log-probability."""
ADAPTER = PolicySpec(
    base_model="base", rank=2, alpha=4, target_modules=("q_proj", "up_proj"), sequence_len=64, dtype="float32"
)
SEVERAL = structs.replace(ADAPTER, adapters=("solver", "proposer"))
NOISY = structs.replace(ADAPTER, norm_noise=True)
FULL = structs.replace(ADAPTER, rank=0, alpha=0, target_modules=(), kind="full")
MERGED = structs.replace(ADAPTER, kind="merged", target_modules=("q_proj",))


@dataclass
class FakeEngine:
    """Scores a version so many nats below the base as its number says, half a nat more for a second adapter, and
    `NOISE_EFFECT` more with noise."""

    device, dtype, torch_dtype, vocab_size, max_model_len = "cpu", "float32", torch.float32, 10, 8
    asleep = False
    adapters: dict[int, Adapter] = field(default_factory=dict)
    loads: list[int | None] = field(default_factory=list)
    """Versions whose weights it was told to load; None is the base."""
    joined: list[int] = field(default_factory=list)
    """First ranks with which it joined trainers."""
    received: list[str] = field(default_factory=list)
    """Sessions of the announcements with which it received weights."""
    names: dict[str, Adapter | None] = field(default_factory=dict)
    error: float = 0.0
    """Added to every log-probability."""
    serves: float | None = None
    """Nats below the base, whatever it was told to load."""
    noise_effect: float = NOISE_EFFECT
    refuses: set[int | None] = field(default_factory=set)
    """Loading one of these fails, with the weights half replaced."""
    stuck: bool = False
    num_replicas: int = 1
    without_adapters: set[int] = field(default_factory=set)
    """Replicas that serve the base, whatever they are told."""
    num_forgotten: int = 0
    fault_text: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def score(
        self,
        token_ids: Sequence[int],
        adapter: Adapter | None,
        *,
        temperature: float = 1.0,
        priority: int = 0,
        replica: int | None = None,
    ) -> list[float]:
        if self.stuck:
            await asyncio.sleep(60)
        below = float((self.loads or [None])[-1] or 0)
        if adapter is not None:
            number, _, name = adapter.name.removeprefix("policy-v").removesuffix("+noise").partition("-")
            below = int(number) + 0.5 * bool(name) + self.noise_effect * adapter.noisy
        below = below if self.serves is None else self.serves
        below = 0.0 if replica in self.without_adapters else below
        return [-temperature - below + self.error] * (len(token_ids) - 1)

    async def score_answers(
        self,
        prompt: Sequence[int],
        answers: Sequence[Sequence[int]],
        adapter: Adapter | None,
        *,
        temperature: float = 1.0,
    ) -> list[float]:
        return [
            sum((await self.score([*prompt, *answer], adapter, temperature=temperature))[len(prompt) - 1 :])
            for answer in answers
        ]

    async def score_top(self, token_ids: Sequence[int], adapter: Adapter | None, **options: Any) -> Scored:
        num_top = options.pop("num_top")
        logprobs = await self.score(token_ids, adapter, **options)
        top = Top(token_ids=[[0] * num_top] * len(logprobs), logprobs=[[-9.0] * num_top] * len(logprobs))
        return Scored(version=None, logprobs=logprobs, top=top if num_top else None)

    async def generate(self, wanted: GenerateRequest, adapter: Adapter | None) -> list[Choice]:
        return [Choice(token_ids=[wanted.prompt_token_ids[-1]], logprobs=[-0.5], finish_reason="length")] * wanted.n

    async def add_adapter(self, adapter: Adapter) -> None:
        if int(adapter.name.removeprefix("policy-v").partition("-")[0].partition("+")[0]) in self.refuses:
            raise PolicyRefused("corrupt", "vLLM refused it: no such tensor")
        self.adapters[adapter.key] = adapter

    async def remove_adapter(self, adapter: Adapter) -> None:
        self.adapters.pop(adapter.key, None)

    async def forget_prefixes(self) -> None:
        self.num_forgotten += 1

    async def load_weights(self, folder: Path | None) -> None:
        version = None if folder is None else int(folder.name.removeprefix("step_"))
        self.loads.append(-9 if version in self.refuses else version)
        if version in self.refuses:
            raise EngineError("vLLM could not load the weights: out of memory")

    async def join_trainer(self, where: Rendezvous, *, rank_offset: int) -> None:
        self.joined.append(rank_offset)

    async def receive_weights(self, announcement: Announcement) -> None:
        self.received.append(announcement.session)
        self.loads.append(len(self.received) - 1)
        if len(self.received) - 1 in self.refuses:
            raise EngineError("vLLM could not load the weights: NCCL timed out")

    def offer(self, name: str, adapter: Adapter | None) -> None:
        self.names[name] = adapter

    def withdraw(self, adapter: Adapter) -> None:
        self.names = {name: known for name, known in self.names.items() if known != adapter}

    def forget_names(self) -> None:
        self.names.clear()

    def end(self, why: str) -> None:
        self.fault_text = why
        self.ended.set()

    def fault(self) -> EngineError:
        return EngineError(self.fault_text or "it has ended")

    async def or_end(self, work: Any) -> Any:
        return await work

    def load(self) -> ServerLoad:
        return ServerLoad(num_running=3, num_waiting=2, kv_use=0.5)


def table_of(
    engine: Any, run: RunFolder, base: BaseModel = BASE, *, fetched: Any = None, num_slots: int = 10
) -> VersionTable:
    options = {"tolerance": None, "timeout_s": 60.0, "num_slots": num_slots}
    return VersionTable(engine, base, output_dir=run.path, fetched=fetched, **options)


def canary_of(version: int, *, below: float | None = None, noisy: bool = False, **changes: Any) -> Canary:
    """Of a policy that is `below` the base by so many nats: its number, where None."""
    below = float(version) if below is None else below
    fields: dict[str, Any] = {"version": version, "token_ids": TOKENS, "dtype": "float32", "is_zero": below == 0}
    fields |= {"logprobs": (-1.0 - below,) * 2, "base_logprobs": (-1.0, -1.0)}
    fields["noisy_logprobs"] = (-1.0 - below - NOISE_EFFECT,) * 2 if noisy else None
    return Canary(**(fields | changes))


def adapter_files(spec: PolicySpec = ADAPTER, *, value: float = 0.1) -> dict[str, bytes]:
    """PEFT's two files of a right adapter."""
    tensors = {}
    for name, shape in SHAPES.items():
        if name.split(".")[-2] in spec.target_modules:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.full((spec.rank, shape[1]), value)
            tensors[f"{prefix}.lora_B.weight"] = torch.full((shape[0], spec.rank), value)
    config = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": [*spec.target_modules], "peft_type": "LORA"}
    return {ADAPTER_FILE: safetensors.torch.save(tensors), ADAPTER_CONFIG_FILE: json.dumps(config).encode()}


def noise_file(value: float = 1.1) -> bytes:
    return safetensors.torch.save({name: torch.full((size,), value) for name, size in NORMS.items()})


def weights_of(spec: PolicySpec, value: float = 0.5) -> dict[str, np.ndarray]:
    names = [name for name in SHAPES if spec.kind == "full" or name.split(".")[-2] in spec.target_modules]
    return {name: np.full(SHAPES[name], value, np.float32) for name in names}


def weight_files(content: Mapping[str, np.ndarray]) -> dict[str, Content]:
    weights = [
        Weight(name=n, dtype=a.dtype.name, shape=a.shape, tensor=lambda a=a: torch.from_numpy(a))  # type: ignore[misc]
        for n, a in content.items()
    ]
    return shard_files(weights, max_shard_bytes=100)


def announcement(shapes: Mapping[str, tuple[int, ...]] = SHAPES, *, session: str = "first") -> bytes:
    meeting = Rendezvous(host="localhost", port=29501, world_size=3)
    dtypes: Any = ("float32",) * len(shapes)
    told: dict[str, Any] = {"names": tuple(shapes), "dtypes": dtypes, "shapes": tuple(shapes.values())}
    return Announcement(rendezvous=meeting, session=session, **told).to_json()


def publish(
    run: RunFolder, version: int, spec: PolicySpec = ADAPTER, *, value: float = 0.1, **changes: Content | None
) -> Path:
    """A right version. `changes`: files by name with two underscores for the point, None takes one out."""
    files: dict[str, Content] = {CANARY_FILE: canary_of(version).to_json()}
    if spec.kind != "adapter":
        files |= weight_files(weights_of(spec, value))
    for place, _ in enumerate(spec.adapters or ("",) if spec.kind == "adapter" else ()):
        folder = f"adapters/{spec.adapters[place]}/" if place else ""
        own = adapter_files(spec, value=value)
        own[CANARY_FILE] = canary_of(version, below=version + 0.5 * place).to_json()
        files |= {f"{folder}{name}": data for name, data in own.items()}
    if spec is NOISY and version > 0:
        files |= {NOISE_FILE: noise_file(), CANARY_FILE: canary_of(version, noisy=True).to_json()}
    for name, data in changes.items():
        files.pop(name.replace("__", "."), None)
        files |= {} if data is None else {name.replace("__", "."): data}
    PolicyPublisher(run.broadcasts, run_id=run.run_id).publish(version=version, spec=spec, files=files)
    return run.broadcasts / f"step_{version:06d}"


def announce(
    run: RunFolder, version: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, *, session: str = "first"
) -> None:
    """A version whose weights are going to be broadcast."""
    files = {CANARY_FILE: canary_of(version).to_json(), ANNOUNCEMENT_FILE: announcement(shapes, session=session)}
    PolicyPublisher(run.broadcasts, run_id=run.run_id).publish(version=version, spec=FULL, files=files)
