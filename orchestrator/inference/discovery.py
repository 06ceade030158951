"""Finds servers by name: every address that the DNS has for it is one."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from configs.client import ElasticSettings
from orchestrator.background import in_thread
from orchestrator.inference.client import InferenceClient

log = logging.getLogger(__name__)

LOOK_UP_S = 30.0
"""What one look-up may take."""


async def addresses_of(hostname: str) -> list[str]:
    """All IPv4 and IPv6 addresses of the name. Raises OSError where the DNS has none, or does not answer."""
    try:
        async with asyncio.timeout(LOOK_UP_S):
            found = await in_thread(socket.getaddrinfo, hostname, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise OSError(f"no answer from the DNS within {LOOK_UP_S:g} s") from None
    except UnicodeError as error:
        raise OSError(f"it is no name that the DNS knows: {error}") from None
    return sorted({str(address[0]) for *_, address in found})


async def discover(
    client: InferenceClient,
    settings: ElasticSettings,
    *,
    look_up: Callable[[str], Awaitable[list[str]]] = addresses_of,
) -> None:
    """Keeps the known servers equal to the addresses of one name. Consumes: the addresses. Waits for: the clock, and
    the DNS. Unblocked by: them. Ends when: it is cancelled. Where a look-up fails, all servers stay as they are; what a
    server was to answer that the DNS has no more goes elsewhere."""
    pool, name = client.pool, settings.hostname
    while True:
        try:
            addresses = await look_up(name)
        except OSError as error:
            why = f"the DNS has no address for client.elastic.hostname = {name!r}: {error}"
            if why != pool.unknown:
                log.warning("%s; %d servers stay", why, len(pool.servers))
            pool.unknown = why
        else:
            pool.unknown = ""
            found = [_url(address, settings.port) for address in addresses]
            for server in found:
                pool.found(server)
            for server in set(pool.servers) - set(found):
                client.abandon(server, why := f"the DNS has it no more for {name}")
                pool.gone(server, why)
        await asyncio.sleep(settings.sync_interval)


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
