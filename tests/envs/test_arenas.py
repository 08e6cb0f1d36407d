# SPDX-License-Identifier: Apache-2.0
"""Which arena an env gets."""

import asyncio
import itertools
import types
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from many_agent_envs import TwoJobs
from some_envs import LendingVectorEnv, Numbered

import etude
from etude.envs import InlineArena, VectorArena, Workers, make_arena
from etude.errors import EnvError, SpaceError


def make_vector() -> Any:
    return gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")


@pytest.mark.parametrize(
    ("env", "num_envs", "kind"),
    [
        ("CartPole-v1", 5, VectorArena),
        ("CartPole-v1", 4, InlineArena),
        ("CartPole-v1", 1, InlineArena),
        ("Pendulum-v1", 3, InlineArena),
        (Numbered, 3, InlineArena),
        (Numbered(), 1, InlineArena),
        ("some_envs:make_numbered", 3, InlineArena),
        (TwoJobs, 3, InlineArena),
        ("many_agent_envs:TwoJobs", 3, InlineArena),
        (make_vector, 3, VectorArena),
        ("test_arenas:make_vector", 3, VectorArena),
        (LendingVectorEnv(3, AutoresetMode.DISABLED), 3, VectorArena),
    ],
)
def test_an_env_of_each_form(env: Any, num_envs: int, kind: type) -> None:
    arena = make_arena(env, num_envs)
    assert type(arena) is kind
    assert arena.num_envs == num_envs
    arena.reset(seed=1)
    assert sum(len(turn.slots) for turn in arena.recv()) >= num_envs
    arena.close()


LIMITS: list[dict[str, Any]] = [
    {"check": 5},
    {"check": "always"},
    {"max_restarts": 3},
    {"max_failure_rate": 0.5},
    {"restart_failed": False},
    {"max_steps": 7},
    {"min_batch": 1},
    {"cleanup_time": 1.0},
    {"mode": "thread"},
]


@pytest.mark.parametrize("limits", LIMITS)
def test_limits_and_checks_do_not_change_the_arena(limits: dict[str, Any]) -> None:
    for env in ("CartPole-v1", make_vector):
        if env is make_vector and "max_steps" in limits:
            continue  # it resets itself
        arena = make_arena(env, 5 if env == "CartPole-v1" else 3, Workers(**limits))
        assert type(arena) is VectorArena
        arena.close()


def played(arena: VectorArena, turns: int = 60) -> list[Any]:
    """By slot, the lengths of the episodes, and whether they terminated and were truncated."""
    arena.reset(seed=3)
    ends: list[Any] = []
    t = np.zeros(arena.num_slots, int)
    for _ in range(turns):
        for turn in arena.recv():
            first = np.zeros(len(turn.slots), bool) if turn.first is None else turn.first
            t[turn.slots] = np.where(first, 0, t[turn.slots] + 1)
            if turn.terminated is not None and turn.truncated is not None:
                over = turn.terminated | turn.truncated
                rows = zip(
                    turn.slots[over], t[turn.slots[over]], turn.terminated[over], turn.truncated[over], strict=True
                )
                ends += [tuple(map(int, row)) for row in rows]
            if turn.waits:
                arena.send(turn, {"action": np.ones(len(turn.slots), np.int64)})
    return ends


def test_a_vectorised_env_is_truncated_after_max_steps() -> None:
    plain = {(slot, t) for slot, t, *_ in played(VectorArena("CartPole-v1", 4))}
    limited = played(VectorArena("CartPole-v1", 4, max_steps=9))
    assert max(t for _, t in plain) > 9
    assert max(t for _, t, *_ in limited) == 9
    assert (9, 0, 1) in {row[1:] for row in limited}
    assert all(terminated or (t, truncated) == (9, 1) for _, t, terminated, truncated in limited)
    with pytest.raises(EnvError, match=r"(?s)CartPoleVectorEnv .*after 9 steps .*max_episode_steps"):
        VectorArena(make_vector, 3, max_steps=9)


def test_a_vector_env_that_leaves_resets_to_others_is_truncated_by_its_arena() -> None:
    long = LendingVectorEnv(3, AutoresetMode.DISABLED)
    ends = played(VectorArena(long, 3, max_steps=2))
    lengths = {t for _, t, *_ in ends}
    assert lengths == {1, 2}
    assert {row[2:] for row in ends if row[1] == 2} >= {(0, 1), (1, 0)}
    arena = VectorArena(LendingVectorEnv(3, AutoresetMode.DISABLED), 3, max_steps=5)
    arena.reset(seed=1)
    assert arena.state_dict()["t"].tolist() == [0, 0, 0]


