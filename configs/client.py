"""Settings of how the orchestrator reaches the inference servers."""

from typing import Annotated

from grpo.configs.common import Conflicts, Listed, OnlyWith, Port, Seconds, Section
from pydantic import Field


class ElasticSettings(Section):
    """Servers that come and go during the run: those that a name stands for in the DNS, or that tell the run's folder
    where they are."""

    hostname: str | None = Field(default=None, min_length=1)
    """DNS name; every address behind it is a server (null: servers with the same `output_dir`)."""
    port: Annotated[Port, OnlyWith("hostname")] = 8000
    """Port of every server."""
    sync_interval: Seconds = 5.0
    """Seconds between look-ups."""


class ClientSettings(Section):
    """How the inference servers are reached."""

    base_url: Listed[str] = Field(default=("http://localhost:8000/v1",), min_length=1)
    """Addresses of the servers."""
    elastic: ElasticSettings | None = None
    """Servers that are found by name, instead of `base_url` (null: those of `base_url`)."""
    timeout: Seconds = 1200.0
    """Seconds that a request may take, with retries, and that the start waits for servers."""
    health_interval_s: Seconds = 1.0
    """Seconds between health checks of a server."""
    health_timeout_s: Seconds = 30.0
    """Seconds without an answer after which a server counts as dead."""
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the servers' API key."""
    skip_model_check: bool = False
    """Does not compare the servers' base model with `model.name`."""

    def conflicts(self) -> Conflicts:
        if self.elastic is not None and "base_url" in self.changed:
            yield "base_url", "has no effect with client.elastic; remove one of the two"
