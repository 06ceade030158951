"""Everything that an environment, a reward, an episode or a program of one's own is made of."""

from grpo.environments.sandbox.local import LocalSandbox
from grpo.environments.sandbox.records import Limits
from grpo.environments.sandbox.remote import RemoteSandbox
from grpo.orchestrator.rollouts.clients import (
    InferenceClient,
    MockClient,
    OpenAIClient,
    OwnClient,
    client_of,
)
from grpo.orchestrator.rollouts.clock import waiting
from grpo.orchestrator.rollouts.context import CallFailed, ContextFull, RolloutContext, Store
from grpo.orchestrator.rollouts.environment import Environment
from grpo.orchestrator.rollouts.episode import (
    AlternatingRolesEpisode,
    ChatEpisode,
    Episode,
    MultiTurnEpisode,
    SingleTurnEpisode,
)
from grpo.orchestrator.rollouts.mcp_tools import McpServer
from grpo.orchestrator.rollouts.messages import Message, ModelResponse
from grpo.orchestrator.rollouts.openai_endpoint import endpoint_of
from grpo.orchestrator.rollouts.play import play
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.rubric import RewardNotFinite, RewardTooLarge, Rubric, Scores
from grpo.orchestrator.rollouts.state import EpisodeState, Reply, StepError
from grpo.orchestrator.rollouts.tool_calls import (
    Tool,
    ToolCall,
    ToolCallError,
    ToolFailed,
    parse_bracketed,
    parse_tagged,
    tagged_answer,
    tagged_integer,
    tools_of,
)
from grpo.orchestrator.rollouts.tool_episode import ToolEpisode

__all__ = [
    "AlternatingRolesEpisode",
    "CallFailed",
    "ChatEpisode",
    "ContextFull",
    "Environment",
    "Episode",
    "EpisodeState",
    "InferenceClient",
    "Limits",
    "LocalSandbox",
    "McpServer",
    "Message",
    "MockClient",
    "ModelResponse",
    "MultiTurnEpisode",
    "OpenAIClient",
    "OwnClient",
    "RemoteSandbox",
    "Reply",
    "RewardNotFinite",
    "RewardTooLarge",
    "Role",
    "RolloutContext",
    "Rubric",
    "Scores",
    "SingleTurnEpisode",
    "StepError",
    "Store",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolEpisode",
    "ToolFailed",
    "client_of",
    "endpoint_of",
    "parse_bracketed",
    "parse_tagged",
    "play",
    "tagged_answer",
    "tagged_integer",
    "tools_of",
    "waiting",
]
