"""Episodes: the protocols by which examples are rolled out and scored."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo.orchestrator.rollouts.context import NO_POOLS, Backend, ContextFull, RolloutContext, current_context
from grpo.orchestrator.rollouts.messages import Message, checked_messages, fields_of, messages_of, plain
from grpo.orchestrator.rollouts.players import Pool
from grpo.orchestrator.rollouts.roles import POLICY, Role
from grpo.orchestrator.rollouts.rubric import RewardNotFinite, RewardTooLarge, Rubric
from grpo.orchestrator.rollouts.state import EpisodeState, Reply
from grpo.orchestrator.workers.protocol import Mark, Outcome

Response = str | Message | Sequence[Message] | None
"""An environment's response to an answer: a text, which becomes a user's message, a message, several, or None for
nothing more."""


class Episode(ABC):
    """A protocol of calls, with a rubric that scores what came of it. One object serves many rollouts at a time: what
    belongs to a rollout lives in its state."""

    rubric: Rubric
    """Scores the rollout; a class attribute, or set in `__init__`."""
    roles: Sequence[Role] = (Role(id=POLICY),)
    """The roles that are trained."""

    @abstractmethod
    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        """Calls roles, spawns sub-episodes, until it is over. What it raises costs the rollout, which is counted with
        its reason, and not the run."""

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """Plain data about a rollout that is over: reward functions get it as `extras`, and logs show it. It is taken
        before scoring for them, and again after it for the logs."""
        return {}

    async def run(self, ctx: RolloutContext) -> EpisodeState:
        """Rolls out the context's example and scores it."""
        token = current_context.set(ctx)
        try:
            await self.rollout(ctx, ctx.state)
            return await self._scored(ctx)
        finally:
            current_context.reset(token)

    async def _scored(self, ctx: RolloutContext) -> EpisodeState:
        state = ctx.state
        state.done = True
        if ctx.score:
            scores = await self.rubric.score(state, ctx, extras=self._plain_extras(state))
            state.rewards, state.accuracy, state.metrics = scores.rewards, scores.accuracy, scores.metrics
        else:
            state.rewards = dict.fromkeys(state.roles, 0.0)
        state.extras = self._plain_extras(state)
        return state

    def _plain_extras(self, state: EpisodeState) -> dict[str, Any]:
        extras = dict(self.extras(state))
        return plain(extras, "what extras() returned") if extras else extras


async def run_episode(
    episode: Episode,
    backend: Backend,
    *,
    example: Mapping[str, Any],
    split: str,
    seed: int | None,
    episodes: Mapping[str, Episode],
    stores: Iterable[str],
    pools: Mapping[str, Pool] = NO_POOLS,
    score: bool = True,
    data: Mapping[str, Any] | None = None,
) -> EpisodeState:
    """Rolls out an example and scores it; `backend` answers its calls. `episodes` can be spawned, opponents drawn from
    `pools`; `data` is the state's at first. Raises what user code and the backend raise."""
    ctx = RolloutContext(
        backend,
        state=EpisodeState(example=example, data=dict(data or {})),
        roles=episode.roles,
        split=split,
        seed=seed,
        episodes=episodes,
        stores=stores,
        pools=pools,
        score=score,
    )
    return await episode.run(ctx)


async def score_answer(
    episode: Episode,
    backend: Backend,
    answer: Reply,
    *,
    example: Mapping[str, Any],
    split: str,
    seed: int | None,
) -> EpisodeState:
    """Scores an answer that is there already, of an episode of one answer; `backend` answers the calls of reward
    functions. Raises what user code and the backend raise."""
    messages: list[Message] = [*map(dict, answer.messages), answer.message]
    state = EpisodeState(example=example, messages=messages, trajectory=[answer], role=answer.role)
    ctx = RolloutContext(backend, state=state, roles=episode.roles, split=split, seed=seed, first_call=answer.call + 1)
    current_context.set(ctx)
    return await episode._scored(ctx)


def reason_of(error: BaseException) -> str:
    """The reason of a `Failure` for what a rollout's code has raised."""
    reasons: dict[type[BaseException], str] = {
        MemoryError: "env_memory",
        RewardTooLarge: "reward_too_large",
        RewardNotFinite: "reward_not_finite",
        ContextFull: "context_full",
        TimeoutError: "env_timeout",
    }
    return next((reason for kind, reason in reasons.items() if isinstance(error, kind)), "env_error")


def outcome_of(state: EpisodeState) -> Outcome:
    """Returns what there is to say about a rollout that is over, and about all that it spawned."""
    marks = {
        reply.call: Mark(
            error=reply.error,
            observed=None if reply.observed is None else [dict(message) for message in reply.observed],
        )
        for reply in state.trajectory
        if reply.player is None and (reply.error is not None or reply.observed is not None)
    }
    return Outcome(
        rollout=state.number,
        rewards=state.rewards,
        accuracy=state.accuracy,
        metrics=state.metrics,
        extras=state.extras,
        fields=fields_of(state.example),
        truncated=state.truncated,
        num_answers=sum(reply.player is None for reply in state.trajectory),
        players=state.players,
        marks=marks,
        children=[outcome_of(child) for child in state.children],
    )


