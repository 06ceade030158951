"""Checkpoints: the state that continues a training, its files, their writing beside the next step, resuming."""
