"""Hints where the policy went wrong: what would have helped, and the contexts that a teacher and a student compare."""
