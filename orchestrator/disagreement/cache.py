"""Teachers' answers by the state in which they were asked."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

A = TypeVar("A")


def state_key(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """BLAKE2b-128 of the state's canonical JSON: keys in order, no white space. Equal states have equal keys."""
    canonical = json.dumps(
        {"messages": [dict(one) for one in messages], "tools": None if tools is None else [dict(one) for one in tools]},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
    )
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


class AnswerCache(Generic[A]):
    """Answers by state and teacher. Of `max_states`, those go first that were not looked at for longest."""

    def __init__(self, max_states: int) -> None:
        if max_states < 0:
            raise ValueError(f"max_states is {max_states}, expected 0 (keeps nothing) or more")
        self._max_states = max_states
        self._states: OrderedDict[str, dict[str, A]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, state: str, teacher: str) -> A | None:
        """None where it is not known."""
        if (answers := self._states.get(state)) is None:
            return None
        self._states.move_to_end(state)
        return answers.get(teacher)

    def put(self, state: str, teacher: str, answer: A) -> None:
        """Kept until others take its place."""
        self._states.setdefault(state, {})[teacher] = answer
        self._states.move_to_end(state)
        while len(self._states) > self._max_states:
            self._states.popitem(last=False)
