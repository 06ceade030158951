"""Environments that are built in, and how others are found."""
