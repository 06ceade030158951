"""Environments: what is built in, and the base class of your own."""

from orchestrator.envs.base import Environment
from orchestrator.episodes.rubric import Rubric

__all__ = ["Environment", "Rubric"]
