"""Ratings from games: maximum likelihood over all of them at once, so that they follow from the ledger alone.

Legend: `P` players, `E` pairs of players that met.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pairs = Mapping[tuple[str, str], tuple[int, int, int]]
"""By (player, other): how many games the player won, drew and lost."""
ELO = 400 / math.log(10)
"""Elo points for one unit of the logistic scale."""
PRIOR_ELO = 800.0
"""Standard deviation of the normal prior on ratings: who has won or lost every game stays finite."""
MAX_ITERATIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """A player's strength. Example: ``Rating(elo=112.0, sigma=15.2, num_games=480)``"""

    elo: float
    """Above the anchor, which has 0."""
    sigma: float
    """Standard error of that difference."""
    num_games: int


def total(games: Iterable[tuple[str, str, float]]) -> Pairs:
    """Returns games `(player, other, score)` counted by pair; a score is 1, 0.5 or 0, the player's."""
    counts: dict[tuple[str, str], list[int]] = {}
    for player, other, score in games:
        counts.setdefault((player, other), [0, 0, 0])[1 if score == 0.5 else 0 if score > 0.5 else 2] += 1
    return {pair: (won, drawn, lost) for pair, (won, drawn, lost) in counts.items()}


def fit(pairs: Pairs, *, anchor: str | None = None) -> dict[str, Rating]:
    """Returns the ratings of all players by the model of Bradley and Terry (1952), P(i beats j) = 1 / (1 + exp(θ_j -
    θ_i)), a draw being half a win and half a loss. θ maximises the likelihood of all games, with a normal prior of
    `PRIOR_ELO`, by Newton's method; errors are those of its inverse Hessian (Laplace). The `anchor`, a player (None:
    the mean of all), has the rating 0. A game of a player against itself says nothing.

    Players that no chain of games connects are compared by the prior alone, and have its error.
    """
    met = {pair: counts for pair, counts in pairs.items() if pair[0] != pair[1]}
    names = sorted({name for pair in met for name in pair})
    if not names:
        return {}
    place = {name: number for number, name in enumerate(names)}
    first_E, second_E = (np.array([place[pair[side]] for pair in met]) for side in (0, 1))
    counts = np.array(list(met.values()), np.float64)
    games_E, score_E = counts.sum(1), counts[:, 0] + counts[:, 1] / 2
    theta_P, inverse_PP = _maximum(first_E, second_E, games_E, score_E, num=len(names))
    weights_P = np.full(len(names), 1 / len(names))
    if anchor in place:
        weights_P = np.eye(len(names))[place[anchor]]
    # Each rating is a difference, θ_i - w·θ, whose variance is e_i - w through the inverse Hessian.
    through_P = inverse_PP @ weights_P
    variance_P = np.diag(inverse_PP) - 2 * through_P + weights_P @ through_P
    num_P = np.bincount(first_E, games_E, len(names)) + np.bincount(second_E, games_E, len(names))
    elo_P, sigma_P = ELO * (theta_P - weights_P @ theta_P), ELO * np.sqrt(np.maximum(variance_P, 0))
    return {
        name: Rating(elo=float(elo_P[at]), sigma=float(sigma_P[at]), num_games=int(num_P[at]))
        for name, at in place.items()
    }


def _maximum(
    first_E: NDArray[np.int64],
    second_E: NDArray[np.int64],
    games_E: NDArray[np.float64],
    score_E: NDArray[np.float64],
    *,
    num: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns θ [P] and the inverse of the negative Hessian [P, P]. The logarithm of the posterior is concave; a step
    that is too long is halved."""
    prior = (ELO / PRIOR_ELO) ** 2
    theta_P = np.zeros(num)

    def loss(theta_P: NDArray[np.float64]) -> float:
        gap_E = theta_P[first_E] - theta_P[second_E]
        return float(
            (games_E * np.logaddexp(0, -gap_E) + (games_E - score_E) * gap_E).sum() + prior / 2 * (theta_P**2).sum()
        )

    for _ in range(MAX_ITERATIONS):
        chance_E = 1 / (1 + np.exp(theta_P[second_E] - theta_P[first_E]))
        residual_E, curvature_E = score_E - games_E * chance_E, games_E * chance_E * (1 - chance_E)
        gradient_P = np.bincount(first_E, residual_E, num) - np.bincount(second_E, residual_E, num) - prior * theta_P
        hessian_PP = prior * np.eye(num)
        for rows, columns, sign in (
            (first_E, first_E, 1),
            (second_E, second_E, 1),
            (first_E, second_E, -1),
            (second_E, first_E, -1),
        ):
            np.add.at(hessian_PP, (rows, columns), sign * curvature_E)
        step_P = np.linalg.solve(hessian_PP, gradient_P)
        before, scale = loss(theta_P), 1.0
        while scale > 1e-6 and loss(theta_P + scale * step_P) > before + 1e-12 * abs(before):
            scale /= 2
        theta_P = theta_P + scale * step_P
        if np.abs(step_P).max() < 1e-8:
            break
    return theta_P, np.linalg.inv(hessian_PP).astype(np.float64)


def expected(elo: float, other: float) -> float:
    """Returns the chance of winning that two ratings say, a draw being half."""
    return 1 / (1 + math.exp((other - elo) / ELO))


def surprises(
    pairs: Pairs, ratings: Mapping[str, Rating], *, at_least: float = 3.0
) -> list[tuple[str, str, float, float, int]]:
    """Returns the pairs whose score no rating explains, as (player, other, share won, share expected, games), the most
    surprising first: those more than `at_least` standard errors off. Where there are some the players beat each other
    in a cycle, and one number for each does not say who is stronger."""
    found = []
    for (player, other), (won, drawn, lost) in both_ways(pairs).items():
        num = won + drawn + lost
        if player < other and num:
            share, chance = (won + drawn / 2) / num, expected(ratings[player].elo, ratings[other].elo)
            error = math.sqrt(max(chance * (1 - chance), 1e-4) / num)
            if abs(share - chance) > at_least * error:
                found.append((abs(share - chance) / error, (player, other, share, chance, num)))
    return [one for _, one in sorted(found, reverse=True)]


def both_ways(pairs: Pairs) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Returns the counts of each pair from either side."""
    counts: dict[tuple[str, str], tuple[int, int, int]] = {}
    for (player, other), (won, drawn, lost) in pairs.items():
        if player != other:
            for key, more in (((player, other), (won, drawn, lost)), ((other, player), (lost, drawn, won))):
                before = counts.get(key, (0, 0, 0))
                counts[key] = (before[0] + more[0], before[1] + more[1], before[2] + more[2])
    return counts


def pfsp_weights(shares_won: Sequence[float], *, power: float = 2.0) -> list[float]:
    """Returns f(x) = (1 - x)^p for the share x that the learner won against each opponent: those that beat it are met
    most (prioritised fictitious self-play; Vinyals et al. 2019, "Grandmaster level in StarCraft II", Methods). All
    alike where it has won every game."""
    weights = [(1 - share) ** power for share in shares_won]
    return weights if sum(weights) > 0 else [1.0] * len(weights)
