"""The protocol's routes over HTTP: who asks, what for, and the futures that answer.

A request of a model or a sampling session goes into the command log and is answered with a future at once, even if
what it asks for cannot be: the future then says why. All else is answered here.
"""

import asyncio
import hashlib
import hmac
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from grpo.service.engine import SAVE_FOR_SAMPLER, UNLOAD, Engine
from grpo.service.errors import Refused
from grpo.service.log import CLONE, SESSION_S, Answer, Command, CommandLog, Received
from grpo.service.sampling import MAX_SAMPLES, Sampling
from grpo.service.training import saved_shape, shape_record
from grpo.service.wire import MAX_BODY_BYTES, decompressed, parse, received
from grpo.transport.weights.store import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response

LONG_POLL_S = 30.0
"""A client gives a poll 45 s."""
BODY_S = 60.0
CLONED = "cloned_sampler_id"
DEFAULTS = {"offset": 0, "limit": 20}
T = TypeVar("T")
MAX_MODELS, MAX_SESSIONS = 256, 1024
"""Models of one tenant in sessions that were heard in the last hour, and such sessions."""
MAX_TTL_S = 10 * 365 * 86400
MAX_HELD_BYTES = 1 << 29
"""Bodies of requests that are read or handled at once, of all tenants together."""
CONFIG = {
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "sample_cancel_enabled": True,
}
"""What a client may use."""
MAX_WAITING_DATUMS, MAX_WAITING_BYTES = 100_000, 512 * 1024 * 1024
"""Datums and bytes of one tenant's requests that wait. One more is refused, and the client sends it again later."""
URL_S = 3600
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NOT_SERVED = {
    "auth/token": "short-lived tokens",
    "billing": "billing",
    "audit": "the audit log",
    "copy_weights": "copies of weights between projects",
    "create_custom_loss": "losses that are traced to the server; forward_backward_custom runs on the client",
    "sessions": "searches, projects and traces of sessions",
}
"""Routes of the client that are refused, and what they are for."""
CHECKPOINT = "training_runs/{model_id}/checkpoints/{kind}/{name}"


class Futures:
    """Lets requests wait for the end of others."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends: dict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def finished(self, request_id: str) -> None:
        """Wakes whoever waits for this request. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._wake, request_id)

    def _wake(self, request_id: str) -> None:
        for name in (request_id, request_id.rpartition(":")[0]):
            for future in self._ends.pop(name, ()):
                if not future.done():
                    future.set_result(None)

    def expect(self, request_id: str) -> "asyncio.Future[None]":
        """Returns what is done once this request ends after this call, or any request of this sampling session."""
        future = self._loop.create_future()
        self._ends[request_id].add(future)
        return future

    def forget(self, request_id: str, future: "asyncio.Future[None]") -> None:
        """Takes back what `expect` returned."""
        self._ends[request_id].discard(future)
        if not self._ends[request_id]:
            del self._ends[request_id]


