"""The parts from which people make environments, rewards, episodes and programs of their own."""

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
from grpo.orchestrator.rollouts.messages import Message, ModelResponse, messages_of, text_of
from grpo.orchestrator.rollouts.openai_endpoint import endpoint_of, shared_endpoint
from grpo.orchestrator.rollouts.parsers import BoxedParser, MarkerParser, Parsed, Parser, XMLParser
from grpo.orchestrator.rollouts.play import play
from grpo.orchestrator.rollouts.players import DrawRule, Player
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.rubric import RewardNotFinite, RewardTooLarge, Rubric, Scores
from grpo.orchestrator.rollouts.state import EpisodeState, Reply, StepError
from grpo.orchestrator.rollouts.tool_calls import (
    Tool,
    ToolCall,
    ToolCallError,
    ToolFailed,
    ToolSource,
    parse_bracketed,
    parse_tagged,
    tools_of,
)
from grpo.orchestrator.rollouts.tool_episode import ToolEpisode
from grpo.transport.errors import UserError
from grpo.transport.importing import load_object

__all__ = [
    "AlternatingRolesEpisode",
    "BoxedParser",
    "CallFailed",
    "ChatEpisode",
    "ContextFull",
    "DrawRule",
    "Environment",
    "Episode",
    "EpisodeState",
    "InferenceClient",
    "MarkerParser",
    "Message",
    "MockClient",
    "ModelResponse",
    "MultiTurnEpisode",
    "OpenAIClient",
    "OwnClient",
    "Parsed",
    "Parser",
    "Player",
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
    "ToolSource",
    "UserError",
    "XMLParser",
    "client_of",
    "endpoint_of",
    "load_object",
    "messages_of",
    "parse_bracketed",
    "parse_tagged",
    "play",
    "shared_endpoint",
    "text_of",
    "tools_of",
    "waiting",
]
