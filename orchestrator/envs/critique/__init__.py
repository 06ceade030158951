"""Critique and revision of programs: problems with tests, and what a critique and a program are worth."""

from orchestrator.envs.critique.environment import Critique

__all__ = ["Critique"]