class Routes:
    """The handlers. A tenant is whoever has one of the `keys`, and sees nothing of the others."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str,
        max_tokens: int,
        keys: Mapping[str, str],
        commands: CommandLog,
        engine: Engine,
        sampling: Sampling | None,
        futures: Futures,
    ) -> None:
        """`model` is the base's name for clients, `tokenizer` where they find its tokenizer, `keys` the tenants' keys
        by name."""
        self._model, self._tokenizer, self._max_tokens, self._keys = model, tokenizer, max_tokens, dict(keys)
        self._log, self._engine, self._sampling, self._futures = commands, engine, sampling, futures
        self._held = 0

    def app(self) -> FastAPI:
        """Returns the application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        post: dict[str, Callable[..., Awaitable[Any]]] = {
            "client/config": self._config,
            "client/dynamic_config": self._config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._of_model,
            "save_weights": self._of_model,
            "save_weights_for_sampler": self._of_model,
            "save_weights_external": self._of_model,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._asample,
            "join_sampling_session": self._join_sampling_session,
            "unload_model": self._unload,
            "retrieve_future": self._retrieve,
            "retrieve_futures": self._retrieve_many,
            "cancel_future": self._cancel,
        }
        for name, handler in post.items():
            app.add_route(f"/api/v1/{name}", self._answering(handler, name), methods=["POST"])
        get: dict[str, Callable[..., Awaitable[Any]]] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._get_sampler,
            "sessions": self._list_sessions,
            "sessions/{session_id}": self._get_session,
            "training_runs": self._list_runs,
            "training_runs/{model_id}": self._get_run,
            "training_runs/{model_id}/checkpoints": self._list_checkpoints,
            f"{CHECKPOINT}/external_weights_urls": self._urls,
            "checkpoints": self._list_checkpoints,
        }
        for name, handler in get.items():
            app.add_route(f"/api/v1/{name}", self._answering(handler, name, body=False), methods=["GET"])
        delete, put = self._answering(self._delete, "delete", body=False), self._answering(self._set_ttl, "ttl")
        app.add_route(f"/api/v1/{CHECKPOINT}", delete, methods=["DELETE"])
        app.add_route(f"/api/v1/{CHECKPOINT}/ttl", put, methods=["PUT"])
        app.add_route("/api/v1/healthz", _healthz, methods=["GET"])
        app.add_route("/files/{model_id}/{kind}/{name}/{file}", self._file, methods=["GET"])
        app.add_route("/api/v1/{rest:path}", self._not_served, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
        return app

    def _answering(
        self, handler: Callable[..., Awaitable[Any]], name: str, *, body: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            held: list[bytes] = []
            try:
                tenant = self._tenant(request)
                given = [await self._body(request, held)] if body else []
                done = await handler(tenant, *given, request=request, kind=name)
            except Refused as error:
                return _refusal(error)
            finally:
                self._held -= sum(map(len, held))
            return done if isinstance(done, Response) else JSONResponse(done)

        return answer

    def _tenant(self, request: Request) -> str:
        """Returns who asks. Every key is compared, in constant time."""
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        same = [hmac.compare_digest(key.encode(), own.encode()) for own in self._keys.values()]
        for name, is_own in zip(self._keys, same, strict=True):
            if is_own:
                return name
        raise Refused("the API key is not one of this service's; service.json in its output_dir has them", status=401)

    async def _body(self, request: Request, held: list[bytes]) -> bytes:
        """Returns the whole body, whose parts it adds to `held`. Raises `Refused` for one that is too long or too
        slow, and where others have too much."""
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    held.append(part)
                    self._held, size = self._held + len(part), size + len(part)
                    if size > MAX_BODY_BYTES:
                        raise Refused(f"the body has more than {MAX_BODY_BYTES} bytes; send fewer datums", status=413)
                    if self._held > MAX_HELD_BYTES:
                        raise Refused("too many requests are read at once; ask again", status=429)
        except TimeoutError:
            raise Refused(f"the body did not come within {BODY_S:g} s") from None
        except ClientDisconnect as error:
            raise Refused("the client has gone") from error
        return b"".join(held)

    async def _not_served(self, request: Request) -> Response:
        rest = str(request.path_params["rest"])
        what = next((what for route, what in NOT_SERVED.items() if rest.startswith(route)), f"/api/v1/{rest:.80}")
        return _refusal(Refused(f"this service does not serve {what}", status=404))

    # --- clients, sessions and models ---

    async def _config(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        return CONFIG

    async def _telemetry(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        return {"status": "accepted"}

    async def _capabilities(self, tenant: str, **_: Any) -> dict[str, Any]:
        can = {"trainable": True, "sampleable": self._sampling is not None}
        return {"supported_models": [{"model_name": self._model, "max_context_length": self._max_tokens + 1, **can}]}

    async def _create_session(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        if len(self._log.sessions(tenant, heard_since=time.time() - SESSION_S)) >= MAX_SESSIONS:
            raise Refused(f"you have {MAX_SESSIONS} sessions of the last hour, which is the most", status=429)
        session = uuid.uuid4().hex
        self._log.add_session(session, tenant)
        return {"type": "create_session", "session_id": session}

    async def _heartbeat(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        self._log.heard(_text(_json(body), "session_id"), tenant)
        return {"type": "session_heartbeat"}

    async def _finish_session(self, tenant: str, body: bytes, request: Request, **_: Any) -> dict[str, Any]:
        self._log.finish_session(str(request.path_params["session_id"]), tenant)
        return {}

    async def _get_session(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        session = str(request.path_params["session_id"])
        models = [model for model in self._log.models(tenant) if model.startswith(f"{session}:")]
        return {"training_run_ids": models, "sampler_ids": self._log.samplers(tenant, session)}

    async def _list_sessions(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        return {"sessions": _page(request, self._log.sessions(tenant))}

    async def _create_model(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        asked = _json(body)
        if (name := asked.get("base_model")) != self._model:
            raise Refused(f"base_model is {name!r:.120}; this service has {self._model!r}")
        _object(asked, "optimizer_config")
        return await self._add_model(tenant, asked, "create_model", body, _object(asked, "lora_config"))

    async def _add_model(
        self, tenant: str, asked: Mapping[str, Any], kind: str, body: bytes, lora_config: Mapping[str, Any]
    ) -> dict[str, Any]:
        session = _text(asked, "session_id")
        self._log.heard(session, tenant)
        model_id = f"{session}:train:{_number(asked, 'model_seq_id')}"
        if model_id not in self._log.models(tenant):
            number = self._log.num_open_models(tenant, heard_since=time.time() - SESSION_S)
            if number >= MAX_MODELS:
                raise Refused(f"you have {number} models in sessions of the last hour, of at most {MAX_MODELS}")
            self._log.add_model(model_id, session, tenant, {"lora_config": dict(lora_config)})
        return await self._submit(Command(target=model_id, seq=0, tenant=tenant, kind=kind, body=body))

    async def _unload(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        """Ends a model after what was asked of it before."""
        model_id = _text(_json(body), "model_id")
        seq = self._log.unload(model_id, tenant)
        return await self._submit(Command(target=model_id, seq=seq, tenant=tenant, kind=UNLOAD, body=b"{}"))

    async def _get_info(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        model_id = _text(_json(body), "model_id")
        rank = self._log.model(model_id, tenant)["lora_config"].get("rank")
        data = {"arch": "causal_lm", "model_name": self._model, "tokenizer_id": self._tokenizer}
        about = {"model_id": model_id, "model_name": self._model, "is_lora": True, "lora_rank": rank}
        return {"type": "get_info", "model_data": data, **about}

    async def _weights_info(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        path = _text(_json(body), "tinker_path")
        shape = shape_record(saved_shape(self._checkpoint(path, tenant)))
        shape["lora_rank"] = shape.pop("rank")
        return {"base_model": self._model, "is_lora": True, "train_unembed": False, **shape}

    # --- training ---

    async def _forward_backward(self, tenant: str, body: bytes, request: Request, **_: Any) -> dict[str, Any]:
        encoding = request.headers.get("content-encoding", "")

        def read() -> tuple[bytes, Any, Received]:
            plain = decompressed(body, encoding)
            message = parse(plain)
            return plain, message, received(message)

        plain, message, datums = await asyncio.to_thread(read)
        self._check_waiting(tenant, message, len(plain))
        return await self._submit_to_model(tenant, "forward_backward", message.model_id, message.seq_id, plain, datums)

    def _check_waiting(self, tenant: str, message: Any, size: int) -> None:
        """Raises `Refused` for a request beyond what may wait, unless it is what its model waits for."""
        num_datums, num_bytes = self._log.num_waiting(tenant)
        fits = num_datums + len(message.data) <= MAX_WAITING_DATUMS and num_bytes + size <= MAX_WAITING_BYTES
        if not fits and not self._engine.is_next(message.model_id, message.seq_id):
            raise Refused(
                f"{num_datums} datums in {num_bytes} bytes of yours wait, and this request has {len(message.data)} "
                f"in {size}; at most {MAX_WAITING_DATUMS} datums and {MAX_WAITING_BYTES} bytes of a tenant may wait: "
                "send it again when some are done",
                status=429,
            )

    async def _of_model(self, tenant: str, body: bytes, kind: str, **_: Any) -> dict[str, Any]:
        asked = _json(body)
        _ttl(asked)
        _object(asked, "adam_params")
        if asked.get("sampling_session_seq_id") is not None:
            _number(asked, "sampling_session_seq_id")
        metadata = _object(asked, "user_metadata")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise Refused(f"user_metadata is {metadata!r:.80}, expected texts by name")
        return await self._submit_to_model(tenant, kind, _text(asked, "model_id"), _number(asked, "seq_id"), body)

    async def _load_weights(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        asked = _json(body)
        folder = self._checkpoint(_text(asked, "path"), tenant)
        if not isinstance(optimizer := asked.get("optimizer"), bool):
            raise Refused(f"optimizer is {optimizer!r:.40}, expected true or false")
        if asked.get("model_id") is not None:
            seq = _number(asked, "seq_id")
            return await self._submit_to_model(tenant, "load_weights", _text(asked, "model_id"), seq, body)
        if (name := asked.get("base_model")) not in (None, self._model):
            raise Refused(f"base_model is {name!r:.120}; this service has {self._model!r}")
        return await self._add_model(tenant, asked, "load_weights", body, shape_record(saved_shape(folder)))

    async def _submit_to_model(
        self, tenant: str, kind: str, model_id: str, seq: int, body: bytes, datums: Received | None = None
    ) -> dict[str, Any]:
        if seq < 1:
            raise Refused(f"seq_id is {seq}, expected 1 or more")
        if seq >= self._log.model(model_id, tenant).get("unloaded", seq + 1):
            raise Refused(f"{model_id} was unloaded", status=410)
        command = Command(target=model_id, seq=seq, tenant=tenant, kind=kind, body=body)
        return await self._submit(command, datums)

    async def _submit(self, command: Command, datums: Received | None = None) -> dict[str, Any]:
        await asyncio.shield(self._accept(command, self._engine.submit, datums))
        return {"request_id": command.request_id, "model_id": command.target}

    async def _accept(
        self, command: Command, submit: Callable[[Command], None], datums: Received | None = None
    ) -> None:
        """Begins a command once it is in the log, also if whoever sent it does not wait."""
        if await asyncio.wrap_future(self._log.add(command, datums)):
            submit(command)

    # --- sampling ---

    async def _create_sampling_session(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        asked = _json(body)
        session, number = _text(asked, "session_id"), _number(asked, "sampling_session_seq_id")
        self._log.heard(session, tenant)
        path = asked.get("model_path")
        if path is None and asked.get("base_model") != self._model:
            raise Refused(f"base_model is {asked.get('base_model')!r:.120}; this service has {self._model!r}")
        self._sampler_of()
        version = None if path is None else await self._version(_text(asked, "model_path"), tenant)
        sampler = f"{session}:sample:{number}"
        self._log.add_sampler(sampler, tenant, path, version)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def _version(self, path: str, tenant: str) -> int:
        """Returns the version that servers have of a checkpoint. Of a training checkpoint it is made when it is first
        asked for, by a model that is loaded from it, saved for samplers and unloaded, as anybody else's."""
        self._checkpoint(path, tenant)
        if (version := self._log.version_of(path)) is not None:
            return version
        row = next(row for row in self._log.checkpoints(tenant) if row.path == path)
        digest = hashlib.sha256(f"{path}\n{row.created_at}".encode()).hexdigest()[:16]
        model_id = f"{path.removeprefix('tinker://').partition('/')[0]}:of:{digest}"
        bodies = {"load_weights": {"path": path, "optimizer": False}, SAVE_FOR_SAMPLER: {}, UNLOAD: {}}
        for seq, (kind, body) in enumerate(bodies.items()):
            content = json.dumps(body).encode()
            await self._submit(Command(target=model_id, seq=seq, tenant=tenant, kind=kind, body=content))
        answer = await self._ended(f"{model_id}:1", tenant)
        if answer is None:
            raise Refused(f"{path} is being made ready for sampling; ask again", status=503)
        if answer.state != "done":
            raise Refused(answer.content.decode(), status=500 if answer.state == "broken" else 400)
        published = self._log.version_of(json.loads(answer.content)["path"])
        assert published is not None
        return published

    async def _get_sampler(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        sampler = str(request.path_params["sampler_id"])
        path = self._log.sampler(sampler, tenant)[0]
        return {"sampler_id": sampler, "base_model": self._model, "model_path": path}

    async def _join_sampling_session(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        number = self._log.join_sampler(_text(_json(body), "sampling_session_id"), tenant)
        return {"type": "join_sampling_session", "client_counter": number}

    async def _asample(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        asked = _json(body)
        sampler, seq = _text(asked, "sampling_session_id"), _number(asked, "seq_id")
        self._log.sampler(sampler, tenant)
        if (num_bytes := self._log.num_waiting(tenant)[1] + len(body)) > MAX_WAITING_BYTES:
            raise Refused(f"{num_bytes} bytes of your requests wait, of at most {MAX_WAITING_BYTES}", status=429)
        command = Command(target=sampler, seq=seq, tenant=tenant, kind="asample", body=body)
        await asyncio.shield(self._accept(command, self._sampler_of().submit))
        number = asked.get("num_samples", 1)
        is_number = isinstance(number, int) and 0 <= number <= MAX_SAMPLES
        ids = [f"{command.request_id}:{index}" for index in range(number if is_number else 0)]
        return {"request_id": command.request_id, "sample_sequence_ids": ids}

    def _sampler_of(self) -> Sampling:
        if self._sampling is None:
            raise Refused("this service was started without sampling (--no_sampling)")
        return self._sampling

    # --- futures ---

    async def _retrieve(self, tenant: str, body: bytes, **_: Any) -> Response:
        """Answers once the request has ended, or asks to try again after `LONG_POLL_S`."""
        request_id = _text(_json(body), "request_id")
        if (answer := await self._ended(request_id, tenant)) is None:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if answer.state == "proto":
            return Response(answer.content, media_type="application/x-protobuf")
        if answer.state == "done":
            return Response(answer.content, media_type="application/json")
        category = "server" if answer.state == "broken" else "user"
        return JSONResponse({"error": answer.content.decode(), "category": category})

    async def _ended(self, request_id: str, tenant: str) -> Answer | None:
        """Returns the end of a request, for which it waits up to `LONG_POLL_S`; None if it has not ended by then."""
        end = self._futures.expect(request_id)
        try:
            if (answer := self._log.answer(request_id, tenant)) is None:
                await asyncio.wait((end,), timeout=LONG_POLL_S)
                answer = self._log.answer(request_id, tenant)
            return answer
        finally:
            self._futures.forget(request_id, end)

    async def _retrieve_many(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        """Answers once requests of a sampling session have ended after those that the client knows of."""
        asked = _json(body)
        target = _object(asked, "target")
        sampler, clone = _text(target, "sampling_session_id"), _number({CLONED: 0} | target, CLONED)
        if clone > CLONE:
            raise Refused(f"{CLONED} is {clone}, expected at most {CLONE}")
        after, timeout_s = _number({"prev_cursor": 0} | asked, "prev_cursor"), asked.get("timeout")
        if timeout_s is not None and not isinstance(timeout_s, int | float):
            raise Refused(f"timeout is {timeout_s!r:.40}, expected seconds")
        self._log.sampler(sampler, tenant)
        end = self._futures.expect(sampler)
        try:
            if not (ends := self._log.ends(sampler, clone=clone, after=after)):
                await asyncio.wait((end,), timeout=LONG_POLL_S if timeout_s is None else min(timeout_s, LONG_POLL_S))
                ends = self._log.ends(sampler, clone=clone, after=after)
        finally:
            self._futures.forget(sampler, end)
        completions = [
            {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}
            if state == "proto"
            else {"state": "failed", "request_id": request_id}
            for request_id, state, size, _ in ends
        ]
        return {"completions": completions, "cursor": max([after, *(number for *_, number in ends)])}

    async def _cancel(self, tenant: str, body: bytes, **_: Any) -> dict[str, Any]:
        """Ends a request for samples. One that has ended stays as it is."""
        command = self._log.command(_text(_json(body), "request_id"), tenant)
        if command.kind != "asample":
            raise Refused(f"request_id is of {command.kind}, and only requests for samples can be cancelled")
        self._sampler_of().cancel(command)
        return {}

    # --- what there is ---

    async def _list_runs(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        models = self._log.models(tenant)
        runs = [self._run(tenant, model, config) for model, config in _page(request, list(models.items()))]
        cursor = {name: _query(request, name, DEFAULTS[name]) for name in DEFAULTS}
        return {"training_runs": runs, "cursor": {**cursor, "total_count": len(models)}}

    async def _get_run(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        model_id = str(request.path_params["model_id"])
        return self._run(tenant, model_id, self._log.model(model_id, tenant))

    def _run(self, tenant: str, model_id: str, config: Mapping[str, Any]) -> dict[str, Any]:
        found = {"training": None, "sampler": None} | {
            one["checkpoint_type"]: one for one in self._checkpoints(tenant, model_id)
        }
        return {
            "training_run_id": model_id,
            "base_model": self._model,
            "model_owner": tenant,
            "is_lora": True,
            "lora_rank": config["lora_config"].get("rank"),
            "last_request_time": datetime.now(UTC).isoformat(),
            "last_checkpoint": found["training"],
            "last_sampler_checkpoint": found["sampler"],
        }

    async def _list_checkpoints(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        model_id = request.path_params.get("model_id")
        found = self._checkpoints(tenant, model_id)
        if model_id is None:
            return {"checkpoints": _page(request, found, limit=100)}
        self._log.model(model_id, tenant)
        return {"checkpoints": found}

    def _checkpoints(self, tenant: str, model_id: str | None) -> list[dict[str, Any]]:
        return [
            {
                "checkpoint_id": row.path.removeprefix("tinker://").partition("/")[2],
                "checkpoint_type": CHECKPOINT_TYPES[row.path.split("/")[-2]],
                "time": _date(row.created_at),
                "tinker_path": row.path,
                "size_bytes": row.num_bytes,
                "user_metadata": json.loads(row.metadata),
                "expires_at": None if row.expires_at is None else _date(row.expires_at),
            }
            for row in self._log.checkpoints(tenant, model_id)
        ]

    def _checkpoint(self, path: str, tenant: str) -> Path:
        """Returns the folder of a tenant's checkpoint. Raises `Refused`."""
        if not self._log.has_checkpoint(path, tenant):
            raise Refused(f"path is {path!r:.160}, and there is no such checkpoint", status=404)
        return self._engine.checkpoint_folder(path)

    async def _urls(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        """Returns addresses of the files of PEFT's folder, which need no key for an hour."""
        parts = self._path(request, tenant).removeprefix("tinker://").split("/")
        expires = int(time.time()) + URL_S
        urls = {}
        for file in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
            place = "/".join([*parts, file])
            urls[file] = f"{request.base_url}files/{place}?expires={expires}&signature={self._signed(place, expires)}"
        return {"urls": urls, "expires": _date(expires)}

    def _path(self, request: Request, tenant: str) -> str:
        """Returns the path of the checkpoint that an address names. Raises `Refused`."""
        path = "tinker://" + "/".join(str(request.path_params[name]) for name in ("model_id", "kind", "name"))
        self._checkpoint(path, tenant)
        return path

    async def _delete(self, tenant: str, request: Request, **_: Any) -> dict[str, Any]:
        """Removes a checkpoint. What samples from it goes on."""
        self._log.expire(self._path(request, tenant), at=0.0)
        return {}

    async def _set_ttl(self, tenant: str, body: bytes, request: Request, **_: Any) -> dict[str, Any]:
        """Sets when a checkpoint is to be removed, from now on."""
        ttl_s = _ttl(_json(body))
        self._log.expire(self._path(request, tenant), at=None if ttl_s is None else time.time() + ttl_s)
        return {}

    def _signed(self, place: str, expires: int) -> str:
        secret = "\n".join(self._keys.values()).encode()
        return hmac.digest(secret, f"{expires}\n{place}".encode(), "sha256").hex()

    async def _file(self, request: Request) -> Response:
        parts = [str(request.path_params[name]) for name in ("model_id", "kind", "name", "file")]
        signature = request.query_params.get("signature", "")
        due = _query(request, "expires", 0)
        if not hmac.compare_digest(self._signed("/".join(parts), due).encode(), signature.encode()):
            return _refusal(Refused("the address is not one that this service has given", status=403))
        if due < time.time():
            return _refusal(Refused("the address has expired; ask for another one", status=403))
        return FileResponse(self._engine.checkpoint_folder("/".join(parts[:3])) / parts[3])


async def _healthz(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(f"the body is JSON of type {type(found).__name__}, expected an object")
    return found


def _text(asked: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := asked.get(key), str):
        raise Refused(f"{key} is {value!r:.80}, expected a text")
    if not value.isprintable():  # a lone surrogate is in no encoding
        raise Refused(f"{key} is {value!r:.80}, expected letters, digits and signs")
    return value


def _object(asked: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the object of this name, which is empty where there is none."""
    if (value := asked.get(key)) is None:
        return {}
    if not isinstance(value, dict):
        raise Refused(f"{key} is {value!r:.80}, expected an object")
    return value


def _number(asked: Mapping[str, Any], key: str) -> int:
    value = asked.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise Refused(f"{key} is {value!r:.80}, expected a whole number from 0 on")
    return value


def _ttl(asked: Mapping[str, Any]) -> int | None:
    """Returns the `ttl_seconds` of a request; None: for ever. Raises `Refused`."""
    if asked.get("ttl_seconds") is None:
        return None
    if not 1 <= (ttl_s := _number(asked, "ttl_seconds")) <= MAX_TTL_S:
        raise Refused(f"ttl_seconds is {ttl_s}, expected 1 to {MAX_TTL_S}")
    return ttl_s


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _page(request: Request, items: list[T], *, limit: int = DEFAULTS["limit"]) -> list[T]:
    """Returns the items from the request's `offset` on, at most its `limit`."""
    offset, limit = _query(request, "offset", 0), _query(request, "limit", limit)
    return items[offset : offset + limit]


def _query(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, str(default))
    if not (value.isascii() and value.isdecimal()) or len(value) > 18:
        raise Refused(f"{name} is {value!r:.40}, expected a whole number")
    return int(value)


def _refusal(error: Refused) -> Response:
    return JSONResponse({"detail": str(error)}, error.status)
