"""Settings of what is rolled out and which of it is trained: sampling, examples, advantages, filters."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from configs.common import Section, changed_fields

_NOT_CORRECTED = (
    "is refused: it changes the distribution that tokens are drawn from, and the trainer, which divides logits by the "
    "temperature and does nothing else, would compute other log-probabilities; leave it at"
)


class TempSchedulerSettings(Section):
    """A temperature that changes with the policy version that samples."""

    type: Literal["linear", "cosine"]
    """Shape: `linear`, or `cosine`, which changes little at both ends."""
    start_temperature: PositiveFloat
    """Temperature of version 0."""
    end_temperature: PositiveFloat
    """Temperature of version `max_steps` - 1, the newest that the last batch can be sampled under."""


class SamplingSettings(Section):
    """How rollouts are sampled. What would bias the loss can only be left as it is."""

    max_tokens: PositiveInt | None = None
    """Longest answer in tokens (null: what `seq_len` and the model leave)."""
    min_tokens: NonNegativeInt = 0
    """Shortest answer in tokens. Only 0: a minimum would bias the log-probabilities."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    temp_scheduler: TempSchedulerSettings | None = None
    """A temperature for each policy version, instead of `temperature` (null: that)."""
    top_p: float = 1.0
    """Share of the probability that is sampled from. Only 1."""
    top_k: int = -1
    """Number of tokens that are sampled from. Only -1, all."""
    min_p: float = 0.0
    """Least probability, relative to the likeliest token's. Only 0."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that are there already. Only 1."""
    presence_penalty: float = 0.0
    """Is taken off the logits of tokens that are there already. Only 0."""
    frequency_penalty: float = 0.0
    """Is taken off the logits of tokens for each time that they are there already. Only 0."""
    seed: int | None = None
    """Seed of each request, mixed with the group's and the rollout's number (null: the server's own randomness)."""

    def conflicts(self, *, seq_len: int, max_steps: int | None) -> Iterator[tuple[str, str]]:
        """Keys that cannot be honoured."""
        if self.max_tokens is not None and self.max_tokens >= seq_len:
            yield "sampling.max_tokens", f"leaves no room for a prompt in seq_len = {seq_len}"
        if self.min_tokens > 0:
            yield (
                "sampling.min_tokens",
                "is refused: the server masks the end token before it computes log-probabilities, so they would not be "
                "those that the trainer computes; leave it at 0",
            )
        for key in _TRANSFORMS:
            if getattr(self, key) != (neutral := type(self).model_fields[key].get_default()):
                yield f"sampling.{key}", f"{_NOT_CORRECTED} {neutral:g}"
        if self.temp_scheduler is not None:
            yield from self._conflicts_of_scheduler(self.temp_scheduler, max_steps)

    def _conflicts_of_scheduler(
        self, scheduler: TempSchedulerSettings, max_steps: int | None
    ) -> Iterator[tuple[str, str]]:
        if "temperature" in changed_fields(self):
            yield "sampling.temperature", "has no effect with sampling.temp_scheduler; remove one of the two"
        if max_steps is None or max_steps < 2:
            yield "sampling.temp_scheduler", "needs max_steps of at least 2, to know where it ends; set max_steps"
        if scheduler.start_temperature == scheduler.end_temperature:
            yield (
                "sampling.temp_scheduler.end_temperature",
                "equals start_temperature, so nothing would change; set sampling.temperature instead",
            )


