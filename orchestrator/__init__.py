"""The orchestrator: samples episodes, scores them, packs batches for the trainer, relays new policy versions."""
