# SPDX-License-Identifier: Apache-2.0
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from some_envs import LendingVectorEnv, Numbered, fails, make_lending, make_numbered, makes_text
from test_snapshot import play

from etude.envs import VectorArena, env_name, make_arena, make_vector_env
from etude.errors import EnvError, SpaceError

gym.register("Vectorised-v0", vector_entry_point="some_envs:LendingVectorEnv")


class Hollow(VectorEnv[Any, Any, Any]):
    """A vector env that does not say what its copies are like."""

    num_envs = 2


@pytest.mark.parametrize(
    ("env", "num_envs", "wanted"),
    [
        ("CartPole-v1", 3, "CartPoleVectorEnv"),
        ("CartPole-v1", 1, "CartPoleVectorEnv"),
        ("some_envs:make_lending", 4, "LendingVectorEnv"),
        (make_lending, 4, "LendingVectorEnv"),
        (LendingVectorEnv(2, AutoresetMode.DISABLED), 2, "LendingVectorEnv"),
        (lambda: SyncVectorEnv([Numbered, Numbered]), 2, "SyncVectorEnv"),
        (SyncVectorEnv([Numbered, Numbered]), 2, "SyncVectorEnv"),
    ],
)
def test_arena_over_whatever_is_a_vector_env(env: Any, num_envs: int, wanted: str) -> None:
    arena = VectorArena(env, num_envs)
    assert isinstance(arena.env, VectorEnv)
    assert type(arena.env.unwrapped).__name__ == wanted
    arena.reset(seed=1)
    (turn,) = arena.recv()
    assert arena.num_slots == num_envs
    assert all(column.shape[0] == num_envs for column in turn.obs.values())
    assert turn.first.all()
    arena.send(turn, {"action": np.stack([arena.action_space.sample() for _ in range(num_envs)])})
    arena.close()


def test_factory_makes_each_copy() -> None:
    made = []

    def factory() -> Numbered:
        made.append(Numbered())
        return made[-1]

    make_arena(factory, 3)
    assert len(made) == 3


def fails_silently() -> None:
    raise LookupError