class ChatEpisode(Episode):
    """A conversation: an answer, what the environment says to it, the next answer, until the environment has nothing
    more to say, `is_done`, or the context is full, which ends the rollout as truncated."""

    def initial_role(self, state: EpisodeState) -> str:
        """Returns the role that begins; by default the first."""
        return self.roles[0].id

    def initial_messages(self, state: EpisodeState) -> Sequence[Message]:
        """Returns the messages before the first answer; by default the example's prompt."""
        return messages_of(state.example)

    @abstractmethod
    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
        """Returns the response to the newest answer, `state.last_text`; None ends the rollout. Called after every
        answer but one at which `is_done`: also after the last one that is allowed, to which nobody answers."""

    def is_done(self, state: EpisodeState) -> bool:
        """Returns whether the newest answer was the last one."""
        return False

    def next_role(self, state: EpisodeState) -> str:
        """Returns the role that answers next; by default the same again."""
        return state.role

    def messages_for(self, role: str, state: EpisodeState) -> Sequence[Message]:
        """Returns the messages that a role is shown; by default the whole conversation."""
        return state.messages

    def tools_for(self, role: str, state: EpisodeState) -> Sequence[Mapping[str, Any]] | None:
        """Returns the tools that a role may call, in the OpenAI format. The model's chat template shows them."""
        return None

    def observe(self, state: EpisodeState) -> Sequence[Message] | None:
        """The state in which `state.role` is about to act, as messages that tell all of it to somebody who has not seen
        the conversation, such as a teacher who is asked what to do there. None, where not overridden: teachers are
        shown the conversation."""
        return None

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        state.role = self.initial_role(state)
        state.messages = list(self.initial_messages(state))
        while not state.done:
            state.done = await self._is_last_turn(ctx, state)

    async def _is_last_turn(self, ctx: RolloutContext, state: EpisodeState) -> bool:
        """An answer, and what the environment says to it."""
        messages, observed = self.messages_for(state.role, state), self.observe(state)
        shown = None if observed is None else tuple(checked_messages(observed))
        try:
            reply = await ctx.sample(state.role, messages, tools=self.tools_for(state.role, state))
        except ContextFull:
            if not state.trajectory:
                raise
            state.truncated = True
            return True
        reply.observed = shown
        state.messages.append(reply.message if len(self.roles) == 1 else {**reply.message, "name": reply.role})
        if self.is_done(state) or (response := await self.respond(state, ctx)) is None:
            return True
        if isinstance(response, str):
            response = {"role": "user", "content": response}
        state.messages += [response] if isinstance(response, Mapping) else response
        if not (is_last := state.done or self._has_had_all_turns(state)):
            state.role = self.next_role(state)
        return is_last

    def _has_had_all_turns(self, state: EpisodeState) -> bool:
        return False


class SingleTurnEpisode(ChatEpisode):
    """One prompt, one answer: for sub-episodes, and for environments whose reward functions need the rollout context.

    Example: ``SingleTurnEpisode(rubric=Rubric([right]), roles=[Role(id="solver")])``
    """

    def __init__(self, *, rubric: Rubric | None = None, roles: Sequence[Role] | None = None) -> None:
        """Both may as well be class attributes."""
        if rubric is not None:
            self.rubric = rubric
        if roles is not None:
            self.roles = roles

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
        """Returns None: the rollout is over."""
        return None


class MultiTurnEpisode(ChatEpisode):
    """A conversation of at most `max_turns` answers.

    Example: a game; the environment is its own episode::

        def won(state):
            return float(state.data.get("won", False))

        class Guess(MultiTurnEpisode, Environment):
            rubric = Rubric([won])
            max_turns = 5

            def dataset(self, split):
                numbers = range(1, 8) if split == "train" else range(8, 10)
                prompt = "Guess my number from 1 to 9."  # all have it: by their `task` they are told apart
                return [{"prompt": prompt, "task": f"number {number}", "number": number} for number in numbers]

            async def respond(self, state, ctx):
                guess = state.last_text.strip()
                if guess == str(state.example["number"]):
                    state.data["won"] = True
                    return None
                if not guess.isdecimal():
                    state.mark_error("no_number", "numbers", guess)
                    return "Please answer with a number."
                return "higher" if int(guess) < state.example["number"] else "lower"
    """

    max_turns: int | None = None
    """None: as many as the context holds."""

    def __init__(self, *, max_turns: int | None = None) -> None:
        """None: as the class has it."""
        if max_turns is not None:
            self.max_turns = max_turns
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"max_turns is {self.max_turns}, expected at least 1, or None")

    def _has_had_all_turns(self, state: EpisodeState) -> bool:
        return self.max_turns is not None and state.turn >= self.max_turns


class AlternatingRolesEpisode(MultiTurnEpisode):
    """Two roles in turn. Each sees its own answers as the assistant's, and the other's as the user's. In
    `state.messages` every answer is the assistant's, with the role's id as its `name`."""

    def __init__(self, *, roles: Sequence[Role] | None = None, max_turns: int | None = None) -> None:
        """Both may as well be class attributes. `max_turns` counts the answers of both."""
        super().__init__(max_turns=max_turns)
        if roles is not None:
            self.roles = roles
        if len(self.roles) != 2:
            raise ValueError(f"{len(self.roles)} roles cannot alternate, expected 2")

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
        """Returns the environment's messages in between, to both roles; by default none."""
        return ()

    def next_role(self, state: EpisodeState) -> str:
        first, second = (role.id for role in self.roles)
        return second if state.role == first else first

    def messages_for(self, role: str, state: EpisodeState) -> Sequence[Message]:
        """The conversation with the other's answers as the user's. What comes one after the other from the user is one
        message: many chat templates refuse two."""
        shown: list[dict[str, Any]] = []
        for message in state.messages:
            own = {key: value for key, value in message.items() if key != "name"}
            if own["role"] == "assistant" and message.get("name", role) != role:
                own["role"] = "user"
            if shown and shown[-1]["role"] == own["role"] == "user" and isinstance(own["content"], str):
                own["content"] = f"{shown.pop()['content']}\n\n{own['content']}"
            shown.append(own)
        return shown
