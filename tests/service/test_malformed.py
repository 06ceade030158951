"""Requests as no client makes them, drawn from those that the stock client has made: none ends the service, none is
answered as a fault of its own, and none changes anybody's weights."""

import json
import random
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import zstandard
from tinker import types

from tests.service.data import datum
from tests.service.running import Running, done
from tests.service.test_client import weights_of

pytestmark = [
    pytest.mark.service,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
NUM_REQUESTS = 1000
WAITS, CLOSED = 1, 2
"""Polls that wait for what does not come, and refusals before a body has been read."""
PEAK_BYTES = 700 << 20
"""By which the service may grow while eight requests of up to 64 MiB come at once."""
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, -0.0, "", "x", "\ud800", "\x00", "x" * 100_000, [], {}, [[]], [None],
    {"a": {"b": {}}}, float("nan"), float("inf"), -float("inf"), 1e308, "../../etc/passwd", "tinker://a/b/c", "%00",
]  # fmt: skip


def recorded(service: Running) -> list[tuple[str, bytes]]:
    """Routes and bodies as the stock client has sent them, and those of routes that leave no trace."""
    with sqlite3.connect(service.folder / "commands.sqlite") as db:
        query = "SELECT kind, body, target FROM commands WHERE tenant='default' AND length(body) > 0"
        rows = db.execute(query).fetchall()
    db.close()
    target = rows[-1][2]
    session = target.partition(":")[0]
    checkpoint = f"tinker://{target}/weights/mine"
    named: dict[str, dict[str, Any]] = {
        "create_session": {"tags": ["a"], "user_metadata": {"b": "c"}, "sdk_version": "0.38.0", "type": "create"},
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}x/finish": {"reason": {"type": "success"}},
        "get_info": {"model_id": target, "type": "get_info"},
        "weights_info": {"tinker_path": checkpoint},
        "create_model": {"session_id": session, "model_seq_id": 9, "base_model": service.model, "lora_config": {}},
        "load_weights": {"path": checkpoint, "optimizer": True, "session_id": session, "model_seq_id": 8},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "model_path": checkpoint},
        "join_sampling_session": {"sampling_session_id": f"{session}:sample:0"},
        "asample": {
            "sampling_session_id": f"{session}:sample:0", "seq_id": 0, "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 3},
        },
        "retrieve_futures": {"target": {"sampling_session_id": f"{session}:sample:0"}, "timeout": 0, "prev_cursor": 0},
        "retrieve_future": {"request_id": f"{target}:1", "allow_metadata_only": True},
        "cancel_future": {"request_id": f"{target}:1"},
        "save_weights_external": {"model_id": target, "seq_id": 90, "path": "e", "ttl_seconds": 9999},
        "client/config": {"sdk_version": "0.38.0"},
        "telemetry": {"events": [], "platform": "x", "sdk_version": "0", "session_id": session},
    }  # fmt: skip
    return [(kind, body) for kind, body, _ in rows] + [
        (route, json.dumps(body).encode()) for route, body in named.items()
    ]


def changed_json(body: dict[str, Any], draw: random.Random) -> bytes:
    """A body in which one value, at any depth, is another, is missing, or is new."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(body)
    if not places or draw.random() < 0.1:
        body[draw.choice(["x", "type", "model_id", "seq_id"])] = draw.choice(ODD)
    else:
        holder, key = draw.choice(places)
        if isinstance(holder, dict) and draw.random() < 0.2:
            del holder[key]
        else:
            holder[key] = draw.choice(ODD)
    return json.dumps(body).encode()


def changed_bytes(body: bytes, draw: random.Random) -> bytes:
    """A body that is cut off, or in which some bytes are others, or are there twice."""
    if not body:
        return b"\xff"
    match draw.randrange(4):
        case 0:
            return body[: draw.randrange(len(body))]
        case 1:
            other = bytearray(body)
            for _ in range(draw.randint(1, 8)):
                other[draw.randrange(len(other))] = draw.randrange(256)
            return bytes(other)
        case 2:
            at = draw.randrange(len(body))
            return body[:at] + draw.choice([b"\xff" * 9 + b"\x01", b"[" * 50_000, bytes(64), body]) + body[at:]
    return draw.randbytes(draw.randrange(2000))


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 30))


def one(good: list[tuple[str, bytes]], theirs: list[str], draw: random.Random) -> dict[str, Any]:
    """A request's method, route, body and headers."""
    route, body = draw.choice(good)
    headers, method = {}, "POST"
    is_json = route != "forward_backward"
    match draw.randrange(10):
        case 0 | 1 | 2 | 3 if is_json:
            body = changed_json(json.loads(body), draw)
        case 4 if is_json:
            for own, other in zip(theirs[::2], theirs[1::2], strict=True):
                body = body.replace(own.encode(), other.encode())
        case 4:
            body = body.replace(theirs[0].encode(), theirs[1].encode())
        case 5:
            packed = zstandard.ZstdCompressor().compress(body)
            headers["Content-Encoding"] = draw.choice(["zstd", "gzip", "br", "zstd, zstd", "\x7f"])
            body = draw.choice([packed, packed[:-3], changed_bytes(packed, draw), BOMB, body])
        case 6:
            route, method = (
                draw.choice(["a", route, "files/../x", "training_runs/%ff/checkpoints", ""]),
                draw.choice(["GET", "PUT", "DELETE", "PATCH", "POST"]),
            )
        case 7:
            model, checkpoint = theirs[1], theirs[3].removeprefix("tinker://").partition("/")[2]
            route = draw.choice(
                [f"training_runs/{quote(model)}/checkpoints/{checkpoint}{rest}" for rest in ("", "/ttl", "/publish")]
                + [
                    f"training_runs?limit={draw.choice(['9' * 5000, '-1', '٣', 'x'])}",
                    f"samplers/{quote(str(ODD[11:13]))}",
                ]
            )
            method = draw.choice(["DELETE", "PUT", "GET"])
            body = json.dumps({"ttl_seconds": draw.choice(ODD)}).encode()
        case _:
            body = changed_bytes(body, draw)
    return {"method": method, "url": f"/api/v1/{route}", "content": body, "headers": headers}