class Wrong(LendingVectorEnv):
    """Gives something wrong in its third step."""

    wrong: ClassVar[dict[str, Any]] = {}

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        given = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
        return tuple((given | self.wrong if self.t.max() >= 3 else given).values())


@pytest.mark.parametrize(
    ("wrong", "check", "match"),
    [
        ({"obs": np.full((3, 3), np.nan, np.float32)}, 10, "`obs` holds NaN"),
        ({"reward": np.zeros((3, 1))}, 0, r"`reward` has shape \(3, 1\).*3 copies"),
        ({"truncated": np.zeros(3)}, 10, "`truncated` is .* 3 booleans"),
        ({"terminated": np.ones(3)}, 0, "`terminated` is .* 3 booleans"),
        ({"reward": np.array([1.0, 2.0, None])}, 0, "`reward` has shape .* and dtype object"),
        ({"obs": np.zeros((4, 3), np.float32)}, 0, r"`obs` has shape \(4, 3\), but its space .* has shape \(3, 3\)"),
        ({"obs": np.array([["a"] * 3] * 3)}, 0, "`obs` has dtype <U1, but its space .* has dtype float32"),
        ({"obs": {"x": 0}}, 0, "`obs`"),
        ({"info": [{}]}, 0, "the infos of Env are of type list, but must be a dict"),
        ({"info": {"final_obs": None}}, 0, r"info\['final_obs'\], do not fit: `obs` has shape \(\)"),
        ({"info": {"final_obs": np.zeros((3, 1), np.float32)}}, 0, r"info\['final_obs'\].* has shape \(3, 1\)"),
        ({"info": {"final_obs": [None] * 3}}, 0, r"info\['final_obs'\].*`final_obs of copy \d` has shape \(\)"),
        ({"info": {"final_obs": []}}, 0, r"info\['final_obs'\], do not fit: list index out of range"),
    ],
)
def test_what_a_vector_env_gives_is_checked(wrong: dict[str, Any], check: int, match: str) -> None:
    class Env(Wrong):
        pass

    Env.wrong = wrong
    with pytest.raises((EnvError, SpaceError), match=match):
        played(VectorArena(Env(3, AutoresetMode.SAME_STEP), 3, check=check))
    if check and "obs" in wrong:
        played(VectorArena(Env(3, AutoresetMode.SAME_STEP), 3, check=0))


def test_final_observations_may_be_a_list() -> None:
    class Listing(LendingVectorEnv):
        def step(self, actions: Any) -> Any:
            *given, info = super().step(actions)
            if "final_obs" in info:
                over = given[2] | given[3]
                info["final_obs"] = [info["final_obs"][copy] if over[copy] else None for copy in range(self.num_envs)]
            return *given, info

    args = (3, AutoresetMode.SAME_STEP)
    assert str(played(VectorArena(Listing(*args), 3))) == str(played(VectorArena(LendingVectorEnv(*args), 3)))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_infos_must_stay_a_dict(mode: AutoresetMode) -> None:
    env = gym.wrappers.vector.DictInfoToList(SyncVectorEnv([Numbered] * 2, autoreset_mode=mode))
    with pytest.raises(EnvError, match="the infos of DictInfoToList are of type list.*Leave out a wrapper"):
        VectorArena(env, 2).reset()


@pytest.mark.parametrize("form", [lambda infos: None, types.MappingProxyType])
def test_infos_may_be_none_or_any_mapping(form: Any) -> None:
    class Other(LendingVectorEnv):
        def reset(self, **given: Any) -> Any:
            obs, infos = super().reset(**given)
            return obs, form(infos)

        def step(self, action: Any) -> Any:
            *given, infos = super().step(action)
            return *given, form(infos)

    mode = AutoresetMode.NEXT_STEP
    assert str(played(VectorArena(Other(3, mode), 3))) == str(played(VectorArena(LendingVectorEnv(3, mode), 3)))


def test_final_observations_may_come_from_another_process() -> None:
    """Their dtype is then another object."""

    class Sent(gym.vector.VectorWrapper):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            *given, infos = super().step(action)
            if "final_obs" in infos:
                infos["final_obs"] = infos["final_obs"].astype(np.dtype(object, copy=True))
            return *given, infos

    env, other = (SyncVectorEnv([Numbered] * 2, autoreset_mode=AutoresetMode.SAME_STEP) for _ in range(2))
    assert str(played(VectorArena(Sent(env), 2))) == str(played(VectorArena(other, 2)))


