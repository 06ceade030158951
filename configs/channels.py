"""Settings of what the policy learns from besides rewards: a teacher, hints, teachers that disagree with it.

Each is switched on by its weight in the trainer's `loss`, and off by a weight of 0, whatever is set here.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from configs.common import Section, changed_fields


class TeacherModelSettings(Section):
    """Which model teaches."""

    name: str | None = None
    """A local folder, or a Hugging Face id that is in the local cache; of a server with OpenAI's routes alone also the
    name under which it serves the teacher."""
    tokenizer: str | None = None
    """A folder or an id with its tokenizer, which must be the policy's (null: that of `name`)."""


class TeacherClientSettings(Section):
    """How the teacher's servers are reached."""

    base_url: tuple[str, ...] | None = None
    """One server or several that serve the teacher: grpo-infer, or any vLLM with OpenAI's routes, which can score at
    temperature 1 only (null: `grpo` starts one)."""
    api_key_var: str = "VLLM_API_KEY"
    """Name of the environment variable that holds the servers' API key."""
    timeout: PositiveFloat = 120.0
    """Seconds that scoring a sample may take, retries included. What is not scored then is dropped and counted."""
    try_timeout_s: PositiveFloat = 60.0
    """Seconds that one request may take."""
    retries: NonNegativeInt = 4
    """How often a request that failed for a reason that may pass is made again; a server that cannot be reached, itself
    or behind its proxy (502, 503, 504), is tried until `timeout`, for it may be starting again."""
    max_concurrent_requests: PositiveInt = 32
    """Requests at a time."""


class TeacherSettings(Section):
    """The teacher of on-policy distillation: the log-probabilities that it gives to the sampled tokens. Switched on by
    the trainer's `loss.teacher_tau`."""

    model: TeacherModelSettings = TeacherModelSettings()
    """Which model teaches."""
    policy_every: NonNegativeInt | None = None
    """The teacher is the policy itself, on the run's own servers, as it was at its newest version that this divides
    (0: as it was before training, which makes `loss.teacher_tau` the weight of the KL to the reference model; null: the
    teacher is `model.name`)."""
    client: TeacherClientSettings = TeacherClientSettings()
    """How the teacher's servers are reached. Only with `model.name`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect or are missing."""
        if self.policy_every is None:
            if self.model.name is None:
                yield (
                    "teacher_model.model.name",
                    "is needed, or teacher_model.policy_every; name the model that teaches",
                )
            return
        for key in sorted(changed_fields(self.model)):
            yield f"teacher_model.model.{key}", "has no effect with teacher_model.policy_every; remove one of the two"
        for key in sorted(changed_fields(self.client)):
            yield (
                f"teacher_model.client.{key}",
                "has no effect with teacher_model.policy_every, where the run's own servers are asked; remove it",
            )


class PriceSettings(Section):
    """What a million tokens cost, in a currency of your choice, the same for all."""

    prompt: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)
    """Of prompts."""
    completion: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)
    """Of answers."""


class ApiSettings(Section):
    """A model behind an OpenAI-compatible API."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """In metrics, pairs and messages."""
    base_url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of the API, with /v1 where it has that (null: the run's own servers)."""
    model: str | None = None
    """The model's name there (null: the policy's base model, with the run's own servers)."""
    api_key_var: str | None = None
    """Name of the environment variable that holds the key (null: none; of the run's own servers
    `client.api_key_var`)."""
    temperature: NonNegativeFloat | None = 0.0
    """Of its answers (null: its own; some APIs take no other)."""
    max_tokens: PositiveInt = 1024
    """Longest answer in tokens."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the API calls that."""
    extra: dict[str, Any] = {}
    """What else goes into every request."""
    price: PriceSettings = PriceSettings()
    """What it costs."""
    timeout_s: PositiveFloat = 60.0
    """Seconds that one request may take."""
    retries: NonNegativeInt = 3
    """How often a request that failed for a reason that may pass is made again, after growing pauses or as the API
    asks for."""
    requests_per_s: PositiveFloat = 8.0
    """Most requests a second on average, with bursts of what is allowed in a second."""

    def conflicts(self, key: str) -> Iterator[tuple[str, str]]:
        """Keys below `key` that are missing or have no effect."""
        if self.base_url is not None and self.model is None:
            yield f"{key}.model", "is needed with base_url; give the model's name there"
        if self.base_url is None and self.api_key_var is not None:
            yield f"{key}.api_key_var", "has no effect without base_url: the run's own servers have client.api_key_var"


class TeacherApiSettings(ApiSettings):
    """A teacher that is asked what it would have done."""

    tool_role: Literal["user", "tool"] = "user"
    """As whom tools speak to it: hosted APIs take `tool` only behind calls of their own format."""


HintSource = Literal["templates", "environment", "sibling", "model", "solution"]


