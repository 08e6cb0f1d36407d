# SPDX-License-Identifier: Apache-2.0
"""A pool's running episodes as plain data; and what it says to those who use it in a wrong way."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from many_agent_envs import TwoJobs
from pool_envs import RAISE, Telling, Told, copies_of, fitting
from some_envs import Juggler, Numbered, Simulated, Stateful
from test_snapshot import through_a_file

from etude.envs.copies import CopiesArena
from etude.envs.workers import Workers
from etude.errors import EnvError, SettingsError
from etude.settings import field_docs

Seen = list[tuple[Any, ...]]


def play(arena: CopiesArena, rounds: int, seed: int) -> Seen:
    """Act at random, and give all that is shown after each action."""
    rng = np.random.default_rng(seed)
    seen: Seen = []
    for _ in range(rounds):
        for turn in arena.recv():
            if turn.waits:
                space = arena.kinds[turn.kind].action_space
                space.seed(int(rng.integers(2**31)))
                arena.send(turn, {"action": np.stack([space.sample() for _ in turn.slots])})
        for turn in arena.recv():
            obs = {name: column.tolist() for name, column in turn.obs.items()}
            rows = (turn.terminated, turn.truncated, turn.first, turn.env_t, turn.episode, turn.over)
            shown = [None if column is None else column.tolist() for column in rows]
            seen.append((turn.slots.tolist(), obs, turn.reward.tolist(), turn.waits, *shown))
    return seen


class Turnwise:
    """Three agents of one kind act in turn; each is shown a number that is drawn, and earns what the others drew."""

    possible_agents: ClassVar[list[str]] = ["a", "b", "c"]

    def observation_space(self, agent: str) -> Any:
        return gym.spaces.Box(0, 1, (1,), np.float64)

    def action_space(self, agent: str) -> Any:
        return gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t = 0
        return self.show(), {}

    def show(self) -> Any:
        return {self.possible_agents[self.t % 3]: self.rng.random(1)}

    def step(self, action: Any) -> Any:
        assert list(action) == [self.possible_agents[self.t % 3]]
        self.t += 1
        obs = self.show()
        reward = dict.fromkeys(self.possible_agents, float(next(iter(obs.values()))[0]))
        return obs, reward, {"__all__": self.t == 8}, {}, {}


MAKERS: dict[str, Any] = {
    "CartPole": "CartPole-v1",
    "FrozenLake": "FrozenLake-v1",
    "Blackjack": lambda: gym.wrappers.FlattenObservation(gym.make("Blackjack-v1")),
    "juggler": Juggler,
    "Stateful": Stateful,
    "two jobs": TwoJobs,
    "in turn": Turnwise,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_fresh_arena_goes_on_bit_for_bit(name: str) -> None:
    arena = copies_of(MAKERS[name], num_envs=3)
    arena.reset(seed=5)
    play(arena, 17, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 60, seed=1)
    other = copies_of(MAKERS[name], num_envs=3)
    assert other.load_state_dict(state) == ("get_state" if name == "Stateful" else "snapshot")
    assert play(other, 60, seed=1) == expected
    assert other.load_state_dict(state) == ("get_state" if name == "Stateful" else "snapshot"), (
        "and one that has played"
    )
    assert play(other, 60, seed=1) == expected


def test_the_turns_that_wait_are_shown_again() -> None:
    arena = copies_of("CartPole-v1", num_envs=2)
    arena.reset(seed=5)
    while len(turns := arena.recv()) == 1:
        arena.send(turns[0], {"action": np.zeros(2, np.int64)})
    state = through_a_file(arena.state_dict())
    other = copies_of("CartPole-v1", num_envs=2)
    other.load_state_dict(state)
    for turn, again in zip(turns, other.recv(), strict=True):
        assert turn.slots.tolist() == again.slots.tolist()
        assert turn.obs["obs"].tolist() == again.obs["obs"].tolist()
        assert turn.waits == again.waits


def test_max_steps_count_on() -> None:
    lengths = []
    for is_resumed in (False, True):
        arena = copies_of("Pendulum-v1", Workers(max_steps=20))
        arena.reset(seed=5)
        play(arena, 12, seed=0)
        if is_resumed:
            state, arena = through_a_file(arena.state_dict()), copies_of("Pendulum-v1", Workers(max_steps=20))
            arena.load_state_dict(state)
        lengths.append([i for i, row in enumerate(play(arena, 30, seed=1)) if not row[3]])
    assert lengths[0] == lengths[1] == [7, 28]


def test_what_can_not_be_kept_is_named() -> None:
    arena = copies_of(Simulated)
    assert "was not reset" in arena.state_dict()["why"]
    arena.reset(seed=5)
    how = copies_of(Simulated).load_state_dict(through_a_file(arena.state_dict()))
    assert how.startswith("new episodes: list[0].env.simulator is a builtins:range_iterator")


def test_infos_need_not_be_plain_data() -> None:
    class Talking(Numbered):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"thing": iter([1])}

    arena = copies_of(Talking)
    arena.reset()
    play(arena, 5, seed=0)
    assert arena.state_dict()["how"] == "snapshot"


def test_workers_keep_their_state_for_themselves() -> None:
    workers = Workers(num_workers=1, mode="thread")
    arena = copies_of(Telling, workers)
    arena.reset(seed=3)
    state = through_a_file(arena.state_dict())
    assert arena.load_state_dict(state) == "new episodes: the envs run in workers, whose state is not kept"
    here = copies_of(Telling)
    here.reset(seed=3)
    assert (
        arena.load_state_dict(here.state_dict()) == "new episodes: the envs ran without workers, but have workers now"
    )
    arena.close()


# -- an env that was made already -----------------------------------------------------------------------------------


def test_one_env_that_is_given_is_played_and_left_open() -> None:
    class Closing(Telling):
        closed = False

        def close(self) -> None:
            self.closed = True

    env = Closing()
    arena = copies_of(env)
    arena.reset(seed=3)
    (turn,) = arena.recv()
    arena.send(turn, {"action": fitting(turn.obs["obs"])})
    arena.recv()
    arena.close()
    assert env.t == 1
    assert not env.closed
    made: list[Closing] = []

    def make() -> Closing:
        made.append(Closing())
        return made[-1]

    copies_of(make, num_envs=2).close()
    assert [env.closed for env in made] == [True, True]


def test_one_env_that_is_given_can_not_be_made_again() -> None:
    env = Told()
    arena = copies_of(env)
    arena.reset(seed=3)
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.array([RAISE])})
    with pytest.raises(EnvError, match=r"(?s)env 0 failed in a step:.*out of order$"):
        arena.recv()
    arena.reset(seed=3)
    assert arena.recv()[0].obs["obs"][0, 2] == env.resets == 2


# -- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "workers", "num_envs", "message"),
    [
        (
            Telling(),
            Workers(),
            2,
            r"one Telling object can't be 2 envs, nor in a worker: give a function that makes one",
        ),
        (
            Telling(),
            Workers(num_workers=1, mode="thread"),
            1,
            r"one Telling object can't be 1 envs, nor in a worker",
        ),
        (Telling, Workers(), 0, r"num_envs must be at least 1, not 0"),
        (SyncVectorEnv([Telling]), Workers(), 1, r"a SyncVectorEnv steps its envs itself: leave workers out"),
        ("some_envs:make_lending", Workers(), 1, r"a LendingVectorEnv steps its envs itself: leave workers out"),
        (lambda: 3, Workers(), 1, r"builtins.int is not an env"),
        (lambda: 1 / 0, Workers(), 1, r"<lambda> fails to make an env: ZeroDivisionError: division by zero"),
        (lambda: 1 / 0, Workers(num_workers=2, mode="thread"), 1, r"<lambda> fails to make an env: ZeroDivision"),
        ("CartPol-v1", Workers(), 1, r"no env 'CartPol-v1' is registered .* Nearest: 'CartPole-v1'"),
    ],
)
def test_what_can_not_be_an_arena(env: Any, workers: Workers, num_envs: int, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        copies_of(env, workers, num_envs)


def test_envs_must_be_different_objects_and_alike() -> None:
    env = Telling()
    for workers in (Workers(), Workers(num_workers=2, mode="thread")):
        with pytest.raises(EnvError, match=r"the same Telling object was returned for several envs"):
            copies_of(lambda: env, workers, 2)
        made = iter([Numbered(), Telling()])
        with pytest.raises(EnvError, match=r"must be alike, but env 1 has the observation spaces .*float.* others"):
            copies_of(lambda made=made: next(made), workers, 2)


def test_what_is_done_in_the_wrong_order() -> None:
    arena = copies_of(Telling, num_envs=2)
    with pytest.raises(EnvError, match=r"was not reset: call reset\(\) before recv\(\)"):
        arena.recv()
    arena.reset(seed=3)
    (turn,) = arena.recv()
    assert arena.recv() == [turn], "it is shown until it is answered"
    action = {"action": fitting(turn.obs["obs"])}
    arena.send(turn, action)
    with pytest.raises(EnvError, match=r"this turn does not wait for actions"):
        arena.send(turn, action)
    arena.close()
    with pytest.raises(EnvError, match=r"the arena is closed"):
        arena.recv()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": -1}, r"`num_workers` is .*, but must be at least 0"),
        ({"envs_per_worker": 0}, r"`envs_per_worker` is .*, but must be at least 1"),
        ({"mode": "fiber"}, r"Workers.mode is 'fiber', expected .*process.*thread"),
        ({"min_batch": 0}, r"`min_batch` is .*, but must be at least 1"),
        (
            {"num_workers": 2, "envs_per_worker": 2, "min_batch": 5},
            r"Workers.min_batch must be at most the 4 envs there",
        ),
        ({"num_workers": 9, "min_batch": 3, "max_batch": 2}, r"Workers.max_batch must be at least min_batch"),
        ({"max_wait": -0.1}, r"`max_wait` is .*, but must be at least 0"),
        ({"max_steps": 0}, r"`max_steps` is .*, but must be at least 1"),
        ({"num_workers": 1, "step_timeout": 0.0}, r"`step_timeout` is .*, but must be above 0"),
        (
            {"step_timeout": 3.0},
            "step_timeout must be auto or none without workers: .* Set num_workers to 1",
        ),
        ({"max_batch": 3}, r"Workers.max_batch must be none without workers: all envs step together"),
        ({"max_restarts": -1}, r"`max_restarts` is .*, but must be at least 0"),
        ({"cleanup_time": -1.0}, r"`cleanup_time` is .*, but must be at least 0"),
        ({"check": -1}, r"`check` is .*, but must be at least 0, or 'always'"),
        ({"check": "never"}, r"Workers.check is 'never'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Workers(**settings)


def test_every_setting_is_documented() -> None:
    assert field_docs(Workers).keys() == vars(Workers()).keys()
