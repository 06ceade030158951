"""Settings of `grpo-orch`, the orchestrator. docs/settings.md has them all."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from configs.common import (
    ProcessSettings,
    RolloutTransportSettings,
    Section,
    WeightBroadcastSettings,
    changed_fields,
)
from configs.rollouts import (
    AdvantageSettings,
    BufferSettings,
    FilterSettings,
    SamplingSettings,
    conflicts_of_filters,
)

EVAL_PREFIX = "eval:"
"""Tells an evaluation environment from a training one of the same name."""


class ModelSettings(Section):
    """The policy as the orchestrator must know it; checked against what server and trainer report."""

    name: str
    """Base model: a local folder, or a Hugging Face id that is in the local cache. Its tokenizer is used."""
    lora_adapter: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]+$")
    """Name under which the newest policy version is served to chat users."""
    lora_rank: PositiveInt = 16
    """Rank of the LoRA adapter; must equal the trainer's `lora_rank`."""
    lora_alpha: PositiveInt = 32
    """LoRA alpha; must equal the trainer's `lora_alpha`."""


class EnvSettings(Section):
    """One environment."""

    id: str
    """A built-in environment (`reverse-text`), or `module:Class` / `path/to/file.py:Class` of your own."""
    name: str | None = None
    """Name in metrics (null: the id)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.id


class ClientSettings(Section):
    """How the inference servers are reached."""

    base_url: tuple[str, ...] = Field(default=("http://localhost:8000/v1",), min_length=1)
    """One or more servers."""
    timeout: PositiveFloat = 1200.0
    """Seconds that one request may take, and that the start waits for each server."""
    api_key_var: str = "VLLM_API_KEY"
    """Name of the environment variable that holds the API key."""
    skip_model_check: bool = False
    """Do not compare the servers' base model with `model.name`."""


class EvalSettings(Section):
    """Greedy evaluation on held-out prompts, before the first and after the last step, and in between."""

    env: tuple[EnvSettings, ...] = ()
    """Environments to evaluate on (empty: the training ones). One that shares its name with a training environment,
    but not its arguments, is another environment, and both keep the name in their own metrics."""
    num_examples: int = Field(default=-1, ge=-1)
    """Held-out examples of each environment (-1: all, 0: no evaluation)."""
    interval: PositiveInt = 100
    """Evaluate every so many steps."""
    eval_base_model: bool = True
    """Evaluate version 0 too, before the first step."""


class OrchSettings(ProcessSettings):
    """Samples episodes from the servers, scores them, packs micro-batches for the trainer, relays new policies."""

    model_config = SettingsConfigDict(env_prefix="GRPO_ORCH_")
    role: ClassVar[str] = "orch"

    model: ModelSettings
    """The policy."""
    env: tuple[EnvSettings, ...] = Field(min_length=1)
    """Environments to train on."""
    output_dir: str = "outputs/run_default"
    """The run's folder, the same for all three programs."""
    run_id: str | None = None
    """Join the run of this id, which the launcher founded (null: the next run that a trainer founds)."""
    seed: int = 42
    """Seed of the order of examples, unless `buffer.seed` is set."""
    batch_size: PositiveInt = 128
    """Rollouts that one step trains on."""
    rollouts_per_example: PositiveInt = 1
    """Rollouts of one prompt: the group whose mean reward is the baseline."""
    seq_len: PositiveInt = 2048
    """Longest packed micro-batch in tokens, and so the longest sample; must equal the trainer's `sequence_len`."""
    max_steps: PositiveInt | None = None
    """Training steps (null: until stopped)."""
    max_async_level: NonNegativeInt = 1
    """How many steps sampling may run ahead of the newest policy version. 0 is strictly on-policy."""
    max_off_policy_steps: NonNegativeInt = 8
    """Largest version lag of a rollout when its batch ships. Sampling is paced so that none exceeds it."""
    oversampling_factor: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """How many times as many groups are on their way as the next batches lack, so that batches need not wait for slow
    groups; those ship later, within `max_off_policy_steps`, and none is lost."""
    sampling: SamplingSettings = SamplingSettings()
    """How rollouts are sampled."""
    buffer: BufferSettings = BufferSettings()
    """Which examples are asked, and which groups are trained."""
    advantage: AdvantageSettings = AdvantageSettings()
    """Advantages."""
    filters: tuple[FilterSettings, ...] = ()
    """Filters of rollouts that have gone astray."""
    client: ClientSettings = ClientSettings()
    """How the servers are reached."""
    eval: EvalSettings = EvalSettings()
    """Evaluation."""
    max_concurrent_groups: PositiveInt | None = None
    """Groups in flight at once (null: as many as one batch holds, times `oversampling_factor`)."""
    reward_timeout: PositiveFloat = 30.0
    """Seconds that an environment may take for one prompt or one reward before the rollout is dropped and counted. Once
    two in a row of a group were late, the rest of the group is dropped untried."""
    max_env_failure_rate: NonNegativeFloat = Field(default=0.5, le=1)
    """Share of failed rollouts, evaluation included, among the last `batch_size` of an environment above which the run
    stops with the environment's error. It stops also, whatever the share, where an evaluation fails whole, or where an
    environment is late 8 times in a row, or as often as fits into half of `wait_timeout`, but at least twice."""
    wait_timeout: PositiveFloat = 1200.0
    """Seconds to wait for the trainer's next version before the run is given up."""
    rollout_transport: RolloutTransportSettings = RolloutTransportSettings()
    """How batches leave."""
    weight_broadcast: WeightBroadcastSettings = WeightBroadcastSettings()
    """How policy versions arrive."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.rollouts_per_example == 1:
            yield "rollouts_per_example", "must be at least 2: the advantage of a group of one is always 0"
        if self.batch_size % self.rollouts_per_example:
            yield "batch_size", f"must be a multiple of rollouts_per_example = {self.rollouts_per_example}"
        yield from self.sampling.conflicts(seq_len=self.seq_len, max_steps=self.max_steps)
        yield from self.buffer.conflicts(num_envs=len(self.env))
        yield from self.advantage.conflicts(skip_verification=self.buffer.skip_verification)
        yield from conflicts_of_filters(self.filters, longest=self.sampling.max_tokens or self.seq_len - 1)
        if self.buffer.seed is not None and "seed" in changed_fields(self):
            yield "seed", "has no effect with buffer.seed; remove one of the two"
        if self.max_off_policy_steps < self.max_async_level:
            yield "max_off_policy_steps", f"must be at least max_async_level = {self.max_async_level}"
        if self.oversampling_factor > 1 and self.max_async_level == 0:
            yield (
                "oversampling_factor",
                "would train what is left over one version late, and max_async_level: 0 is strictly on-policy",
            )
        elif self.oversampling_factor > 1 and self.max_off_policy_steps == self.max_async_level:
            yield (
                "oversampling_factor",
                "has no effect with max_off_policy_steps = max_async_level: what is left over could not ship later",
            )
        yield from self.rollout_transport.conflicts()
        yield from self.weight_broadcast.conflicts_of_reader()
        yield from _labels_conflict("env", self.env)
        yield from _labels_conflict("eval.env", self.eval.env)


def _labels_conflict(key: str, environments: tuple[EnvSettings, ...]) -> Iterator[tuple[str, str]]:
    labels = [env.label for env in environments]
    for position, label in enumerate(labels):
        if label in labels[:position]:
            yield f"{key}.{position}.id", f"a second environment called {label}; give it a name of its own"
        if label.startswith(EVAL_PREFIX):
            yield f"{key}.{position}.name", f"must not begin with {EVAL_PREFIX}, which marks environments of evaluation"
