"""Runs programs that nobody vouches for."""

from orchestrator.sandbox.local import LocalSandbox
from orchestrator.sandbox.normalise import key_of
from orchestrator.sandbox.records import LimitName, Limits, Result, Sandbox, SandboxError, SandboxMissing
from orchestrator.sandbox.remote import RemoteSandbox

__all__ = [
    "LimitName",
    "Limits",
    "LocalSandbox",
    "RemoteSandbox",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxMissing",
    "key_of",
]
