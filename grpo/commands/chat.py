"""`grpo chat RUN`: a conversation in a terminal with a policy version and its base, side by side."""

import argparse
import shutil
import textwrap
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

from grpo.policy_version import open_version, program_settings
from grpo.run_files import REWARD, metrics
from grpo.server_process import ALIAS, ServerProcess, server_process, server_settings
from grpo.transport.logs import printable

EPILOG = """\
Each line is answered by the base (left) and by the policy (right). Where the run's rollouts were single answers, each
line starts a new conversation, since second turns were not trained; elsewhere, and with --conversation, a line
continues each one's own conversation, and an empty line starts a new one. Ctrl-D ends.

exit codes: 0 done, 1 the version cannot be served, 2 there is no run, or the command line is wrong, 130 Ctrl-C"""
ANSWER_S = 300.0
_GAP = "  |  "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its output_dir)")
    parser.add_argument("--step", type=int, metavar="N", help="the version of this step (default: the newest)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s, the likeliest answer")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, help="of an answer (default: as the run samples)")
    parser.add_argument("--conversation", action="store_true", help="continue the conversation, whatever was trained")
    parser.add_argument("--system", help="a system message before everything")


def main(options: argparse.Namespace) -> int:
    """Returns the exit code, once the conversation has ended."""
    version = open_version(options.run, options.step)
    print(f"starting the server of version {version.manifest.version} …", flush=True)
    with server_process(server_settings(version), version.run / "logs" / "chat.log", version=version) as server:
        sampling = program_settings(version.run, "orch").get("sampling", {})
        options.max_tokens = options.max_tokens or sampling.get("max_tokens")
        talk(server, options, keeps=options.conversation or not has_single_answers(version.run))
    return 0


def has_single_answers(run: Path) -> bool:
    """Returns whether every rollout that the run has trained was one answer to one prompt."""
    steps = [line for line in metrics(run) if REWARD in line]
    return bool(steps) and not any("rollout/num_turns" in line for line in steps)


def talk(server: ServerProcess, options: argparse.Namespace, *, keeps: bool) -> None:
    """Asks and answers, until the input ends. `keeps`: a line continues the conversation."""
    from openai import OpenAI, OpenAIError

    client = OpenAI(base_url=f"{server.url}/v1", api_key=server.key or "none", timeout=ANSWER_S)
    models = (server.base, ALIAS)
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    conversations: list[list[dict[str, str]]] = [list(begin) for _ in models]
    if not keeps:
        print("(each line starts a new conversation, as in the run; --conversation continues it)")
    print(side_by_side("base", "policy"))

    def answer(model: str, messages: list[Any]) -> str:
        try:
            made = client.chat.completions.create(
                model=model, messages=messages, temperature=options.temperature, max_tokens=options.max_tokens
            )
        except OpenAIError as error:
            return f"[no answer: {error}]"
        return made.choices[0].message.content or ""

    with client, ThreadPoolExecutor(len(models)) as pool:
        while (line := _asked()) is not None:
            if not line.strip():
                conversations = [list(begin) for _ in models]
                print("(a new conversation)")
                continue
            if not keeps:
                conversations = [list(begin) for _ in models]
            for messages in conversations:
                messages.append({"role": "user", "content": line})
            answers = list(pool.map(answer, models, conversations))
            for messages, text in zip(conversations, answers, strict=True):
                messages.append({"role": "assistant", "content": text})
            print(side_by_side(*answers), flush=True)


def _asked() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def side_by_side(left: str, right: str, *, width: int | None = None) -> str:
    """Returns two texts as two columns of a screen: ``side_by_side("a", "b c", width=15)`` is ``"a      |  b c"``."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    column = max(5, (width - len(_GAP)) // 2)
    columns = [
        [part for line in printable(text).splitlines() or [""] for part in textwrap.wrap(line, column) or [""]]
        for text in (left, right)
    ]
    return "\n".join(f"{one:<{column}}{_GAP}{other}".rstrip() for one, other in zip_longest(*columns, fillvalue=""))