_TRANSFORMS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class BufferSettings(Section):
    """Which example is asked next, and which groups are worth training."""

    seed: int | None = None
    """Seed of the order of examples (null: `seed`)."""
    env_ratios: tuple[NonNegativeFloat, ...] | None = None
    """How often each environment is asked, relative to the others, in the order of `env` (null: equally often)."""
    hash_keys: tuple[str, ...] = Field(default=("task", "prompt"), min_length=1)
    """Fields of an example that make out its identity: of two that agree in them, the second is left out and counted,
    and after a restart an example is known by them. `task` is the environment's name, unless the example has its own;
    without it, an example of one environment can be that of another."""
    online_difficulty_filtering: bool = False
    """Do not train groups whose rewards are all 0.0 or all 1.0; others are sampled in their place."""
    easy_threshold: FiniteFloat | None = None
    """Mean reward of a group from which on its example is easy, and not asked again (null: none is)."""
    hard_threshold: FiniteFloat | None = None
    """Mean reward of a group down from which its example is hard, and not asked again (null: none is)."""
    easy_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the easy examples that are asked again after a restart."""
    hard_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the hard examples that are asked again after a restart."""
    skip_verification: bool = False
    """Score no rollout: rewards are 0, and no rubric runs but the evaluation's. For learning from a teacher alone."""

    def conflicts(self, *, num_envs: int) -> Iterator[tuple[str, str]]:
        """Keys that have no effect or contradict each other."""
        yield from self._conflicts_of_envs(num_envs)
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and hard >= easy:
            yield "buffer.hard_threshold", f"must be below buffer.easy_threshold = {easy:g}"
        for name, threshold in (("easy", easy), ("hard", hard)):
            if threshold is None and getattr(self, f"{name}_fraction") > 0:
                yield f"buffer.{name}_fraction", f"has no effect without buffer.{name}_threshold; remove it or set that"
        if self.skip_verification:
            for key in ("easy_threshold", "hard_threshold"):
                if getattr(self, key) is not None:
                    yield f"buffer.{key}", "has no effect with buffer.skip_verification: true, where rewards are 0"
            if self.online_difficulty_filtering:
                yield (
                    "buffer.online_difficulty_filtering",
                    "would drop every group with buffer.skip_verification: true, where rewards are 0; remove one",
                )
        if len(set(self.hash_keys)) < len(self.hash_keys):
            yield "buffer.hash_keys", "names a field twice; remove one"

    def conflicts_of_new_run(self) -> Iterator[tuple[str, str]]:
        """Keys that only have an effect when the buffer goes on from where an earlier process left it."""
        for name in ("easy_fraction", "hard_fraction"):
            if getattr(self, name) > 0:
                yield (
                    f"buffer.{name}",
                    "has no effect where the order of examples begins anew, and none is easy or hard yet; remove it",
                )

    def _conflicts_of_envs(self, num_envs: int) -> Iterator[tuple[str, str]]:
        if (ratios := self.env_ratios) is None:
            return
        if len(ratios) != num_envs:
            yield "buffer.env_ratios", f"has {len(ratios)} numbers for {num_envs} environments; give one each"
        elif num_envs == 1:
            yield "buffer.env_ratios", "has no effect with one environment; remove it"
        if sum(ratios) <= 0:
            yield "buffer.env_ratios", "must have a number above 0"


AdvantageType = Literal["default", "normalized", "leave_one_out", "constant", "episodic", "custom", "custom_credit"]


