"""Finds an environment by its id."""

import difflib
from typing import Any

from orchestrator.envs.base import Environment, episode_of
from orchestrator.importing import find

BUILT_IN = {
    "reverse-text": "orchestrator.envs.reverse_text:ReverseText",
    "arithmetic": "orchestrator.envs.arithmetic:Arithmetic",
    "zorplex": "orchestrator.envs.zorplex:Zorplex",
    "debate": "orchestrator.envs.debate:Debate",
    "proposer-solver": "orchestrator.envs.proposer_solver:ProposerSolver",
    "critique": "orchestrator.envs.critique:Critique",
    "jsonl": "orchestrator.envs.jsonl:Jsonl",
    "verifiers": "orchestrator.envs.verifiers:Verifiers",
    "openenv": "orchestrator.envs.openenv:OpenEnv",
}


class UnknownEnvironment(ValueError):
    """An id that leads to no environment."""


def make_environment(env_id: str, args: dict[str, Any]) -> Environment:
    """The environment of a built-in name, `module:Class` or `path/to/file.py:Class`. Raises UnknownEnvironment, and
    NotFound where there is no such module, file or class."""
    location = BUILT_IN.get(env_id, env_id)
    if ":" not in location:
        raise UnknownEnvironment(_unknown(location))
    environment = find(location, setting="env.id")(**args)
    if not isinstance(environment, Environment):
        raise UnknownEnvironment(
            f"env.id = {env_id!r} is a {type(environment).__name__}; derive it from orchestrator.envs.Environment"
        )
    try:
        episode_of(environment)
    except ValueError as error:
        raise UnknownEnvironment(f"env.id = {env_id!r}: {error}") from None
    return environment


def _unknown(env_id: str) -> str:
    close = difflib.get_close_matches(env_id, BUILT_IN, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = ", ".join(sorted(BUILT_IN))
    return f"unknown env.id = {env_id!r}{hint} Built in: {known}. Your own: module:Class or path/to/file.py:Class"
