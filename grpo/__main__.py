"""`python -m grpo`: the `grpo` command."""

from grpo.cli import main

main()
