# SPDX-License-Identifier: Apache-2.0
"""What can't be captured of an env is a reason for new episodes, never an error; its own methods are used."""

import asyncio
import functools
import os
import subprocess
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from pool_envs import copies_of
from some_envs import Numbered, Simulated, Stateful
from test_pool_state import play
from test_snapshot import through_a_file

from etude.envs.env_state import CannotRestoreError, capture_env, restore_env


def captured(make: Callable[[], Any], rounds: int = 5) -> dict[str, Any]:
    arena = copies_of(make, num_envs=2)
    arena.reset(seed=5)
    play(arena, rounds, seed=0)
    state: dict[str, Any] = through_a_file(arena.state_dict())
    return state


class Crowd:
    """Its agents are in the order of `ORDER`, as if each process had its own."""

    ORDER: ClassVar[list[str]] = ["a", "b"]

    def __init__(self) -> None:
        self.possible_agents: Any = list(self.ORDER)
        self.observation_spaces = self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Discrete(3))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return dict.fromkeys(self.possible_agents, 0), {}

    def step(self, actions: Any) -> Any:
        return dict.fromkeys(actions, 1), dict.fromkeys(actions, 1.0), {}, {}, {}


def test_agents_in_another_order_begin_new_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on(Crowd, "snapshot")
    state = captured(Crowd)
    monkeypatch.setattr(Crowd, "ORDER", ["b", "a"])
    arena = copies_of(Crowd, num_envs=2)
    assert arena.load_state_dict(state) == (
        "new episodes: the env has other agents, or in another order: make `possible_agents` a fixed list"
    )


def test_the_agents_of_a_set_are_in_one_order() -> None:
    class Unordered(Crowd):
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = {f"agent-{k}" for k in range(20)}
            self.observation_spaces = self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.Discrete(3))

    agents = copies_of(Unordered, num_envs=1).agents
    assert agents == sorted(agents)


def goes_on(make: Callable[[], Any], how: str, rounds: int = 5) -> None:
    arena = copies_of(make, num_envs=2)
    arena.reset(seed=5)
    play(arena, rounds, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 30, seed=1)
    other = copies_of(make, num_envs=2)
    assert other.load_state_dict(state) == how
    assert play(other, 30, seed=1) == expected


# -- things that don't want to be looked at -------------------------------------------------------------------------


class Unnamed(type):
    """Classes that SWIG makes have no ``__module__``."""

    @property
    def __module__(cls) -> Any:  # type: ignore[override]
        raise AttributeError("__module__")


class LikeSwig(metaclass=Unnamed):
    __slots__ = ("this",)


class RaisesKeyError:
    def __getattribute__(self, name: str) -> Any:
        raise KeyError(name)


class WithoutADict:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("the server is gone")


class NotAnError:
    @property
    def __class__(self) -> Any:
        raise asyncio.CancelledError


class Exits:
    def keys(self) -> Any:
        raise SystemExit

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise SystemExit(3)


class CantBeShown(Exception):
    def __str__(self) -> str:
        raise ValueError


class RaisesWhatCantBeShown:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise CantBeShown


def deep_list() -> Any:
    inside: list[Any] = []
    for _ in range(5000):
        inside = [inside]
    return inside


class Link:
    def __init__(self, depth: int) -> None:
        self.next = Link(depth - 1) if depth else None


