"""Settings of environments and of the evaluation on them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.common import Section, changed_fields

EVAL_PREFIX = "eval:"
"""Tells an evaluation environment from a training one of the same name."""


_ADDRESS = r"^https?://([^/\s:@\[\]]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?/?$"


class EnvIdentity(Section):
    """What an environment is, whatever it is used for."""

    id: str
    """A built-in environment (`reverse-text`, see docs/environments.md), or `module:Class` / `path/to/file.py:Class` of
    your own."""
    name: str | None = None
    """Name in metrics (null: the id)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    address: str | None = Field(default=None, pattern=_ADDRESS)
    """Where an environment server has it, `http://host:port`; `grpo-env ID` starts one, and `args` are sent there
    (null: processes of the orchestrator's own)."""
    num_workers: PositiveInt = 1
    """Processes that its rollouts are spread over, where these are episodes. Answers of single-turn environments are
    scored by one."""
    memory_gb: PositiveFloat | None = None
    """What the code of the environment may allocate in each process, in GB; a rollout that needs more is dropped (null:
    as much as the machine has)."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.id

    def is_same(self, other: "EnvIdentity") -> bool:
        """Whether both are one environment under one name."""
        mine, others = (EnvIdentity.model_validate(one.model_dump(include=_IDENTITY)) for one in (self, other))
        return (mine.label, mine.model_dump(exclude={"name"})) == (others.label, others.model_dump(exclude={"name"}))


_IDENTITY = set(EnvIdentity.model_fields)


class EnvSettings(EnvIdentity):
    """One environment to train on."""

    adapters: dict[str, str] = {}
    """Which of `model.lora_adapters` a role has, by the role's id, as `{Proposer: proposer}`; that of an environment of
    single answers is `policy`. Roles that are not named have the first."""


class EvalSamplingSettings(Section):
    """How held-out prompts are answered."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    max_tokens: PositiveInt | None = None
    """Longest answer in tokens (null: `sampling.max_tokens`)."""


class EvalEnvSamplingSettings(Section):
    """As `eval.sampling`, for one environment."""

    temperature: NonNegativeFloat | None = None
    """As `eval.sampling.temperature`, for this environment (null: that)."""
    max_tokens: PositiveInt | None = None
    """As `eval.sampling.max_tokens`, for this environment (null: that)."""


class EvalEnvSettings(EnvIdentity):
    """One environment to evaluate on."""

    num_examples: int | None = Field(default=None, ge=-1)
    """As `eval.num_examples`, for this environment (null: that)."""
    rollouts_per_example: PositiveInt | None = None
    """As `eval.rollouts_per_example`, for this environment (null: that)."""
    interval: PositiveInt | None = None
    """As `eval.interval`, for this environment (null: that)."""
    sampling: EvalEnvSamplingSettings = EvalEnvSamplingSettings()
    """How its prompts are answered, where it differs from the other environments."""
    adapters: dict[str, str] | None = None
    """As `env[].adapters` (null: those of the training environment of this name, if there is one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One environment that is evaluated, with all that applies to it.

    Example: ``HeldOut(key="reverse-text", label="reverse-text", id="reverse-text", args={}, num_examples=200, ...)``
    """

    key: str
    """Of its process: the label, or where a training environment of the same name is another one, with a prefix."""
    label: str
    """Name in metrics."""
    id: str
    args: dict[str, Any]
    address: str | None
    num_workers: int
    memory_gb: float | None
    num_examples: int
    """Held-out examples; -1 for all, never 0."""
    rollouts_per_example: int
    interval: int
    """In steps."""
    temperature: float
    """0 is greedy."""
    max_tokens: int | None
    """Longest answer in tokens; None for what the context leaves."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Names by role; the others have the first."""


