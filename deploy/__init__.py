"""Puts the programs on machines: the `grpo` command, container files."""
