"""The rollout context: how an episode reaches the policy, models beside it, sub-episodes and artifact stores."""

import asyncio
import functools
import hashlib
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo.orchestrator.rollouts.clock import in_thread, together, waiting
from grpo.orchestrator.rollouts.messages import Message, checked_messages, plain, shown
from grpo.orchestrator.rollouts.players import DrawRule, Player, PlayerId, Pool, check_draw
from grpo.orchestrator.rollouts.roles import Role, by_id, check_temperature
from grpo.orchestrator.rollouts.state import EpisodeState, Reply
from grpo.orchestrator.workers import protocol

MAX_DEPTH = 8
"""Generations of sub-episodes below a rollout: one that spawns itself without end is an error."""


NO_EPISODES: Mapping[str, Any] = {}
NO_POOLS: Mapping[str, Pool] = {}
MAX_CHILDREN = 4096
"""Sub-episodes of one `spawn`."""


class ContextFull(RuntimeError):
    """The messages leave no room for an answer in the model's context."""


class CallFailed(RuntimeError):
    """A call of a model or of an artifact store has failed."""


Backend = Callable[[protocol.AnyCall], Awaitable[Any]]
"""Answers the calls of one rollout and of all that it spawns: `Sample` and `Ask` by `Sampled`, others by `StoreReply`,
or any by `Refused`. Raises ContextFull and CallFailed."""


class Store:
    """An artifact store: JSON values with weights, which outlive the rollout and the run's restarts.

    Example: ``await ctx.stores["questions"].add({"question": "3 + 4"}, weight=0.5)``
    """

    def __init__(self, name: str, call: Backend) -> None:
        self.name, self._call = name, call

    async def add(self, data: Any, *, weight: float = 1.0) -> str:
        """The id of the value, which is that of any equal value. A full store loses its lightest artifact."""
        value = plain(data, f"what is added to the store {self.name}")
        return str(await self._do("add", data=value, weight=float(weight)))

    async def sample(self, num: int = 1, *, weighted: bool = False, replace: bool = True) -> list[tuple[str, Any]]:
        """`num` draws as (id, data), of all alike or by weight. Raises CallFailed where the store has not enough."""
        drawn = await self._do("sample", num=num, weighted=weighted, replace=replace)
        return [(artifact_id, data) for artifact_id, data in drawn]

    async def sample_one(self, *, weighted: bool = False) -> tuple[str, Any] | None:
        """Returns one draw as (id, data); None where the store is empty."""
        return (await self.sample(weighted=weighted))[0] if await self.count() else None

    async def get(self, id: str) -> Any:
        """The value with this id, as `add` and `sample` gave it; None where it is not there any more."""
        found = await self._do("get", id=id)
        return found[0] if found else None

    async def set_weight(self, id: str, weight: float) -> bool:
        """Returns whether the artifact is still there: other rollouts add to a store at the same time, and the lightest
        leaves a full one."""
        return await self._do("set_weight", id=id, weight=float(weight)) is not False

    async def count(self) -> int:
        """Returns how many artifacts there are."""
        return int(await self._do("count"))

    async def _do(self, operation: str, **arguments: Any) -> Any:
        return (await self._call(protocol.StoreCall(store=self.name, operation=operation, arguments=arguments))).value


