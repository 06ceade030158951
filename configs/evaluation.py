"""Settings of environments and of the evaluation on them."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from configs.common import Conflicts, Section, changed_fields

EVAL_PREFIX = "eval:"
"""Tells an evaluation environment from a training one of the same name."""


EvalTemperature = Annotated[float, Field(ge=0, le=100)]
_ADDRESS = r"^tcp://([^/\s:@\[\]]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?/?$"


class EnvIdentity(Section):
    """What an environment is, whatever it is used for."""

    id: str = Field(min_length=1)
    """A built-in environment (`reverse-text`, see docs/environments.md), or `module:Class` or `path/to/file.py:Class`
    of your own."""
    name: str | None = None
    """Name in metrics (null: the id)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    address: str | None = Field(default=None, pattern=_ADDRESS)
    """Address of an environment server, `tcp://host:port`, as `grpo-env ID` starts one; `args` are sent there (null:
    the orchestrator starts processes of its own)."""
    num_workers: PositiveInt = 1
    """Number of processes that its episodes are spread over; single-turn answers are scored by one."""
    memory_gb: float | None = Field(default=None, ge=0.05, le=1e6)
    """Memory that the environment's code may allocate in each process, in GB (null: as much as the machine has). A
    rollout that needs more is dropped."""

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
    """Which of `model.lora_adapters` each role has, by the role's id, as `{Proposer: proposer}`; the role of an
    environment of single answers is `policy`. Roles that are not named have the first."""


class EvalSamplingSettings(Section):
    """How held-out prompts are answered."""

    temperature: EvalTemperature = 0.0
    """Sampling temperature; 0 is greedy."""
    max_tokens: PositiveInt | None = None
    """Longest answer in tokens (null: `sampling.max_tokens`)."""


class EvalEnvSamplingSettings(Section):
    """As `eval.sampling`, for one environment."""

    temperature: EvalTemperature | None = None
    """`eval.sampling.temperature` of this environment (null: the same for all)."""
    max_tokens: PositiveInt | None = None
    """`eval.sampling.max_tokens` of this environment (null: the same for all)."""


class EvalEnvSettings(EnvIdentity):
    """One environment to evaluate on."""

    num_examples: int | None = Field(default=None, ge=-1)
    """`eval.num_examples` of this environment (null: the same for all)."""
    rollouts_per_example: PositiveInt | None = None
    """`eval.rollouts_per_example` of this environment (null: the same for all)."""
    interval: PositiveInt | None = None
    """`eval.interval` of this environment (null: the same for all)."""
    sampling: EvalEnvSamplingSettings = EvalEnvSamplingSettings()
    """How its prompts are answered, where it differs from the other environments."""
    adapters: dict[str, str] | None = None
    """Which of `model.lora_adapters` each role has (null: as in the training environment of this name, if there is
    one)."""


class HeldOut(EnvIdentity):
    """One environment that is evaluated, with all that applies to it."""

    key: str
    """Its process's key: the label, or where a training environment of the same name is another one, with a prefix."""
    num_examples: int
    """Held-out examples; -1 for all, never 0."""
    rollouts_per_example: int
    interval: int
    """In steps."""
    temperature: float
    """0 is greedy."""
    max_tokens: int | None
    """Longest answer in tokens; None for what the context leaves."""
    adapters: dict[str, str] = {}
    """Names by role; the others have the first."""