class AdvantageSettings(Section):
    """Which advantage each step of each rollout of a group gets for its reward."""

    type: AdvantageType = "default"
    """Rollouts are compared with those of the same task, each role with itself; rollouts that another one has spawned,
    with those that it spawned beside them. `default`: the reward minus the group's mean. `normalized`: that, divided
    by the group's standard deviation. `leave_one_out`: the reward minus the mean of the others'. `constant`: the same
    for every step. `episodic`: the reward itself. `custom`: what a function of yours says of a group's rewards.
    `custom_credit`: what yours says of whole trees of rollouts."""
    length_weighted_mean: bool = False
    """Weigh each reward in the group's mean by the tokens that its rollout sampled, so that the advantages of all the
    group's tokens, rather than rollouts, sum to 0. Only with `default`."""
    positive_only: bool = False
    """Negative advantages count as 0. Not with `constant`, `episodic` and `custom_credit`."""
    value: FiniteFloat = 1.0
    """The advantage of every step. Only with `constant`."""
    import_path: str | None = None
    """Of `custom`: a function, `module:function` or `path/to/file.py:function`. It is called with the group's rewards
    and numbers of sampled tokens, two lists, and with `kwargs`, and returns as many advantages. Of `custom_credit`: a
    subclass of `CreditAssigner`, or a function of a list of `GenerateResult`, which returns an advantage for each
    (rollout id, index of the step)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of what `import_path` names. Only with `custom` and `custom_credit`."""

    @property
    def fewest_rollouts(self) -> int:
        """Of a group from which anything is learned: where rollouts are compared, one alone teaches nothing."""
        return 1 if self.type in ("constant", "episodic", "custom_credit") else 2

    def conflicts(self, *, skip_verification: bool) -> Iterator[tuple[str, str]]:
        """Keys that have no effect or are missing."""
        changed = changed_fields(self)
        if self.type in _NAMED and self.import_path is None:
            yield "advantage.import_path", f"is needed with advantage.type: {self.type}; give module:function"
        for key in sorted(changed - {"type"}):
            if self.type not in (types := _TYPES_WITH[key]):
                yield (
                    f"advantage.{key}",
                    f"has no effect with advantage.type: {self.type}; remove it, or use {' or '.join(types)}",
                )
        if not skip_verification:
            return
        if self.type == "default" and self.length_weighted_mean:
            yield (
                "advantage.length_weighted_mean",
                "has no effect with buffer.skip_verification: true, where all rewards are 0; remove it",
            )
        elif self.type in ("normalized", "leave_one_out", "episodic"):
            yield (
                "advantage.type",
                f"{self.type} has no effect with buffer.skip_verification: true, where all rewards are 0; remove it",
            )


_NAMED: tuple[AdvantageType, ...] = ("custom", "custom_credit")
_TYPES_WITH: dict[str, tuple[AdvantageType, ...]] = {
    "length_weighted_mean": ("default",),
    "positive_only": ("default", "normalized", "leave_one_out", "custom"),
    "value": ("constant",),
    "import_path": _NAMED,
    "kwargs": _NAMED,
}
"""Where a key has an effect."""


class FilterSettings(Section):
    """Finds rollouts that have gone astray."""

    type: Literal["gibberish", "repetition"]
    """`gibberish`: a rare token that was sampled although it was hardly likely. `repetition`: a long run of tokens of
    which each was all but certain."""
    enforce: bool = False
    """Keep what is found out of the loss; its reward still counts in the group's mean. false: only count it."""
    token_id_threshold: NonNegativeInt = 100_000
    """Tokens with a higher id are rare. Only with `gibberish`."""
    logprob_offset: NonNegativeFloat = 2.0
    """A token is hardly likely where its log-probability is so many nats below that of a uniform draw from the
    vocabulary, -log(V). Only with `gibberish`."""
    window: PositiveInt = 3000
    """Tokens in a row. Only with `repetition`."""
    prob_threshold: float = Field(default=0.99, gt=0, lt=1)
    """A token is all but certain where its probability is above this. Only with `repetition`."""

    def conflicts(self, key: str, *, longest: int) -> Iterator[tuple[str, str]]:
        """Keys below `key` that have no effect. `longest`: the longest answer in tokens."""
        others = _OF_REPETITION if self.type == "gibberish" else _OF_GIBBERISH
        for name in sorted(others & changed_fields(self)):
            yield f"{key}.{name}", f"has no effect with type: {self.type}; remove it"
        if self.type == "repetition" and self.window > longest:
            yield (
                f"{key}.window",
                f"finds nothing: by sampling.max_tokens and seq_len no answer is longer than {longest}",
            )


_OF_GIBBERISH = {"token_id_threshold", "logprob_offset"}
_OF_REPETITION = {"window", "prob_threshold"}


def conflicts_of_filters(filters: tuple[FilterSettings, ...], *, longest: int) -> Iterator[tuple[str, str]]:
    """Keys of `filters` that have no effect or contradict each other. `longest`: the longest answer in tokens."""
    for position, one in enumerate(filters):
        yield from one.conflicts(f"filters.{position}", longest=longest)
        if one.type in [other.type for other in filters[:position]]:
            yield f"filters.{position}.type", f"a second filter of type {one.type}; merge the two"
