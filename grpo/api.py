"""Everything that an environment, a reward, an episode or a program of one's own is made of."""

from orchestrator.envs.base import Environment
from orchestrator.rollouts.clients import (
    InferenceClient,
    MockClient,
    OpenAIClient,
    OwnClient,
    client_of,
)
from orchestrator.rollouts.clock import waiting
from orchestrator.rollouts.context import CallFailed, ContextFull, RolloutContext, Store
from orchestrator.rollouts.episode import (
    AlternatingRolesEpisode,
    ChatEpisode,
    Episode,
    MultiTurnEpisode,
    SingleTurnEpisode,
)
from orchestrator.rollouts.mcp_tools import McpServer
from orchestrator.rollouts.messages import Message, ModelResponse
from orchestrator.rollouts.openai_endpoint import endpoint_of
from orchestrator.rollouts.play import play
from orchestrator.rollouts.roles import Role
from orchestrator.rollouts.rubric import RewardNotFinite, Rubric, Scores
from orchestrator.rollouts.state import EpisodeState, Reply, StepError
from orchestrator.rollouts.tool_calls import (
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
from orchestrator.rollouts.tool_episode import ToolEpisode
from orchestrator.sandbox.local import LocalSandbox
from orchestrator.sandbox.records import Limits
from orchestrator.sandbox.remote import RemoteSandbox

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
