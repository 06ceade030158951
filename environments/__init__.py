"""Environments that are built in, written as people write theirs: on `import grpo` alone."""
