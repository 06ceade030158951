"""Everything that an environment, a reward, an episode or a program of one's own is made of."""

from orchestrator.envs.base import Environment
from orchestrator.episodes.clients import InferenceClient, MockClient, OpenAIClient, OwnClient, client_of
from orchestrator.episodes.clock import waiting
from orchestrator.episodes.context import CallFailed, ContextFull, RolloutContext, Store
from orchestrator.episodes.episode import (
    AlternatingRolesEpisode,
    ChatEpisode,
    Episode,
    MultiTurnEpisode,
    SingleTurnEpisode,
)
from orchestrator.episodes.messages import Message
from orchestrator.episodes.replay import play, replay
from orchestrator.episodes.roles import Role
from orchestrator.episodes.rubric import RewardNotFinite, Rubric, Scores
from orchestrator.episodes.state import EpisodeState, Reply, StepError
from orchestrator.episodes.tool_calls import (
    Tool,
    ToolCall,
    ToolCallError,
    parse_bracketed,
    parse_tagged,
    tagged_answer,
    tagged_integer,
    tools_of,
)
from orchestrator.episodes.tool_episode import ToolEpisode, ToolFailed
from orchestrator.sandbox import Limits, LocalSandbox, RemoteSandbox

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
    "Message",
    "MockClient",
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
    "parse_bracketed",
    "parse_tagged",
    "play",
    "replay",
    "tagged_answer",
    "tagged_integer",
    "tools_of",
    "waiting",
]