class _Stores(dict[str, Store]):
    def __missing__(self, name: str) -> Store:
        raise KeyError(f"there is no store {name}; there are {sorted(self)}; name it in the environment's `stores`")


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """A conversation that the policy takes part in, as it is known by its messages."""

    number: int
    opened: tuple[str, list[dict[str, Any]] | None, bool]
    """(role, tools, raw), the same for all of it."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All of them, the newest answer included."""
    answers: set[int] = field(default_factory=set)
    """Places of the policy's own answers among them."""

    def goes_on_as(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether `messages` begin with all of it. Only the text of the policy's own answers counts: an
        environment may add to them, such as tool calls."""
        if len(self.messages) > len(messages):
            return False
        return all(
            (known["role"], known["content"]) == (given["role"], given.get("content"))
            if place in self.answers
            else known == given
            for place, (known, given) in enumerate(zip(self.messages, messages, strict=False))
        )

    def answered(self, messages: list[dict[str, Any]], text: str) -> None:
        self.answers.add(len(messages))
        self.messages = [*messages, {"role": "assistant", "content": text}]


class RolloutContext:
    """A rollout's way to models, sub-episodes and stores. Each rollout, and each sub-episode, has its own.

    Message lists are always whole. Where one goes on from an answer that the same role gave in this rollout, with the
    same messages before it, that conversation goes on: what the policy sampled stays the tokens that it sampled.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        state: EpisodeState,
        roles: Sequence[Role],
        split: str = "train",
        seed: int | None = None,
        episodes: Mapping[str, Any] = NO_EPISODES,
        stores: Iterable[str] = (),
        pools: Mapping[str, Pool] = NO_POOLS,
        score: bool = True,
        first_call: int = 0,
        parent: "RolloutContext | None" = None,
    ) -> None:
        """`backend` answers calls, the first of which has the number `first_call`. `episodes`, by name, can be
        spawned; from `pools`, by name, opponents can be drawn. `parent`: the context of the rollout that spawns this
        one; both count their calls together."""
        self.state = state
        self.roles: Mapping[str, Role] = by_id(roles)
        """The roles that may be called, by id."""
        self.split = split
        """`train` or `eval`."""
        self.score = score
        """False if no rubric is asked, and all rewards are 0."""
        self.seed = seed
        """This rollout's seed; None if the run has none."""
        self.stores: Mapping[str, Store] = _Stores({name: Store(name, self._call) for name in stores})
        """Artifact stores by name."""
        self._backend, self._episodes, self._number = backend, episodes, state.number
        self._pools = pools
        self._bound: dict[str, Player] = {}
        """Players by the role that they answer for."""
        self._root: RolloutContext = self if parent is None else parent._root
        self._depth: int = 0 if parent is None else parent._depth + 1
        self._num_calls, self._num_conversations, self._num_rollouts = first_call, 0, 1
        """The root counts for the whole tree."""
        self._known: list[_Conversation] = []
        self._num_spawned = 0

    @functools.cached_property
    def rng(self) -> random.Random:
        """The random numbers of this rollout: the same whenever it is rolled out with the same seed."""
        return random.Random(self.seed)

    async def sample(
        self,
        role: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        raw: bool = False,
        logprobs: bool = False,
    ) -> Reply:
        """A role's answer, which is appended to the state's trajectory, and trained, unless the role is bound to a
        player. `tools` may be called, in the
        OpenAI format; the model's chat template shows them. `max_tokens` and `temperature`: None for the role's; an
        evaluation has its own temperature. `raw`: the messages' texts are the prompt as they stand, control tokens
        included. `logprobs`: the reply is to have its tokens.

        Of calls at the same time that would continue one conversation, one does, and the others begin new ones.

        Raises ContextFull, CallFailed, and ValueError for what cannot be asked.
        """
        if role not in self.roles:
            raise ValueError(f"there is no role {role!r}; the episode's `roles` are {', '.join(self.roles)}")
        _check_max_tokens(max_tokens)
        if temperature is not None and self.split == "train":
            check_temperature(temperature)
        whole = checked_messages(messages)
        if not raw and (prompt := self.roles[role].system_prompt) and whole[0]["role"] != "system":
            whole = [{"role": "system", "content": prompt}, *whole]
        player = self._bound.get(role)
        if player is not None and player.answer is not None:
            return await self._answer_here(role, player, whole)
        shown = None if tools is None else plain(list(tools), "tools")
        conversation = self._take((role, shown, raw), whole)
        new = whole[len(conversation.messages) :]
        whole = conversation.messages + new
        # Meanwhile, and where this raises, nobody continues it.
        call = protocol.Sample(
            role=role,
            rollout=self._number,
            conversation=conversation.number,
            messages=new,
            tools=None if conversation.messages else shown,
            max_tokens=max_tokens,
            temperature=temperature,
            raw=raw,
            logprobs=logprobs,
            drawn=None if player is None else player.drawn,
        )
        answer: protocol.Sampled = await self._call(call)
        conversation.answered(whole, answer.text)
        self._known.append(conversation)
        reply = Reply(
            role=role,
            messages=tuple(whole),
            text=answer.text,
            finish_reason=answer.finish_reason,
            num_tokens=answer.num_tokens,
            num_prompt_tokens=answer.num_prompt_tokens,
            opening=answer.opening,
            tokens=tuple(answer.tokens),
            index=len(self.state.trajectory),
            call=call.call,
            player=None if player is None else player.id,
        )
        self.state.trajectory.append(reply)
        return reply

    async def _answer_here(self, role: str, player: Player, messages: list[dict[str, Any]]) -> Reply:
        """Returns the answer of a player that answers in this process."""
        assert player.answer is not None
        is_async = inspect.iscoroutinefunction(player.answer)
        answer = (
            player.answer(self.state, messages) if is_async else await in_thread(player.answer, self.state, messages)
        )
        text = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(text, str):
            raise ValueError(f"the player {player.id.name} answered {type(text).__name__}, expected a text")
        reply = Reply(
            role=role,
            messages=tuple(messages),
            text=text,
            finish_reason="stop",
            num_tokens=0,
            index=len(self.state.trajectory),
            player=player.id,
        )
        self.state.trajectory.append(reply)
        return reply

    async def opponent(
        self,
        pool: str,
        *,
        by: DrawRule = "uniform",
        per: Literal["group", "game"] = "group",
        adapter: str | None = None,
    ) -> Player:
        """Returns a player for this game, to be bound to a role: one of the environment's pools, drawn `by` a rule,
        `base`, or `newest`, the policy as it is now, with several adapters the `adapter` of this name. All rollouts of
        a group meet the same one, so that they can be compared, or with `per="game"` each its own. Before a pool has a
        snapshot, it is `base`. Which it is follows from the run's seed, the policy's version and the example.

        Raises CallFailed, and ValueError for what there is not.

        Example: ``ctx.bind("Neg", await ctx.opponent("past", by="pfsp"))``
        """
        check_draw(pool, by=by, per=per, adapter=adapter, pools=self._pools)
        call = protocol.Draw(pool=pool, by=by, per_game=per == "game", rollout=self._number, adapter=adapter)
        drawn = (await self._call(call)).value
        return Player(id=PlayerId(name=drawn["name"], digest=drawn["digest"]), drawn=call.call)

    def bind(self, role: str, player: Player) -> None:
        """Has `player` answer for a role in this rollout: what it says is not trained, and the record of the game names
        it. Raises ValueError for a role that there is not, or that has answered already."""
        if role not in self.roles:
            raise ValueError(f"there is no role {role!r}; the episode's `roles` are {', '.join(self.roles)}")
        if any(reply.role == role for reply in self.state.trajectory):
            raise ValueError(f"role {role} has answered already; bind it to {player.id.name} before its first answer")
        self._bound[role] = player
        self.state.players[role] = player.id

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        model: Literal["base", "policy"] = "base",
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> str:
        """An answer of our own servers that is never trained: of the model as it was before training (`base`), or as it
        is now (`policy`). Raises ContextFull, CallFailed, and ValueError for what cannot be asked."""
        if model not in ("base", "policy"):
            raise ValueError(f"model is {model!r}, expected base or policy; other models have clients of their own")
        _check_max_tokens(max_tokens)
        check_temperature(temperature, greedy=True)
        checked = checked_messages(messages)
        call = protocol.Ask(model=model, messages=checked, temperature=float(temperature), max_tokens=max_tokens)
        return str((await self._call(call)).text)

    async def score_answers(
        self, role: str, prompts: Sequence[Sequence[Message]], answers: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """The log-probabilities, in nats, that the role's policy gives each of the `answers` [N] to each of the
        `prompts` [N], in one request: nothing is sampled, and nothing trained. They are those of its temperature in
        training (1 where the role has none), and of the answer's end as well where the role may say more than that.
        Raises ContextFull, CallFailed, and ValueError for what cannot be asked."""
        if role not in self.roles:
            raise ValueError(f"there is no role {role!r}; the episode's `roles` are {', '.join(self.roles)}")
        if len(prompts) != len(answers) or not all(answers):
            raise ValueError(f"{len(prompts)} prompts and {len(answers)} lists of answers; give some for each prompt")
        system = self.roles[role].system_prompt
        whole = [checked_messages(messages) for messages in prompts]
        if system:
            opening = {"role": "system", "content": system}
            whole = [one if one[0]["role"] == "system" else [opening, *one] for one in whole]
        call = protocol.ScoreAnswers(role=role, prompts=whole, answers=[list(own) for own in answers])
        return [[float(value) for value in own] for own in (await self._call(call)).value]

    @asynccontextmanager
    async def delayed(self, timeout_s: float) -> AsyncIterator[None]:
        """Waits for a reward that comes later, such as a person's or an experiment's. While it is entered, the rollout
        holds none of the slots that others are sampled in, and `timeout_s` is its only deadline. Raises TimeoutError.

        Example::

            async def verdict(completion, ctx):
                async with ctx.delayed(timeout_s=3600):
                    return await experiment(completion)
        """
        await self._call(protocol.Delay())
        with waiting():
            async with asyncio.timeout(timeout_s):
                yield

    async def spawn(self, episode: str, examples: Sequence[Mapping[str, Any]]) -> list[EpisodeState]:
        """Sub-episodes of the environment's `episodes`, one for each example, at the same time. Each is scored by its
        own rubric, and credit compares it with its siblings. Returns their states, which say what they came to, in
        order, and appends them to the state's `children`. Raises ValueError for what cannot be spawned.

        Example: a question is worth most where half of its solvers solve it::

            def right(completion, example):
                return float(completion.strip() == example["answer"])

            def goldilocks(extras):
                return 1 - 2 * abs(extras["pass_rate"] - 0.5)

            class Propose(Episode):
                roles = [Role(id="proposer")]
                rubric = Rubric([goldilocks])

                async def rollout(self, ctx, state):
                    reply = await ctx.sample("proposer", [{"role": "user", "content": "Ask for a sum, such as 3+4"}])
                    left, _, right = reply.text.partition("+")
                    if left.isdecimal() and right.isdecimal():
                        task = {"prompt": reply.text, "answer": str(int(left) + int(right))}
                        await ctx.spawn("solve", [task] * 4)

                def extras(self, state):
                    solved = [child.reward for child in state.children]
                    return {"pass_rate": sum(solved) / len(solved) if solved else 0.0}

            class ProposeAndSolve(Environment):
                episode = Propose()
                episodes = {"solve": SingleTurnEpisode(rubric=Rubric([right]), roles=[Role(id="solver")])}

                def dataset(self, split):
                    return [{"prompt": "Ask for a sum."}]
        """
        if (found := self._episodes.get(episode)) is None:
            there = sorted(self._episodes) or "none"
            raise ValueError(f"there is no sub-episode {episode!r}; the environment's `episodes` has {there}")
        if self._depth >= MAX_DEPTH:
            raise ValueError(f"{episode} is spawned {MAX_DEPTH + 1} generations below a rollout, at most {MAX_DEPTH}")
        is_list = isinstance(examples, Sequence) and not isinstance(examples, str | bytes)
        if not is_list or len(examples) > MAX_CHILDREN or not all(isinstance(one, Mapping) for one in examples):
            what = f"{len(examples)} examples" if is_list else shown(examples)
            raise ValueError(f"{episode} is spawned for {what}, expected a list of at most {MAX_CHILDREN} mappings")
        children: list[EpisodeState] = await together(
            [found.run(self._child(found.roles, example)) for example in examples]
        )
        self.state.children += children
        return children

    def _child(self, roles: Sequence[Role], example: Mapping[str, Any]) -> "RolloutContext":
        seed = None
        if self.seed is not None:
            digest = hashlib.blake2b(f"{self.seed}/{self._num_spawned}".encode(), digest_size=4).digest()
            seed = int.from_bytes(digest)
        self._num_spawned += 1
        root = self._root
        root._num_rollouts += 1
        return RolloutContext(
            self._backend,
            state=EpisodeState(example=example, number=root._num_rollouts - 1),
            roles=roles,
            split=self.split,
            seed=seed,
            episodes=self._episodes,
            stores=self.stores,
            pools=self._pools,
            score=self.score,
            parent=self,
        )

    async def _call(self, call: protocol.AnyCall) -> Any:
        """Returns the reply to a call. Raises ContextFull and CallFailed."""
        root = self._root
        call.call, root._num_calls = root._num_calls, root._num_calls + 1
        reply = await self._backend(call)
        if isinstance(reply, protocol.CallRefused):
            raise (ContextFull if reply.reason == "context_full" else CallFailed)(reply.message)
        return reply

    # --- conversations ---

    def _take(
        self, opened: tuple[str, list[dict[str, Any]] | None, bool], messages: list[dict[str, Any]]
    ) -> _Conversation:
        """Returns the longest known conversation that `messages` continue, or a new one. A conversation that is being
        answered is not known."""
        fitting = [one for one in self._known if one.opened == opened and one.goes_on_as(messages)]
        if not fitting:
            number = self._root._num_conversations
            self._root._num_conversations += 1
            return _Conversation(number=number, opened=opened)
        longest = max(fitting, key=lambda one: len(one.messages))
        self._known.remove(longest)
        return longest


current_context: ContextVar[RolloutContext] = ContextVar("current_context")
"""The context of the rollout whose code runs."""


def _check_max_tokens(max_tokens: Any) -> None:
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens < 1 << 63):
        raise ValueError(f"max_tokens is {shown(max_tokens)}, expected an integer of at least 1, or None")
