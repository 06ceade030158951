"""`zorplex`: questions about values that only look-up tools know."""

from orchestrator.envs.zorplex.environment import Zorplex

__all__ = ["Zorplex"]
