"""What the sandbox runs for a test that calls functions: the program in one process, the test in another.

The test gets the program's functions as proxies, and what crosses is values, so that a program can neither see the test
and what it expects, nor answer with an object that equals everything. The test's process cannot be read by the other
(it is not dumpable), which was forked before the test was read. Where the test has come to its end, the last line of
standard output is the mark that it was given, with the returned value behind it where `function` was called.

This file runs alone: it imports nothing of ours. Its standard input is one JSON object: `mark`, `program`, and either
`setup`, `code` and `entry_point`, or `function` and `arguments`.
"""

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, TextIO

PR_SET_DUMPABLE = 4
CONTAINERS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encoded(value: Any, reference: Callable[[Any], list[Any]]) -> Any:
    """Returns JSON for a value: what is no number, text or container becomes a `reference`."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    for name, container in CONTAINERS.items():
        if isinstance(value, container):
            return [name, [encoded(item, reference) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encoded(key, reference), encoded(item, reference)] for key, item in value.items()]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if hasattr(value, "__next__"):
        return ["iterator", [encoded(item, reference) for item in value]]
    return reference(value)


def decoded(value: Any, dereference: Callable[[str, Any], Any]) -> Any:
    """Returns the value that `encoded` has made JSON of."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind in CONTAINERS:
        return CONTAINERS[kind](decoded(item, dereference) for item in content)
    if kind == "dict":
        return {decoded(key, dereference): decoded(item, dereference) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "iterator":
        return iter([decoded(item, dereference) for item in content])
    return dereference(kind, content)


def serve(requests: TextIO, replies: TextIO) -> None:
    """Runs the program, tells its names, and then calls what it is asked to, until nobody asks."""
    objects: list[Any] = []

    def reference(value: Any) -> list[Any]:
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        objects.append(value)
        return ["object", len(objects) - 1]

    def tell(reply: Any) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(json.loads(requests.readline()), "program.py", "exec", dont_inherit=True), main.__dict__)
    tell({name: encoded(value, reference) for name, value in main.__dict__.items() if name[:2] != "__"})
    for line in requests:
        number, attribute, given = json.loads(line)
        try:
            if attribute is not None:
                tell([None, encoded(getattr(objects[number], attribute), reference), None])
                continue
            arguments, named = decoded(given, lambda _, number: objects[number])
            value = objects[number](*arguments, **named)
            tell([None, encoded(value, reference), encoded(arguments, reference)])
        except BaseException as error:
            traceback.print_exc()
            tell([type(error).__name__, str(error), None])


class Program:
    """The program's process, asked from that of the test."""

    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self._requests, self._replies = requests, replies

    def ask(self, request: Any) -> Any:
        """Sends a line and returns the answer. Ends this process where the other has ended."""
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        if not (line := self._replies.readline()):
            sys.exit("the program has ended")
        return json.loads(line)

    def call(self, number: int, attribute: str | None, given: tuple[list[Any], dict[str, Any]] | None) -> Any:
        """Returns an attribute, or what a call has returned; lists and alike that it has changed are changed here.
        Raises the program's own error where it is a built-in one."""
        error, value, changed = self.ask([number, attribute, encoded(given, _referred)])
        if error is not None:
            kind: Any = getattr(builtins, error, RuntimeError)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(value)
        for before, after in zip(given[0] if given else (), self.decoded(changed) or (), strict=False):
            if isinstance(before, list) and before != after:
                before[:] = after
            elif isinstance(before, dict | set) and before != after:
                before.clear()
                before.update(after)
        return self.decoded(value)

    def decoded(self, value: Any) -> Any:
        return decoded(value, self._dereferenced)

    def _dereferenced(self, kind: str, content: Any) -> Any:
        """Returns a proxy; for one of Python's own modules, the module here."""
        if kind == "module":
            return importlib.import_module(content) if content in sys.stdlib_module_names else None
        return Proxy(self, content)


class Proxy:
    """A function or an object of the program."""

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.call(self._number, None, (list(arguments), named))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.call(self._number, name, None)


def _referred(value: Any) -> list[Any]:
    if isinstance(value, Proxy):
        return ["object", value._number]
    raise TypeError(f"a {type(value).__name__} cannot be given to the program: only values and its own objects")


def test(job: dict[str, Any], program: Program) -> str:
    """Returns what is to be printed behind the mark. Raises where the test fails."""
    given = {name: program.decoded(value) for name, value in program.ask(job["program"]).items()}
    if "function" in job:
        place = given["Solution"]() if "Solution" in given else types.SimpleNamespace(**given)
        return " " + json.dumps(getattr(place, job["function"])(*job["arguments"]))
    # What Python itself has stays Python's: a program's own `abs` would decide about the test.
    names = {name: value for name, value in given.items() if name == job["entry_point"] or not hasattr(builtins, name)}
    exec(compile(f"{job['setup']}\n{job['code']}", "test.py", "exec", dont_inherit=True), names)
    return ""


def main() -> None:
    sys.set_int_max_str_digits(0)
    requests, replies = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if fd > 2 and fd not in (requests[0], replies[1]):
                with contextlib.suppress(OSError):
                    os.close(fd)
        with contextlib.suppress(BaseException):
            serve(os.fdopen(requests[0]), os.fdopen(replies[1], "w"))
        os._exit(0)
    os.close(requests[0])
    os.close(replies[1])
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    job = json.load(sys.stdin)
    told = test(job, Program(os.fdopen(requests[1], "w"), os.fdopen(replies[0])))
    sys.stdout.flush()
    os.write(1, f"\n{job['mark']}{told}\n".encode())


if __name__ == "__main__":
    main()
