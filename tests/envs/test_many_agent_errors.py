# SPDX-License-Identifier: Apache-2.0
"""Envs with many agents that break their contract are refused with a word of advice."""

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from many_agent_envs import CartPoles, Nim, TwoJobs
from many_agent_scripts import Scene, ScriptedDicts, ScriptedParallel
from pool_envs import tried

from etude.envs import Workers, multi_agent
from etude.envs.multi_agent import MAX_IDLE, AECAdapter, DictAdapter, ManyAgentsAdapter, ParallelAdapter, adapt_env
from etude.errors import EnvError, SpaceError


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_agent, "_WARNED", set())


@pytest.fixture
def quiet() -> Iterator[None]:
    """PettingZoo's tests warn of what a toy need not have, such as render(), and of modules of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def refused(match: str, copy: ManyAgentsAdapter, steps: int = 1) -> None:
    with pytest.raises(EnvError, match=match):  # noqa: PT012
        copy.reset(0)
        for _ in range(steps):
            copy.step(dict.fromkeys(copy.waiting, 0))  # type: ignore[attr-defined]


class Broken(ScriptedParallel):
    """An env of one step for two agents, told what to give."""

    def __init__(self, *given: Any, there: Any = None, start: Any = None) -> None:
        super().__init__(("a", "b"), [Scene(("a", "b")), Scene(("a", "b"))])
        self.given, self.there, self.start = given, there, start

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        given = super().reset()
        return given if self.start is None else self.start

    def step(self, actions: Any) -> Any:
        super().step(actions)
        self.agents = self.agents if self.there is None else self.there
        return self.given


def played(copy: ManyAgentsAdapter, episodes: int = 2) -> None:
    for _ in range(episodes):
        copy.reset(0)
        while not copy.over:
            copy.step(dict.fromkeys(copy.waiting, 0))  # type: ignore[attr-defined]
        copy.unacted_reward()


def test_a_reward_without_a_step_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ends = {"__all__": (True, False)}
    played(DictAdapter(ScriptedDicts(("a", "b"), [Scene(("a",)), Scene((), {"a": 1.0, "b": -2.5}, ends)])))
    assert caplog.text.count("agent 'b' got the reward -2.5 in an episode in which it never acted") == 1
    played(DictAdapter(ScriptedDicts(("a", "b"), [Scene(("a",)), Scene((), {"a": 1.0, "b": -2.5}, ends)])))  # a copy
    assert caplog.text.count("never acted") == 1
    caplog.clear()
    played(DictAdapter(ScriptedDicts(("a", "b"), [Scene(("a", "b")), Scene((), {"a": 1.0, "b": -2.5}, ends)])))
    played(DictAdapter(ScriptedDicts(("a", "b"), [Scene(("a",)), Scene((), {"a": 1.0}, ends)])))
    assert not caplog.text


def test_names_of_agents_that_are_no_text_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Numbered(ScriptedDicts):
        possible_agents = (0, 1)  # type: ignore[assignment]

    for agents, told in (((0, 1), 1), ((0, 1), 0), (("0", "1"), 0)):
        Numbered.possible_agents = agents  # type: ignore[assignment]
        caplog.clear()
        assert multi_agent._agent_ids(Numbered, f"Numbered{agents}") == [*agents]
        assert caplog.text.count("module_of, callbacks and recordings get '0', not 0") == told


def test_a_mask_that_only_infos_hold_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Masking(ScriptedDicts):
        def step(self, action: dict[str, Any]) -> Any:
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"a": {"action_mask": np.ones(2)}}

    script = [Scene(("a",)), Scene((), {}, {"__all__": (True, False)})]
    played(DictAdapter(Masking(("a",), script)))
    assert caplog.text.count("Masking: the infos hold an `action_mask`, but observations do not") == 1
    caplog.clear()
    masked = Masking(("a",), script)
    masked._obs_space = spaces.Dict({"observation": masked._obs_space, "action_mask": spaces.MultiBinary(2)})  # type: ignore[assignment]
    played(DictAdapter(masked))
    assert not caplog.text


@pytest.mark.parametrize("by_agent", [True, False])
def test_spaces_as_attributes(by_agent: bool) -> None:
    env: Any = ScriptedDicts(("a", "b"), [Scene(("a", "b"))])
    own = env._obs_space
    env.observation_space = spaces.Dict({"a": own, "b": own}) if by_agent else own
    assert DictAdapter(env).obs_spaces == (own, own)
    other = spaces.Box(0, 1, (3,))
    env.observation_spaces = {"a": own, "b": other}  # says more
    assert DictAdapter(env).obs_spaces == (own, other)


def test_a_dict_of_spaces_lacks_no_agent() -> None:
    env: Any = ScriptedDicts(("a", "b"), [Scene(("a", "b"))])
    env.observation_space = spaces.Dict({"a": env._obs_space})
    with pytest.raises(EnvError, match=r"has no observation_space for agent 'b', but KeyError"):
        DictAdapter(env)


def test_an_observation_of_another_shape_is_told_with_its_agent() -> None:
    class Grows(CartPoles):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return obs | {"cart_1": np.zeros(5, np.float32)}, *rest

    with pytest.raises(SpaceError, match=r"env 0: agent 'cart_1': `obs` has shape \(5,\), but its space .* \(4,\)"):
        tried(Grows, Workers())


OBS: dict[Any, Any] = {"a": np.zeros(2), "b": np.zeros(2)}


@pytest.mark.parametrize(
    ("copy", "match"),
    [
        (
            DictAdapter(Broken({"z": 0}, {}, {}, {}, {})),
            r"Broken gave an observation, .* for agent 'z'.*\['a', 'b'\]\. Name",
        ),
        (DictAdapter(Broken(OBS, {"z": 1.0}, {}, {}, {})), "a reward .* for agent 'z', who is not in its possible"),
        (DictAdapter(Broken(OBS, {"b": None}, {}, {}, {})), "`reward` of agent 'b' is None, not a finite number"),
        (DictAdapter(Broken(OBS, {}, {"z": True}, {}, {})), "an end for agent 'z'"),
        (
            DictAdapter(Broken(OBS, {}, False, False, {})),
            r"step must return \(obs, reward, .* returned \['dict', 'dict', 'bool'",
        ),
        (DictAdapter(Broken(OBS, {}, {}, {})), "step must return .*, each a dict keyed by agent"),
        (
            DictAdapter(Broken(start=OBS)),
            r"reset must return \(obs, info\), each a dict keyed by agent, but returned dict",
        ),
        (
            DictAdapter(Broken({}, {}, {}, {}, {})),
            f"no agent has acted for {MAX_IDLE} steps, and the episode is not over",
        ),
        (DictAdapter(Broken({"a": None}, {}, {}, {}, {})), "it is the turn of agent 'a', but there is no obs"),
        (ParallelAdapter(Broken({"a": OBS["a"]}, {}, {}, {}, {})), "scripted: it is the turn of agent 'b', but"),
        (
            ParallelAdapter(Broken(OBS, {}, {}, {}, {}, there=["a"])),
            "'b' is no longer in env.agents, but was neither term",
        ),
        (ParallelAdapter(Broken(OBS, {}, {}, {}, {}, there=["a", "b", "z"])), "gave an observation, .* for agent 'z'"),
        (ParallelAdapter(Broken(OBS, {}, {}, {}, None)), "step must return"),
        (ParallelAdapter(Broken(start=({}, None))), "reset must return"),
    ],
)
def test_broken_step_is_refused(copy: ManyAgentsAdapter, match: str) -> None:
    if isinstance(copy, DictAdapter):
        copy.env.script = [*copy.env.script, *copy.env.script[1:] * MAX_IDLE]
    refused(match, copy)


@pytest.mark.parametrize("make", [DictAdapter, ParallelAdapter])
def test_ended_agents_stay_away(make: Any) -> None:
    scenes = [Scene(("a", "b")), Scene(("a", "b"), {}, {"a": (True, False)})]
    env_class: Any = ScriptedDicts if make is DictAdapter else ScriptedParallel
    refused("agent 'a' ended and appears again in the same ep", make(env_class(("a", "b"), [*scenes, scenes[0]])), 2)
    late = Scene(("b",), {"a": 2.0})
    refused("agent 'a' got the reward 2.0 after its end", make(env_class(("a", "b"), [*scenes, late])), 2)


@pytest.mark.parametrize("flag", ["False", None, np.zeros(2, bool), np.array(False), [True]])
def test_flags_that_are_not_booleans_are_refused_with_the_name_of_the_agent(flag: Any) -> None:
    match = "`truncated` of agent 'b' is .*, not True or False"
    refused(match, DictAdapter(Broken(OBS, {}, {"a": False}, {"b": flag}, {})))
    refused(match, ParallelAdapter(Broken(OBS, {}, {"a": False, "b": np.bool_(False)}, {"b": flag}, {})))
    refused("`truncated` of agent '__all__' is", DictAdapter(Broken(OBS, {}, {}, {"__all__": flag}, {})))
    env = Nim()
    env.last = lambda observe=True: (np.zeros(1), 0.0, False, flag, {})  # type: ignore[method-assign]
    refused("`truncated` of agent 'first' is", AECAdapter(env))


def test_numbers_are_flags_of_agents() -> None:
    copy = DictAdapter(Broken(OBS, {}, {"a": 1, "b": np.float32(0)}, {"a": 0.0}, {}))
    copy.reset(0)
    assert [(row.agent, row.terminated, row.truncated) for row in copy.step({0: 0, 1: 0})] == [
        (1, False, False),
        (0, True, False),
    ]


def test_agents_of_an_aec_env_must_leave() -> None:
    env = Nim(2)
    env._was_dead_step = lambda action: None  # type: ignore[method-assign]
    refused(r"nim: agent .* was stepped with None, but is still in env.agents", AECAdapter(env), 2)
    env = Nim()
    env.reset = lambda seed=None, options=None: vars(env).update(agents=[])  # type: ignore[method-assign]
    refused(r"nim: env.agents is empty after reset\(\)", AECAdapter(env))
    refused(r"env.agents is empty after reset\(\)", ParallelAdapter(ScriptedParallel(("a",), [Scene(())])))


def test_agents_of_an_aec_env_must_not_vanish() -> None:
    class Leaving(Nim):
        def step(self, action: Any) -> None:
            super().step(action)
            if len(self.agents) == 2 and self.agent_selection == "first":
                self.agents = ["first"]

    refused("nim: agent 'second' is no longer in env.agents, but was neither", AECAdapter(Leaving()), 2)


def test_actions_are_for_those_that_wait() -> None:
    copy = DictAdapter(TwoJobs())
    copy.reset(0)
    with pytest.raises(
        EnvError, match=r"TwoJobs: there are actions for the agents \['aim'\], but \['echo', 'aim'\] wait"
    ):
        copy.step({1: np.zeros(1)})


def test_agents_and_spaces_must_be_told() -> None:
    class Bare:
        possible_agents: Any = ()

        def reset(self) -> None: ...

        def step(self) -> None: ...

    with pytest.raises(EnvError, match="Bare has no `possible_agents`: set it to the list of all agents that may"):
        adapt_env(Bare())
    Bare.possible_agents = ["a", "a"]
    with pytest.raises(EnvError, match=r"Bare: `possible_agents` has an agent twice: \['a', 'a'\]"):
        adapt_env(Bare())
    Bare.possible_agents = ["a"]
    with pytest.raises(EnvError, match=r"Bare has no observation_space for agent 'a', but .*: add a method `obs"):
        adapt_env(Bare())
    Bare.observation_spaces = {"a": spaces.Discrete(2)}  # type: ignore[attr-defined]
    Bare.action_space = lambda self, agent: 3  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="Bare has no action_space for agent 'a', but a int: add"):
        adapt_env(Bare())


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["generated_agents_env_v0", "generated_agents_parallel_v0"])
def test_envs_that_make_agents_up_are_refused(name: str) -> None:
    module = importlib.import_module(f"pettingzoo.test.example_envs.{name}")
    env = module.parallel_env() if "parallel" in name else module.env()
    with pytest.raises(EnvError, match=f"{name} has no `possible_agents`"):
        adapt_env(env)
