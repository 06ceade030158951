"""The orchestrator's records of a rollout, from the task to the tree of results.

Only roles are trained; whoever judges or answers beside them is no role and leaves no step.

Legend: `L` tokens of one completion or row.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from grpo.orchestrator.rollouts.players import PlayerId
from grpo.orchestrator.rollouts.roles import SHARED_ADAPTER, RoleAdapters
from grpo.orchestrator.rollouts.state import StepError
from grpo.transport.http import Choice
from grpo.transport.records import Bool, Float32, Int32

MAX_REWARD = 1e6
"""Rewards and advantages are at most so large, either way: the trainer computes with float32, and their squares, sums
and quotients must be finite there."""
MAX_METRIC = 1e15
"""So large is any other number of a rollout at most: means over thousands of them must be finite."""
Message = Mapping[str, str]
Messages = tuple[Message, ...]
"""Chat messages, `{"role": "user", "content": "Reverse: hello"}`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that a policy is sampled with. Example: ``SamplingParams(temperature=1.0, max_tokens=64)``"""

    temperature: float
    """0 is greedy."""
    max_tokens: int | None
    """Longest answer in tokens; None for what the context leaves."""
    noisy: bool = False
    """With the policy version's noise on its norm weights, where it has any: to explore, never to evaluate."""
    follow: bool = False
    """Answers that are being sampled go on under each new version as it becomes live."""
    adapter: str | None = None
    """Which of a version's adapters; None: the first, or only one."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One example of an environment.

    Example: ``Task(env="reverse-text", split="train", index=12, messages=({"role": "user", ...},))``
    """

    env: str
    """Label of the environment."""
    split: str
    """`train` or `eval`."""
    index: int
    """Its place in the environment's dataset; the rest of the example stays in the environment's workers."""
    messages: Messages
    """The prompt."""
    epoch: int | None = None
    """The pass over the training examples, from 0; None where they come in no order. Seeds follow from it, so that they
    outlive a restart."""
    solution: str = ""
    """The example's own `solution`, for hints; empty where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of rollouts that is asked for."""

    task: Task
    id: str
    """Rollouts are named `id/number`."""
    num: int
    version: int
    """The policy version that samples."""
    params: SamplingParams
    adapters: RoleAdapters = SHARED_ADAPTER
    seed: int | None = None
    """The seed of its requests; None for the server's own randomness."""
    score: bool = True
    """False if the rubric is not asked, and rewards are 0."""
    first: int = 0
    """Number of the first of its rollouts."""

    def name(self, place: int) -> str:
        """The id of one of its rollouts."""
        return f"{self.id}/{self.first + place}"

    def failed(self, reason: str, message: str) -> "list[EpisodeResult]":
        """Returns its rollouts where all of them have failed for one reason."""
        failure, names = Failure(reason=reason, message=message), map(self.name, range(self.num))
        return [EpisodeResult(id=name, task=self.task, failure=failure) for name in names]


class StepEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What hints and teachers say of a step (`hints.advantage_weight`, `preferences.advantage_weight`)."""

    hint_logprobs: Float32 | None = None
    """[L] of its sampled tokens, had the policy that sampled them read the hint; None without a hint."""
    teachers: Mapping[str, str] = {}
    """What each teacher that answered would have done instead, as text, by its name."""
    consensus: float | None = None
    """The share of the teachers that would have done the same less the largest share that would have done one other
    thing; None where none was asked or answered."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the policy."""

    role: str
    """Id of the role that acted."""
    temperature: float = 1.0
    """The sampling temperature."""
    completion: Choice = Choice(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), finish_reason="")
    """The tokens as the server sampled them, never decoded and tokenized again."""
    text: str = ""
    """The completion decoded without special tokens: for reward functions, never for training."""
    version: int = 0
    """Policy version that was asked for; newer ones may have sampled, where the request follows them."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The messages that are new in the conversation since its answer before this one."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools that could be called, in the OpenAI format."""
    observed: Sequence[Mapping[str, Any]] | None = None
    """The state in which it acted as the environment tells all of it without the conversation; None: only the
    conversation tells."""
    error: StepError | None = None
    adapter: int = 0
    """The one that sampled it, by its place among the run's."""
    evidence: StepEvidence | None = None
    """For credit, if evidence is an advantage."""

    def within(self, row: "TrainingRow", turn: "Turn") -> "Step":
        """Returns the step with its tokens as a part of the row that they are in: they are held once."""
        return msgspec.structs.replace(self, completion=row.holding(self.completion, turn))

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Runs of (version that sampled, number of tokens) in order, over the completion."""
        return self.completion.versions or ((self.version, len(self.completion.token_ids)),)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the policy within a row. Example: ``Turn(index=0, opens=12, begins=15, ends=20, ...)``"""

    index: int
    """Its place among the policy's answers in the conversation, from 0."""
    opens: int
    """The index where the template opens the turn: everything before is the prompt. A hint goes here. Equal to
    `begins` where the template opens turns with nothing, or with what cannot be told apart."""
    begins: int
    """Its first sampled token."""
    ends: int
    """One past its last sampled token."""
    finish_reason: str
    """`stop` or `length`."""


class TrainingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with one answer or several, and what others said between them; it ends with an answer.

    Example: two answers, [8, 9] and [4]: ``token_ids=[5, 6, 8, 9, 7, 4]``, ``sampled=[0, 0, 1, 1, 0, 1]``
    """

    token_ids: Int32
    """[L] as the server was given and as it sampled them."""
    sampled: Bool
    """[L] exactly what the policy sampled in this row."""
    logprobs: Float32
    """[L] natural log, at the sampling temperature; 0 where not sampled."""
    temperatures: Float32
    """[L] of the sampling; what was not sampled has that of the answer that follows."""
    versions: tuple[tuple[int, int], ...]
    """Runs of (policy version, number of tokens) in order; the numbers sum to L. What was not sampled has the version
    that began the answer that follows."""
    turns: tuple[Turn, ...]
    """In order, at least one."""
    steps: tuple[int, ...] = ()
    """The index of each turn's step in the rollout."""

    def holding(self, completion: Choice, turn: Turn) -> Choice:
        """Returns the completion of a turn with its tokens as a part of the row's."""
        own = slice(turn.begins, turn.ends)
        return msgspec.structs.replace(completion, token_ids=self.token_ids[own], logprobs=self.logprobs[own])

    def spread(self, by_turn: Sequence[float] | Mapping[int, float | Float32]) -> Float32:
        """[L] a number for each of the conversation's turns (by `Turn.index`), or one for each of its sampled tokens,
        on the tokens of this row's turns; 0 where not sampled. Advantages, for example."""
        values = np.zeros(len(self.token_ids), np.float32)
        for turn in self.turns:
            values[turn.begins : turn.ends] = by_turn[turn.index]
        return values


def single_row(
    prompt: Sequence[int] | Int32, completion: Choice, *, opening: Sequence[int], version: int, temperature: float
) -> TrainingRow:
    """Returns the row of a prompt with one answer, of a rollout with one step. `opening`: how the template opens the
    policy's turn; `version`: the requested one. Raises ValueError if the completion contradicts itself."""
    begins, ends, versions = len(prompt), len(prompt) + len(completion.token_ids), list[tuple[int, int]]()
    add_versions(versions, completion, requested=version, num_before=begins)
    token_ids, logprobs, sampled = np.empty(ends, np.int32), np.zeros(ends, np.float32), np.zeros(ends, np.bool_)
    token_ids[:begins], token_ids[begins:] = prompt, completion.token_ids
    logprobs[begins:], sampled[begins:] = completion.logprobs, True
    reason = completion.finish_reason
    turn = Turn(index=0, opens=opening_at(prompt, opening), begins=begins, ends=ends, finish_reason=reason)
    return TrainingRow(
        token_ids=token_ids,
        sampled=sampled,
        logprobs=logprobs,
        temperatures=np.ndarray(ends, np.float32, np.float32(temperature).tobytes(), strides=(0,)),  # one for all
        versions=tuple(versions),
        turns=(turn,),
        steps=(0,),
    )


def opening_at(token_ids: Sequence[int] | Int32, opening: Sequence[int]) -> int:
    """Returns where `opening` begins at the end of a row; the row's length where it does not stand there."""
    length = len(token_ids)
    at = length - len(opening)
    return at if at >= 0 and tuple(token_ids[at:]) == tuple(opening) else length


