"""Settings of `grpo-orch`, the orchestrator. docs/settings.md has them all."""

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_settings import SettingsConfigDict

from configs.channels import HintSettings, PreferenceSettings, TeacherSettings
from configs.client import ClientSettings
from configs.common import (
    ProcessSettings,
    RolloutTransportSettings,
    Section,
    WeightBroadcastSettings,
    changed_fields,
    conflicts_of_adapters,
)
from configs.evaluation import EnvSettings, EvalSettings, conflicts_of_labels, conflicts_of_roles
from configs.reporting import ConversationSettings, ReportSettings
from configs.rollouts import (
    AdvantageSettings,
    BufferSettings,
    FilterSettings,
    SamplingSettings,
    conflicts_of_filters,
)


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
    lora_adapters: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")], ...] = ()
    """Names of several adapters, for roles that shall not share one; must equal the trainer's `lora_adapters` (empty:
    one adapter for all). Chat users get the newest version of each but the first as `lora_adapter`-NAME."""


class ResumeSettings(Section):
    """Going on with a run. When there is a checkpoint, the trainer says; the orchestrator adds its part to each."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Go back to the checkpoint after this step, the same as the trainer's (-1 or null: go on after the newest batch
    that the trainer has or can have)."""
    wait_for_weights_timeout: PositiveFloat | None = None
    """Seconds to wait for the trainer's version to go on with (null: `wait_timeout_s`)."""
    skip_progress: bool = False
    """Begin the totals of the summary anew at each start. The steps are counted on."""
    skip_buffer: bool = False
    """Begin the order of examples anew at each start: none is easy or hard, and what was in flight is not asked
    first."""


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
    """Join the run of this id, which the launcher founded (null: the one in `output_dir`)."""
    resume: Literal["auto", "never"] = "auto"
    """Where an orchestrator has worked in the run in `output_dir` before: `auto` goes on with it, `never` refuses."""
    seed: int = 42
    """Seed of all that is drawn at random here but what servers sample: the order of examples (unless `buffer.seed` is
    set), environments' own draws, and which turns teachers are asked about."""
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
    inflight_weight_updates: bool = False
    """Let answers that are being sampled when a new policy version becomes live go on under it, instead of ending under
    the version they began with. What has been computed under the earlier version is not used again; each token is
    trained with the version and the log-probability that it was sampled under. The lag of a rollout is that of its
    oldest token."""
    sleep_mode: bool = False
    """Put all servers to sleep (`sleep_mode` of grpo-infer) before a batch leaves for the trainer, and wake them when
    the next version is there, so that both use the memory of one GPU in turns. Needs `max_async_level: 0`."""
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
    teacher_model: TeacherSettings | None = None
    """A teacher whose log-probabilities go with every batch; needed with the trainer's `loss.teacher_tau` above 0."""
    hints: HintSettings = HintSettings()
    """Hints for what went wrong, with the trainer's `loss.alpha_sdpo` above 0."""
    preferences: PreferenceSettings = PreferenceSettings()
    """Preference pairs from teachers' disagreement with the policy, with the trainer's `loss.beta_replay` above 0."""
    ckpt: ResumeSettings = ResumeSettings()
    """Going on with a run."""
    client: ClientSettings = ClientSettings()
    """How the servers are reached."""
    eval: EvalSettings = EvalSettings()
    """Evaluation."""
    conversations: ConversationSettings = ConversationSettings()
    """What is kept of rollouts to be read."""
    report_to: ReportSettings | None = None
    """Report to Weights & Biases (null: nothing leaves the machine)."""
    max_concurrent_groups: PositiveInt | None = None
    """Groups in flight at once (null: as many as one batch holds, times `oversampling_factor`)."""
    min_concurrent_groups: PositiveInt | None = None
    """Let the groups in flight follow what the servers say about their queues and KV caches: from this number, by a
    twentieth at a time while no server is crowded, up to `max_concurrent_groups`; down, and never below this number,
    while one is (null: always `max_concurrent_groups`)."""
    reward_timeout_s: PositiveFloat = 30.0
    """Seconds that an environment may take for one prompt or one reward before the rollout is dropped and counted. Once
    two in a row of a group were late, the rest of the group is dropped untried."""
    max_env_failure_rate: NonNegativeFloat = Field(default=0.5, le=1)
    """Share of failed rollouts, evaluation included, among the last `batch_size` of an environment above which the run
    stops with the environment's error. It stops also, whatever the share, where an evaluation fails whole, or where an
    environment is late 8 times in a row, or as often as fits into half of `wait_timeout_s`, but at least twice."""
    wait_timeout_s: PositiveFloat = 1200.0
    """Seconds to wait for the trainer's next version before the run is given up."""
    rollout_transport: RolloutTransportSettings = RolloutTransportSettings()
    """How batches leave."""
    weight_broadcast: WeightBroadcastSettings = WeightBroadcastSettings()
    """How policy versions arrive."""

    @property
    def most_concurrent_groups(self) -> int:
        """Groups that may be in flight at once, whatever the servers say."""
        groups_per_batch = self.batch_size // self.rollouts_per_example
        return self.max_concurrent_groups or math.ceil(self.oversampling_factor * groups_per_batch)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.rollouts_per_example < self.advantage.fewest_rollouts:
            yield "rollouts_per_example", "must be at least 2: the advantage of a group of one is always 0"
        if self.batch_size % self.rollouts_per_example:
            yield "batch_size", f"must be a multiple of rollouts_per_example = {self.rollouts_per_example}"
        yield from self.sampling.conflicts(seq_len=self.seq_len, max_steps=self.max_steps)
        yield from self.buffer.conflicts(num_envs=len(self.env))
        yield from self.advantage.conflicts(skip_verification=self.buffer.skip_verification)
        yield from conflicts_of_filters(self.filters, longest=self.sampling.max_tokens or self.seq_len - 1)
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
        if self.inflight_weight_updates and self.max_async_level == 0:
            yield (
                "inflight_weight_updates",
                "has no effect with max_async_level: 0: nothing is being sampled when a version becomes live",
            )
        if self.sleep_mode:
            yield from self._conflicts_of_turns()
        if self.teacher_model is not None:
            yield from self.teacher_model.conflicts()
        yield from self.hints.conflicts()
        yield from self.preferences.conflicts()
        if self.buffer.skip_verification:
            yield from self._conflicts_of_reward()
        if self.resume == "never":
            yield from self._conflicts_of_new_run()
        if self.resume == "never" or self.ckpt.skip_buffer:
            yield from self.buffer.conflicts_of_new_run()
        yield from self.client.conflicts(broadcast_type=self.weight_broadcast.type)
        if self.min_concurrent_groups is not None and self.min_concurrent_groups >= self.most_concurrent_groups:
            yield (
                "min_concurrent_groups",
                f"has no effect unless it is less than max_concurrent_groups, here {self.most_concurrent_groups}",
            )
        yield from self.rollout_transport.conflicts()
        yield from self.weight_broadcast.conflicts_of_reader()
        yield from conflicts_of_labels("env", self.env)
        yield from self._conflicts_of_adapters()
        yield from self.eval.conflicts(seq_len=self.seq_len)
        yield from self.conversations.conflicts()
        if self.report_to is not None:
            yield from self.report_to.conflicts()

    def _conflicts_of_new_run(self) -> Iterator[tuple[str, str]]:
        """Of a run that is never gone on with."""
        for name in sorted(changed_fields(self.ckpt)):
            yield f"ckpt.{name}", "has no effect with resume: never; remove one of the two"
        if "skip_eval_on_resume" in changed_fields(self.eval):
            yield "eval.skip_eval_on_resume", "has no effect with resume: never; remove one of the two"

    def _conflicts_of_turns(self) -> Iterator[tuple[str, str]]:
        if self.max_async_level > 0:
            yield (
                "sleep_mode",
                f"needs max_async_level: 0, not {self.max_async_level}: with batches in advance there is always "
                "something to sample while the trainer steps",
            )
        if self.weight_broadcast.type == "nccl":
            yield "sleep_mode", "is for one device, and weight_broadcast.type: nccl for several; use filesystem"

    def _conflicts_of_adapters(self) -> Iterator[tuple[str, str]]:
        names = self.model.lora_adapters
        yield from conflicts_of_roles("env", self.env, names)
        yield from conflicts_of_roles("eval.env", self.eval.env, names)
        if not names:
            return
        yield from conflicts_of_adapters("model.lora_adapters", names)
        trained = {name for env in self.env for name in env.adapters.values()}
        if idle := sorted(set(names[1:]) - trained):
            yield (
                "model.lora_adapters",
                f"no role has {', '.join(idle)}; give it to one by env[].adapters, or remove it",
            )

    def _conflicts_of_reward(self) -> Iterator[tuple[str, str]]:
        """Of channels, where all rewards are 0."""
        why = "with buffer.skip_verification: true, where all rewards are 0"
        low, select = self.preferences.low_reward_below, self.preferences.select
        if self.preferences.teachers and "low_reward" in select and not (low is not None and low > 0):
            yield "preferences.select", f"low_reward names no turn {why}; name others, for example all"
        if "sibling" in self.hints.sources:
            yield "hints.sources", f"sibling finds nobody who succeeded {why}; remove it"
