# SPDX-License-Identifier: Apache-2.0
"""The trials that a search space gives."""

import itertools

import numpy as np
import pytest

import etude
from etude.algorithms.search import Choice, Grid, Range, applied, trials, written
from etude.errors import SettingsError


def test_each_draw_goes_through_all_grids():
    space = {"lr": Grid([1, 2]), "clip": 0.3, "hidden": [[8], [4, 4]]}
    found = trials(space, 2, seed=0)
    one = [{"lr": lr, "clip": 0.3, "hidden": hidden} for lr, hidden in itertools.product([1, 2], [[8], [4, 4]])]
    assert found == one * 2


def test_draws_are_those_of_the_seed_and_more_of_them_begin_alike():
    space = {"lr": Range(1e-4, 1e-2, is_log=True, is_whole=False), "n": Choice(["a", "b"]), "grid": Grid([0, 1])}
    few = trials(space, 2, seed=5)
    assert trials(space, 5, seed=5)[:4] == few
    assert trials(space, 2, seed=6) != few
    assert len({trial["lr"] for trial in few}) == 4


@pytest.mark.parametrize("words", ["uniform:1,100", "loguniform:1,100", "randint:1,101", "lograndint:1,101"])
def test_ranges_are_spread_as_their_words_say(words):
    space = {"x": written(words, "x", float)}
    drawn = np.array([trial["x"] for trial in trials(space, 4000, seed=1)])
    assert drawn.min() >= 1
    assert drawn.max() <= 100
    middle = 10 if "log" in words else 50.5  # half of what is drawn is below it
    assert abs((drawn < middle).mean() - 0.5) < 0.05
    assert ("int" in words) == all(float(x).is_integer() for x in drawn)


def test_lists_in_words():
    assert written("0.1", "lr", float) == 0.1
    assert written("0.1,0.2", "lr", float) == written("grid:0.1,0.2", "lr", float) == Grid([0.1, 0.2])
    assert written("choice:1,2", "n", int) == Choice([1, 2])
    assert written("module:f,module:g", "env", str) == Grid(["module:f", "module:g"])


@pytest.mark.parametrize("text", ["0:1e-3,100000:0", "0:0.3,5e4:0.1", "cosine:0:1e-3,100:0"])
def test_a_schedule_is_one_value(text):
    assert written(text, "lr", str) == text


def test_tried_settings_go_into_those_that_are_there():
    config = etude.PPOConfig(network=etude.NetworkConfig(hidden=(8,), activation="relu"))
    found = applied(config, {"network.hidden": [4, 4], "lr": 1e-4, "engine.num_runners": 3}, "ppo")
    assert (found.network.hidden, found.network.activation, found.lr) == ((4, 4), "relu", 1e-4)
    assert found.engine == etude.Ray(num_runners=3)
    again = applied(found, {"engine.num_learners": 2}, "ppo")
    assert (again.engine.num_runners, again.engine.num_learners) == (3, 2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("uniform:2,1", "2 is not less than 1"),
        ("loguniform:0,1", "0 has no logarithm"),
        ("randint:1,2.5", "both must be whole numbers"),
        ("uniform:a,b", "could not convert string to float"),
        ("uniform:1", "must be uniform:LOW,HIGH, as in uniform:1e-4,1e-2"),
        ("unifrom:1,2", "unknown keyword `unifrom`. Nearest: `uniform`"),
    ],
)
def test_words_that_are_no_search_space(words, why):
    with pytest.raises(SettingsError, match="the search space of `lr` is") as found:
        written(words, "lr", float)
    assert why in str(found.value)
