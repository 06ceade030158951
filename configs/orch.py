"""Settings of `grpo-orch`, the orchestrator. docs/settings.md has them all."""

import math
from typing import ClassVar, Literal

from grpo.configs.auxiliary import HintSettings, PreferenceSettings, TeacherSettings
from grpo.configs.client import ClientSettings
from grpo.configs.common import (
    AdapterName,
    Broadcast,
    Conflicts,
    FilesystemBroadcast,
    FilesystemTransport,
    Listed,
    ProcessSettings,
    ProofSettings,
    Seconds,
    Section,
    Share,
    Shared,
    TemplateArguments,
    Transport,
    adapter_conflicts,
    changed_keys,
)
from grpo.configs.evaluation import Environments, EvalSettings, label_conflicts
from grpo.configs.reporting import ReportSettings, TraceSettings
from grpo.configs.rollouts import (
    BATCH_ADVANTAGES,
    AdvantageSettings,
    BufferSettings,
    DefaultAdvantage,
    FilterSettings,
    RewardShapingSettings,
    SamplingSettings,
    fewest_rollouts,
    filter_conflicts,
)
from grpo.configs.train import CheckpointSettings
from pydantic import Field, NonNegativeInt, PositiveInt


class ModelSettings(Section):
    """The policy as the orchestrator must know it; compared with what server and trainer report."""

    name: str
    """Base model: a local folder or a Hugging Face id."""
    chat_template_kwargs: TemplateArguments = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`. Unused ones are refused."""
    lora_adapter: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the newest policy version for chat users."""
    lora_rank: PositiveInt = 16
    """As the trainer's `lora_rank`."""
    lora_alpha: PositiveInt = 32
    """As the trainer's `lora_alpha`."""
    lora_adapters: Listed[AdapterName] = ()
    """As the trainer's `lora_adapters`. Chat users get all but the first as `lora_adapter`-NAME."""


class ResumeSettings(CheckpointSettings):
    """Checkpoints, as the trainer has them, and what the orchestrator takes up when a run goes on."""

    wait_for_weights_timeout: Seconds | None = None
    """Seconds to wait for the version that a run continues with (null: `wait_timeout_s`)."""
    skip_progress: bool = False
    """The summary's totals restart; steps continue."""
    skip_buffer: bool = False
    """The order of examples restarts; which were easy, hard or in flight is forgotten."""


class OrchSettings(ProcessSettings, Shared):
    """The orchestrator. It samples episodes from the servers, scores them, packs micro-batches for the trainer, and has
    the servers load new policy versions."""

    role: ClassVar[str] = "orch"
    env_prefix: ClassVar[str] = "GRPO_ORCH_"

    model: ModelSettings
    """The policy."""
    env: Environments = ()
    """Environments to train on; an id alone stands for one."""
    arena: str | None = None
    """A schedule of your own, derived from `grpo.Arena`: `file.py:Class` or `module:Class` (null: examples of
    `env`)."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run in `output_dir` that an orchestrator has worked in goes on (`auto`) or is refused (`never`)."""
    resume_with_changed_code: bool = False
    """Continues although files that the settings name (environments, rewards, filters, data) have changed. false:
    refuse."""
    run_id: str | None = None
    """Id of the run to join, set by the launcher (null: the one in `output_dir`)."""
    batch_size: PositiveInt = 128
    """Rollouts in a step."""
    rollouts_per_example: PositiveInt = 8
    """Rollouts of each prompt (a group); their mean reward is the baseline."""
    seq_len: PositiveInt = 2048
    """Longest sample in tokens, as the trainer's `sequence_len`."""
    micro_batch_tokens: PositiveInt | None = None
    """Largest micro-batch in tokens, as the trainer's (null: `seq_len`)."""
    max_steps: PositiveInt | None = None
    """Number of training steps (null: until stopped)."""
    max_async_level: NonNegativeInt = 1
    """Steps that sampling may run ahead of the newest version; 0 is strictly on-policy."""
    max_off_policy_steps: NonNegativeInt = 8
    """Largest version lag of a rollout when its batch ships; sampling is paced accordingly."""
    inflight_weight_updates: bool = False
    """Answers in progress continue under a new version. A rollout's lag is that of its oldest token."""
    oversampling_factor: float = Field(default=1.0, ge=1, le=100)
    """Samples this many times the groups that the next batches need, so none waits for slow ones."""
    max_opponents: NonNegativeInt = 0
    """Earlier versions that one version's games may meet. `grpo` multiplies the servers' `max_loras` by 1 +
    `max_opponents`."""
    sampling: SamplingSettings = SamplingSettings()
    """How rollouts are sampled."""
    buffer: BufferSettings = BufferSettings()
    """Which examples are asked, and which groups are trained."""
    advantage: AdvantageSettings = DefaultAdvantage()
    """How rewards become advantages."""
    reward_shaping: RewardShapingSettings = RewardShapingSettings()
    """What is taken off rewards before."""
    filters: tuple[FilterSettings, ...] = ()
    """Filters of degenerate rollouts."""
    teacher_model: TeacherSettings | None = None
    """Teacher of on-policy distillation; needed with `loss.teacher_tau` above 0 (null: none)."""
    hints: HintSettings = HintSettings()
    """Hints for errors, with the trainer's `loss.alpha_sdpo` above 0."""
    preferences: PreferenceSettings = PreferenceSettings()
    """Preference pairs from teachers, with the trainer's `loss.beta_replay` above 0."""
    ckpt: ResumeSettings = ResumeSettings()
    """What is taken up when a run goes on."""
    client: ClientSettings = ClientSettings()
    """How the servers are reached."""
    eval: EvalSettings = EvalSettings()
    """Evaluation on held-out prompts."""
    traces: TraceSettings = TraceSettings()
    """Every rollout token by token, in Parquet files, and how much of that is kept."""
    report_to: ReportSettings | None = None
    """Reports to Weights & Biases or TensorBoard (null: nothing leaves the machine)."""
    max_concurrent_groups: PositiveInt | None = None
    """Groups in flight at once (null: a batch's, times `oversampling_factor`)."""
    reward_timeout_s: Seconds = 30.0
    """Seconds that an environment may take for a prompt or reward; then the rollout is dropped."""
    max_env_failure_rate: Share = 0.5
    """The run stops if a larger share of an environment's last `batch_size` rollouts failed, or a whole evaluation, or
    `batch_size` rollouts (at least 32) in a row."""
    wait_timeout_s: Seconds = 1200.0
    """Seconds to wait for the trainer's next version."""
    rollout_transport: Transport = FilesystemTransport()
    """How batches leave, as the trainer's `rollout_transport`."""
    weight_broadcast: Broadcast = FilesystemBroadcast()
    """How policy versions arrive, as the trainer's `weight_broadcast`."""
    proofs: ProofSettings = ProofSettings()
    """Proofs of what was sampled and trained."""

    @property
    def pack_tokens(self) -> int:
        """Largest micro-batch in tokens."""
        return self.micro_batch_tokens or self.seq_len

    @property
    def groups_per_batch(self) -> int:
        """Groups that one step trains on. All rollouts of an arena's step are one."""
        return 1 if self.arena is not None else self.batch_size // self.rollouts_per_example

    @property
    def most_concurrent_groups(self) -> int:
        """Groups that may be in flight at once."""
        return self.max_concurrent_groups or math.ceil(self.oversampling_factor * self.groups_per_batch)

    @property
    def longest_held_out(self) -> int | None:
        """Longest held-out answer in tokens; None for what the context leaves."""
        return self.eval.sampling.max_tokens or self.sampling.max_tokens

    def conflicts(self) -> Conflicts:
        if self.rollouts_per_example < fewest_rollouts(self.advantage):
            yield "rollouts_per_example", "must be at least 2: the advantage of a group of one is always 0"
        if self.batch_size % self.rollouts_per_example:
            yield "batch_size", f"must be a multiple of rollouts_per_example = {self.rollouts_per_example}"
        if bool(self.env) == (self.arena is not None):
            yield "env", "must name environments, as --env FILE:CLASS, or arena a schedule of your own; one of the two"
        if self.arena is not None:
            yield from self._arena_conflicts()
        yield from self._length_conflicts()
        yield from self._pace_conflicts()
        yield from self._environment_conflicts()
        if self.buffer.skip_verification:
            yield from self._reward_conflicts()
        if self.weight_broadcast.type == "nccl" and self.client.elastic is not None:
            yield "client.elastic", "cannot be had with weight_broadcast.type: nccl, where no server can join late"

    def _arena_conflicts(self) -> Conflicts:
        """Yields settings that an arena decides itself."""
        for key in ("buffer", "eval", "rollouts_per_example", "oversampling_factor", "max_concurrent_groups"):
            for idle in changed_keys(getattr(self, key), key) if key in self.changed else ():
                yield idle, f"has no effect with arena = {self.arena}; remove it"

    def _length_conflicts(self) -> Conflicts:
        max_tokens = self.sampling.max_tokens
        for key, tokens in (("sampling", max_tokens), ("eval.sampling", self.eval.sampling.max_tokens)):
            if tokens is not None and tokens >= self.seq_len:
                yield f"{key}.max_tokens", f"leaves no room for a prompt in seq_len = {self.seq_len}"
        if self.pack_tokens < self.seq_len:
            yield "micro_batch_tokens", f"must hold the longest sample, of seq_len = {self.seq_len} tokens"
        if self.sampling.temp_scheduler is not None and (self.max_steps is None or self.max_steps < 2):
            yield "sampling.temp_scheduler", "needs max_steps of at least 2, to know where it ends; set max_steps"
        interval = self.reward_shaping.overlong_interval
        if interval is not None and (max_tokens is None or interval > max_tokens):
            yield "reward_shaping.overlong_interval", f"needs sampling.max_tokens of at least {interval}; set that"
        yield from filter_conflicts(self.filters, longest=max_tokens or self.seq_len - 1)

    def _pace_conflicts(self) -> Conflicts:
        if self.max_off_policy_steps < self.max_async_level:
            yield "max_off_policy_steps", f"must be at least max_async_level = {self.max_async_level}"
        if self.oversampling_factor > 1 and self.max_off_policy_steps == self.max_async_level:
            yield "oversampling_factor", "needs max_off_policy_steps above max_async_level: the rest ships later"
        elif self.oversampling_factor > 1 and self.max_async_level == 0:
            yield "oversampling_factor", "trains the rest one version late, which max_async_level: 0 forbids"
        if self.max_opponents and (kind := self.weight_broadcast.format) != "adapter":
            why = f"{kind} versions replace the model's own weights, so that servers hold no earlier one"
            yield "max_opponents", f"must be 0 with weight_broadcast.format: {kind}: {why}; train adapters (lora: true)"
        if self.inflight_weight_updates and self.max_async_level == 0:
            yield "inflight_weight_updates", "has no effect with max_async_level: 0: nothing is sampled meanwhile"
        if self.sleep_mode and self.max_async_level > 0:
            why = "with batches in advance there is always something to sample while the trainer steps"
            yield "sleep_mode", f"needs max_async_level: 0, not {self.max_async_level}: {why}"

    def _environment_conflicts(self) -> Conflicts:
        """Environments of one name, their ratios, and adapters of their roles that the run has not."""
        yield from label_conflicts("env", self.env)
        if (ratios := self.buffer.env_ratios) is not None and (len(ratios) != len(self.env) or len(ratios) == 1):
            yield "buffer.env_ratios", f"has {len(ratios)} numbers for {len(self.env)} environments; give each one"
        names, envs = self.model.lora_adapters, {"env": self.env, "eval.env": self.eval.env}
        for key, position, env in [(key, *one) for key, some in envs.items() for one in enumerate(some)]:
            if unknown := sorted(set(env.adapters.values()) - set(names)):
                there = ", ".join(names) or "none"
                yield f"{key}.{position}.adapters", f"{', '.join(unknown)} must be among model.lora_adapters: {there}"
        yield from adapter_conflicts("model.lora_adapters", names)
        if len(names) > 1 and (idle := set(names[1:]).difference(*(env.adapters.values() for env in self.env))):
            yield "model.lora_adapters", f"no role has {', '.join(sorted(idle))}; give it one by env[].adapters"

    def _reward_conflicts(self) -> Conflicts:
        """Yields settings that need rewards, where they are all 0."""
        why = "with buffer.skip_verification: true, where all rewards are 0"
        if self.advantage.type == "default" and self.advantage.length_weighted_mean:
            yield "advantage.length_weighted_mean", f"has no effect {why}; remove it"
        if self.advantage.type in ("normalized", "leave_one_out", "episodic", *BATCH_ADVANTAGES):
            yield "advantage.type", f"{self.advantage.type} has no effect {why}; remove it"
        if self.preferences.teachers and "low_reward" in self.preferences.select:
            yield "preferences.select", f"low_reward names no turn {why}; name others, for example all"
        if "sibling" in self.hints.sources:
            yield "hints.sources", f"sibling finds nobody who succeeded {why}; remove it"