def peak_of(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def test_a_thousand_malformed_requests_change_nothing(service: Running) -> None:
    draw = random.Random(28)
    mine, kept, other = (service.training_client(tenant) for tenant in ("default", "default", "other"))
    for client in (mine, kept, other):
        done(client.forward_backward([datum(9, 1)], "cross_entropy"))
        done(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    paths = {client: done(client.save_state("before")).path for client in (kept, other)}
    tenants = {kept: "default", other: "other"}
    before = {client: weights_of(service, path, tenants[client]) for client, path in paths.items()}
    done(mine.save_state("mine"))
    done(mine.save_weights_for_sampler("sampled"))
    good = [(route, body) for route, body in recorded(service) if kept.model_id.encode() not in body]
    assert len({route for route, _ in good}) >= 20
    theirs = [mine.model_id, other.model_id, f"tinker://{mine.model_id}/weights/mine", paths[other]]
    theirs += [mine.model_id.partition(":")[0], other.model_id.partition(":")[0]]
    assert service._process is not None
    peak = peak_of(service._process.pid)
    where = httpx.URL(service.about["base_url"])
    slow = [socket.create_connection((where.host, where.port)) for _ in range(20)]
    key = f"X-API-Key: {service.about['api_key']}"
    for number, one_socket in enumerate(slow):  # bodies that never come whole, and one that says to be very long
        length = 10**15 if number % 2 else 100
        one_socket.sendall(
            f"POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: {length}\r\n\r\n{{".encode()
        )
    keys = [service.about["api_key"]] * 30 + ["", "tml-", "é" * 5]

    with httpx.Client(base_url=service.about["base_url"], timeout=5) as http, ThreadPoolExecutor(8) as pool:

        def ask(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            try:
                answer = http.request(**request)
            except httpx.TimeoutException:
                return WAITS, request
            except httpx.TransportError:
                return CLOSED, request
            return answer.status_code, {**request, "content": request["content"][:300], "answer": answer.text[:300]}

        requests = [one(good, theirs, draw) for _ in range(NUM_REQUESTS)]
        for request in requests:
            request["headers"]["X-API-Key"] = draw.choice(keys).encode("latin-1")
        answers = list(pool.map(ask, requests))
    statuses = [status for status, _ in answers]
    assert [told for status, told in answers if status >= 500] == []
    log = service.folder.with_suffix(".log").read_text()
    assert "Traceback" not in log, "".join(f"Traceback{one[-600:]}" for one in log.split("Traceback")[1:9])
    assert sum(status == WAITS for status in statuses) < NUM_REQUESTS / 50
    assert sum(status == CLOSED for status in statuses) < NUM_REQUESTS / 10
    assert sum(status >= 400 for status in statuses) > NUM_REQUESTS / 2
    assert sum(status == 200 for status in statuses) > 20, "some are as good as before"
    for one_socket in slow:
        one_socket.close()

    assert service.is_up()
    assert peak_of(service._process.pid) - peak < PEAK_BYTES
    for client, path in paths.items():
        now = done(client.save_state("after")).path
        for saved in (path, now):
            after = weights_of(service, saved, tenants[client])
            assert all((after[name] == before[client][name]).all() for name in before[client])
