"""Roles: who is trained. Judges and other models beside the policy are no roles, but clients of a rubric."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.orchestrator.rollouts.messages import Message, shown
from grpo.transport.http import MAX_TEMPERATURE, MIN_TEMPERATURE

POLICY = "policy"
"""The role of those who have no other."""


def check_temperature(value: Any, what: str = "temperature", *, greedy: bool = False) -> None:
    """Raises ValueError for one that servers do not sample at. `greedy`: 0 will do, where nothing is trained."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (MIN_TEMPERATURE <= value <= MAX_TEMPERATURE or (greedy and value == 0)):
        return
    zero = "0 or " if greedy else ""
    raise ValueError(
        f"{what} is {shown(value)}, expected {zero}{MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        + ("" if greedy else ", because the trainer divides by it")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Someone whose answers are trained.

    Example: ``Role(id="Aff", system_prompt="You argue for the motion.", max_tokens=80)``
    """

    id: str
    system_prompt: str = ""
    """Put before the messages of this role's calls, where they do not begin with a system message."""
    temperature: float | None = None
    """None: the run's `sampling.temperature`. In an evaluation that of the evaluation."""
    max_tokens: int | None = None
    """The longest answer in tokens. None: the run's `sampling.max_tokens`."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a role has an empty id; name it, such as Role(id='policy')")
        if self.temperature is not None:
            check_temperature(self.temperature, f"the temperature of role {self.id}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"role {self.id} has max_tokens {self.max_tokens}, expected at least 1, or None")

    def build_messages(self, content: str, history: Sequence[Message] = ()) -> list[Message]:
        """Returns chat messages for one call of this role: its system prompt where it has one and `history` does not
        begin with one, then `history`, then `content` as the user's message."""
        messages = [*history, {"role": "user", "content": content}]
        if self.system_prompt and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.system_prompt}, *messages]
        return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdapters:
    """Which of the run's adapters the roles of an environment have.

    Example: ``RoleAdapters(names=("solver", "proposer"), of_roles={"Proposer": "proposer"})``
    """

    names: tuple[str, ...] = ()
    """All of the run, in their order; none where it has one, which all roles share."""
    of_roles: Mapping[str, str] = field(default_factory=dict)
    """Adapters by role; the other roles have the first."""

    def place(self, role: str) -> int:
        """Among the run's adapters."""
        return self.names.index(self.of_roles[role]) if role in self.of_roles else 0

    def name(self, role: str) -> str | None:
        """None where the run has one."""
        return self.names[self.place(role)] if self.names else None


SHARED_ADAPTER = RoleAdapters()
"""All roles have one."""


def by_id(roles: Sequence[Role]) -> dict[str, Role]:
    """Raises ValueError where two share an id, or there is none."""
    if not roles:
        raise ValueError("an episode has no roles, so nobody is trained; give at least Role(id='policy')")
    known: dict[str, Role] = {}
    for role in roles:
        if role.id in known:
            raise ValueError(f"an episode has two roles {role.id}; rename one")
        known[role.id] = role
    return known


def all_roles(groups: Iterable[Sequence[Role]]) -> list[Role]:
    """The roles of several episodes. Raises ValueError where two of one id are not sampled alike."""
    known: dict[str, Role] = {}
    for roles in groups:
        for role in by_id(roles).values():
            other = known.setdefault(role.id, role)
            if (other.temperature, other.max_tokens) != (role.temperature, role.max_tokens):
                raise ValueError(
                    f"role {role.id} has temperature {other.temperature} and max_tokens {other.max_tokens} in one "
                    f"episode, {role.temperature} and {role.max_tokens} in another; let them agree, or rename one"
                )
    return list(known.values())
