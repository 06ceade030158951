"""Settings of what is rolled out and which of it is trained: sampling, examples, advantages, filters."""

from typing import Annotated, Any, Literal, TypeAlias

from grpo.configs.common import Conflicts, Listed, OnlyWith, Section, Seed, Share, Temperature, only, type_is
from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt

_NOT_FOLLOWED = "others change the distribution that tokens are drawn from, which the trainer could not follow"


class TempSchedulerSettings(Section):
    """A temperature that changes with the policy version that samples."""

    type: Literal["linear", "cosine"]
    """Shape of the change."""
    start_temperature: Temperature
    """Temperature of version 0."""
    end_temperature: Temperature
    """Temperature of the last version sampled from, `max_steps` - 1."""

    def conflicts(self) -> Conflicts:
        if self.start_temperature == self.end_temperature:
            yield "end_temperature", "equals start_temperature, so nothing changes; set sampling.temperature instead"


class SamplingSettings(Section):
    """How rollouts are sampled. What else changes the distribution is refused: the trainer would compute other
    log-probabilities than the server."""

    max_tokens: PositiveInt | None = None
    """Longest answer in tokens (null: what `seq_len` and the model leave)."""
    temperature: Temperature = 1.0
    """Sampling temperature."""
    temp_scheduler: TempSchedulerSettings | None = None
    """A temperature for each policy version, instead of `temperature` (null: that)."""
    seed: Seed | None = None
    """Seed of requests, mixed with group and rollout number (null: the server's randomness)."""
    min_tokens: Annotated[int, only(0, _NOT_FOLLOWED)] = 0
    """Only 0: the trainer cannot follow a minimum."""
    repetition_penalty: Annotated[float, only(1.0, _NOT_FOLLOWED)] = 1.0
    """Only 1: the trainer cannot follow a penalty."""

    def conflicts(self) -> Conflicts:
        if self.temp_scheduler is not None and "temperature" in self.changed:
            yield "temperature", "has no effect with sampling.temp_scheduler; remove one of the two"


class BufferSettings(Section):
    """Which example is asked next, and which groups are worth training."""

    seed: Seed | None = None
    """Seed of the order of examples (null: `seed`)."""
    env_ratios: Listed[NonNegativeFloat] | None = None
    """Relative frequency of each environment, in the order of `env` (null: equal)."""
    hash_keys: Listed[str] = Field(default=("task", "prompt"), min_length=1)
    """Fields that identify an example; later ones that agree in them are skipped. `task` is the environment's name,
    unless the example has its own."""
    max_prompt_length: PositiveInt | None = None
    """Longest training prompt in tokens; longer ones are skipped (null: those without room for an answer)."""
    online_difficulty_filtering: bool = False
    """Replaces groups with equal rewards, at most 8 per group with spread (DAPO's dynamic sampling)."""
    easy_threshold: FiniteFloat | None = None
    """Examples whose group's mean reward reaches this are not asked again (null: none)."""
    hard_threshold: FiniteFloat | None = None
    """Examples whose group's mean reward is at most this are not asked again (null: none)."""
    easy_fraction: Annotated[Share, OnlyWith("easy_threshold")] = 0.0
    """Share of easy examples that are asked again after a restart."""
    hard_fraction: Annotated[Share, OnlyWith("hard_threshold")] = 0.0
    """Share of hard examples that are asked again after a restart."""
    skip_verification: bool = False
    """Training rollouts are not scored (reward 0), for learning from a teacher alone."""

    def conflicts(self) -> Conflicts:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and hard >= easy:
            yield "hard_threshold", f"must be below easy_threshold = {easy:g}"
        if self.skip_verification:
            for key in sorted(self.changed & {"easy_threshold", "hard_threshold", "online_difficulty_filtering"}):
                yield key, "has no effect with skip_verification: true, where all rewards are 0; remove one"
        if len(set(self.hash_keys)) < len(self.hash_keys):
            yield "hash_keys", "names a field twice; remove one"
        if self.env_ratios is not None and sum(self.env_ratios) <= 0:
            yield "env_ratios", "must have a number above 0"


class _Signed(Section):
    positive_only: bool = False
    """Negative advantages count as 0."""


class DefaultAdvantage(_Signed):
    """The reward minus the group's mean."""

    type: Literal["default"] = "default"
    length_weighted_mean: bool = False
    """Weights the mean by tokens; then the tokens' advantages sum to 0."""


class ComparedAdvantage(_Signed):
    """The same, divided by the standard deviation, or minus the others' mean."""

    type: Literal["normalized", "leave_one_out"]


class ConstantAdvantage(Section):
    """The same advantage for every step."""

    type: Literal["constant"]
    value: FiniteFloat = 1.0
    """The advantage."""


