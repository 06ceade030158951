"""Ratings of made-up games whose strengths are known."""

import math
import time

import numpy as np
import pytest
from grpo.orchestrator.ratings import ELO, Pairs, both_ways, fit, pfsp_weights, surprises, total


def games_of(strengths: list[float], *, num: int, seed: int, draws: float = 0.0) -> list[tuple[str, str, float]]:
    """Games between random pairs, in Elo points."""
    rng, games = np.random.default_rng(seed), []
    for _ in range(num):
        one, other = rng.choice(len(strengths), 2, replace=False)
        chance = 1 / (1 + math.exp((strengths[other] - strengths[one]) / ELO))
        score = 0.5 if rng.random() < draws else float(rng.random() < chance)
        games.append((f"v{one}", f"v{other}", score))
    return games


def test_known_strengths_are_within_two_sigma_nineteen_times_of_twenty() -> None:
    strengths = [0.0, 30.0, 80.0, -60.0, 150.0, 220.0]
    within = []
    for seed in range(60):
        ratings = fit(total(games_of(strengths, num=1500, seed=seed)), anchor="v0")
        within += [abs(ratings[f"v{n}"].elo - s) <= 2 * ratings[f"v{n}"].sigma for n, s in enumerate(strengths) if n]
    share = sum(within) / len(within)
    assert 0.93 <= share <= 0.98  # 0.954 of a normal distribution; 0.013 is the error of 300 that are not independent


def test_two_players_by_hand() -> None:
    # 30 of 40 games: θ = ln(30/10), and its variance is 1 / (40 · 0.75 · 0.25), up to the prior, which is weak.
    ratings = fit({("a", "b"): (30, 0, 10)}, anchor="b")
    assert ratings["b"].elo == ratings["b"].sigma == 0.0
    assert ratings["a"].elo == pytest.approx(ELO * math.log(3), rel=0.02)
    assert ratings["a"].sigma == pytest.approx(ELO / math.sqrt(40 * 0.75 * 0.25), rel=0.02)
    assert ratings["a"].num_games == 40


def test_draws_count_half_and_games_against_oneself_nothing() -> None:
    assert fit({("a", "b"): (10, 20, 10), ("a", "a"): (5, 0, 0)})["a"].elo == pytest.approx(0, abs=1e-6)
    assert fit({("a", "a"): (5, 0, 0)}) == {}


def test_who_wins_every_game_stays_finite_and_uncertain() -> None:
    rating = fit({("a", "b"): (20, 0, 0)}, anchor="b")["a"]
    assert 300 < rating.elo < 1500
    assert rating.sigma > 100


def test_ratings_do_not_depend_on_who_is_named_first() -> None:
    pairs = total(games_of([0, 50, 100, 20], num=400, seed=1, draws=0.2))
    turned: Pairs = {(other, one): (lost, drawn, won) for (one, other), (won, drawn, lost) in pairs.items()}
    for name, rating in fit(pairs).items():
        assert fit(turned)[name].elo == pytest.approx(rating.elo, abs=1e-6)


def test_a_hundred_thousand_games_take_less_than_a_second() -> None:
    rng = np.random.default_rng(0)
    pairs: dict[tuple[str, str], tuple[int, int, int]] = {}
    for version in range(1000):
        for other in rng.choice(1000, 10, replace=False):
            won = int(rng.binomial(10, 0.5))
            pairs[f"v{version}", f"v{other}"] = (won, 0, 10 - won)
    assert sum(map(sum, pairs.values())) == 100_000
    since_s = time.perf_counter()
    ratings = fit(pairs)
    assert len(ratings) == 1000
    assert time.perf_counter() - since_s < 5  # others may work on the machine


def test_cycles_are_told() -> None:
    circle: Pairs = {("r", "s"): (90, 0, 10), ("s", "p"): (90, 0, 10), ("p", "r"): (90, 0, 10)}
    ratings = fit(circle)
    assert all(abs(rating.elo) < 1e-6 for rating in ratings.values())
    assert len(surprises(circle, ratings)) == 3
    chain = total(games_of([0, 100, 200], num=600, seed=2))
    assert surprises(chain, fit(chain)) == []


def test_each_side_sees_its_own_wins() -> None:
    counts = both_ways({("a", "b"): (3, 2, 1), ("b", "a"): (4, 0, 0)})
    assert counts["a", "b"] == (3, 2, 5)
    assert counts["b", "a"] == (5, 2, 3)


def test_who_beats_the_learner_is_met_most() -> None:
    assert pfsp_weights([0.0, 0.5, 1.0]) == [1.0, 0.25, 0.0]
    assert pfsp_weights([1.0, 1.0]) == [1.0, 1.0]