AWKWARD: dict[str, Callable[[], Any]] = {
    "SWIG": LikeSwig,
    "KeyError": RaisesKeyError,
    "a property that raises": WithoutADict,
    "CancelledError": NotAnError,
    "SystemExit": Exits,
    "an error that can't be shown": RaisesWhatCantBeShown,
    "lists in lists": deep_list,
    "objects in objects": lambda: Link(300),
    "a lock in a tuple in a deque": lambda: deque([(1, iter([2]))]),
    "a structured array": lambda: np.zeros(2, [("a", int), ("b", object)]),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_what_can_not_be_looked_at_is_a_reason(name: str) -> None:
    class Holder(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.awkward_thing = AWKWARD[name]()

    state = captured(Holder)
    assert state["how"] == "new episodes"
    assert "awkward_thing" in state["why"]
    assert len(state["why"]) < 1000
    arena = copies_of(Holder, num_envs=2)
    assert arena.load_state_dict(state) == f"new episodes: {state['why']}"


def test_an_object_that_is_a_number_of_a_simulators_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pybullet, client = types.ModuleType("pybullet"), types.ModuleType("bullet_client")
    monkeypatch.setitem(sys.modules, "pybullet", pybullet)
    monkeypatch.setitem(sys.modules, "bullet_client", client)
    client.p = pybullet  # type: ignore[attr-defined]  # import pybullet as p
    kind = type(
        "BulletClient", (), {"__module__": "bullet_client", "__init__": lambda self: setattr(self, "_client", 0)}
    )

    class Simulated(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.world = type("Mine", (kind,), {})()  # of a class in another file than the simulator's

    state = captured(Simulated)
    assert state["how"] == "new episodes"
    assert "whose state is in pybullet" in state["why"]

    class Own(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.world = kind()

    state = captured(Own)
    assert state["how"] == "new episodes"
    assert "world is a bullet_client:BulletClient, whose state is in pybullet" in state["why"]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, asyncio.CancelledError, RecursionError])
def test_a_get_state_that_fails_is_a_reason(error: type[BaseException]) -> None:
    class Failing(Stateful):
        def get_state(self) -> Any:
            raise error("no")

    state = captured(Failing)
    assert state["how"] == "new episodes"
    assert error.__name__ in state["why"]


def test_ctrl_c_is_handed_on() -> None:
    class Interrupted(Stateful):
        def get_state(self) -> Any:
            raise KeyboardInterrupt

    arena = copies_of(Interrupted)
    arena.reset(seed=1)
    with pytest.raises(KeyboardInterrupt):
        arena.state_dict()


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_set_state_that_fails_gives_new_episodes_in_new_envs(error: type[BaseException]) -> None:
    made = []

    class Failing(Stateful):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            self.is_ready = False

        def reset(self, **kwargs: Any) -> Any:
            self.is_ready = False
            obs = super().reset(**kwargs)
            self.is_ready = True
            return obs

        def set_state(self, state: Any) -> None:
            if self.is_ready:
                raise error("no")
            super().set_state(state)

    state = captured(Failing)
    arena = copies_of(Failing, num_envs=2)
    before = len(made)
    how = arena.load_state_dict(state)
    assert how.startswith("new episodes: ")
    assert error.__name__ in how
    arena.reset(seed=1)
    assert play(arena, 3, seed=0)
    assert len(made) == before + 2  # half a state may have been in the old ones


# -- an env's own methods -------------------------------------------------------------------------------------------


class Noisy(gym.Wrapper[Any, Any, Any, Any]):
    """Adds what comes out of an iterator, which only its own methods can capture."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.count = 0

    def reset(self, **kwargs: Any) -> Any:
        self._start(0)
        return super().reset(**kwargs)

    def _start(self, count: int) -> None:
        self.count = count
        self.noise = iter(range(count, 1_000_000))

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        self.count = next(self.noise) + 1
        return obs, float(reward) + 0.001 * self.count, *rest

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self._start(state["count"])


def test_a_wrappers_own_state_is_used_and_the_env_below_is_captured() -> None:
    goes_on(lambda: gym.wrappers.TimeLimit(Noisy(gym.make("CartPole-v1")), 20), "get_state")
    goes_on(lambda: Noisy(gym.wrappers.TimeLimit(Noisy(gym.make("CartPole-v1")), 20)), "get_state")


def test_a_wrapper_answers_for_an_env_that_can_not_be_captured() -> None:
    class AnswersFor(gym.Wrapper[Any, Any, Any, Any]):
        def get_state(self) -> Any:
            return [self.env.unwrapped.episode, self.env.unwrapped.t]  # type: ignore[attr-defined]

        def set_state(self, state: Any) -> None:
            self.env.unwrapped.episode, self.env.unwrapped.t = state  # type: ignore[attr-defined]

    assert captured(Simulated)["how"] == "new episodes"
    goes_on(lambda: AnswersFor(Simulated()), "get_state")


def test_a_wrapper_that_hands_on_attributes_has_no_state_of_its_own() -> None:
    class HandsOn(gym.Wrapper[Any, Any, Any, Any]):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.steps = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.env, name)

        def step(self, action: Any) -> Any:
            self.steps += 1
            obs, reward, *rest = super().step(action)
            return obs, float(reward) + self.steps, *rest

    goes_on(lambda: HandsOn(Stateful()), "get_state")


def test_methods_that_take_other_arguments_are_others() -> None:
    class Robot(Numbered):
        def get_state(self) -> Any:
            raise AssertionError("has nothing to do with it")

        def set_state(self, position: Any, speed: Any) -> None:
            raise AssertionError("has nothing to do with it")

    class Picky(Numbered):
        def get_state(self, agent: str) -> Any:
            raise AssertionError("has nothing to do with it")

        def set_state(self, state: Any) -> None:
            raise AssertionError("has nothing to do with it")

    goes_on(Robot, "snapshot")
    goes_on(Picky, "snapshot")


def test_an_env_of_many_agents_is_asked_for_its_state() -> None:
    class Hidden:
        possible_agents: ClassVar[list[str]] = ["a", "b"]
        observation_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, gym.spaces.Box(0, 1e9, (1,)))
        action_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, gym.spaces.Discrete(2))

        def __init__(self) -> None:
            self.set_state(0)

        def get_state(self) -> int:
            return self.count()

        def set_state(self, state: int) -> None:
            numbers = iter(range(state, 1_000_000))
            self.last = state
            self.draw = lambda: next(numbers)
            self.held = numbers

        def count(self) -> int:
            return self.last

        def show(self) -> Any:
            self.last = self.draw() + 1
            return {agent: np.array([self.last], np.float32) for agent in self.possible_agents}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.show(), {}

        def step(self, action: Any) -> Any:
            ends = {"__all__": self.last % 7 == 0}
            return self.show(), dict.fromkeys(self.possible_agents, 1.0), ends, {"__all__": False}, {}

    goes_on(Hidden, "get_state")


# -- arrays that share memory ---------------------------------------------------------------------------------------


def test_arrays_that_share_memory_still_do() -> None:
    class Sharing(gym.Env[Any, Any]):
        observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        action_space: Any = gym.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.table = self.np_random.normal(size=(4, 3)).astype(np.float64)
            self.row = self.table[1]
            self.column = self.table[::2, 1]
            self.turned = self.table.T
            self.apart = self.table[3].copy()
            self.alone = np.arange(12.0).reshape(3, 4)[1:]
            self.bits = self.table.view(np.int64)[0]
            self.t = 0
            return self.row.copy(), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            self.row += self.np_random.normal(size=3)
            self.column *= -1
            self.turned[2, 3] += 1
            self.apart += 1
            self.bits[0] += 1
            obs = self.table.sum(axis=0) + self.apart + self.alone.sum()
            return obs, float(self.table[2, 1]), False, self.t == 11, {}

    goes_on(Sharing, "snapshot", rounds=16)


def test_frames_that_are_one_thing_in_a_new_env_may_be_several() -> None:
    goes_on(lambda: gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 4), "snapshot", rounds=3)


# -- functions that have a state --------------------------------------------------------------------------------------


def counter(start: int) -> Callable[[], int]:
    def count() -> int:
        nonlocal start
        start += 1
        return start

    return count


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> int:
        self.count += 1
        return self.count


def first_of(numbers: Any) -> int:
    numbers[0] += 1
    return int(numbers[0])


def counts_itself() -> Callable[[], int]:
    """A function that refers to itself."""

    def count(by: int = 1) -> int:
        seen.append(count)
        return by * len(seen)

    seen: list[Any] = []
    return count


def with_default() -> Callable[[], int]:
    def count(seen: list[int] = [], *, more: list[int] = []) -> int:  # noqa: B006
        seen.append(1)
        more += [1, 1]
        return len(seen) + len(more)

    return count


def with_attribute() -> Callable[[], int]:
    def count() -> int:
        count.n += 1  # type: ignore[attr-defined]
        return int(count.n)  # type: ignore[attr-defined]

    count.n = 0  # type: ignore[attr-defined]
    return count


def partial_with_attribute() -> Callable[[], int]:
    count: Any = functools.partial(first_of, [0])
    count.n = 0
    return lambda: counted(count)


def counted(function: Any) -> int:
    function.n += 1
    return int(function.n) + int(function())


COUNTERS: dict[str, Callable[[], Callable[[], Any]]] = {
    "a variable of an enclosing function": lambda: counter(0),
    "a method of another object": lambda: Counter().tick,
    "arguments of a partial": lambda: functools.partial(first_of, [0]),
    "an array in a partial": lambda: functools.partial(first_of, np.zeros(3, np.int64)),
    "a generator's method": lambda: functools.partial(np.random.default_rng(3).integers, 1000),
    "functions in functions": lambda: functools.partial(lambda count: count(), counter(0)),
    "itself": counts_itself,
    "a default": lambda: with_default(),
    "an attribute": lambda: with_attribute(),
    "an attribute of a partial": lambda: partial_with_attribute(),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_function_goes_on_where_it_was(name: str) -> None:
    class Ticking(Numbered):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.tick = COUNTERS[name]()
            self.again = self.tick
            return super().reset(seed=seed)

        def step(self, action: Any) -> Any:
            obs, reward, *ends = super().step(action)
            return obs, float(reward + self.tick() + 3 * self.again()), *ends

    goes_on(Ticking, "snapshot", rounds=3)


def test_a_functions_state_that_can_not_be_looked_at_is_a_reason() -> None:
    class Drawing(Numbered):
        def __init__(self) -> None:
            super().__init__()
            numbers = iter(range(100))
            self.draw = lambda: next(numbers)

    state = captured(Drawing)
    assert state["how"] == "new episodes"
    assert "draw.numbers is a builtins:range_iterator, not plain data" in state["why"]


def test_variables_of_functions_that_the_program_uses_stay_as_they_are() -> None:
    class Parsing(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.of_the_program = shared
            self.alone = lambda: shared

    env = Parsing()
    state = capture_env(env)
    assert "function" not in str(state["env"]["object"]["of_the_program"])
    state["env"]["object"]["of_the_program"] = {"id": 99, "function": {"start": {"value": 5}}, "code": "x"}
    with pytest.raises(CannotRestoreError, match=r"of_the_program was a function x, but a new env has none there"):
        restore_env(env, state)


shared = counter(0)
shared.__qualname__ = "shared"


def test_functions_that_were_swapped_meanwhile_are_not_taken_for_others() -> None:
    class Switching(Numbered):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.rule: Any = lambda: 1
            return super().reset(seed=seed)

    env, other = Switching(), Switching()
    env.reset()
    other.reset()
    restore_env(other, capture_env(env))
    env.rule = lambda: 2
    with pytest.raises(CannotRestoreError, match=r"rule was .*<lambda>#[0-9a-f]{8}, but is something else"):
        restore_env(other, capture_env(env))


def test_one_function_that_became_two_is_told() -> None:
    class Doubling(Numbered):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.a = self.b = counter(0)
            return super().reset(seed=seed)

    env, other = Doubling(), Doubling()
    env.reset()
    other.reset()
    env.a()
    env.b = counter(70)
    with pytest.raises(CannotRestoreError, match="b is one function with another in a new env, but they were two"):
        restore_env(other, capture_env(env))


def test_a_generators_method_is_a_reason() -> None:
    class Drawing(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.draw = (number for number in range(100)).__next__

    state = captured(Drawing)
    assert state["how"] == "new episodes"
    assert "draw.__self__ is a builtins:generator, not plain data" in state["why"]


def decorated(function: Callable[[], int]) -> Callable[[], int]:
    def called() -> int:
        return function() + 1

    return called


@decorated
def one() -> int:
    return 1


def test_a_decorated_function_of_the_program_stays_as_it_is() -> None:
    class Calling(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.one = one
            self.two = decorated(lambda: 2)

    env = Calling()
    state = capture_env(env)
    for name in ("one", "two"):
        tampered = capture_env(env)
        code = state["env"]["object"][name].get("code", "x")
        tampered["env"]["object"][name] = {"id": 99, "function": {"function": {"value": 5}}, "code": code}
        with pytest.raises(CannotRestoreError):
            restore_env(env, tampered)
    assert (one(), env.two()) == (2, 3)


def test_a_function_has_one_name_in_all_processes() -> None:
    code = (
        "import gymnasium as gym\nfrom etude.envs.env_state import capture_env\n"
        "class Asking(gym.Env):\n    def __init__(self):\n"
        "        self.ask = lambda word: word in {'a', 'b', 'c', 'd'} or (lambda: 1)\n"
        "print(capture_env(Asking())['env']['object']['ask'])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(found) == 1
    assert "<lambda>#" in found.pop()