class EvalSettings(Section):
    """Evaluation on held-out prompts, before the first and after the last step, and in between. Training goes on
    meanwhile, unless it is told to wait."""

    env: tuple[EvalEnvSettings, ...] = ()
    """Environments to evaluate on (empty: the training ones). One that shares its name with a training environment, but
    not its arguments, is another environment, and both keep the name in their own metrics."""
    num_examples: int = Field(default=-1, ge=-1)
    """Number of held-out examples of each environment (-1: all, 0: no evaluation)."""
    rollouts_per_example: PositiveInt = 1
    """Number of answers to each prompt. With more than one, pass@k is estimated for k = 1, 2, 4 and so on."""
    interval: PositiveInt = 100
    """Steps between two evaluations."""
    sampling: EvalSamplingSettings = EvalSamplingSettings()
    """How held-out prompts are answered."""
    eval_base_model: bool = True
    """Version 0 is evaluated too, before the first step."""
    skip_eval_on_resume: bool = True
    """The version that a run goes on with is not evaluated, unless it is the last one."""
    cancel_inflight_rollouts_on_eval: bool = False
    """Training waits while a version is evaluated: rollouts in flight are cancelled and counted, and their prompts are
    asked again afterwards. false: both share the servers."""

    def held_out(self, training: Sequence[EnvSettings], *, max_tokens: int | None) -> list[HeldOut]:
        """The environments that are evaluated. `max_tokens`: of training."""
        given = self.env or [EvalEnvSettings(**env.model_dump()) for env in training]
        every = [self._held_out(env, training, max_tokens) for env in given]
        return [one for one in every if one.num_examples != 0]

    def _held_out(self, env: EvalEnvSettings, training: Sequence[EnvSettings], max_tokens: int | None) -> HeldOut:
        of_training = next((other.adapters for other in training if other.label == env.label), {})
        return HeldOut(
            **env.model_dump(include=_IDENTITY),
            key=env.label if any(env.is_same(other) for other in training) else f"{EVAL_PREFIX}{env.label}",
            num_examples=_first(env.num_examples, self.num_examples),
            rollouts_per_example=env.rollouts_per_example or self.rollouts_per_example,
            interval=env.interval or self.interval,
            temperature=_first(env.sampling.temperature, self.sampling.temperature),
            max_tokens=env.sampling.max_tokens or self.sampling.max_tokens or max_tokens,
            adapters=_first(env.adapters, of_training),
        )

    def conflicts(self) -> Conflicts:
        yield from label_conflicts("env", self.env)
        numbers = [_first(env.num_examples, self.num_examples) for env in self.env] or [self.num_examples]
        if not any(numbers):
            for key in sorted(changed_fields(self) - {"num_examples"}):
                yield key, "has no effect with num_examples: 0, which switches evaluation off; remove it"
            return
        yield from self._overridden()
        for position, env in enumerate(self.env):
            if numbers[position] == 0:
                yield f"env.{position}.num_examples", "is 0: the environment would never be evaluated on; remove it"
            yield from self._repeated(f"env.{position}.", env)
        if not self.env:
            yield from self._repeated("", EvalEnvSettings(id="any"))

    def _overridden(self) -> Conflicts:
        """Keys that every environment has its own of."""
        for key in sorted({"num_examples", "rollouts_per_example", "interval"} & changed_fields(self)):
            if self.env and all(getattr(env, key) is not None for env in self.env):
                yield key, f"has no effect: every environment of eval.env has its own {key}; remove it"
        for key in sorted(changed_fields(self.sampling)):
            if self.env and all(getattr(env.sampling, key) is not None for env in self.env):
                yield f"sampling.{key}", f"has no effect: every environment of eval.env has its own {key}"

    def _repeated(self, prefix: str, env: EvalEnvSettings) -> Conflicts:
        """Several answers to a prompt that would all be the same."""
        temperature = _first(env.sampling.temperature, self.sampling.temperature)
        if (env.rollouts_per_example or self.rollouts_per_example) > 1 and temperature == 0:
            key = "rollouts_per_example" if env.rollouts_per_example is None else f"{prefix}rollouts_per_example"
            why = "makes the same answer again and again at temperature 0"
            yield key, f"{why}; set eval.{prefix}sampling.temperature above 0"

    def length_conflicts(self, seq_len: int) -> Conflicts:
        """Answers that leave no room for a prompt."""
        own = [
            (f"env.{position}.sampling.max_tokens", env.sampling.max_tokens) for position, env in enumerate(self.env)
        ]
        for key, max_tokens in [("sampling.max_tokens", self.sampling.max_tokens), *own]:
            if max_tokens is not None and max_tokens >= seq_len:
                yield key, f"leaves no room for a prompt in seq_len = {seq_len}"


def _first(own: Any, otherwise: Any) -> Any:
    return otherwise if own is None else own


def role_conflicts(key: str, environments: Sequence[EnvSettings | EvalEnvSettings], names: Sequence[str]) -> Conflicts:
    """Roles with adapters that the run has not."""
    for position, env in enumerate(environments):
        if unknown := sorted(set((env.adapters or {}).values()) - set(names)):
            there = f"which has {', '.join(names)}" if names else "which names none"
            yield f"{key}.{position}.adapters", f"{', '.join(unknown)} must be among model.lora_adapters, {there}"


def label_conflicts(key: str, environments: Sequence[EnvIdentity]) -> Conflicts:
    """Environments that could not be told apart."""
    labels = [env.label for env in environments]
    for position, label in enumerate(labels):
        if label in labels[:position]:
            yield f"{key}.{position}.id", f"a second environment called {label}; give it a name of its own"
        if label.startswith(EVAL_PREFIX):
            yield f"{key}.{position}.name", f"must not begin with {EVAL_PREFIX}, which marks environments of evaluation"
