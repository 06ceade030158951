"""What asking teachers costs, and may cost."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MILLION = 1_000_000
MAX_CLOSED = 4096
"""So many of the traces that were closed last are known to be closed; what is asked too late comes soon after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """In a currency of the user's choice, the same for all teachers. Example: ``Price(prompt=2.5, completion=10.0)``"""

    prompt: float = 0.0
    """Of a million prompt tokens."""
    completion: float = 0.0
    """Of a million sampled tokens."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(price) and price >= 0 for price in (self.prompt, self.completion)):
            raise ValueError(f"prices are {self.prompt} and {self.completion} a million tokens, expected 0 or more")

    def of(self, usage: "Usage") -> float:
        """prompt tokens · price / 10⁶ + sampled tokens · price / 10⁶"""
        return (usage.prompt_tokens * self.prompt + usage.completion_tokens * self.completion) / MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. Example: ``Usage(prompt_tokens=900, completion_tokens=40)``"""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reserved:
    """The most that a request which is under way can cost."""

    teacher: str
    trace: str
    cost: float


class Budget:
    """Of a run. A request is made only where what is spent, what is under way at its most, and it at its most stay
    within the ceiling, so many at a time do not pass it together. It is passed only by what a provider counts beyond
    what it was asked for, once, and by what was spent after the newest state that was kept, if the process is killed.

    Example: ``Budget({"a": Price(prompt=2.5)}, ceiling=10.0, state=kept)``
    """

    def __init__(
        self,
        prices: Mapping[str, Price],
        *,
        ceiling: float | None = None,
        trace_ceiling: float | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`prices` by teacher. `ceiling` of the run, `trace_ceiling` of all questions about one rollout; None is none.
        `state` is what an earlier process of the run kept."""
        for name, value in (("ceiling", ceiling), ("trace_ceiling", trace_ceiling)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, expected 0 or more, or none")
        self._prices, self._ceiling, self._trace_ceiling = dict(prices), ceiling, trace_ceiling
        self.spent: defaultdict[str, float] = defaultdict(float)
        """By teacher."""
        self.num_traces = 0
        """Rollouts about which anything was asked."""
        self._by_trace: dict[str, float] = {}
        """Of rollouts that are not closed: what was spent on them."""
        self._closed: dict[str, None] = {}
        """The oldest first."""
        self._under_way: set[Reserved] = set()
        if state is not None:
            self._restore(state)

    @property
    def total(self) -> float:
        """Spent until now."""
        return math.fsum(self.spent.values())

    @property
    def cost_per_trace(self) -> float:
        """What is spent, by rollouts about which anything was asked."""
        return self.total / self.num_traces if self.num_traces else 0.0

    def reserve(self, teacher: str, trace: str, at_most: Usage) -> Reserved | None:
        """Before a request; None where it does not fit, or nothing more is asked about the rollout."""
        if trace in self._closed:
            return None
        cost = self._prices[teacher].of(at_most)
        if self._ceiling is not None and self.total + self._reserved() + cost > self._ceiling:
            return None
        so_far = self._by_trace.get(trace, 0.0) + self._reserved(trace)
        if self._trace_ceiling is not None and so_far + cost > self._trace_ceiling:
            return None
        if trace not in self._by_trace:
            self._by_trace[trace] = 0.0
            self.num_traces += 1
        reserved = Reserved(teacher=teacher, trace=trace, cost=cost)
        self._under_way.add(reserved)
        return reserved

    def settle(self, reserved: Reserved, usage: Usage | None, *, billed: bool = True) -> float:
        """After it; returns what it cost. `usage`: as the provider told; None where it did not, and what was reserved
        counts. Not `billed`: it cost nothing."""
        self._under_way.remove(reserved)
        cost = reserved.cost if usage is None else self._prices[reserved.teacher].of(usage)
        cost = cost if billed else 0.0
        self.spent[reserved.teacher] += cost
        if reserved.trace in self._by_trace:
            self._by_trace[reserved.trace] += cost
        return cost

    def close_trace(self, trace: str) -> float:
        """Nothing more is asked about a rollout, and no further try of what was asked is paid. Returns what it cost."""
        self._closed[trace] = None
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        return self._by_trace.pop(trace, 0.0)

    def state(self) -> dict[str, Any]:
        """JSON, to be kept with the run. What is under way counts as spent at its most."""
        spent = dict(self.spent)
        for one in self._under_way:
            spent[one.teacher] = spent.get(one.teacher, 0.0) + one.cost
        return {"spent": spent, "num_traces": self.num_traces}

    def _reserved(self, trace: str | None = None) -> float:
        return math.fsum(one.cost for one in self._under_way if trace is None or one.trace == trace)

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            spent = {str(name): float(cost) for name, cost in state["spent"].items()}
            num_traces = int(state["num_traces"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the teachers' budget was kept as {state!r} ({error}), expected what state() gave"
            ) from error
        if num_traces < 0 or not all(math.isfinite(cost) and cost >= 0 for cost in spent.values()):
            raise ValueError(f"the teachers' budget was kept as {state!r}, expected costs and a number from 0")
        self.spent.update(spent)
        self.num_traces = num_traces
