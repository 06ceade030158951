"""Batches, orchestrator to trainer: exactly once, whole or not at all."""
