# SPDX-License-Identifier: Apache-2.0
import string
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from some_envs import Growing, Juggler, LendingVectorEnv, Numbered, Simulated, Stateful, numbered

from etude.checkpoints import load_tree, save_tree
from etude.envs import Arena, VectorArena, make_arena
from etude.envs.arena import Turn


def play(arena: Arena, steps: int, seed: int) -> list[Turn]:
    space = gym.vector.utils.batch_space(arena.kinds[0].action_space, arena.num_slots)
    space.seed(seed)
    turns = []
    for _ in range(steps):
        arena.send(arena.recv()[-1], {"action": space.sample()})
        turns += arena.recv()
    return turns


def assert_same(turns: list[Turn], others: list[Turn]) -> None:
    for turn, other in zip(turns, others, strict=True):
        assert turn.obs.keys() == other.obs.keys()
        for name in turn.obs:
            np.testing.assert_array_equal(turn.obs[name], other.obs[name])
        assert turn.waits == other.waits
        for name in ("slots", "reward", "terminated", "truncated", "first"):
            np.testing.assert_array_equal(getattr(turn, name), getattr(other, name))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save_tree(Path(folder), state)
        return load_tree(Path(folder))[0]


MAKERS = {
    "CartPole": lambda: VectorArena("CartPole-v1", 3),
    "CartPole in turn, TimeLimit": lambda: make_arena(lambda: gym.make("CartPole-v1", max_episode_steps=12), 3),
    "wrapped": lambda: make_arena(
        lambda: gym.wrappers.RecordEpisodeStatistics(gym.wrappers.TimeAwareObservation(gym.make("CartPole-v1"))), 2
    ),
    "Pendulum": lambda: make_arena("Pendulum-v1", 2),
    "Acrobot": lambda: make_arena("Acrobot-v1", 2),
    "Taxi": lambda: make_arena("Taxi-v4", 2),
    "FrozenLake": lambda: make_arena("FrozenLake-v1", 2),
    "CliffWalking": lambda: make_arena("CliffWalking-v1", 2),
    "Blackjack": lambda: make_arena("Blackjack-v1", 2),
    "same step": lambda: VectorArena(numbered(3, AutoresetMode.SAME_STEP), 3),
    "disabled": lambda: VectorArena(numbered(3, AutoresetMode.DISABLED), 3),
    "lending": lambda: VectorArena(LendingVectorEnv(3, AutoresetMode.SAME_STEP), 3),
    "juggler": lambda: make_arena(Juggler, 2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_fresh_arena_goes_on_bit_for_bit(name: str) -> None:
    make = MAKERS[name]
    arena = make()
    arena.reset(seed=5)
    play(arena, 17, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 60, seed=1)
    other = make()
    assert other.load_state_dict(state) == "snapshot"
    assert_same(expected, play(other, 60, seed=1))


def test_an_arena_that_has_played_goes_back() -> None:
    arena = make_arena("FrozenLake-v1", 2)
    arena.reset(seed=5)
    play(arena, 5, seed=0)
    state = arena.state_dict()
    expected = play(arena, 30, seed=1)
    arena.load_state_dict(state)
    assert_same(expected, play(arena, 30, seed=1))


def test_an_envs_own_state_is_used_and_its_random_stream_goes_on() -> None:
    arena = make_arena(Stateful, 2)
    arena.reset(seed=5)
    play(arena, 5, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 30, seed=1)
    other = make_arena(Stateful, 2)
    assert other.load_state_dict(state) == "get_state"
    assert_same(expected, play(other, 30, seed=1))


def test_what_is_no_plain_data_is_named() -> None:
    arena = make_arena(Simulated, 1)
    arena.reset(seed=5)
    state = through_a_file(arena.state_dict())
    assert state["how"] == "new episodes"
    how = make_arena(Simulated, 1).load_state_dict(state)
    assert how.startswith("new episodes: list[0].env.simulator is a builtins:range_iterator")


def test_objects_that_a_new_env_does_not_have_are_not_made_up() -> None:
    arena = make_arena(Growing, 1)
    arena.reset()
    play(arena, 2, seed=0)
    how = make_arena(Growing, 1).load_state_dict(arena.state_dict())
    assert "enemies[0] was a some_envs:Ball, but a new env has none there" in how


def test_the_state_of_another_env_is_refused() -> None:
    arena = make_arena("Acrobot-v1", 1)
    arena.reset()
    how = make_arena(Numbered, 1).load_state_dict(arena.state_dict())
    assert how.startswith("new episodes: ")
    assert "list[0].env was a gymnasium.wrappers.common:TimeLimit" in how


def nodes_in(state: Any) -> list[dict[str, Any]]:
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [state] * isinstance(state, dict) + [found for item in inner for found in nodes_in(item)]


class Tool:
    made = 0

    def __init__(self, *_: Any) -> None:
        Tool.made += 1


class Equipped(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.module = string
        self.marked = Tool()


def test_a_made_up_state_neither_changes_modules_nor_makes_objects() -> None:
    arena = make_arena(Equipped, 1)
    arena.reset()
    saved, names = arena.state_dict(), dict(vars(string))
    tool = f"{__name__}:Tool"
    for key, value, made_up in (
        ("static", "string", {"id": 901, "object": {"digits": {"value": "x"}}, "class": "builtins:module"}),
        ("class", tool, {"id": 902, "named": [{"value": "x"}], "class": tool}),
    ):
        state = through_a_file(saved)
        node = next(node for node in nodes_in(state) if node.get(key) == value)
        node.clear()
        node.update(made_up)
        other, made = make_arena(Equipped, 1), Tool.made
        assert other.load_state_dict(state).startswith("new episodes: ")
        assert Tool.made == made
        assert vars(string) == names


def test_state_hidden_in_c_is_not_passed_over() -> None:
    class Hidden(np.random.RandomState):
        """Has a __dict__, but what counts is elsewhere."""

    class Holder(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.thing = Hidden(3)

    arena = make_arena(Holder, 1)
    arena.reset()
    assert "Hidden" in arena.state_dict()["why"]


def test_many_references_to_one_thing_take_one_place() -> None:
    class Grid(Numbered):
        def __init__(self) -> None:
            super().__init__()
            cells: list[list[Any]] = [[]]
            for _ in range(60):  # without memory of what was met: 2 ** 60 paths
                cells.append([cells[-1], cells[-1]])
            self.cells = cells

    arena = make_arena(Grid, 1)
    arena.reset()
    state = through_a_file(arena.state_dict())
    other = make_arena(Grid, 1)
    assert other.load_state_dict(state) == "snapshot"
    cells = other.env_at(0).cells
    assert cells[5][0] is cells[5][1]
    assert cells[5][0] is cells[4]


def test_before_the_first_reset_there_is_nothing_to_keep() -> None:
    state = VectorArena("CartPole-v1").state_dict()
    assert VectorArena("CartPole-v1").load_state_dict(state) == "new episodes: the arena was not reset"


def test_how_arrays_lie_in_memory_is_kept() -> None:
    # products of matrices round differently by it, and a resumed run would drift from the uninterrupted one
    arena = VectorArena("CartPole-v1", 3)
    arena.reset(seed=1)
    play(arena, 2, seed=0)
    other = VectorArena("CartPole-v1", 3)
    other.load_state_dict(through_a_file(arena.state_dict()))
    now, then = (each.recv()[-1].obs["obs"] for each in (arena, other))
    assert now.flags.fnc
    assert then.flags.fnc
