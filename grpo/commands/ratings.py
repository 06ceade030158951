"""`grpo ratings RUN`: how strong the players of a run's games are, and who beats whom."""

import argparse
import itertools
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.orchestrator.ledger import LEDGER_FILE
from grpo.orchestrator.ledger_reader import LedgerReader, open_ledger
from grpo.orchestrator.opponents import version_of
from grpo.orchestrator.ratings import Pairs, Rating, both_ways, fit, surprises
from grpo.orchestrator.rollouts.players import BASE
from grpo.run_files import metrics
from grpo.transport.errors import UserError
from grpo.transport.logs import printable

EPILOG = """\
Elo by maximum likelihood over all games in the ledger whose batch has left, with standard errors; the model before
training, where it has played, has 0. `grpo docs league` says what ratings do not say.

exit codes: 0 done; 2 there is no ledger, or the command line is wrong"""
_MAX_SHOWN = 24
"""Players of a matrix on a screen."""
_JUDGED = "nash_conv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder (output_dir)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def main(options: argparse.Namespace) -> int:
    """Prints the ratings, and returns the exit code."""
    try:
        with open_ledger(options.run) as ledger:
            tables = ratings_of(ledger, options.run)
    except sqlite3.OperationalError as error:
        raise UserError(f"{options.run / LEDGER_FILE} cannot be read now: {error}; try again") from error
    if options.json:
        print(json.dumps({"games": tables}, indent=1))
    else:
        none = "no games: a role has to be bound to a player, and the game's batch to have left (`grpo docs league`)"
        print(printable("\n\n".join(map(as_text, tables)) if tables else none))
    return 0


def ratings_of(ledger: LedgerReader, folder: Path) -> list[dict[str, Any]]:
    """Returns for each environment with games its `players`, strongest first, the `pairs` that met, `cycles`, which no
    rating explains, and what an exact judge says by version (`judged`), with the pairs of versions that it orders
    otherwise (`disagree`)."""
    return [_table(env, pairs, _judged(folder, env)) for env, pairs in ledger.games().items()]


def _table(env: str, pairs: Pairs, judged: Mapping[int, float]) -> dict[str, Any]:
    ratings = fit(pairs, anchor=BASE)
    players = [
        {"name": name, "elo": one.elo, "sigma": one.sigma, "games": one.num_games}
        for name, one in sorted(ratings.items(), key=lambda item: -item[1].elo)
    ]
    counted = [
        {"player": player, "other": other, "won": won, "drawn": drawn, "lost": lost}
        for (player, other), (won, drawn, lost) in sorted(both_ways(pairs).items())
    ]
    cycles = [
        {"player": player, "other": other, "won": share, "expected": chance, "games": num}
        for player, other, share, chance, num in surprises(pairs, ratings)
    ]
    return {
        "env": env,
        "num_games": sum(map(sum, pairs.values())),
        "players": players,
        "pairs": counted,
        "cycles": cycles,
        "judged": {str(version): value for version, value in judged.items()},
        "disagree": disagreements(ratings, judged),
    }


def _judged(folder: Path, env: str) -> dict[int, float]:
    """Returns NashConv by evaluated version, where an evaluation has it for this environment or for one of the same
    game, as `eval/measure/nash_conv/ENV`."""
    found: dict[str, dict[int, float]] = {}
    for line in metrics(folder):
        for key, value in line.items():
            if key.startswith("eval/") and key.split("/")[2:3] == [_JUDGED]:
                found.setdefault("/".join(key.split("/")[3:]), {})[int(line["progress/step"])] = value
    return found.get(env) or (next(iter(found.values())) if len(found) == 1 else {})


def disagreements(ratings: Mapping[str, Rating], judged: Mapping[int, float]) -> list[dict[str, Any]]:
    """Returns the neighbouring judged versions of which the later is rated higher by more than two standard errors, and
    is easier to beat, or the other way round."""
    rated = {version_of(name): one for name, one in ratings.items()} | ({0: ratings[BASE]} if BASE in ratings else {})
    versions = [version for version in sorted(judged) if version in rated]
    found = []
    for earlier, later in itertools.pairwise(versions):
        gap = rated[later].elo - rated[earlier].elo
        error = (rated[later].sigma ** 2 + rated[earlier].sigma ** 2) ** 0.5
        worse = judged[later] - judged[earlier]
        if abs(gap) > 2 * error and gap * worse > 0:
            found.append({"earlier": earlier, "later": later, "elo": gap, "sigma": error, "nash_conv": worse})
    return found


# --- as text ---


def as_text(table: Mapping[str, Any]) -> str:
    """Returns the ratings of one environment for a screen."""
    lines = [f"{table['env']}: {table['num_games']:,} games", "", f"  {'player':24} {'Elo':>7}  {'±':>5}  {'games':>7}"]
    lines += [
        f"  {one['name'][:24]:24} {one['elo']:7.0f}  {one['sigma']:5.0f}  {one['games']:7,}" for one in table["players"]
    ]
    lines += ["", *_matrix(table["pairs"], [one["name"] for one in table["players"]])]
    for one in table["cycles"][:8]:
        lines.append(
            f"  cycle: {one['player']} won {one['won']:.0%} of {one['games']} games against {one['other']}, "
            f"and their ratings say {one['expected']:.0%}"
        )
    for one in table["disagree"]:
        better, easier = ("better", "easier") if one["elo"] > 0 else ("worse", "harder")
        lines.append(
            f"  judge: version {one['later']} is rated {better} than version {one['earlier']} "
            f"({one['elo']:+.0f} ± {one['sigma']:.0f}), and is {easier} to beat (NashConv {one['nash_conv']:+.3f})"
        )
    return "\n".join(line.rstrip() for line in lines)


def _matrix(pairs: Sequence[Mapping[str, Any]], players: Sequence[str]) -> list[str]:
    """Returns lines with the share of games that the player of the row won against that of the column."""
    columns = sorted({one["other"] for one in pairs}, key=lambda name: (version_of(name), name))
    won = {(one["player"], one["other"]): one for one in pairs}
    met = {name: sum((name, other) in won for other in columns) for name in columns}
    columns = sorted(
        sorted(columns, key=lambda name: -met[name])[:_MAX_SHOWN], key=lambda name: (version_of(name), name)
    )
    width = max([6, *(len(name) for name in columns)])

    def cell(player: str, other: str) -> str:
        if (one := won.get((player, other))) is None:
            return "·".rjust(width)
        share = (one["won"] + one["drawn"] / 2) / (one["won"] + one["drawn"] + one["lost"])
        return f"{share:.0%}".rjust(width)

    heading = f"  {'won against':24} " + " ".join(name.rjust(width) for name in columns)
    rows = [name for name in players if name in columns]
    left_out = [f"  ({len(players) - len(rows)} more players: --json)"] * (len(players) > len(rows))
    return [heading, *(f"  {row[:24]:24} " + " ".join(cell(row, one) for one in columns) for row in rows), *left_out]
