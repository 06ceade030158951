"""`grpo judge RUN|MODEL`: how far a policy is from one that nobody can beat, at a game; exactly, if it is small."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from grpo.commands.evaluate import evaluation_settings, figures, find_target
from grpo.configs.evaluation import EnvSettings
from grpo.environments.games.environment import JUDGED, Games
from grpo.notebook import yaml_value
from grpo.orchestrator.inference.client import ServerError
from grpo.orchestrator.rollouts.registry import find_class
from grpo.orchestrator.workers.failures import EnvironmentFailed
from grpo.transport.errors import UserError
from grpo.transport.logs import printable

TAKES_OTHERS = True
TIMEOUT_S = 86_400.0
"""Longest time of a response to learn."""
EPILOG = """\
RUN is a run's folder, of which the newest version is judged, or that of --version; it may as well be a checkpoint, or
a model with a game in --env. A server is started for it, whose keys are all other options:

  grpo judge outputs/kuhn
  grpo judge outputs/kuhn --version 40 --json
  grpo judge outputs/connect_four --games 5000
  grpo judge configs/games/model --env '{"id": "game", "args": {"game": "nim", "rules": false}}' --max_tokens 1

exit codes: 0 done, 1 a server or the environment failed, 2 settings that cannot be honoured, 130 Ctrl-C"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", help="a run, a checkpoint of a run, or a model")
    parser.add_argument("--version", type=int, help="which version of the run (the newest)")
    parser.add_argument(
        "--env", help="the name of one of the run's games, or a game's settings as JSON (the run's own)"
    )
    parser.add_argument(
        "--games", type=int, help="a response learns to beat the policy by so many games in each seat, for large games"
    )
    parser.add_argument("--max_tokens", type=int, help="longest answer (as the run has it)")
    parser.add_argument("--json", action="store_true", help="one object instead of lines")


def main(options: argparse.Namespace) -> int:
    """Prints what was judged, and returns the exit code."""
    target = find_target(options.target, options.version)
    named = [yaml_value(options.env)] if (options.env or "").lstrip().startswith("{") else []
    more: dict[str, Any] = {"num_examples": 1, "max_tokens": options.max_tokens, "server": options.others}
    orch, infer = evaluation_settings(target, env=named, **more)
    found = [env for env in (*orch.eval.env, *orch.env) if is_game(env)]
    games = list({env.label: env for env in reversed(found)}.values())
    if options.env and not named:
        games = [env for env in games if env.label == options.env]
    if len(games) != 1:
        names = ", ".join(env.label for env in games) or "none"
        raise UserError(f"{target.name} has {len(games)} games to judge ({names}); name one with --env")
    [game] = games
    if options.games is not None:
        game = game.model_copy(update={"args": {**game.args, "response_games": options.games}})
    judging = Games(**game.args)
    if not game.args.get("response_games"):
        judging.judge  # noqa: B018 - raises TooLarge before a server is started
    orch, infer = evaluation_settings(target, env=[game.model_dump(mode="json", exclude_defaults=True)], **more)
    try:
        evaluation = figures(target, orch.model_copy(update={"reward_timeout_s": TIMEOUT_S}), infer)
    except (ServerError, EnvironmentFailed) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    [result] = evaluation.results
    if result.failure is not None:
        print(f"error: {printable(result.failure.message)}", file=sys.stderr)
        return 1
    judged = {name: result.metrics[name] for name in JUDGED if name in result.metrics}
    about = {"model": target.model, "run": target.run and str(target.run), "version": target.number}
    _print({**about, "env": game.label, **judged}, as_json=options.json)
    return 0


def is_game(env: EnvSettings) -> bool:
    """Returns whether this environment is a game that can be judged."""
    found = find_class(env.id) if env.address is None else object
    return isinstance(found, type) and issubclass(found, Games)


def _print(judged: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(judged))
        return
    for name, value in judged.items():
        if value is not None:
            print(f"{name:23} {value:.4g}" if isinstance(value, float) else f"{name:23} {value}")
