"""The commands of `grpo`: one module answers each."""
