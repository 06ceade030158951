"""A schedule of a person's own in place of the sampling loop: `grpo.Arena`."""
