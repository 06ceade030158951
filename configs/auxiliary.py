"""Settings of what the policy learns from besides rewards: a teacher, hints, and teachers that disagree with it.

Each is switched on by its weight in the trainer's `loss`, and off by a weight of 0, whatever is set here.
"""

from typing import Annotated, Any, Literal

from grpo.configs.common import Conflicts, Listed, OnlyWith, Seconds, Section
from pydantic import Field, NonNegativeInt, PositiveInt

Cost = Annotated[float, Field(ge=0, le=1e9)]


class TeacherModelSettings(Section):
    """The model that teaches."""

    name: str | None = None
    """A local folder or a Hugging Face id; on servers with only OpenAI's routes also the name there."""
    tokenizer: str | None = None
    """Folder or id of its tokenizer, which must be the policy's (null: that of `name`)."""


class TeacherClientSettings(Section):
    """How the teacher's servers are reached."""

    base_url: Listed[str] | None = None
    """Addresses of its servers: grpo-infer or any vLLM (null: `grpo` starts one)."""
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the servers' API key."""
    timeout: Seconds = 120.0
    """Seconds that scoring a sample may take, with retries; then it is dropped."""


class TeacherSettings(Section):
    """The teacher of on-policy distillation: its log-probabilities of the sampled tokens go with every batch. Switched
    on by the trainer's `loss.teacher_tau`. It is either `model.name` or the model before training."""

    model: TeacherModelSettings = TeacherModelSettings()
    """The model that teaches."""
    reference: bool = False
    """The teacher is the model before training, on the run's servers (false: `model.name`)."""
    client: TeacherClientSettings = TeacherClientSettings()
    """How the servers of `model.name` are reached."""

    def conflicts(self) -> Conflicts:
        if not self.reference and self.model.name is None:
            yield "model.name", "is needed, or teacher_model.reference; name the model that teaches"
        elif self.reference:
            idle = [f"model.{key}" for key in self.model.changed]
            for key in sorted([*idle, *(f"client.{key}" for key in self.client.changed)]):
                yield (
                    key,
                    "has no effect with teacher_model.reference, where the run's own servers are asked; remove it",
                )


class PriceSettings(Section):
    """The price of a million tokens, in a currency of your choice, the same for all."""

    prompt: Cost = 0.0
    """Price of a million prompt tokens."""
    completion: Cost = 0.0
    """Price of a million answer tokens."""


class ApiSettings(Section):
    """A model behind an OpenAI-compatible API."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Its name in metrics, pairs and messages."""
    base_url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of the API, with its `/v1` (null: the run's servers)."""
    model: str | None = None
    """Name at the API (null: the policy's base model, on the run's servers)."""
    api_key_var: Annotated[str | None, OnlyWith("base_url")] = None
    """Environment variable with the key (null: none; on the run's servers `client.api_key_var`)."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 0.0
    """Sampling temperature (null: the API's default)."""
    max_tokens: PositiveInt = 1024
    """Longest answer in tokens."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """That field's name in requests."""
    extra: dict[str, Any] = {}
    """More fields of every request."""
    price: PriceSettings = PriceSettings()
    """What its tokens cost."""
    timeout_s: Seconds = 60.0
    """Seconds that a request may take."""
    retries: NonNegativeInt = 3
    """Retries after a temporary failure."""
    requests_per_s: float = Field(default=8.0, gt=0, le=1e6)
    """Most requests a second on average."""

    def conflicts(self) -> Conflicts:
        if self.base_url is not None and self.model is None:
            yield "model", "is needed with base_url; give the model's name there"


HintSource = Literal["templates", "environment", "sibling", "model", "solution"]


class HintSettings(Section):
    """Hints for the answers that environments mark as errors: the policy without the hint learns from itself with it
    (SDPO). Switched on by the trainer's `loss.alpha_sdpo`, or by `advantage_weight`."""

    sources: Listed[HintSource] = Field(default=("templates", "environment"), min_length=1)
    """Where hints come from; the first with a text is used. `templates`: texts by the error's key or kind.
    `environment`: what it said. `sibling`: the group's best answer from the same point. `model`: written by `model`.
    `solution`: the example's `solution`, for every answer."""
    templates: Annotated[str | None, OnlyWith("sources", "templates")] = None
    """YAML or JSON file of texts by `hint_template_key` or `error_kind`, added to the built-in ones; null removes
    one."""
    max_per_sample: PositiveInt | None = None
    """Errors of a sample that get hints, the first ones (null: all)."""
    advantage_weight: float = Field(default=0.0, ge=0, le=1e3)
    """Weight of (log-probability with the hint − without), added to the advantage of each hinted token."""
    model: Annotated[ApiSettings | None, OnlyWith("sources", "model")] = None
    """The model that writes hints."""

    def conflicts(self) -> Conflicts:
        if len(set(self.sources)) != len(self.sources):
            yield "sources", "names a source twice; name each once"
        if self.model is None and "model" in self.sources:
            yield "model", "is needed with the source model"


Selection = Literal["all", "errors", "low_reward"]


class PreferenceSettings(Section):
    """Preference pairs from teachers, who are asked what they would have done: where they agree with each other and not
    with the policy, it learns to prefer their action (DPO). Switched on by the trainer's `loss.beta_replay`, or by
    `advantage_weight`."""

    teachers: tuple[ApiSettings, ...] = ()
    """Models that are asked."""
    num_agreeing: PositiveInt = 2
    """Teachers that must agree. 1 makes more and noisier pairs."""
    judge: ApiSettings | None = None
    """The model that says whether differently worded actions are the same (null: words, numbers and signs decide)."""
    select: Listed[Selection] = Field(default=("low_reward", "errors"), min_length=1)
    """Turns that teachers are asked about. `errors`: marked ones. `low_reward`: those of rollouts with a reward below
    the group's mean."""
    max_cost: Cost | None = None
    """Asks no more once the whole run has spent this (null: no limit)."""
    max_waiting: PositiveInt = 1024
    """Most turns that wait, newest first; the oldest is dropped and counted."""
    max_pairs: PositiveInt = 64
    """Most pairs in a batch, newest versions first; others wait."""
    max_off_policy_steps: NonNegativeInt | None = 32
    """Largest version lag of a pair when its batch ships; older ones are dropped (null: no limit)."""
    pairs: str | None = None
    """Folder of another run of the same base model whose pairs are used (null: teachers are asked)."""
    advantage_weight: float = Field(default=0.0, ge=0, le=1e3)
    """Weight of (share of teachers that agree − largest share for another action), added to a turn's advantage."""

    def conflicts(self) -> Conflicts:
        changed = self.changed
        if self.pairs is not None:
            for key in sorted(changed - {"pairs", "max_pairs"}):
                yield key, "has no effect with preferences.pairs, where nobody is asked; remove it"
            return
        if not self.teachers:
            if changed:
                yield min(changed), "has no effect without preferences.teachers; name some"
            return
        asked = [*self.teachers, *filter(None, (self.judge,))]
        if len({one.name for one in asked}) < len(asked):
            yield "teachers", f"are called {[one.name for one in asked]}, the judge too; give each a name of its own"
        if self.num_agreeing > len(self.teachers):
            yield "num_agreeing", f"is more than the {len(self.teachers)} teachers; lower it, or name more"
        if self.max_cost is not None and not any(one.price.prompt or one.price.completion for one in asked):
            yield "max_cost", "has no effect where nobody has a price; give teachers theirs, or remove it"

    @property
    def gives_pairs(self) -> bool:
        """True where pairs are made or read."""
        return bool(self.teachers) or self.pairs is not None
