"""Settings of `grpo-orch`, the orchestrator. docs/settings.md has them all."""

import math
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from configs.auxiliary import HintSettings, PreferenceSettings, TeacherSettings
from configs.client import ClientSettings
from configs.common import (
    AdapterName,
    Conflicts,
    FilesystemSending,
    ProcessSettings,
    ReadBroadcast,
    Seconds,
    Section,
    Seed,
    Sending,
    adapter_conflicts,
    changed_fields,
)
from configs.evaluation import EnvIdentity, EnvSettings, EvalSettings, HeldOut, label_conflicts, role_conflicts
from configs.reporting import ReportSettings, TraceSettings
from configs.rollouts import (
    AdvantageSettings,
    BufferSettings,
    DefaultAdvantage,
    FilterSettings,
    SamplingSettings,
    fewest_rollouts,
    filter_conflicts,
)


class ModelSettings(Section):
    """The policy as the orchestrator must know it; compared with what server and trainer report."""

    name: str
    """Base model: a local folder or a Hugging Face id. Its tokenizer is used."""
    lora_adapter: str = Field(default="default", pattern=r"^[A-Za-z0-9._-]+$")
    """Name under which chat users get the newest policy version."""
    lora_rank: PositiveInt = 16
    """Rank of the LoRA adapter, as the trainer's `lora_rank`."""
    lora_alpha: PositiveInt = 32
    """LoRA alpha, as the trainer's `lora_alpha`."""
    lora_adapters: tuple[AdapterName, ...] = ()
    """Names of several adapters, as the trainer's `lora_adapters` (empty: one adapter for all). Chat users get the
    newest version of each but the first as `lora_adapter`-NAME."""


class ResumeSettings(Section):
    """What the orchestrator takes up when a run goes on. The trainer says when there is a checkpoint."""

    resume_step: int | None = Field(default=None, ge=-1)
    """The run goes back to the checkpoint of this step, as the trainer's `ckpt.resume_step` (-1: the newest one)."""
    wait_for_weights_timeout: Seconds | None = None
    """Seconds to wait for the trainer's version to go on with (null: `wait_timeout_s`)."""
    skip_progress: bool = False
    """The totals of the summary begin anew; the steps are counted on."""
    skip_buffer: bool = False
    """The order of examples begins anew: none is easy or hard, and what was in flight is not asked first."""