def test_how_a_vector_env_resets_is_said_by_name_too() -> None:
    env = LendingVectorEnv(3, AutoresetMode.NEXT_STEP)
    env.metadata = {"autoreset_mode": "NEXT_STEP"}
    assert str(played(VectorArena(env, 3))) == str(played(VectorArena(LendingVectorEnv(3, AutoresetMode.NEXT_STEP), 3)))
    for unknown in ("next", None, 1):
        env.metadata = {"autoreset_mode": unknown}
        with pytest.raises(EnvError, match=r"'autoreset_mode'\] is .*Set it to AutoresetMode.NEXT_STEP, "):
            VectorArena(env, 3)
    del env.num_envs
    with pytest.raises(EnvError, match="LendingVectorEnv does not say how many copies it has"):
        VectorArena(env, 3)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_observations_of_a_vector_env_get_the_dtype_of_their_space(mode: AutoresetMode) -> None:
    class Changing(LendingVectorEnv):
        forms: ClassVar[Any] = itertools.cycle([np.int64, np.float64, np.float32, np.ndarray.tolist])

        def _look(self) -> Any:
            form = next(self.forms)
            obs = super()._look()
            return form(obs) if form is np.ndarray.tolist else obs.astype(form)

    def shown(env: Any) -> list[Any]:
        arena = VectorArena(env, 3, check=0)
        arena.reset(seed=0)
        found = []
        for _ in range(30):
            for turn in arena.recv():
                found.append(turn.obs["obs"].copy())
                assert turn.obs["obs"].dtype == np.float32
                if turn.waits:
                    arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
        return found

    for found, wanted in zip(shown(Changing(3, mode)), shown(LendingVectorEnv(3, mode)), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_an_action_without_axes_is_an_array() -> None:
    class Taking(gym.Env[Any, Any]):
        observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Box(-1, 1, ())

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            assert type(action) is np.ndarray
            assert action.shape == ()
            return np.zeros(1, np.float32), float(action), False, False, {}

    space = Taking.observation_space, Taking.action_space
    exp = etude.Runner(make_arena(Taking, 1), etude.modules.make_module(None, *space), seed=0).collect(num_steps=5)
    np.testing.assert_allclose(exp.steps["reward"], exp.steps["action"])


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (gym.spaces.Box(-100, 100, (1,), np.int8), np.array([200])),
        (gym.spaces.Box(-100, 100, (1,), np.int8), [-129]),
        (gym.spaces.Box(0, 255, (1,), np.uint8), np.array([300], np.uint16)),
        (gym.spaces.MultiBinary(2), np.array([257, 256])),
        (gym.spaces.Discrete(3, dtype=np.int32), 2**32 + 1),
        (gym.spaces.Discrete(3, dtype=np.int32), np.int64(2**32 + 1)),
    ],
)
def test_whole_numbers_are_never_wrapped(space: Any, given: Any) -> None:
    class Wrapping(gym.Env[Any, Any]):
        observation_space, action_space = space, gym.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.t = 0
            return np.zeros(space.shape, space.dtype) if space.shape else 0, {}

        def step(self, action: Any) -> Any:
            self.t += 1
            obs = given if self.t == 5 else np.asarray(given) * 0 if space.shape else type(given)(1)
            return obs, 0.0, False, False, {}

    runner = etude.Runner(
        make_arena(Wrapping, 1, Workers(max_restarts=0)), etude.modules.make_module(None, space, gym.spaces.Discrete(2))
    )
    with pytest.raises((EnvError, SpaceError), match="`obs` holds .*, outside the range of u?int(8|32)"):
        runner.collect(num_steps=20)


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), GeneratorExit()])
def test_a_vector_env_ends_no_program_silently(error: BaseException) -> None:
    class Ending(LendingVectorEnv):
        def step(self, actions: Any) -> Any:
            raise error

    with pytest.raises(EnvError, match=f"Ending raised {type(error).__name__}"):
        played(VectorArena(Ending(3, AutoresetMode.SAME_STEP), 3))


class Choosing(LendingVectorEnv):
    """Shows one of three letters; after a while one of its copies shows none, in a step or in a final observation."""

    single_observation_space: Any = gym.spaces.Discrete(3)
    at_end = False

    def __init__(self, mode: AutoresetMode) -> None:
        super().__init__(3, mode)
        self.single_observation_space, self.count = gym.spaces.Discrete(3), 0

    def reset(self, **kwargs: Any) -> Any:
        _, infos = super().reset(**kwargs)
        return np.zeros(3, np.int64), infos

    def step(self, actions: Any) -> Any:
        _, *rest, infos = super().step(actions)
        self.count += 1
        if "final_obs" in infos:
            final = np.zeros(3, np.int64)
            final[1] = 3 if self.at_end and self.count > 20 else 0
            infos["final_obs"] = final
        return np.array([0, 0 if self.count <= 20 or self.at_end else -1, 0]), *rest, infos


