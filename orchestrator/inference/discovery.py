"""Finds servers that come and go: by name, every address that the DNS has for it is one; or those that tell the run's
folder where they are."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from configs.client import ElasticSettings
from orchestrator.background import in_thread
from orchestrator.inference.client import InferenceClient
from transport.status import AWAY, FAILED, FINISHED, read_status, server_of

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


def servers_in(folder: Path) -> list[str]:
    """The servers that say in this folder that they are there. Raises OSError where none does."""
    said = {path: read_status(path) for path in sorted(folder.glob("infer.*.json"))}
    gone = (FAILED, FINISHED, AWAY)
    if there := [server_of(path) for path, fields in said.items() if fields and fields["state"] not in gone]:
        return there
    raise OSError(f"no server has said there where it is; start grpo-infer with the output_dir {folder.parent}")


async def discover(
    client: InferenceClient,
    settings: ElasticSettings,
    folder: Path,
    *,
    look_up: Callable[[str], Awaitable[list[str]]] = addresses_of,
) -> None:
    """Keeps the known servers equal to the addresses of one name, or to those that are told in the `folder`. Consumes:
    the addresses. Waits for: the clock, and the DNS or the disk. Unblocked by: them. Ends when: it is cancelled. Where
    a look-up fails, all servers stay as they are; what a server was to answer that is there no more goes elsewhere."""
    pool, name = client.pool, settings.hostname
    where = str(folder) if name is None else f"the DNS, as client.elastic.hostname = {name!r}"
    find = partial(in_thread, servers_in, folder) if name is None else partial(_by_name, look_up, name, settings.port)
    while True:
        try:
            found = await find()
        except OSError as error:
            why = f"there is no server in {where}: {error}"
            if why != pool.unknown:
                log.warning("%s; %d servers stay", why, len(pool.servers))
            pool.unknown = why
        else:
            pool.unknown = ""
            for server in found:
                pool.found(server)
            for server in set(pool.servers) - set(found):
                client.abandon(server, why := f"it is no more in {where}")
                pool.gone(server, why)
        await asyncio.sleep(settings.sync_interval)


async def _by_name(look_up: Callable[[str], Awaitable[list[str]]], name: str, port: int) -> list[str]:
    return [_url(address, port) for address in await look_up(name)]


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