class EvalSettings(Section):
    """Evaluation on held-out prompts, before the first and after the last step, and in between. Training goes on
    meanwhile, unless it is told to wait."""

    env: tuple[EvalEnvSettings, ...] = ()
    """Environments to evaluate on (empty: the training ones). One that shares its name with a training environment,
    but not its arguments, is another environment, and both keep the name in their own metrics."""
    num_examples: int = Field(default=-1, ge=-1)
    """Held-out examples of each environment (-1: all, 0: no evaluation)."""
    rollouts_per_example: PositiveInt = 1
    """Answers to each prompt. With more than one, pass@k is estimated for k = 1, 2, 4 and so on; they are all the same
    at temperature 0."""
    interval: PositiveInt = 100
    """Evaluate every so many steps."""
    sampling: EvalSamplingSettings = EvalSamplingSettings()
    """How held-out prompts are answered."""
    eval_base_model: bool = True
    """Evaluate version 0 too, before the first step."""
    skip_eval_on_resume: bool = True
    """Do not evaluate the version that a run is resumed at, unless it is the last one."""
    cancel_inflight_rollouts_on_eval: bool = False
    """Let training wait while a version is evaluated: rollouts in flight are cancelled and counted, their prompts asked
    again afterwards, and none starts meanwhile. false: both share the servers."""

    def held_out(self, training: Sequence[EnvSettings], *, max_tokens: int | None) -> list[HeldOut]:
        """The environments that are evaluated. `max_tokens`: of training."""
        given = self.env or [EvalEnvSettings(**env.model_dump()) for env in training]
        every = [self._held_out(env, training, max_tokens) for env in given]
        return [one for one in every if one.num_examples != 0]

    def _held_out(self, env: EvalEnvSettings, training: Sequence[EnvSettings], max_tokens: int | None) -> HeldOut:
        of_training = next((other.adapters for other in training if other.label == env.label), {})
        return HeldOut(
            key=env.label if any(env.is_same(other) for other in training) else f"{EVAL_PREFIX}{env.label}",
            label=env.label,
            id=env.id,
            args=env.args,
            address=env.address,
            num_workers=env.num_workers,
            memory_gb=env.memory_gb,
            num_examples=_first(env.num_examples, self.num_examples),
            rollouts_per_example=env.rollouts_per_example or self.rollouts_per_example,
            interval=env.interval or self.interval,
            temperature=_first(env.sampling.temperature, self.sampling.temperature),
            max_tokens=env.sampling.max_tokens or self.sampling.max_tokens or max_tokens,
            adapters=_first(env.adapters, of_training),
        )

    def conflicts(self, *, seq_len: int) -> Iterator[tuple[str, str]]:
        """Keys that have no effect or contradict each other."""
        yield from conflicts_of_labels("eval.env", self.env)
        if not self._evaluates:
            yield from self._conflicts_where_off()
            return
        yield from self._conflicts_where_overridden()
        yield from _conflicts_of_length("eval.sampling.max_tokens", self.sampling.max_tokens, seq_len)
        for position, env in enumerate(self.env):
            yield from self._conflicts_of_env(f"eval.env.{position}", env, seq_len)
        if not self.env and self.rollouts_per_example > 1 and self.sampling.temperature == 0:
            yield "eval.rollouts_per_example", f"{_ALL_THE_SAME}; set eval.sampling.temperature above 0"

    @property
    def _evaluates(self) -> bool:
        numbers = [_first(env.num_examples, self.num_examples) for env in self.env] or [self.num_examples]
        return any(numbers)

    def _conflicts_where_off(self) -> Iterator[tuple[str, str]]:
        for key in sorted(changed_fields(self) - {"num_examples", "env"}):
            yield f"eval.{key}", "has no effect with num_examples: 0, which switches evaluation off; remove it"
        if self.env:
            yield "eval.env", "has no effect with num_examples: 0, which switches evaluation off; remove it"

    def _conflicts_where_overridden(self) -> Iterator[tuple[str, str]]:
        """What every environment has its own of."""
        if not self.env:
            return
        for key in sorted({"num_examples", "rollouts_per_example", "interval"} & changed_fields(self)):
            if all(getattr(env, key) is not None for env in self.env):
                yield f"eval.{key}", f"has no effect: every environment of eval.env has its own {key}; remove it"
        for key in sorted(changed_fields(self.sampling)):
            if all(getattr(env.sampling, key) is not None for env in self.env):
                yield f"eval.sampling.{key}", f"has no effect: every environment of eval.env has its own {key}"

    def _conflicts_of_env(self, key: str, env: EvalEnvSettings, seq_len: int) -> Iterator[tuple[str, str]]:
        if _first(env.num_examples, self.num_examples) == 0:
            whose = "" if env.num_examples == 0 else "is eval.num_examples = 0: "
            yield f"{key}.num_examples", f"{whose}the environment would never be evaluated on; remove it"
        yield from _conflicts_of_length(f"{key}.sampling.max_tokens", env.sampling.max_tokens, seq_len)
        temperature = _first(env.sampling.temperature, self.sampling.temperature)
        if (env.rollouts_per_example or self.rollouts_per_example) > 1 and temperature == 0:
            where = "eval" if env.rollouts_per_example is None else key
            yield f"{where}.rollouts_per_example", f"{_ALL_THE_SAME}; set {key}.sampling.temperature above 0"


_ALL_THE_SAME = "makes the same answer again and again at temperature 0"


def _first(own: Any, otherwise: Any) -> Any:
    return otherwise if own is None else own


def _conflicts_of_length(key: str, max_tokens: int | None, seq_len: int) -> Iterator[tuple[str, str]]:
    if max_tokens is not None and max_tokens >= seq_len:
        yield key, f"leaves no room for a prompt in seq_len = {seq_len}"


def conflicts_of_roles(
    key: str, environments: Sequence[EnvSettings | EvalEnvSettings], names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Roles with adapters that the run has not."""
    for position, env in enumerate(environments):
        if unknown := sorted(set((env.adapters or {}).values()) - set(names)):
            there = f"which has {', '.join(names)}" if names else "which names none"
            yield f"{key}.{position}.adapters", f"{', '.join(unknown)} must be among model.lora_adapters, {there}"


def conflicts_of_labels(key: str, environments: Sequence[EnvIdentity]) -> Iterator[tuple[str, str]]:
    """Environments that could not be told apart."""
    labels = [env.label for env in environments]
    for position, label in enumerate(labels):
        if label in labels[:position]:
            yield f"{key}.{position}.id", f"a second environment called {label}; give it a name of its own"
        if label.startswith(EVAL_PREFIX):
            yield f"{key}.{position}.name", f"must not begin with {EVAL_PREFIX}, which marks environments of evaluation"
