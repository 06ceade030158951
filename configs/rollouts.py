"""Settings of what is rolled out and which of it is trained: sampling, examples, advantages, filters."""

from typing import Annotated, Any, Literal, TypeAlias

from grpo.configs.common import Conflicts, Listed, OnlyWith, Section, Seed, Share, Temperature, only, type_is
from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt

_NOT_FOLLOWED = "others change the distribution that tokens are drawn from, which the trainer could not follow"


class TempSchedulerSettings(Section):
    """A temperature that changes with the policy version that samples."""

    type: Literal["linear", "cosine"]
    """Shape of the change: `linear` or `cosine`."""
    start_temperature: Temperature
    """Temperature of version 0."""
    end_temperature: Temperature
    """Temperature of version `max_steps` - 1, the last that is sampled from."""

    def conflicts(self) -> Conflicts:
        if self.start_temperature == self.end_temperature:
            yield "end_temperature", "equals start_temperature, so nothing changes; set sampling.temperature instead"


class SamplingSettings(Section):
    """How rollouts are sampled. What else changes the distribution is refused: the trainer would compute other
    log-probabilities than the server."""

    max_tokens: PositiveInt | None = None
    """Longest answer in tokens (null: what `seq_len` and the model leave)."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    temp_scheduler: TempSchedulerSettings | None = None
    """A temperature for each policy version, instead of `temperature` (null: that)."""
    seed: Seed | None = None
    """Seed of requests, mixed with group and rollout number (null: the server's own randomness)."""
    min_tokens: Annotated[int, only(0, _NOT_FOLLOWED)] = 0
    """Only 0: a minimum would change the distribution in a way that the trainer cannot follow."""
    repetition_penalty: Annotated[float, only(1.0, _NOT_FOLLOWED)] = 1.0
    """Only 1: a penalty would change the distribution in a way that the trainer cannot follow."""

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
    """Fields that identify an example; the second of two that agree in them is skipped and counted. `task` is the
    environment's name, unless the example has its own."""
    max_prompt_length: PositiveInt | None = None
    """Longest training prompt in tokens; longer ones are skipped and counted as `prompt_too_long` (null: those without
    room for an answer are)."""
    online_difficulty_filtering: bool = False
    """Groups with equal rewards are replaced by others, at most 8 per group with spread (DAPO's dynamic sampling)."""
    easy_threshold: FiniteFloat | None = None
    """An example whose group's mean reward reaches this is easy and not asked again (null: none)."""
    hard_threshold: FiniteFloat | None = None
    """An example whose group's mean reward is at most this is hard and not asked again (null: none)."""
    easy_fraction: Annotated[Share, OnlyWith("easy_threshold")] = 0.0
    """Share of the easy examples that are asked again after a restart."""
    hard_fraction: Annotated[Share, OnlyWith("hard_threshold")] = 0.0
    """Share of the hard examples that are asked again after a restart."""
    skip_verification: bool = False
    """Training rollouts are not scored, and rewards are 0, for learning from a teacher alone."""

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
    """The mean is weighted by tokens, so that the advantages of tokens sum to 0, not those of rollouts."""


class ComparedAdvantage(_Signed):
    """`normalized`: the reward minus the group's mean, divided by its standard deviation. `leave_one_out`: the reward
    minus the mean of the others'."""

    type: Literal["normalized", "leave_one_out"]


class ConstantAdvantage(Section):
    """The same advantage for every step."""

    type: Literal["constant"]
    value: FiniteFloat = 1.0
    """The advantage."""


class RunningBaseline(Section):
    """The reward minus a running mean of the environment's rewards (REINFORCE with a baseline), without groups."""

    type: Literal["running_baseline"]
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean that stays; the rest is the batch's mean."""


class ReinforcePlusPlus(Section):
    """The reward, normalised over all tokens of the batch (REINFORCE++)."""

    type: Literal["reinforce_plus_plus"]
    group_baseline: bool = False
    """The group's mean is subtracted before (REINFORCE++-baseline)."""


BATCH_ADVANTAGES = ("running_baseline", "reinforce_plus_plus")
"""Types of advantages that are known only with their batch."""


class EpisodicAdvantage(Section):
    """The reward itself."""

    type: Literal["episodic"]


class CustomAdvantage(_Signed):
    """The result of a function of two lists, a group's rewards and numbers of sampled tokens, which returns as many
    advantages."""

    type: Literal["custom"]
    import_path: str
    """The function or class: `module:name` or `path/to/file.py:name`."""
    kwargs: dict[str, Any] = {}
    """Its keyword arguments."""


class CustomCredit(Section):
    """The result of a subclass of `CreditAssigner`, or of a function of a list of `EpisodeResult`
    (`grpo docs environments`)."""

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
    """DAPO's soft overlong punishment: an answer loses up to 1 over the last so many tokens before
    `sampling.max_tokens` (null: off)."""
    reference_kl: NonNegativeFloat = 0.0
    """Weight of the KL to the model before training, summed over a rollout's tokens and subtracted from its reward."""
    reference_kl_estimator: Annotated[Literal["k1", "k2", "k3"], OnlyWith("reference_kl")] = "k1"
    """Estimate of the KL of a token, with d = log π - log π_ref: `k1` d, `k2` d² / 2, `k3` exp(-d) - 1 + d."""


class _Filter(Section):
    enforce: bool = False
    """Rollouts with a find are kept out of the loss; their rewards still count in the group's mean. false: finds are
    only counted."""


class GibberishFilter(_Filter):
    """Finds a rare token that was sampled although improbable."""

    type: Literal["gibberish"]
    token_id_threshold: NonNegativeInt = 100_000
    """Tokens with a higher id are rare."""
    logprob_offset: NonNegativeFloat = 2.0
    """A token is improbable if its log-probability is this many nats below -log(size of the vocabulary)."""


class RepetitionFilter(_Filter):
    """Finds a long run of nearly certain tokens."""

    type: Literal["repetition"]
    window: PositiveInt = 3000
    """Length of the run in tokens."""
    prob_threshold: float = Field(default=0.99, gt=0, lt=1)
    """A token is nearly certain if its probability is above this."""


class CustomFilter(_Filter):
    """Finds what a function of two lists, an answer's token ids and log-probabilities, says."""

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