class OrchSettings(ProcessSettings):
    """The orchestrator. It samples episodes from the servers, scores them, packs micro-batches for the trainer, and has
    the servers load new policy versions."""

    role: ClassVar[str] = "orch"
    env_prefix: ClassVar[str] = "GRPO_ORCH_"

    model: ModelSettings
    """The policy."""
    env: tuple[EnvSettings, ...] = Field(min_length=1)
    """Environments to train on."""
    output_dir: str = Field(default="outputs/run_default", min_length=1)
    """The run's folder, the same for all programs."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run in `output_dir` that an orchestrator has worked in goes on (`auto`) or is refused (`never`)."""
    run_id: str | None = None
    """Id of the run to join, which the launcher gives (null: the one in `output_dir`)."""
    seed: Seed = 42
    """Seed of the order of examples (unless `buffer.seed` is set), of environments, and of what teachers are asked
    about."""
    batch_size: PositiveInt = 128
    """Number of rollouts that one step trains on."""
    rollouts_per_example: PositiveInt = 1
    """Number of rollouts of one prompt, whose mean reward is the baseline."""
    seq_len: PositiveInt = 2048
    """Longest packed micro-batch in tokens, and so the longest sample, as the trainer's `sequence_len`."""
    max_steps: PositiveInt | None = None
    """Number of training steps (null: until stopped)."""
    max_async_level: NonNegativeInt = 1
    """How many steps sampling may run ahead of the newest policy version; 0 is strictly on-policy."""
    max_off_policy_steps: NonNegativeInt = 8
    """Largest version lag of a rollout when its batch ships; sampling is paced so that none exceeds it."""
    inflight_weight_updates: bool = False
    """Answers that are being sampled when a new policy version becomes live go on under it. Each token is trained with
    the version and the log-probability that it was sampled under; a rollout's lag is that of its oldest token."""
    sleep_mode: bool = False
    """The servers sleep while the trainer steps, so that both use the memory of one GPU in turns; all programs need
    `sleep_mode`, and it needs `max_async_level: 0`."""
    oversampling_factor: float = Field(default=1.0, ge=1, le=100)
    """How many times as many groups are sampled as the next batches lack, so that no batch waits for slow groups; those
    ship later, within `max_off_policy_steps`."""
    sampling: SamplingSettings = SamplingSettings()
    """How rollouts are sampled."""
    buffer: BufferSettings = BufferSettings()
    """Which examples are asked, and which groups are trained."""
    advantage: AdvantageSettings = DefaultAdvantage()
    """How rewards become advantages."""
    filters: tuple[FilterSettings, ...] = ()
    """Filters of degenerate rollouts."""
    teacher_model: TeacherSettings | None = None
    """Teacher of on-policy distillation; needed with the trainer's `loss.teacher_tau` above 0 (null: none)."""
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
    """Conversations that are kept to be read."""
    report_to: ReportSettings | None = None
    """Reports to Weights & Biases (null: nothing leaves the machine)."""
    max_concurrent_groups: PositiveInt | None = None
    """Number of groups in flight at once (null: as many as a batch holds, times `oversampling_factor`)."""
    min_concurrent_groups: PositiveInt | None = None
    """The number of groups in flight follows the servers' queues and KV caches, between this and
    `max_concurrent_groups` (null: it is always the latter)."""
    reward_timeout_s: Seconds = 30.0
    """Seconds that an environment may take for one prompt or reward before the rollout is dropped and counted. Once two
    in a row of a group were late, the rest of the group is dropped untried."""
    max_env_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of failed rollouts among the last `batch_size` of an environment above which the run stops with its error.
    It stops also where an evaluation fails whole, or an environment is late 8 times in a row, or as often as fits into
    half of `wait_timeout_s`, but at least twice."""
    wait_timeout_s: Seconds = 1200.0
    """Seconds to wait for the trainer's next version before the run is given up."""
    rollout_transport: Sending = FilesystemSending()
    """How batches leave."""
    weight_broadcast: ReadBroadcast = ReadBroadcast()
    """How policy versions arrive."""

    @property
    def most_concurrent_groups(self) -> int:
        """Groups that may be in flight at once, whatever the servers say."""
        groups_per_batch = self.batch_size // self.rollouts_per_example
        return self.max_concurrent_groups or math.ceil(self.oversampling_factor * groups_per_batch)

    @property
    def held_out(self) -> list[HeldOut]:
        """The environments that are evaluated."""
        return self.eval.held_out(self.env, max_tokens=self.sampling.max_tokens)

    @property
    def environments(self) -> dict[str, EnvIdentity]:
        """All environments by the key of their workers; one of evaluation that equals a training one is that."""
        return {one.key: one for one in self.held_out} | {env.label: env for env in self.env}

    def conflicts(self) -> Conflicts:
        if self.rollouts_per_example < fewest_rollouts(self.advantage):
            yield "rollouts_per_example", "must be at least 2: the advantage of a group of one is always 0"
        if self.batch_size % self.rollouts_per_example:
            yield "batch_size", f"must be a multiple of rollouts_per_example = {self.rollouts_per_example}"
        if self.min_concurrent_groups is not None and self.min_concurrent_groups >= self.most_concurrent_groups:
            most = f"max_concurrent_groups, here {self.most_concurrent_groups}"
            yield "min_concurrent_groups", f"has no effect unless it is less than {most}"
        yield from self._length_conflicts()
        yield from (("buffer." + key, message) for key, message in self.buffer.env_conflicts(len(self.env)))
        yield from self._pace_conflicts()
        yield from label_conflicts("env", self.env)
        yield from self._adapter_conflicts()
        if self.buffer.skip_verification:
            yield from self._reward_conflicts()
        yield from self._resume_conflicts()
        if self.weight_broadcast.type == "nccl":
            if self.sleep_mode:
                yield "sleep_mode", "is for one device, and weight_broadcast.type: nccl for several; use filesystem"
            if self.client.elastic is not None:
                yield "client.elastic", "cannot be had with weight_broadcast.type: nccl, where no server can join late"

    def _length_conflicts(self) -> Conflicts:
        max_tokens, scheduler = self.sampling.max_tokens, self.sampling.temp_scheduler
        if max_tokens is not None and max_tokens >= self.seq_len:
            yield "sampling.max_tokens", f"leaves no room for a prompt in seq_len = {self.seq_len}"
        if scheduler is not None and (self.max_steps is None or self.max_steps < 2):
            yield "sampling.temp_scheduler", "needs max_steps of at least 2, to know where it ends; set max_steps"
        yield from filter_conflicts(self.filters, longest=max_tokens or self.seq_len - 1)
        yield from (("eval." + key, message) for key, message in self.eval.length_conflicts(self.seq_len))

    def _pace_conflicts(self) -> Conflicts:
        if self.max_off_policy_steps < self.max_async_level:
            yield "max_off_policy_steps", f"must be at least max_async_level = {self.max_async_level}"
        if self.oversampling_factor > 1 and self.max_async_level == 0:
            why = "would train what is left over one version late, and max_async_level: 0 is strictly on-policy"
            yield "oversampling_factor", why
        elif self.oversampling_factor > 1 and self.max_off_policy_steps == self.max_async_level:
            why = "has no effect with max_off_policy_steps = max_async_level: what is left over could not ship later"
            yield "oversampling_factor", why
        if self.inflight_weight_updates and self.max_async_level == 0:
            why = "has no effect with max_async_level: 0: nothing is being sampled when a version becomes live"
            yield "inflight_weight_updates", why
        if self.sleep_mode and self.max_async_level > 0:
            why = "with batches in advance there is always something to sample while the trainer steps"
            yield "sleep_mode", f"needs max_async_level: 0, not {self.max_async_level}: {why}"

    def _resume_conflicts(self) -> Conflicts:
        if self.resume == "never":
            for key in [*(f"ckpt.{name}" for name in sorted(changed_fields(self.ckpt))), "eval.skip_eval_on_resume"]:
                if key.startswith("ckpt.") or "skip_eval_on_resume" in changed_fields(self.eval):
                    yield key, "has no effect with resume: never; remove one of the two"
        if self.resume == "never" or self.ckpt.skip_buffer:
            for key in ("easy_fraction", "hard_fraction"):
                if getattr(self.buffer, key) > 0:
                    why = "has no effect where the order of examples begins anew, and none is easy or hard yet"
                    yield f"buffer.{key}", f"{why}; remove it"

    def _adapter_conflicts(self) -> Conflicts:
        names = self.model.lora_adapters
        yield from role_conflicts("env", self.env, names)
        yield from role_conflicts("eval.env", self.eval.env, names)
        if not names:
            return
        yield from adapter_conflicts("model.lora_adapters", names)
        trained = {name for env in self.env for name in env.adapters.values()}
        if idle := sorted(set(names[1:]) - trained):
            mend = "give it to one by env[].adapters, or remove it"
            yield "model.lora_adapters", f"no role has {', '.join(idle)}; {mend}"

    def _reward_conflicts(self) -> Conflicts:
        """What needs rewards, where they are all 0."""
        why = "with buffer.skip_verification: true, where all rewards are 0"
        if self.advantage.type == "default" and self.advantage.length_weighted_mean:
            yield "advantage.length_weighted_mean", f"has no effect {why}; remove it"
        if self.advantage.type in ("normalized", "leave_one_out", "episodic"):
            yield "advantage.type", f"{self.advantage.type} has no effect {why}; remove it"
        if self.preferences.teachers and "low_reward" in self.preferences.select:
            yield "preferences.select", f"low_reward names no turn {why}; name others, for example all"
        if "sibling" in self.hints.sources:
            yield "hints.sources", f"sibling finds nobody who succeeded {why}; remove it"
