"""Hides keys in the environment of this product's processes from user code: any process of the same user can read in
/proc the environment that another was started with."""

import ctypes
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

ENV_KEY_VAR = "GRPO_ENV_KEY"
"""The environment variable with the key that `grpo-env` and its orchestrators share."""
RUN_KEYS = frozenset(
    {
        *(ENV_KEY_VAR, "GRPO_TRANSPORT_KEY", "VLLM_API_KEY", "WANDB_API_KEY"),
        *(f"OTEL_EXPORTER_OTLP{of}_HEADERS" for of in ("", "_TRACES", "_METRICS")),
    }
)
"""Environment variables that are keys by their names."""
_ENVIRON_START = 49
"""Place in /proc/self/stat, from 0, of the address at which the environment begins that the process was given."""


def key_variables(settings: Any) -> set[str]:
    """Returns the environment variables with keys of the run: those that `settings`, as plain data, name in any
    `…key_var`, and `RUN_KEYS`."""
    return named_keys(settings) | RUN_KEYS


def named_keys(settings: Any) -> set[str]:
    """Returns the environment variables that `settings`, as plain data, name in any `…key_var`."""
    if isinstance(settings, Mapping):
        named = {one for key, one in settings.items() if str(key).endswith("key_var") and isinstance(one, str)}
        return named.union(*map(named_keys, settings.values()))
    if isinstance(settings, list | tuple):
        return set[str]().union(*map(named_keys, settings))
    return set()


def hide_environment(names: Collection[str]) -> None:
    """Overwrites these variables in the memory that /proc/PID/environ shows. `os.environ` keeps them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    address = int(fields[_ENVIRON_START - 2])
    if address == 0:  # a kernel that does not tell
        return
    given = Path("/proc/self/environ").read_bytes()
    kept = {name: os.environ[name] for name in names if name in os.environ}
    for name in kept:
        del os.environ[name]
    at = 0
    for entry in given.split(b"\0"):
        key, _, value = entry.partition(b"=")
        if value and key.decode(errors="replace") in names:
            ctypes.memset(address + at + len(key) + 1, ord("*"), len(value))
        at += len(entry) + 1
    os.environ.update(kept)
