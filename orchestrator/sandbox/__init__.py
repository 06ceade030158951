"""Runs programs that nobody vouches for."""

from orchestrator.sandbox.cache import ResultCache
from orchestrator.sandbox.local import LocalSandbox
from orchestrator.sandbox.records import (
    Input,
    LimitName,
    Limits,
    Result,
    Sandbox,
    SandboxError,
    SandboxMissing,
    SandboxUnreachable,
)
from orchestrator.sandbox.remote import RemoteSandbox

__all__ = [
    "Input",
    "LimitName",
    "Limits",
    "LocalSandbox",
    "RemoteSandbox",
    "Result",
    "ResultCache",
    "Sandbox",
    "SandboxError",
    "SandboxMissing",
    "SandboxUnreachable",
]
