"""Settings of environments and of the evaluation on them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from grpo.configs.common import Conflicts, Section, changed_keys
from pydantic import BeforeValidator, Field, PositiveInt

EVAL_PREFIX = "eval:"
"""Tells an evaluation environment from a training one of the same name."""
_ADDRESS = r"^tcp://([^/\s:@\[\]]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?/?$"


class EnvSettings(Section):
    """One environment."""

    id: str = Field(min_length=1)
    """A built-in environment such as `reverse-text` (`grpo docs environments`), or your own: `module:Class` or
    `path/to/file.py:Class`."""
    name: str | None = None
    """Name in metrics (null: the id)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    address: str | None = Field(default=None, pattern=_ADDRESS)
    """Address of an environment server, `tcp://host:port`, started by `grpo-env ID` (null: the orchestrator starts
    processes)."""
    num_workers: PositiveInt = 1
    """Processes for its rollouts."""
    memory_gb: float | None = Field(default=None, ge=0.05, le=1e6)
    """Memory limit of each process in GB; rollouts that need more are dropped (null: no limit)."""
    adapters: dict[str, str] = {}
    """Each role's adapter, from `model.lora_adapters`, such as `{Proposer: proposer}` (others: the first). The role of
    single answers is `policy`."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.id

    def conflicts(self) -> Conflicts:
        if self.label.startswith(EVAL_PREFIX):
            yield "name", f"must not begin with {EVAL_PREFIX}, which marks environments of evaluation"


def _environments(given: Any) -> Any:
    """An id, or one environment's settings, stand for a list of one."""
    one = {"id": given} if isinstance(given, str) else given
    return [one] if isinstance(one, Mapping) else one


Environments: TypeAlias = Annotated[tuple[EnvSettings, ...], BeforeValidator(_environments)]


class EvalSamplingSettings(Section):
    """How held-out prompts are answered."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Sampling temperature; 0 is greedy."""
    max_tokens: PositiveInt | None = None
    """Longest answer in tokens (null: `sampling.max_tokens`)."""


class EvalSettings(Section):
    """Evaluation on held-out prompts, before the first and after the last step, and in between. Training goes on
    meanwhile, unless it is told to wait."""

    env: Environments = ()
    """Environments to evaluate on (empty: the training ones)."""
    num_examples: int = Field(default=200, ge=-1)
    """Held-out examples of each environment (-1: all, 0: no evaluation)."""
    rollouts_per_example: PositiveInt = 1
    """Answers to each prompt. More than one gives pass@k for k = 1, 2, 4, …"""
    interval: PositiveInt = 100
    """Steps between evaluations."""
    sampling: EvalSamplingSettings = EvalSamplingSettings()
    """How held-out prompts are answered."""
    eval_base_model: bool = True
    """Also evaluates version 0, before the first step."""
    skip_eval_on_resume: bool = True
    """Does not evaluate the version with which a run resumes, unless it is the last."""
    cancel_inflight_rollouts_on_eval: bool = False
    """Training waits for evaluations; rollouts in flight are cancelled and asked again. false: both share the
    servers."""

    def conflicts(self) -> Conflicts:
        yield from label_conflicts("env", self.env)
        idle = sorted(self.changed - {"num_examples"}) if self.num_examples == 0 else ()
        for key in [one for name in idle for one in changed_keys(getattr(self, name), name)]:
            yield key, "has no effect with num_examples: 0, which switches evaluation off; remove it"
        if self.num_examples and self.rollouts_per_example > 1 and self.sampling.temperature == 0:
            why = "makes the same answer again and again at temperature 0; set eval.sampling.temperature above 0"
            yield "rollouts_per_example", why


def label_conflicts(key: str, environments: Sequence[EnvSettings]) -> Conflicts:
    """Environments that could not be told apart."""
    labels = [env.label for env in environments]
    for position, label in enumerate(labels):
        if label in labels[:position]:
            yield f"{key}.{position}.id", f"a second environment called {label}; give it a name of its own"