@pytest.mark.parametrize(
    ("mode", "at_end"),
    [(AutoresetMode.SAME_STEP, False), (AutoresetMode.SAME_STEP, True), (AutoresetMode.NEXT_STEP, False)],
)
def test_a_copy_of_a_vector_env_that_shows_no_choice_is_named(mode: AutoresetMode, at_end: bool) -> None:
    env = Choosing(mode)
    env.at_end = at_end
    with pytest.raises(SpaceError, match=r"copy \d: `obs` is (-1|3), outside its space Discrete\(3\)"):
        played(VectorArena(env, 3, check=0), 40)


@pytest.mark.parametrize("error", [RuntimeError("lost"), SystemExit(0), asyncio.CancelledError(), GeneratorExit()])
@pytest.mark.parametrize("kind", ["sync", "thread", "vector"])
def test_an_env_that_can_not_be_closed_loses_nothing(
    kind: Any, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(Numbered):
        def close(self) -> None:
            raise error

    class StuckVector(LendingVectorEnv):
        def close(self, **kwargs: Any) -> None:
            raise error

    workers = Workers(num_workers=2 * (kind == "thread"), mode="thread")
    arena: Any = VectorArena(lambda: StuckVector(2, AutoresetMode.SAME_STEP), 2)
    if kind != "vector":
        arena = make_arena(Stuck, 2, workers)
    arena.reset(seed=1)
    arena.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (1 if kind == "vector" else 2)
    assert all(f"Stuck{'Vector' if kind == 'vector' else ''} fails to close an env" in text for text in told)
    assert all(type(error).__name__ in text for text in told)


def test_with_workers_their_number_counts() -> None:
    arena = make_arena("CartPole-v1", 3, Workers(num_workers=2, envs_per_worker=2, mode="thread"))
    assert arena.num_envs == 4
    arena.close()


def test_the_factory_is_called_once_for_each_copy() -> None:
    made = []

    def make() -> Any:
        made.append(Numbered())
        return made[-1]

    make_arena(make, 3).close()
    assert len(made) == 3


class Tensors(gym.vector.VectorEnv[Any, Any, Any]):
    """Numbered, in tensors."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, late: bool = False) -> None:
        self.num_envs, self.late = 2, late
        self.single_observation_space = gym.spaces.Box(-1, 1, (3,))
        self.single_action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return (np.zeros((2, 3), np.float32) if self.late else torch.zeros(2, 3)), {}

    def step(self, actions: Any) -> Any:
        over = torch.zeros(2, dtype=torch.bool)
        return torch.zeros(2, 3), torch.ones(2), over, over, {}


class InNumPy(gym.vector.VectorWrapper):
    """In NumPy, though computed on a device."""

    device = "cpu"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        return obs.cpu().numpy(), info

    def step(self, actions: Any) -> Any:
        *given, info = self.env.step(torch.as_tensor(actions))
        return *(tensor.cpu().numpy() for tensor in given), info


@pytest.mark.parametrize("late", [False, True])
def test_a_vector_env_of_tensors_is_named_with_what_to_do(late: bool) -> None:
    arena = make_arena(Tensors(late), 2)
    with pytest.raises(
        EnvError, match=r"Tensors returns torch tensors.* set its attribute `device`, such as env.device"
    ):
        one_step(arena)
    arena = make_arena(InNumPy(Tensors()), 2)
    assert type(arena) is VectorArena
    assert one_step(arena).reward.tolist() == [1.0, 1.0]


def one_step(arena: Any) -> Any:
    arena.reset(seed=1)
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.zeros(2, np.int64)})
    return arena.recv()[0]


def test_what_is_no_env() -> None:
    with pytest.raises(EnvError, match="is not an env"):
        make_arena(lambda: 3, 1)
    with pytest.raises(EnvError, match="has 3 envs, but num_envs is 2"):
        make_arena(make_vector, 2)


@pytest.mark.parametrize("num_envs", [2, 8])  # an InlineArena and a VectorArena
@pytest.mark.parametrize("trains_before", [False, True])
def test_a_closed_run_says_that_it_is_closed(num_envs: int, trains_before: bool) -> None:
    ppo = etude.PPO(etude.PPOConfig(env="CartPole-v1", num_envs=num_envs, num_steps=32, epochs=1, seed=1))
    if trains_before:
        ppo.train()
    ppo.close()
    with pytest.raises(EnvError, match="the arena is closed: make it, or the algorithm that it belongs to, again"):
        ppo.train()
