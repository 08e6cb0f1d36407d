# SPDX-License-Identifier: Apache-2.0
"""A module that marks what it does, and a ledger that holds what a runner gives against what its arena showed."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scripted_arena import ScriptedArena
from scripted_envs import Key, reward_of, who
from torch import nn

from etude.columns import Columns
from etude.envs import Arena
from etude.experience import Experience
from etude.modules import Module
from etude.modules.distributions import distribution_for
from etude.policies import Policy
from etude.runners import Runner


class Marked(Module):
    """Acts at random, though not the same whatever it sees. Its values are its ``version``; its state counts steps."""

    def __init__(self, arena: Arena, kind: int = 0, spaces: tuple[Any, Any] | None = None) -> None:
        obs_space, action_space = spaces or arena.kinds[kind][:2]
        super().__init__(nn.Identity(), obs_space, action_space, distribution_for(action_space))
        self.version = 0

    def initial_state(self) -> Columns:
        return {"h": np.zeros(2, np.float32)}

    def actor(self, *, explore: bool) -> Any:
        return _MarkedActor(self)


class _MarkedActor:
    def __init__(self, module: Marked) -> None:
        self.module = module
        self.rng = np.random.default_rng(0)

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        self.rng = rng

    def step(self, obs: Columns, state: Columns | None = None, *, ends: Any = None) -> tuple[Columns, Columns]:
        dist, n = self.module.dist, len(next(iter(obs.values())))
        inputs = self.rng.normal(size=(n, dist.num_inputs)).astype(np.float32)
        inputs[:, 0] += np.sin(sum(column.reshape(n, -1).sum(1) for column in obs.values()))
        extras = {"dist_inputs": inputs, "value": np.full(n, self.module.version, np.float32)}
        assert state is not None
        extras["state_out/h"] = state["state_in/h"] + 1
        return dist.act(inputs, dist.noise(self.rng, (n,))), extras

    def logp(self, dist_inputs: Any, action: Columns) -> Any:
        return logp_of(self.module, {"dist_inputs": dist_inputs, **action})


def logp_of(module: Module, columns: Columns) -> Any:
    action = {"action": torch.from_numpy(columns["action"])}
    return module.dist.logp(torch.from_numpy(columns["dist_inputs"]), action).numpy()


Players = tuple[Callable[[Any, int], Any], dict[Any, int]]
"""Which module acts for an agent in an episode of a number, and for which kind of agents each module is."""

PLAIN: Players = (lambda agent, number: None), {None: 0}

SCENES: dict[str, tuple[dict[str, Any], Players]] = {
    "vector": ({"agents": [None], "ready": 1.0}, PLAIN),
    "vector, ends mixed in": ({"agents": [None], "ready": 1.0, "mixed": 1.0, "blind": 0.0}, PLAIN),
    "pool": ({"agents": [None], "fail": 0.05, "taken": 0.2}, PLAIN),
    "one after the other": ({"num_envs": 1, "agents": "ab", "turn": 0.0, "here": 0.1, "appear": 0.3}, PLAIN),
    "all together": ({"turn": 1.0, "here": 1.0, "ready": 1.0, "at_once": 1.0, "end": 0.0}, PLAIN),
    "coming and going": ({"num_envs": 4, "fail": 0.05, "taken": 0.2}, PLAIN),
    "mixed in": ({"turn": 1.0, "fail": 0.08, "mixed": 0.5, "blind": 0.0}, PLAIN),
    "many in step": ({"num_envs": 2, "agents": "abcdefg", "turn": 1.0, "fail": 0.05}, PLAIN),
    "a module each": (
        {"agents": "abc", "kinds": [1, 0, 1], "turn": 1.0, "fail": 0.05, "taken": 0.2},
        ((lambda agent, number: agent), {"c": 1, "a": 1, "b": 0}),
    ),
    "one module asked for": ({"agents": "ab", "fail": 0.05}, ((lambda agent, number: "m"), {"m": 0})),
    "self-play": (
        {"agents": "abcd", "kinds": [1, 1, 0, 0], "fail": 0.05, "taken": 0.2, "end": 0.05},
        ((lambda agent, number: "cc" if agent in "cd" else "ab"[(ord(agent) + number) % 2]), {"a": 1, "b": 1, "cc": 0}),
    ),
}
"""What the arena is like, and who acts in it."""


def play(
    scene: str | tuple[dict[str, Any], Players],
    seed: int = 0,
    make: Callable[[Arena, int], Module] = Marked,
    act: Callable[[Any], Any] = lambda action: action,
    connectors: Any = None,
    **options: Any,
) -> "Ledger":
    """A runner in a scene, and the ledger of what it gives.

    Args:
        scene: The name of one of `SCENES`, or one like them.
        seed: Of the runner.
        make: Makes the modules.
        act: What connectors make of actions.
        connectors: Of all modules, or by the id of each.
        **options: Of the runner.
    """
    chances, (module_of, kinds) = SCENES[scene] if isinstance(scene, str) else scene
    arena = ScriptedArena(**chances)
    policies: dict[Any, Policy] = {}
    for name, kind in kinds.items():
        own = connectors.get(name) if isinstance(connectors, dict) else connectors
        policies[name] = Policy(make(arena, kind), own)
    given: Any = policies.get(None, policies)
    if None not in policies and scene != "a module each":
        options["module_of"] = lambda agent, episode: module_of(agent, episode.number)
    runner = Runner(arena, given, seed=seed, **options)
    return Ledger(arena, runner, lambda key: module_of(arena.names[key.agent], key.episode), act)


class Ledger:
    """Says whether each Experience is what must come next.

    Args:
        arena: Which keeps what was shown and sent.
        runner: Where it comes from.
        module_of: Whose steps which module makes.
        act: Of the module's actions, those that the env gets.
    """

    def __init__(
        self, arena: ScriptedArena, runner: Runner, module_of: Callable[[Key], Any], act: Callable[[Any], Any]
    ) -> None:
        self.arena, self.runner, self.module_of, self.act = arena, runner, module_of, act
        self.given: dict[Key, int] = {}
        """The steps of each life that were given."""
        self.changed: set[Key] = set()
        """The lives of which steps were given last."""
        self.ids: dict[str, tuple[int, int]] = {}
        self._clock: dict[tuple[int, int], int] = {}  # by env and episode
        self._unsure: set[tuple[int, int]] = set()
        self._never_told = 0
        self._reported: set[tuple[int, int]] = set()
        arena.stamp = lambda key: runner.rollouts[module_of(key)].module.version

    def learn(self) -> None:
        """Let the modules become others."""
        for rollout in self.runner.rollouts.values():
            rollout.module.version += 1

    def steps(self, num_steps: int) -> int:
        """Collect steps, check them, and give how many of agents they were."""
        count = self.enter(self.runner.collect_each(num_steps=num_steps))
        self._check_late()
        rollouts = self.runner.rollouts.values()
        most = self.arena.num_slots * (1 + max(rollout.connectors.context for rollout in rollouts))
        assert sum(rollout.pending for rollout in rollouts) <= most, "rollouts only grow"
        return count

    def episodes(self, num_episodes: int) -> None:
        """Collect episodes, and check that they are whole, and the first of each env."""
        begin = {env: one.episode + 1 for env, one in enumerate(self.arena.copies)}
        before = set(self.given)
        self.enter(self.runner.collect_each(num_episodes=num_episodes))
        found = sorted({key[:2] for key in self.given.keys() - before})
        share = [num_episodes // len(begin) + (env < num_episodes % len(begin)) for env in begin]
        over = {env: sorted(e for e in self.arena.over if e[0] == env and e[1] >= begin[env]) for env in begin}
        assert found == [episode for env in begin for episode in over[env][: share[env]]]
        assert len(found) == num_episodes
        for key, life in self.arena.lives.items():
            if key[:2] in found:
                assert life.end is not None
                assert self.given[key] == life.end.k

    # -- steps --------------------------------------------------------------------------------------------------

    def enter(self, parts: Mapping[Any, Experience]) -> int:
        """Check what was collected; gives the number of steps."""
        seen = self.changed = set()
        for module_id, exp in parts.items():
            exp.validate()
            if "dist_inputs" in exp.steps:
                logp = logp_of(self.runner.rollouts[module_id].module, exp.steps)
                np.testing.assert_allclose(exp.steps["logp"], logp, rtol=1e-5, atol=1e-6)
            for i in range(exp.num_segments):
                key = self._segment(exp, i)
                assert key not in seen, f"{key} is cut in two"
                assert self.module_of(key) == module_id == exp.segments.module_id[i]
                seen.add(key)
        return sum(int(exp.trained().sum()) for exp in parts.values())

    def _segment(self, exp: Experience, i: int) -> Key:
        segments, start, stop = exp.segments, int(exp.offsets[i]), int(exp.offsets[i + 1])
        key, begin = who(exp.steps, start)
        life = self.arena.lives[key]
        assert not life.void, f"{key} is void"
        assert begin == segments.t_start[i]
        assert begin + segments.lookback[i] == self.given.get(key, 0), f"{key} has a gap, or a step twice"
        for row in range(start, stop):
            self._step(exp.steps, row, key, begin + row - start)
        count = begin + stop - start
        assert count <= life.results
        self.given[key] = count
        end = life.end if life.end is not None and count == life.end.k else None
        assert bool(segments.terminated[i]) == (end is not None and end.terminated)
        is_cut = life.is_cut and end is None and count == life.results
        assert bool(segments.truncated[i]) == (is_cut or (end is not None and end.truncated))
        assert bool(segments.has_final_obs[i]) == (end is None or not end.blind)
        if segments.has_final_obs[i]:
            assert who(exp.final_obs, i) == (key, count)
        else:
            assert not any(column[i].any() for column in exp.final_obs.values())
        assert segments.agent_id[i] == self.arena.names[key.agent]
        assert self.ids.setdefault(segments.episode_id[i], key[:2]) == key[:2]
        assert len(set(self.ids.values())) == len(self.ids)
        return key

    def _step(self, steps: Columns, row: int, key: Key, k: int) -> None:
        life = self.arena.lives[key]
        assert who(steps, row) == (key, k)
        assert steps["reward"][row] == reward_of(key, k)
        np.testing.assert_allclose(self.act(steps["action"][row]), life.actions[k]["action"], rtol=1e-5, atol=1e-6)
        if self.arena.named:
            assert steps["env_t"][row] == life.clock[k]
        if isinstance(self.runner.rollouts[self.module_of(key)].module, Marked):
            assert steps["value"][row] == life.stamps[k]
        if "state_in/h" in steps:
            assert (steps["state_in/h"][row] == k).all()

    def _check_late(self) -> None:
        """All results must have been given, but for those that were shown last."""
        shown = {row.key for row in self.arena.last if not row.first}
        for key, life in self.arena.lives.items():
            if not life.void and life.results != self.given.get(key, 0):
                assert life.results == self.given.get(key, 0) + 1
                assert key in shown, f"a step of {key} was left out"

    def env_steps(self) -> tuple[int, int]:
        """The steps of envs that were counted, at least and at most: who can tell, of one that brought no result?"""
        last = {row.key[:2] for row in self.arena.last if row.env_t}
        late = {key[:2] for key, life in self.arena.lives.items() if life.results != self.given.get(key, 0)} & last
        for episode, steps in self.arena.steps.items():
            self._clock[episode] = steps - (episode in late)
        self._never_told += len(self._unsure & self.arena.broken)
        self._unsure = last - {row.key[:2] for row in self.arena.last if not row.first}
        total = sum(self._clock.values())
        return total - len(self._unsure) - self._never_told, total

    # -- episodes -----------------------------------------------------------------------------------------------

    def check_finished(self) -> int:
        """Check what is told of the episodes that ended since this was last asked; gives how many did."""
        returns, agents, modules = [], {}, {}
        for episode in self.arena.over:
            lives = {key: life for key, life in self.arena.lives.items() if key[:2] == episode}
            complete = all(life.end is not None and self.given.get(key) == life.end.k for key, life in lives.items())
            if episode in self._reported or not complete:
                continue
            self._reported.add(episode)
            totals = {key: sum(reward_of(key, k) for k in range(self.given[key])) for key in lives}
            returns.append((sum(totals.values()), self.arena.steps[episode]))
            by_module: dict[Any, list[float]] = {}
            for key, total in totals.items():
                agents.setdefault(self.arena.names[key.agent], []).append(total)
                by_module.setdefault(self.module_of(key), []).append(total)
            for name, own in by_module.items():
                modules.setdefault(name, []).append(sum(own) / len(own))
        told = self.runner.take_finished()
        assert sorted(zip(told.returns.tolist(), told.lengths.tolist(), strict=True)) == sorted(returns)
        for found, expected in ((told.agent_returns, agents), (told.module_returns, modules)):
            expected = {name: sorted(totals) for name, totals in expected.items() if self.arena.named and name}
            assert {name: sorted(totals.tolist()) for name, totals in found.items()} == expected
        return len(returns)