def add_versions(known: list[tuple[int, int]], completion: Choice, *, requested: int, num_before: int) -> None:
    """Adds the versions that sampled an answer to the runs (version, number of tokens) of its row. `num_before`: tokens
    before it, which count as sampled by the first. Raises ValueError where the completion contradicts itself."""
    num = len(completion.token_ids)
    if len(completion.logprobs) != num:
        raise ValueError(
            f"a completion of {num} tokens has {len(completion.logprobs)} log-probabilities; a server must give one "
            "for each"
        )
    (first, count), *others = versions = completion.versions or ((requested, num),)
    if (covered := sum(count for _, count in versions)) != num:
        raise ValueError(f"a completion of {num} tokens has versions {versions}, which cover {covered}; expected all")
    for version, num_tokens in ((first, num_before + count), *others):
        if known and known[-1][0] == version:
            num_tokens += known.pop()[1]
        if num_tokens:
            known.append((version, num_tokens))


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a rollout failed."""

    reason: str
    """`env_error`, `env_timeout`, `env_crashed`, `env_memory`, `reward_not_finite`, `reward_too_large`,
    `context_full` (before an episode's first answer), `server_timeout`, or `prompt_too_long` in an evaluation."""
    message: str
    """A text for people, with the environment's own traceback if there is one."""


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout: what was sampled, what it is worth, and the rollouts that it spawned.

    Example: a proposer whose question two solvers tried:
    ``EpisodeResult(id="3/0", rewards={"proposer": 1.0}, children=(solved, failed), ...)``
    """

    id: str = ""
    """Unique in the run, `group/number`; of a child `group/number.place`."""
    task: Task = Task(env="", split="", index=-1, messages=())
    steps: tuple[Step, ...] = ()
    """The rollout's own steps in order, without those of its children."""
    rows: tuple[TrainingRow, ...] = ()
    """The rows for training."""
    rewards: Mapping[str, float] = {}
    """Reward of each role by its id; every role that has a step has one, unless the rollout failed."""
    accuracy: float = 0.0
    """The measure that evaluation reports."""
    metrics: Mapping[str, float] = {}
    """The rubric's metrics by name."""
    extras: Mapping[str, Any] = {}
    """The result of `Episode.extras`, for logs."""
    fields: Mapping[str, Any] = {}
    """The example's fields other than its prompt, long texts cut, for traces."""
    context_full: bool = False
    """Ended by the episode because the context was full."""
    children: "tuple[EpisodeResult, ...]" = ()
    """Results of its sub-episodes."""
    players: Mapping[str, PlayerId] = {}
    """Who played, by role, the policy's own roles included; empty where nobody but the policy did."""
    opponent: "EpisodeResult | None" = None
    """The steps and rows of the opponents that our servers answered for, which are not trained."""
    failure: Failure | None = None
    """Why it has no reward; its steps are then those that are known."""
    seal: int | None = None
    """What `sealed` gave when its environment's rewards came; None where they came otherwise."""

    def __post_init__(self) -> None:
        if self.failure is not None:
            return
        for step in self.steps:
            if step.role not in self.rewards:
                raise ValueError(
                    f"rollout {self.id} has rewards for {sorted(self.rewards)}, and steps of {step.role} as well; "
                    "a rubric must give every role that acted a reward"
                )
        check_numbers(f"rollout {self.id}", self.rewards, self.metrics, self.accuracy)

    def sealed(self) -> int:
        """Returns a number of rollout, answers and rewards, by which it is known that they belong together. It is this
        process's alone."""
        return seal_of(self.id, self.steps, self.rewards)

    def step_reward(self, index: int) -> float:
        """The reward of the role that took a step."""
        return self.rewards[self.steps[index].role]

    def num_sampled_tokens(self, role: str | None = None) -> int:
        """Tokens that the policy sampled in this rollout alone, in all roles or in one."""
        return sum(len(step.completion.token_ids) for step in self.steps if role is None or step.role == role)

    @property
    def reward(self) -> float:
        """The reward of the role that acted first. It stands for the rollout where one number is needed."""
        return self.rewards[self.steps[0].role] if self.steps else 0.0

    @property
    def roles(self) -> tuple[str, ...]:
        """Ids of the roles that acted in this rollout, in the order in which they did first."""
        return tuple(dict.fromkeys(step.role for step in self.steps))

    @property
    def truncated(self) -> bool:
        """True if the last answer was cut at its limit, or no room was left for another one."""
        return self.context_full or (bool(self.steps) and self.steps[-1].completion.finish_reason == "length")

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled in the whole tree."""
        return sum(len(step.completion.token_ids) for one in self.walk() for step in one.steps)

    @property
    def versions(self) -> list[int]:
        """Policy versions that sampled any of the tree, ascending."""
        return sorted({version for one in self.walk() for step in one.steps for version, _ in step.versions})

    def walk(self) -> "Iterator[EpisodeResult]":
        """This result, then each child with all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def seal_of(rollout: str, steps: Iterable[Step], rewards: Mapping[str, float]) -> int:
    """Returns what `EpisodeResult.sealed` does, of a result that is about to be made."""
    answers = tuple(step.completion.token_ids.tobytes() for step in steps)
    return hash((rollout, answers, tuple(sorted(rewards.items()))))


def check_numbers(who: str, rewards: Mapping[str, float], metrics: Mapping[str, float], accuracy: float) -> None:
    """Raises NotFinite or TooLarge where a rollout's numbers cannot be trained on, or reported."""
    if all(-MAX_REWARD <= value <= MAX_REWARD for value in (*rewards.values(), *metrics.values(), accuracy)):
        return  # which is nearly always so, and what is not a number is not
    for numbers, most in ((rewards, MAX_REWARD), (metrics, MAX_METRIC), ({"accuracy": accuracy}, MAX_METRIC)):
        if not all(map(math.isfinite, numbers.values())):
            raise NotFinite(f"{who} has {dict(numbers)}, expected finite numbers")
        if large := [value for value in numbers.values() if abs(value) > most]:
            raise TooLarge(f"{who} has a number of {large[0]:g}, expected at most {most:g} either way")


class NotFinite(ValueError):
    """A rollout's numbers cannot be rewards."""


class TooLarge(NotFinite):
    """A rollout's numbers are beyond what can be trained on, or reported."""


def walk_all(results: Iterable[EpisodeResult]) -> Iterator[EpisodeResult]:
    """Every result of several trees, tree by tree."""
    for result in results:
        yield from result.walk()


def levels(results: Iterable[EpisodeResult]) -> Iterator[tuple[EpisodeResult, ...]]:
    """Groups by level of the hierarchy: the results themselves form one group, and each parent's children form one of
    their own."""
    top = tuple(results)
    if top:
        yield top
    for result in walk_all(top):
        if result.children:
            yield result.children
