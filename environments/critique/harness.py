"""The program that the sandbox runs for a test that calls functions: the candidate in one process, the test in another.

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
import re
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, TextIO

PR_SET_DUMPABLE = 4
MAKERS: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, bytes)}
MAKERS |= {"complex": lambda parts: complex(*parts), "iterator": iter}


def encoded(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Returns JSON for a value: what is no number, text or container becomes what `refer` says."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kind in (list, tuple, set, frozenset, bytes):
        if isinstance(value, kind):
            return [kind.__name__, [encoded(item, refer) for item in value]]
    if isinstance(value, dict):
        return ["dict", [encoded(item, refer) for item in value.items()]]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if hasattr(value, "__next__"):
        return ["iterator", [encoded(item, refer) for item in value]]
    return refer(value)


def decoded(value: Any, find: Callable[[str, Any], Any]) -> Any:
    """Returns the value that `encoded` has made JSON of."""
    if not isinstance(value, list):
        return value
    kind, content = value
    return MAKERS[kind]([decoded(item, find) for item in content]) if kind in MAKERS else find(kind, content)


def serve(requests: TextIO, replies: TextIO) -> None:
    """Runs the program, tells its names, and then calls what it is asked to, until nobody asks."""
    objects: list[Any] = []

    def refer(value: Any) -> list[Any]:
        objects.append(value)
        return ["object", len(objects) - 1]

    def tell(*reply: Any) -> None:
        print(json.dumps([encoded(part, refer) for part in reply]), file=replies, flush=True)

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(json.loads(requests.readline()), "program.py", "exec", dont_inherit=True), main.__dict__)
    tell(None, {name: value for name, value in main.__dict__.items() if name[:2] != "__"}, None)
    for line in requests:
        number, attribute, given = json.loads(line)
        try:
            arguments, named = decoded(given, lambda _, number: objects[number])
            value = getattr(objects[number], attribute) if attribute else objects[number](*arguments, **named)
            tell(None, value, arguments)
        except BaseException as error:
            traceback.print_exc()
            tell(type(error).__name__, str(error), None)


class Proxy:
    """Stands for a function or an object of the candidate, in its process."""

    def __init__(self, number: int, requests: TextIO, replies: TextIO) -> None:
        self._number, self._requests, self._replies = number, requests, replies

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the function; lists and dictionaries that it has changed are changed here."""
        value, changed = self._ask([self._number, None, encoded(([*arguments], named), _referred)])
        for before, after in zip(arguments, changed, strict=False):
            if isinstance(before, list):
                before[:] = after
            elif isinstance(before, dict | set):
                before.clear()
                before.update(after)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask([self._number, name, encoded(((), {}), _referred)])[0]

    def _ask(self, request: Any) -> tuple[Any, Any]:
        """Sends a line and returns the answer. Raises the program's own error where it is a built-in one. Ends this
        process where the other has ended."""
        print(json.dumps(request), file=self._requests, flush=True)
        if not (line := self._replies.readline()):
            sys.exit("the program has ended")
        error, value, changed = (decoded(part, self._found) for part in json.loads(line))
        if error is not None:
            kind: Any = getattr(builtins, error, RuntimeError)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(value)
        return value, changed

    def _found(self, kind: str, content: Any) -> Any:
        return Proxy(content, self._requests, self._replies)


def _referred(value: Any) -> list[Any]:
    if isinstance(value, Proxy):
        return ["object", value._number]
    raise TypeError(f"a {type(value).__name__} cannot be given to the program: only values and its own objects")


def test(job: dict[str, Any], program: Proxy) -> str:
    """Returns what is to be printed behind the mark. Raises where the test fails."""
    given = program._ask(job["program"])[0]
    if "function" in job:
        place = given["Solution"]() if "Solution" in given else types.SimpleNamespace(**given)
        return " " + json.dumps(getattr(place, job["function"])(*job["arguments"]))
    # What Python itself has stays Python's: a program's own `abs` or `math` would decide about the test.
    kept = {name for name in given if name[:2] != "__" and not hasattr(builtins, name)} | {job["entry_point"]}
    names = {name: value for name, value in given.items() if name in kept}
    for name in set(re.findall(r"\b(\w+)\.", job["code"])) & sys.stdlib_module_names - {job["entry_point"]}:
        names[name] = importlib.import_module(name)
    exec(compile(f"{job['setup']}\n{job['code']}", "test.py", "exec", dont_inherit=True), names)
    for name, function in [item for item in names.items() if isinstance(item[1], types.FunctionType)]:
        if name.startswith("test"):
            function()
        elif name == "check" and job["entry_point"]:
            function(names[job["entry_point"]])
    return ""


def main() -> None:
    sys.set_int_max_str_digits(0)
    requests, replies = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, requests[0], replies[1]}:  # noqa: PTH208
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(BaseException):
            serve(os.fdopen(requests[0]), os.fdopen(replies[1], "w"))
        os._exit(0)
    os.close(requests[0])
    os.close(replies[1])
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    job = json.load(sys.stdin)
    told = test(job, Proxy(-1, os.fdopen(requests[1], "w"), os.fdopen(replies[0])))
    sys.stdout.flush()
    os.write(1, f"\n{job['mark']}{told}\n".encode())


if __name__ == "__main__":
    main()
