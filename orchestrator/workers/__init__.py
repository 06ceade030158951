"""Processes in which user code runs, so that it can neither block nor break the orchestrator."""
