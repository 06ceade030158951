"""Settings of how the orchestrator reaches the inference servers."""

from collections.abc import Iterator

from pydantic import Field, PositiveFloat

from configs.common import Section, changed_fields


class ElasticSettings(Section):
    """Servers that a name stands for in the DNS, and that may come and go during the run."""

    hostname: str = Field(min_length=1)
    """Every address that the DNS has for this name is a server, for example that of a headless service."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of every server."""
    sync_interval: PositiveFloat = 5.0
    """Seconds between two look-ups. A new address is a server once it has proved every version in use; one that is gone
    from the DNS gets no more requests, and is forgotten when it does not answer any more."""


class ClientSettings(Section):
    """How the inference servers are reached."""

    base_url: tuple[str, ...] = Field(default=("http://localhost:8000/v1",), min_length=1)
    """One or more servers."""
    elastic: ElasticSettings | None = None
    """Servers that are found by name, instead of `base_url` (null: those of `base_url`)."""
    timeout: PositiveFloat = 1200.0
    """Seconds that one request may take, retries included, and that the start waits for the servers."""
    health_interval_s: PositiveFloat = 1.0
    """Seconds between asking a server how it is and how much it has to do. The limit of `min_concurrent_groups` changes
    at most as often."""
    health_timeout_s: PositiveFloat = 30.0
    """Seconds without an answer to that after which a server counts as dead: its requests go elsewhere."""
    api_key_var: str = "VLLM_API_KEY"
    """Name of the environment variable that holds the API key."""
    skip_model_check: bool = False
    """Do not compare the servers' base model with `model.name`."""

    def conflicts(self, *, broadcast_type: str) -> Iterator[tuple[str, str]]:
        """Keys that contradict each other or have no effect."""
        changed = changed_fields(self)
        if self.elastic is not None and "base_url" in changed:
            yield "client.base_url", "has no effect with client.elastic; remove one of the two"
        if self.elastic is not None and broadcast_type == "nccl":
            yield (
                "client.elastic",
                "cannot be honoured with weight_broadcast.type: nccl, where no server can join late; set "
                "client.base_url",
            )
        if "health_timeout_s" in changed and self.health_timeout_s >= self.timeout:
            yield "client.health_timeout_s", f"has no effect unless it is less than client.timeout = {self.timeout:g}"