@pytest.mark.parametrize(
    ("env", "num_envs", "message"),
    [
        ("CartPol-v1", 1, r"no env 'CartPol-v1' is registered .* Nearest: 'CartPole-v1'"),
        ("highway-fast-v0", 1, r"no env 'highway-fast-v0' is registered .* 'package:highway-fast-v0'"),
        ("some_envs.make", 1, r"no env 'some_envs.make' is registered .* 'module:function'"),
        ("sisl/pursuit-v5", 1, r"no env 'sisl/pursuit-v5' .* PettingZoo has 'pettingzoo.sisl.pursuit_v5:parallel_env'"),
        ("pursuit_v5", 1, r"no env 'pursuit_v5' .* PettingZoo has 'pettingzoo.sisl.pursuit_v5:parallel_env'"),
        ("tictactoe_v3", 1, r"no env 'tictactoe_v3' .* PettingZoo has 'pettingzoo.classic.tictactoe_v3:env'"),
        ("tictactoe-v1", 1, r"no env 'tictactoe-v1' .* PettingZoo has 'pettingzoo.classic.tictactoe_v3:env'"),
        ("pettingzoo.sisl.pursuit_v4", 1, r"no env .* PettingZoo has 'pettingzoo.sisl.pursuit_v5:parallel_env'"),
        ("no_such_module:make", 1, r"can't import the module `no_such_module` .*importable"),
        ("gymnasium.envs.nothing:make", 1, r"can't import the module .*importable from here"),
        ("gymnasium.wrapper:make", 1, r"can't import the module .* Nearest: `gymnasium.wrappers`."),
        ("some_envs_that_need_more:make", 1, r"It needs `no_such_module`, which is not installed"),
        ("gymnasium:CartPole-v7", 1, r"registers no env of that name. Nearest: `CartPole-v1`"),
        ("some_envs:nothing", 1, r"the module has no `nothing`, and registers no env of that name"),
        ("some_envs:fails", 1, r"some_envs:fails fails to make an env: RuntimeError: no licence"),
        (fails, 2, r"fails to make an env: RuntimeError: no licence"),
        (fails_silently, 2, r"to make an env: LookupError in .*test_make.py, line \d+: `raise LookupError`"),
        (makes_text, 1, r"builtins.str is not an env: neither a gymnasium.Env"),
        ("gymnasium:wrappers", 4, r"'gymnasium:wrappers' is a module: name .* as 'gymnasium\.wrappers:function'"),
        ("Acrobat-v1", 1, r"Nearest: 'Acrobot-v1'\. If a package registers it, .* 'package:Acrobat-v1'"),
        ("Vectorised-v0", 2, r"has only a vectorised version: .*make_vec\('Vectorised-v0', num_envs=16"),
        (Hollow, 2, r"gives a Hollow, not a VectorEnv with single_observation_space"),
        (Numbered(), 2, r"one Numbered object can't be 2 envs.*: give a function that makes one"),
        (make_lending, 2, r"has 4 envs, but num_envs is 2"),
        (3, 1, r"builtins.int is not an env: neither a gymnasium.Env"),
        ("CartPole-v1", 0, r"num_envs must be at least 1, not 0"),
    ],
)
def test_messages(env: Any, num_envs: int, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_arena(env, num_envs)


@pytest.mark.parametrize(
    ("env", "num_envs", "message"),
    [
        ("CartPol-v1", 1, r"no env 'CartPol-v1' is registered .* Nearest: 'CartPole-v1'"),
        ("Acrobot-v1", 2, r"Acrobot-v1 gives a TimeLimit.*, not a VectorEnv .*: make_arena steps copies of one env"),
        (makes_text, 1, r"some_envs:makes_text gives a str, not a VectorEnv"),
        (Numbered(), 1, r"some_envs:Numbered gives a Numbered, not a VectorEnv"),
        (fails, 2, r"fails to make an env: RuntimeError: no licence"),
        (make_lending, 2, r"has 4 envs, but num_envs is 2"),
        ("CartPole-v1", 0, r"num_envs must be at least 1, not 0"),
    ],
)
def test_what_is_no_vector_env(env: Any, num_envs: int, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        VectorArena(env, num_envs)


def test_flags_may_be_lists() -> None:
    class Listed(gym.vector.VectorEnv[Any, Any, Any]):
        num_envs = 2
        single_observation_space, single_action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)
        metadata: dict[str, Any] = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros((2, 1), np.float32), {}

        def step(self, actions: Any) -> Any:
            return np.zeros((2, 1), np.float32), np.zeros(2), [False, True], np.zeros(2, bool), {}

    arena = VectorArena(Listed(), 2)
    arena.reset(0)
    arena.send(arena.recv()[0], {"action": np.zeros(2, np.int64)})
    assert arena.recv()[0].terminated.tolist() == [False, True]


def test_a_factory_that_gives_one_env_twice_or_fails_later_is_refused() -> None:
    env = Numbered()
    with pytest.raises(EnvError, match="the same Numbered object was returned for several envs"):
        make_arena(lambda: env, 2)
    made = iter([Numbered()])
    with pytest.raises(EnvError, match="fails to make an env: StopIteration"):
        make_arena(lambda: next(made), 2)


def test_a_ready_vector_env_brings_its_own_number_where_that_is_allowed() -> None:
    assert VectorArena(make_lending, 16, exact=False).num_slots == 4
    assert make_vector_env("CartPole-v1", 3, exact=False).num_envs == 3


def test_vector_env_must_say_how_it_resets() -> None:
    env = LendingVectorEnv(2, AutoresetMode.SAME_STEP)
    env.metadata = {}
    with pytest.raises(EnvError, match="LendingVectorEnv does not say how it resets: its metadata.*AutoresetMode.NEXT"):
        VectorArena(env, 2)


def test_same_step_needs_the_last_observations() -> None:
    class Silent(LendingVectorEnv):
        def step(self, actions: Any) -> Any:
            return (*super().step(actions)[:-1], {"final_info": 1})

    arena = VectorArena(Silent(2, AutoresetMode.SAME_STEP), 2)
    arena.reset()
    with pytest.raises(EnvError, match=r"Silent resets in the same step, but its info has no 'final_obs'"):
        play(arena, 9, seed=0)


@pytest.mark.parametrize("kind", [VectorArena, make_arena])
def test_recv_before_reset(kind: Any) -> None:
    with pytest.raises(EnvError, match=r"was not reset: call reset\(\) before recv\(\)"):
        kind("CartPole-v1", 1).recv()


@pytest.mark.parametrize("is_vector", [True, False])
def test_first_observations_outside_their_bounds(is_vector: bool, caplog: pytest.LogCaptureFixture) -> None:
    env = Numbered()
    env.observation_space = gym.spaces.Box(5, 6, (3,), np.float32)
    arena = make_arena(SyncVectorEnv([lambda: env]) if is_vector else env, 1)
    arena.reset()
    for _ in range(3):
        assert len(arena.recv()) == 1
    (record,) = [record for record in caplog.records if record.name == "etude.envs"]
    assert "env 0: `obs` is 0.0 at [0], outside its space's bounds [5.0, 6.0]" in record.getMessage()
    assert "(for a VectorEnv, gymnasium.wrappers.vector.TransformObservation)" in record.getMessage()


@pytest.mark.parametrize("is_vector", [True, False])
def test_first_observation_that_is_not_in_its_discrete_space(is_vector: bool) -> None:
    env = Numbered(kind="dict")
    env.observation_space["t"] = gym.spaces.Discrete(5, start=3)
    arena = make_arena(SyncVectorEnv([lambda: env]) if is_vector else env, 1)

    def begin() -> None:
        arena.reset()
        arena.recv()

    with pytest.raises(SpaceError, match=r"`obs/t` is \[?0\]?, outside its space"):
        begin()


def test_what_was_given_ready_made_is_not_closed() -> None:
    given = LendingVectorEnv(2, AutoresetMode.SAME_STEP)
    VectorArena(given, 2).close()
    assert not given.closed
    arena = VectorArena(make_lending, 4)
    arena.close()
    assert arena.env.closed


def test_names() -> None:
    assert env_name("CartPole-v1") == "CartPole-v1"
    assert env_name(make_numbered) == "some_envs:make_numbered"
    assert env_name(Numbered()) == "some_envs:Numbered"
    assert env_name(gym.make("Acrobot-v1")) == "Acrobot-v1"
    assert env_name(gym.wrappers.TimeLimit).endswith(":TimeLimit")  # of a class, `spec` is a property
    assert env_name(SyncVectorEnv([make_numbered])) == "gymnasium.vector.sync_vector_env:SyncVectorEnv"


class Emulated(Numbered):
    there = 0

    def __init__(self) -> None:
        super().__init__()
        Emulated.there += 1
        if Emulated.there > 1:
            raise RuntimeError("Cannot create multiple emulator instances per process")


def test_an_env_of_which_a_process_can_have_only_one() -> None:
    with pytest.raises(EnvError, match=r"multiple emulator .*: workers=Workers\(num_workers=4, envs_per_worker=1\)"):
        [make_arena(Emulated, 1).reset() for _ in range(2)]
