"""Hints where the policy went wrong: texts that would have helped, and the contexts of teacher and student."""