class HintSettings(Section):
    """Hints for the answers that environments mark as errors: the policy without the hint learns from itself with it
    (SDPO). Switched on by the trainer's `loss.alpha_sdpo`."""

    sources: tuple[HintSource, ...] = Field(default=("templates", "environment"), min_length=1)
    """Where a hint comes from, asked in order until one has a text. `templates`: texts by the error's key or kind.
    `environment`: what it said of the error. `sibling`: the answer of another rollout of the group that succeeded from
    the same point. `model`: written by `model`. `solution`: the example's own `solution`, for every answer, marked or
    not (privileged self-distillation)."""
    templates: str | None = None
    """Texts of your own by `hint_template_key` or `error_kind`, which replace and extend the built-in ones: a YAML or
    JSON file, or `module:NAME` or `path/to/file.py:NAME` of a mapping; null takes a built-in one away. Only with the
    source `templates`."""
    role: Literal["user", "system", "tool"] = "user"
    """Whose message a hint is."""
    max_per_sample: PositiveInt | None = None
    """So many errors of a row have hints, from its beginning (null: all)."""
    until_end: bool = False
    """Compare what was sampled after a hinted answer too, and not that answer alone."""
    model: ApiSettings | None = None
    """Who writes hints. Only with the source `model`."""
    max_chars: PositiveInt = 1000
    """Longest text of a hint, and of what a template is filled with, in characters. Not of the sources `sibling`
    and `solution`."""
    sibling_reward: FiniteFloat = 1.0
    """Reward from which on an answer counts as that of a rollout that succeeded (of its role, where several have one).
    Only with the source `sibling`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect or are missing."""
        if len(set(self.sources)) != len(self.sources):
            yield "hints.sources", "names a source twice; name each once"
        if self.templates is not None and "templates" not in self.sources:
            yield "hints.templates", "has no effect without the source templates; remove it, or add that to sources"
        if "sibling" not in self.sources and "sibling_reward" in changed_fields(self):
            yield "hints.sibling_reward", "has no effect without the source sibling; remove it, or add that to sources"
        if {"sibling", "solution"}.issuperset(self.sources) and "max_chars" in changed_fields(self):
            yield "hints.max_chars", f"has no effect with the source {' and '.join(self.sources)} alone; remove it"
        if (self.model is None) == ("model" in self.sources):
            without = self.model is None
            yield (
                "hints.model",
                "is needed with the source model" if without else "has no effect without the source model",
            )
        if self.model is not None:
            yield from self.model.conflicts("hints.model")


Selection = Literal["all", "errors", "low_reward", "first_divergence"]


class PreferenceSettings(Section):
    """Teachers that are asked what they would have done: where they agree with each other and not with the policy, it
    learns to prefer their action (DPO). Switched on by the trainer's `loss.beta_replay`."""

    teachers: tuple[TeacherApiSettings, ...] = ()
    """Who is asked."""
    num_agreeing: PositiveInt = 2
    """So many of them must agree."""
    agreement: Literal["exact", "normalised", "tool_calls", "judge"] = "normalised"
    """When two actions are the same: letter by letter; the same words, numbers and signs, whatever their case,
    punctuation and Markdown; the same tools with the same arguments; where `judge` says so."""
    judge: ApiSettings | None = None
    """Who says whether two actions are the same. Only with `agreement: judge`."""
    select: tuple[Selection, ...] = Field(default=("low_reward", "errors"), min_length=1)
    """Which of the policy's turns are asked about; any that one of these names. `errors`: those that the environment
    marked. `low_reward`: all of rollouts with a reward below `low_reward_below`. `first_divergence`: the first of each
    rollout in which another one of its group did something else in the same state."""
    low_reward_below: float | None = Field(default=None, allow_inf_nan=False)
    """What a low reward is (null: one below the group's mean). Only with `low_reward` among `select`."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of these turns, drawn by lot."""
    max_turns: PositiveInt | None = None
    """Most turns of one rollout (null: all)."""
    max_cost: NonNegativeFloat | None = Field(default=None, allow_inf_nan=False)
    """Nothing more is asked once so much has been spent in the whole run, across resumptions (null: no limit)."""
    max_waiting: PositiveInt = 1024
    """Turns that wait to be asked about, of which the newest comes next; what does not fit is left out, the oldest
    first, and counted."""
    max_concurrent: PositiveInt = 16
    """Turns that are asked about at a time."""
    max_pairs: PositiveInt = 64
    """Most pairs in one batch, those of the newest versions; others wait for the next."""
    max_off_policy_steps: NonNegativeInt | None = 32
    """Largest version lag of a turn when the batch that its pair goes with ships. Turns that are older already are not
    asked about, pairs that become older are not trained, and both are counted (null: no limit)."""
    pairs: str | None = None
    """The folder of another run with the same base model: `max_pairs` of the pairs that it has kept go into every
    batch, and nobody is asked (null: ask)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect or are missing."""
        if self.pairs is not None:
            for key in sorted(changed_fields(self) - {"pairs", "max_pairs"}):
                yield f"preferences.{key}", "has no effect with preferences.pairs, where nobody is asked; remove it"
            return
        if not self.teachers:
            if changed := sorted(changed_fields(self)):
                yield f"preferences.{changed[0]}", "has no effect without preferences.teachers; name some"
            return
        names = [teacher.name for teacher in self.teachers]
        if len(set(names)) != len(names):
            yield "preferences.teachers", f"are called {names}; give each a name of its own"
        if self.judge is not None and self.judge.name in names:
            yield "preferences.judge.name", "is what a teacher is called too; give the judge a name of its own"
        if self.num_agreeing > len(self.teachers):
            yield "preferences.num_agreeing", f"is more than the {len(self.teachers)} teachers; lower it, or name more"
        if (self.judge is None) == (self.agreement == "judge"):
            why = "is needed with preferences.agreement: judge" if self.judge is None else "has no effect without it"
            yield "preferences.judge", why
        if self.low_reward_below is not None and "low_reward" not in self.select:
            yield "preferences.low_reward_below", "has no effect without low_reward in preferences.select; remove it"
        asked = [*self.teachers, *filter(None, (self.judge,))]
        if self.max_cost is not None and not any(one.price.prompt or one.price.completion for one in asked):
            yield (
                "preferences.max_cost",
                "has no effect where nobody has a price; give teachers theirs, or remove it",
            )
        for position, teacher in enumerate(self.teachers):
            yield from teacher.conflicts(f"preferences.teachers.{position}")
        if self.judge is not None:
            yield from self.judge.conflicts("preferences.judge")

    @property
    def gives_pairs(self) -> bool:
        """Whether pairs can come of it."""
        return bool(self.teachers) or self.pairs is not None
