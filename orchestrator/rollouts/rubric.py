"""Rubrics: weighted reward functions, plain or async. Runs in the environment's process."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.orchestrator.rollouts.clock import in_thread, together
from grpo.orchestrator.rollouts.context import RolloutContext
from grpo.orchestrator.rollouts.messages import shown
from grpo.orchestrator.rollouts.parsers import Parser
from grpo.orchestrator.rollouts.records import MAX_METRIC, MAX_REWARD
from grpo.orchestrator.rollouts.state import EpisodeState

RewardFunction = Callable[..., Any]
"""Takes any of `completion`, `example`, `state`, `ctx`, `extras` and `parsed` by name; see Rubric."""

NAMES = ("completion", "example", "state", "ctx", "extras", "parsed")

_ELSEWHERE = {
    **dict.fromkeys(("completions", "completion_ids", "responses", "solution_str"), "completion"),
    **dict.fromkeys(("prompt", "prompts", "solution", "ground_truth", "extra_info", "info", "task"), "example"),
    **dict.fromkeys(("rollout", "trainer_state"), "state"),
    **dict.fromkeys(("arena", "judge"), "ctx"),
    "parser": "parsed",
}
"""What reward functions of other libraries take, and what tells the same here."""


class RewardNotFinite(ValueError):
    """A reward function returned something that cannot be a reward."""


class RewardTooLarge(RewardNotFinite):
    """A rollout's reward is beyond what can be trained on, or one of its metrics beyond what can be reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a rubric says about a rollout. Example: ``Scores(rewards={"Aff": 1.0, "Neg": -1.0}, accuracy=1.0)``"""

    rewards: dict[str, float]
    """By role: those who acted, and those to whom a function gave something."""
    accuracy: float
    metrics: dict[str, float] = field(default_factory=dict)


class Rubric:
    """Scores a rollout: the weighted sum of reward functions.

    Example: ``Rubric([exact, in_place], weights=[0.5, 0.5], accuracy=exact)``

    A function, plain or async, takes by name any of

    - `completion`: the last answer's text; with a `parser`, the answer that it finds there, or an empty text,
    - `example`: of the dataset,
    - `state`: the rollout, an EpisodeState,
    - `ctx`: the rollout context, to ask a judge,
    - `extras`: what the episode's `extras` returned,
    - `parsed`: with a `parser`, its `Parsed`: answer, thinking and fields.

    Functions run at the same time: async ones on the event loop, plain ones in threads, so that one that blocks
    stops nobody else. After them come the metrics and the accuracy, of which plain ones share a thread.

    A function of two parameters with other names gets the completion and the example. It returns a finite number, which
    every role that acted gets, or a mapping from role to number; who is not in it gets 0 from this function. A role's
    weighted sum is at most a million, either way.

    Metrics are the functions' values by name, those of mappings as `name/key`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        accuracy: RewardFunction | None = None,
        metrics: Sequence[RewardFunction] = (),
        parser: Parser | None = None,
    ) -> None:
        """`weights` default to 1 each; `accuracy`, which evaluation reports, defaults to the first function; of a
        mapping it is the value of the role that acted first. `metrics` are reported and weigh nothing; their mappings
        may have any keys. `parser`: takes the last answer apart for all of them (None: they get its text)."""
        if not functions:
            raise ValueError("a rubric without reward functions cannot score; give at least one")
        self._weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(self._weights) != len(functions):
            raise ValueError(f"{len(self._weights)} weights for {len(functions)} reward functions; give one each")
        if not all(map(math.isfinite, self._weights)):
            raise ValueError(f"the weights are {self._weights}, expected finite numbers")
        self._functions = [_Function(function) for function in functions]
        self._metrics = [_Function(function) for function in metrics]
        reported = [*self._functions, *self._metrics]
        if len({function.name for function in reported}) != len(reported):
            names = [function.name for function in reported]
            raise ValueError(f"reward functions {names} do not have different names; rename one")
        known = {function.function: function for function in reported}
        self._accuracy = self._functions[0] if accuracy is None else known.get(accuracy) or _Function(accuracy)
        self.parser = parser
        named = {one.name for one in (*reported, self._accuracy) if one.takes is not None and "parsed" in one.takes}
        if named and parser is None:
            raise ValueError(f"{min(named)} takes parsed, and the rubric has no parser; give one, as parser=Parser()")
        others = [one for one in dict.fromkeys([*self._metrics, self._accuracy]) if one not in self._functions]
        plain = [one for one in others if not one.is_async]
        first, then = [[one] for one in self._functions], [*([one] for one in others if one.is_async), plain]
        if len(first) == len(then) == 1 and not self._functions[0].is_async:  # as in most rubrics: one thread for all
            first, then = [[*self._functions, *plain]], []
        self._turns = [[group for group in groups if group] for groups in (first, then)]
        """Groups of functions that are asked at the same time: async ones alone, plain ones one after another in a
        thread. A thread for each would cost more than most metrics do."""

    async def score(
        self, state: EpisodeState, ctx: RolloutContext, *, extras: Mapping[str, Any] | None = None
    ) -> Scores:
        """Of a rollout. Raises what a reward function raises, RewardNotFinite, RewardTooLarge, and ValueError for a
        reward of a role that there is not."""
        known: dict[str, Any] = {
            "completion": state.last_text,
            "example": state.example,
            "state": state,
            "ctx": ctx,
            "extras": extras or {},
        }
        if self.parser is not None:
            known["parsed"] = self.parser.parse(state.last or "")
            known["completion"] = known["parsed"].answer or ""
        acted, roles = state.roles, tuple(ctx.roles)
        values = dict[_Function, float | dict[str, float]]()
        for groups in self._turns:
            asked = [_said(group, known) for group in groups]
            for said in [await one for one in asked] if len(asked) < 2 else await together(asked):
                values |= said
        rewards, metrics = dict.fromkeys(acted, 0.0), dict[str, float]()
        for function, weight in zip(self._functions, self._weights, strict=True):
            value = values[function]
            by_role = dict.fromkeys(acted, value) if isinstance(value, float) else value
            if unknown := [role for role in by_role if role not in roles]:
                raise ValueError(
                    f"{function.name} gave {unknown[0]!r} a reward, which is no role; there are {', '.join(roles)}"
                )
            for role, number in by_role.items():
                rewards[role] = _finite(f"the weighted sum for {role}", rewards.get(role, 0.0) + weight * number)
        if large := [f"{value:g} for {role}" for role, value in rewards.items() if abs(value) > MAX_REWARD]:
            raise RewardTooLarge(
                f"the reward is {large[0]}, expected at most {MAX_REWARD:g} either way; scale it, by `weights` for "
                "example"
            )
        for function in (*self._functions, *self._metrics):
            value, name = values[function], function.name
            metrics |= {name: value} if isinstance(value, float) else {f"{name}/{key}": n for key, n in value.items()}
        told = values[self._accuracy]
        accuracy = told if isinstance(told, float) else told.get(acted[0], 0.0) if acted else 0.0
        return Scores(rewards=rewards, accuracy=accuracy, metrics=metrics)


async def _said(
    functions: "Sequence[_Function]", known: Mapping[str, Any]
) -> "dict[_Function, float | dict[str, float]]":
    """What an async function says, or plain ones do."""
    if functions[0].is_async:
        values = [functions[0].ask(known)]
    else:
        values = await in_thread(lambda: [one.ask(known) for one in functions])
    pairs = zip(functions, values, strict=True)
    return {one: one.checked(await value if inspect.isawaitable(value) else value) for one, value in pairs}


class _Function:
    """A reward function and how it is called."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.takes = _parameters(function, self.name)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (of an object that can be called)
        )

    def ask(self, known: Mapping[str, Any]) -> Any:
        """Calls it; what it returns may be awaitable."""
        if self.takes is None:
            return self.function(known["completion"], known["example"])
        return self.function(**{name: known[name] for name in self.takes})

    def checked(self, value: Any) -> float | dict[str, float]:
        """What it said, as finite numbers."""
        if isinstance(value, Mapping):
            return {str(key): _finite(f"{self.name} for {key}", one) for key, one in value.items()}
        return _finite(self.name, value)


