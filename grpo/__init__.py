"""Reinforcement learning for language models from Python, and what people's own files import.

`grpo.train`, `grpo.evaluate` and `grpo.Run` serve scripts and notebooks; `from grpo import Environment, Rubric,
Episode` is for environments of one's own. Each name is imported when it is first asked for, so that `import grpo`
costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.api import *  # noqa: F403
    from grpo.commands.evaluate import evaluate as evaluate
    from grpo.commands.status import RunStatus as RunStatus
    from grpo.configs.errors import Problem as Problem
    from grpo.configs.errors import SettingsError as SettingsError
    from grpo.environments.mcp_tools import McpServer as McpServer
    from grpo.environments.sandbox.local import LocalSandbox as LocalSandbox
    from grpo.environments.sandbox.records import Limits as Limits
    from grpo.environments.sandbox.records import Sandbox as Sandbox
    from grpo.environments.sandbox.records import SandboxError as SandboxError
    from grpo.environments.sandbox.records import SandboxMissing as SandboxMissing
    from grpo.environments.sandbox.remote import RemoteSandbox as RemoteSandbox
    from grpo.orchestrator.advantage import CreditAssigner as CreditAssigner
    from grpo.orchestrator.advantage import constant_credit as constant_credit
    from grpo.orchestrator.advantage import episodic_credit as episodic_credit
    from grpo.orchestrator.advantage import group_credit as group_credit
    from grpo.orchestrator.arena.arena import Arena as Arena
    from grpo.orchestrator.arena.arena import EpisodeRequest as EpisodeRequest
    from grpo.orchestrator.arena.arena import TrainingBatch as TrainingBatch
    from grpo.orchestrator.arena.verbose import VerboseLogger as VerboseLogger
    from grpo.orchestrator.evaluate import Evaluation as Evaluation
    from grpo.orchestrator.inference.client import ServerError as ServerError
    from grpo.orchestrator.rollouts.records import EpisodeResult as EpisodeResult
    from grpo.orchestrator.rollouts.stores import ArtifactStore as ArtifactStore
    from grpo.policy_version import CannotExport as CannotExport
    from grpo.run import Run as Run
    from grpo.run import RunFailed as RunFailed
    from grpo.run_files import NoRun as NoRun
    from grpo.start import train as train
    from grpo.transport.errors import TransportError as TransportError
    from grpo.transport.errors import UserError as UserError

    __version__: str

__all__ = [
    "AlternatingRolesEpisode",
    "Arena",
    "ArtifactStore",
    "BoxedParser",
    "CallFailed",
    "CannotExport",
    "ChatEpisode",
    "ContextFull",
    "CreditAssigner",
    "DrawRule",
    "Environment",
    "Episode",
    "EpisodeRequest",
    "EpisodeResult",
    "EpisodeState",
    "Evaluation",
    "InferenceClient",
    "Limits",
    "LocalSandbox",
    "MarkerParser",
    "McpServer",
    "Message",
    "MockClient",
    "ModelResponse",
    "MultiTurnEpisode",
    "NoRun",
    "OpenAIClient",
    "OwnClient",
    "Parsed",
    "Parser",
    "Player",
    "Problem",
    "RemoteSandbox",
    "Reply",
    "RewardNotFinite",
    "RewardTooLarge",
    "Role",
    "RolloutContext",
    "Rubric",
    "Run",
    "RunFailed",
    "RunStatus",
    "Sandbox",
    "SandboxError",
    "SandboxMissing",
    "Scores",
    "ServerError",
    "SettingsError",
    "SingleTurnEpisode",
    "StepError",
    "Store",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolEpisode",
    "ToolFailed",
    "ToolSource",
    "TrainingBatch",
    "TransportError",
    "UserError",
    "VerboseLogger",
    "XMLParser",
    "client_of",
    "constant_credit",
    "endpoint_of",
    "episodic_credit",
    "evaluate",
    "group_credit",
    "load_object",
    "messages_of",
    "parse_bracketed",
    "parse_tagged",
    "play",
    "shared_endpoint",
    "text_of",
    "tools_of",
    "train",
    "waiting",
]

_HOMES = {
    "Arena": "grpo.orchestrator.arena.arena",
    "ArtifactStore": "grpo.orchestrator.rollouts.stores",
    "CannotExport": "grpo.policy_version",
    "CreditAssigner": "grpo.orchestrator.advantage",
    "EpisodeRequest": "grpo.orchestrator.arena.arena",
    "EpisodeResult": "grpo.orchestrator.rollouts.records",
    "Evaluation": "grpo.orchestrator.evaluate",
    "Limits": "grpo.environments.sandbox.records",
    "LocalSandbox": "grpo.environments.sandbox.local",
    "McpServer": "grpo.environments.mcp_tools",
    "NoRun": "grpo.run_files",
    "Problem": "grpo.configs.errors",
    "RemoteSandbox": "grpo.environments.sandbox.remote",
    "Run": "grpo.run",
    "RunFailed": "grpo.run",
    "RunStatus": "grpo.commands.status",
    "Sandbox": "grpo.environments.sandbox.records",
    "SandboxError": "grpo.environments.sandbox.records",
    "SandboxMissing": "grpo.environments.sandbox.records",
    "ServerError": "grpo.orchestrator.inference.client",
    "SettingsError": "grpo.configs.errors",
    "TrainingBatch": "grpo.orchestrator.arena.arena",
    "TransportError": "grpo.transport.errors",
    "UserError": "grpo.transport.errors",
    "VerboseLogger": "grpo.orchestrator.arena.verbose",
    "constant_credit": "grpo.orchestrator.advantage",
    "episodic_credit": "grpo.orchestrator.advantage",
    "evaluate": "grpo.commands.evaluate",
    "group_credit": "grpo.orchestrator.advantage",
    "train": "grpo.start",
}
"""The modules of the names that `grpo.api` does not have: those that take long to import, and those of environments,
which import `grpo` themselves."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("grpo-pipeline")
    if name not in __all__:
        raise AttributeError(f"module 'grpo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "grpo.api")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"])
