"""Critique and revision of programs: problems with tests, and what a critique and a program are worth."""