def _parameters(function: RewardFunction, name: str) -> tuple[str, ...] | None:
    """What it takes by name; None where it takes (completion, example) by place."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some that are written in C do not say
        return None
    _check_names(parameters, name)
    single = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    needed = [one for one in single if one.default is one.empty]
    by_name = all(one.name in NAMES and one.kind is not one.POSITIONAL_ONLY for one in needed)
    if by_name and (needed or single or not parameters):
        return tuple(one.name for one in single if one.name in NAMES)
    by_place = [one for one in needed if one.kind is not one.KEYWORD_ONLY]
    if len(by_place) == len(needed) == 2 or (not single and parameters):
        return None
    raise ValueError(
        f"reward function {name} takes ({', '.join(one.name for one in parameters)}), expected any of "
        f"{', '.join(NAMES)}, or two parameters of other names for the completion and the example"
    )


def _check_names(parameters: Sequence[inspect.Parameter], name: str) -> None:
    """Raises ValueError for what other libraries pass and this one does not, with the line to write instead."""
    by_place = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    unknown = [f"**{one.name}" for one in parameters if one.kind is one.VAR_KEYWORD and not by_place]
    unknown += [one.name for one in parameters if one.name in _ELSEWHERE and one.default is one.empty]
    unknown += ["answer"] * ([one.name for one in parameters] == ["completion", "answer"])
    if unknown:
        known = [one.name for one in parameters if one.name in NAMES]
        known += [_ELSEWHERE[one.name] for one in parameters if one.name in _ELSEWHERE]
        known += ["example"] if "answer" in [one.name for one in parameters] else []
        line = f"def {name}({', '.join(one for one in NAMES if one in known) or 'completion, example'})"
        raise ValueError(
            f"reward function {name} takes {', '.join(unknown)}, which it does not get: it is called for one rollout, "
            f"with any of {', '.join(NAMES)}; write {line}"
            + ", and example['COLUMN'] for a column"
            * ("example" in line)
        )


def _finite(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardNotFinite(f"{what} returned {shown(value)}, expected a finite number") from None
    if not math.isfinite(number):
        raise RewardNotFinite(f"{what} returned {number}, expected a finite number")
    if abs(number) > MAX_METRIC:
        raise RewardTooLarge(f"{what} returned {number:g}, expected at most {MAX_METRIC:g} either way")
    return number
