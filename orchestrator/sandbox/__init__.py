"""Runs programs that nobody vouches for."""

from orchestrator.sandbox.cache import ResultCache
from orchestrator.sandbox.pool import LocalSandbox
from orchestrator.sandbox.records import (
    Input,
    LimitName,
    Limits,
    Program,
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
    "Program",
    "RemoteSandbox",
    "Result",
    "ResultCache",
    "Sandbox",
    "SandboxError",
    "SandboxMissing",
    "SandboxUnreachable",
]