class RunningBaseline(Section):
    """The reward minus a running mean of the environment's rewards."""

    type: Literal["running_baseline"]
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean that stays at each batch."""


class ReinforcePlusPlus(Section):
    """The reward, normalised over all tokens of the batch."""

    type: Literal["reinforce_plus_plus"]
    group_baseline: bool = False
    """Subtracts the group's mean first (REINFORCE++-baseline)."""


BATCH_ADVANTAGES = ("running_baseline", "reinforce_plus_plus")
"""Types of advantages that are known only with their batch."""


class EpisodicAdvantage(Section):
    """The reward itself."""

    type: Literal["episodic"]


class CustomAdvantage(_Signed):
    """A function of two lists, a group's rewards and numbers of sampled tokens."""

    type: Literal["custom"]
    import_path: str
    """The function or class: `module:name` or `path/to/file.py:name`."""
    kwargs: dict[str, Any] = {}
    """Its keyword arguments."""


class CustomCredit(Section):
    """A `CreditAssigner`, or a function of a list of `EpisodeResult` (`grpo docs environments`)."""

    type: Literal["custom_credit"]
    import_path: str
    """The function or class: `module:name` or `path/to/file.py:name`."""
    kwargs: dict[str, Any] = {}
    """Its keyword arguments."""


AnyAdvantage: TypeAlias = (
    DefaultAdvantage
    | ComparedAdvantage
    | RunningBaseline
    | ReinforcePlusPlus
    | ConstantAdvantage
    | EpisodicAdvantage
    | CustomAdvantage
    | CustomCredit
)
AdvantageSettings: TypeAlias = Annotated[AnyAdvantage, Field(discriminator="type"), type_is("default")]
"""Which advantage each step of each rollout of a group gets for its reward. Rollouts are compared with those of the
same task, each role with itself; rollouts that another one has spawned, with those spawned beside them."""


def fewest_rollouts(advantage: AnyAdvantage) -> int:
    """Size of the smallest group from which anything is learned: a rollout that is compared teaches nothing alone."""
    if advantage.type == "reinforce_plus_plus":
        return 2 if advantage.group_baseline else 1
    return 1 if advantage.type in ("constant", "episodic", "running_baseline", "custom_credit") else 2


class RewardShapingSettings(Section):
    """What is taken off rewards before advantages are made of them. Rewards in metrics and traces are not changed."""

    overlong_interval: PositiveInt | None = None
    """DAPO's soft overlong punishment: up to 1 is subtracted over this many last tokens before `sampling.max_tokens`
    (null: off)."""
    reference_kl: NonNegativeFloat = 0.0
    """Weight of the KL to the model before training, subtracted from a rollout's reward."""
    reference_kl_estimator: Annotated[Literal["k1", "k2", "k3"], OnlyWith("reference_kl")] = "k1"
    """Estimate of a token's KL; formulas in `grpo docs advantages`."""


class _Filter(Section):
    enforce: bool = False
    """Keeps found rollouts out of the loss; their rewards still count in the group's mean. false: only counts them."""


class GibberishFilter(_Filter):
    """Finds a rare token that was improbable."""

    type: Literal["gibberish"]
    token_id_threshold: NonNegativeInt = 100_000
    """Token ids above this are rare."""
    logprob_offset: NonNegativeFloat = 2.0
    """Nats below -log(vocabulary size) from which a token is improbable."""


class RepetitionFilter(_Filter):
    """Finds a long run of nearly certain tokens."""

    type: Literal["repetition"]
    window: PositiveInt = 3000
    """Length of the run in tokens."""
    prob_threshold: float = Field(default=0.99, gt=0, lt=1)
    """Probability above which a token is nearly certain."""


class CustomFilter(_Filter):
    """A function of an answer's token ids and log-probabilities."""

    type: Literal["custom"]
    import_path: str
    """The function: `module:name` or `path/to/file.py:name`."""
    kwargs: dict[str, Any] = {}
    """Its keyword arguments."""


AnyFilter: TypeAlias = GibberishFilter | RepetitionFilter | CustomFilter
FilterSettings: TypeAlias = Annotated[AnyFilter, Field(discriminator="type")]


def filter_conflicts(filters: tuple[AnyFilter, ...], *, longest: int) -> Conflicts:
    """Filters that cannot find anything, or stand there twice. `longest`: the longest answer in tokens."""
    for position, one in enumerate(filters):
        if one.type == "repetition" and "window" in one.changed and one.window > longest:
            why = f"by sampling.max_tokens and seq_len no answer is longer than {longest}"
            yield f"filters.{position}.window", f"finds nothing: {why}"
        if one.type in [other.type for other in filters[:position]]:
            yield f"filters.{position}.type", f"a second filter of type {one.type}; merge the two"
