"""A minimal OpenEnv server: `python openenv_server.py PORT [CAPACITY [STEPS]]`. Its environment has a word written
backwards. After so many steps, of all sessions together, the process ends as if it were killed.

It says what OpenEnv's own servers say on `/ws`, and needs none of its packages.
"""

import asyncio
import os
import random
import sys
import uuid
from typing import Any

from aiohttp import WSMsgType, web

MAX_LETTERS = 40
MAX_TRIES = 3


class Refused(Exception):
    """An error frame: code, message, and what else it holds."""

    def __init__(self, code: str, message: str, **others: Any) -> None:
        super().__init__(message)
        self.data = {"message": message, "code": code, **others}


class Backwards:
    """One environment, of one session."""

    def __init__(self) -> None:
        self.word, self.episode_id, self.tries = "", "", 0

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        rng = random.Random(data.get("seed"))
        self.word = "".join(rng.choices("abcdefgh", k=int(data.get("length", 3))))
        self.episode_id, self.tries = data.get("episode_id") or uuid.uuid4().hex, 0
        return _result({"text": f"Reverse: {self.word}", "metadata": {}}, None, False)

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        message = data.get("message")
        if not isinstance(message, str) or len(message) > MAX_LETTERS or data.keys() - {"message", "metadata"}:
            wrong = [{"loc": ["message"], "msg": f"a text of at most {MAX_LETTERS} letters is expected"}]
            raise Refused("VALIDATION_ERROR", "Invalid message", errors=wrong)
        if message == "raise":
            raise Refused("EXECUTION_ERROR", "no such column: colour")
        if message == "hang":
            await asyncio.sleep(60)
        self.tries += 1
        expected = self.word[::-1]
        right = message == expected
        metadata: dict[str, Any] = {}
        if not message.isalpha():
            metadata = {"error_kind": "not_a_word", "hint_template_key": "words", "error": f"{message!r} is no word"}
        same = sum(one == other for one, other in zip(message, expected, strict=False)) / len(expected)
        reward = 1.0 if right else 0.5 * same / MAX_TRIES
        text = "right" if right else f"no, reverse: {self.word}"
        return _result({"text": text, "metadata": metadata}, reward, right or self.tries == MAX_TRIES)

    async def state(self) -> dict[str, Any]:
        return {"episode_id": self.episode_id, "step_count": self.tries, "word": self.word}


def _result(observation: dict[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    result = {"observation": observation, "reward": reward, "done": done}
    return result | ({"metadata": observation["metadata"]} if observation["metadata"] else {})


class Server:
    """All sessions of one process."""

    def __init__(self, capacity: int, last_step: int | None) -> None:
        self.capacity, self.num_open = capacity, 0
        self.last_step, self.num_steps = last_step, 0

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open >= self.capacity:
            about = {"message": f"{self.capacity} sessions are open", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": about})
            await socket.close()
            return socket
        self.num_open += 1
        try:
            await self._talk(socket, Backwards())
        finally:
            self.num_open -= 1
        return socket

    async def _talk(self, socket: web.WebSocketResponse, environment: Backwards) -> None:
        async for received in socket:
            if received.type is not WSMsgType.TEXT or received.json()["type"] == "close":
                return
            asked = received.json()
            self.num_steps += asked["type"] == "step"
            if self.num_steps == self.last_step:
                os._exit(1)
            try:
                if asked["type"] == "state":
                    await socket.send_json({"type": "state", "data": await environment.state()})
                else:
                    made = await getattr(environment, asked["type"])(asked["data"])
                    await socket.send_json({"type": "observation", "data": made})
            except Refused as refused:
                await socket.send_json({"type": "error", "data": refused.data})


def app(capacity: int = 100, last_step: int | None = None) -> web.Application:
    made = web.Application()
    made.router.add_get("/ws", Server(capacity, last_step).serve)
    return made


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    web.run_app(app(*arguments[1:]), host="127.0.0.1", port=arguments[0], print=None)
