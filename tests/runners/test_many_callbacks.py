# SPDX-License-Identifier: Apache-2.0
"""Callbacks where agents share envs, come and go, act in turn or break off."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from many_agent_envs import CartPoles, Nim, TwoJobs
from scripted_envs import Key, Life, reward_of, who
from scripted_runs import PLAIN, SCENES, Ledger, Marked, play

from etude.envs import InlineArena, PoolArena, Workers
from etude.errors import EtudeError
from etude.experience import Experience
from etude.runners import Callback, Runner, RunningAgent, RunningEpisode

SIZES = st.lists(st.sampled_from([1, 2, 3, 7, 50]), min_size=1, max_size=8)
SEEDS = st.integers(0, 1 << 20)


class Witness(Callback):
    """Compares what it is told with what the arena kept."""

    def __init__(self) -> None:
        self.run: Ledger
        self.knows = True
        """What the arena kept is all there."""
        self.calls: list[tuple[Any, ...]] = []
        """Event, env, episode, the env's steps, the return."""
        self.state: dict[int, tuple[int, str]] = {}
        """By env: the episode and the last event."""

    def watch(self, run: Ledger) -> None:
        self.run, self.names = run, {name: i for i, name in enumerate(run.arena.names)}

    def note(self, event: str, episode: RunningEpisode, *before: str) -> None:
        number, last = self.state.get(episode.env_index, (-1, ""))
        if event == "created":
            assert number < episode.number
        else:
            assert number == episode.number
            assert last in before
        self.state[episode.env_index] = episode.number, event
        self.calls.append((event, episode.env_index, episode.number, episode.t, episode.return_so_far))

    def on_episode_created(self, episode: RunningEpisode) -> None:
        assert not episode.agents
        self.note("created", episode)

    def on_episode_start(self, episode: RunningEpisode) -> None:
        self.note("start", episode, "created")
        self.check(episode)
        assert episode.t == 0
        assert all(agent.steps == 0 and agent.action is None for agent in episode.agents.values())

    def on_episode_step(self, episode: RunningEpisode) -> None:
        self.note("step", episode, "start", "step")
        self.check(episode)
        episode.log("t", episode.t)

    def on_episode_end(self, episode: RunningEpisode) -> None:
        self.note("end", episode, "step")
        self.check(episode)
        assert all(agent.terminated or agent.truncated for agent in episode.agents.values())
        episode.log("return", episode.return_so_far)
        episode.log("env", episode.env_index)

    def on_segment(self, segment: Experience, episode: RunningEpisode) -> None:
        if not self.knows:
            return
        key, _ = who(segment.steps, 0)
        assert key[:2] == (episode.env_index, episode.number)
        agent = episode.agents[self.run.arena.names[key.agent]]
        assert agent.steps >= segment.segments.t_start[0] + segment.num_steps
        assert agent.steps == self.run.arena.lives[key].results
        assert segment.segments.episode_id[0] == episode.id

    def check(self, episode: RunningEpisode) -> None:
        """All agents that were shown something are there, with what they were shown and did."""
        if not self.knows:
            return
        shown = {row.key: row for row in self.run.arena.last}
        here = {
            key: life
            for key, life in self.run.arena.lives.items()
            if key[:2] == (episode.env_index, episode.number) and not life.void
        }
        assert {self.names[name] for name in episode.agents} == {key.agent for key in here}
        for key, life in here.items():
            self.check_agent(episode.agents[self.run.arena.names[key.agent]], key, life, key in shown)

    def check_agent(self, agent: RunningAgent, key: Key, life: Life, is_shown: bool) -> None:
        assert agent.id == self.run.arena.names[key.agent]
        assert agent.module_id == self.run.module_of(key)
        assert agent.steps == life.results
        rewards = [reward_of(key, k) for k in range(life.results)]
        assert agent.return_so_far == sum(rewards)
        ended = (False, False) if life.end is None else (life.end.terminated, life.end.truncated)
        assert agent.reward == [0.0, *rewards][-1]
        assert (agent.terminated, agent.truncated) == ended
        if is_shown:
            if life.end is not None and life.end.blind:
                assert agent.obs is None
            else:
                assert seen_by(agent.obs) == (key, life.results)
        if is_shown and life.results:
            np.testing.assert_array_equal(self.run.act(agent.action), life.actions[life.results - 1]["action"])


def seen_by(obs: Any) -> tuple[Key, int]:
    if isinstance(obs, dict):
        return Key(*obs["who"].astype(int).tolist()), int(obs["k"])
    *key, k = obs.astype(int).tolist()
    return Key(*key), k


def witnessed(scene: Any, seed: int, **options: Any) -> tuple[Ledger, Witness]:
    witness = Witness()
    run = play(scene, seed, callbacks=[witness], **options)
    witness.watch(run)
    return run, witness


@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=5)
@given(SIZES, SEEDS)
def test_all_that_is_told_is_so(scene: str, pieces: list[int], seed: int) -> None:
    run, witness = witnessed(scene, seed)
    for num_steps in pieces:
        run.steps(num_steps)
        told = run.runner.take_finished()
        np.testing.assert_array_equal(told.custom.get("return", []), told.returns)
        np.testing.assert_array_equal(told.custom.get("env", []), told.envs)
        assert (told.durations > 0).all()
    ended = [call[1:3] for call in witness.calls if call[0] == "end"]
    assert sorted(ended) == sorted(run.arena.over)
    for event, env, number, *_ in witness.calls:
        assert event != "end" or (env, number) in run.arena.over


@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=4)
@given(st.lists(st.tuples(st.sampled_from(["steps", "episodes", "broken"]), st.integers(1, 8)), max_size=8), SEEDS)
def test_steps_and_episodes_in_any_order(scene: str, what: list[tuple[str, int]], seed: int) -> None:
    run, witness = witnessed(scene, seed, count_steps_by="agent_steps")
    for name, number in what:
        before = len(witness.calls)
        if name == "broken":
            run.arena.sends_left = number
            with pytest.raises(KeyboardInterrupt):
                run.runner.collect_each(num_steps=1000)
        elif name == "episodes":
            run.episodes(number)
            ends = [call for call in witness.calls[before:] if call[0] == "end"]
            assert len(ends) == number
        else:
            run.steps(number)
        told = run.runner.take_finished()
        np.testing.assert_array_equal(told.custom.get("return", []), told.returns)
        if name == "episodes":
            assert len(told.returns) == number


@pytest.mark.parametrize("scene", SCENES)
def test_a_resumed_runner_goes_on_calling(scene: str) -> None:
    for first in (5, 23, 24, 25):
        run, witness = witnessed(scene, 3)
        run.runner.collect_each(num_steps=first)
        other, its = witnessed(scene, 9)
        other.runner.load_state_dict(run.runner.state_dict())
        for one in (witness, its):
            one.knows = False
            one.calls.clear()
        its.state = dict(witness.state)
        for one in (run, other):
            one.runner.collect_each(num_steps=60)
        assert its.calls == witness.calls
        a, b = run.runner.take_finished(), other.runner.take_finished()
        assert a.custom.keys() == b.custom.keys()
        for name in a.custom:
            np.testing.assert_array_equal(a.custom[name], b.custom[name])


def test_actions_are_found_again_where_modules_change_and_results_are_kept() -> None:
    run, witness = witnessed("self-play", 4, count_steps_by="agent_steps")
    for _ in range(600):
        run.steps(1)
    assert sum(call[0] == "end" for call in witness.calls) > 15


def test_nothing_is_told_of_what_broke_off() -> None:
    chances = {"turn": 1.0, "fail": 0.25, "end": 0.3, "over": 0.0, "at_once": 0.0, "ready": 1.0, "num_envs": 4}
    run, _ = witnessed((chances, PLAIN), 1)  # where `on_segment` looks
    for _ in range(60):
        run.steps(4)
    assert len(run.arena.broken) > 40


@pytest.mark.parametrize("scene", ["pool", "coming and going", "mixed in"])
def test_durations_are_those_of_the_whole_episode(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, witness = witnessed(scene, 6)
    now, recv = [0.0], run.arena.recv
    for module in ("runner", "rollout", "callbacks"):
        monkeypatch.setattr(f"etude.runners.{module}.perf_counter", lambda: now[0])

    def slow() -> Any:
        now[0] += 1.0 + len(witness.calls) % 3
        return recv()

    run.arena.recv = slow  # type: ignore[method-assign]
    times: dict[tuple[int, int], list[float]] = {}
    note = witness.note

    def noted(event: str, episode: RunningEpisode, *before: str) -> None:
        note(event, episode, *before)
        times.setdefault((episode.env_index, episode.number), []).append(episode.duration)

    witness.note = noted  # type: ignore[method-assign]
    for num_steps in (5, 30, 1, 40, 20):
        run.steps(num_steps)
        now[0] += 1000.0
        told = run.runner.take_finished()
        expected = [times[key][-1] for key in zip(told.envs.tolist(), told.numbers.tolist(), strict=True)]
        assert told.durations.tolist() == expected
    assert all(durations[0] == durations[1] == 0 for durations in times.values())
    assert all(durations == sorted(durations) and durations[-1] < 1000 for durations in times.values())


def test_infos_are_there_for_those_who_are_shown_something() -> None:
    said: list[tuple[Any, Any]] = []

    class InTurn(TwoJobs):
        def draw(self) -> dict[str, Any]:
            agent = self.possible_agents[self.t % 2]
            return {agent: super().draw()[agent]}

        def step(self, action: Any) -> Any:
            reward, self.t = dict.fromkeys(action, 1.0), self.t + 1
            obs = self.draw()
            return obs, reward, {}, {"__all__": self.t == 10}, {agent: {"t": self.t} for agent in obs}

    class Reads(Callback):
        def on_episode_step(self, episode: RunningEpisode) -> None:
            own = self.shown(episode)
            said.append((own, {name: agent.info for name, agent in episode.agents.items()}))

        def shown(self, episode: RunningEpisode) -> Any:
            name = InTurn.possible_agents[episode.t % 2]
            return {name: {"t": episode.t}} | ({} if episode.t < 10 else {"aim": {}, "echo": {"t": 10}})

    arena = InlineArena(InTurn)
    modules = {"echo": Marked(arena, 0), "aim": Marked(arena, 1)}
    Runner(arena, modules, callbacks=[Reads]).collect_each(num_steps=35)
    assert len(said) >= 35
    for expected, found in said:
        assert {name: info for name, info in found.items() if info} == {n: i for n, i in expected.items() if i}


class Totals(Callback):
    """The returns and lengths of all episodes, as added up step by step."""

    def __init__(self) -> None:
        self.totals: dict[tuple[int, int], dict[str | None, float]] = {}
        self.steps: dict[tuple[int, int], int] = {}
        self.said: list[Any] = []

    def on_episode_step(self, episode: RunningEpisode) -> None:
        key = episode.env_index, episode.number
        own = self.totals.setdefault(key, {})
        for name, agent in episode.agents.items():
            own[name] = agent.return_so_far
        self.steps[key] = self.steps.get(key, 0) + 1
        self.said.append([agent.info for agent in episode.agents.values()])

    def on_episode_end(self, episode: RunningEpisode) -> None:
        key = episode.env_index, episode.number
        assert episode.return_so_far == sum(self.totals[key].values()) + episode.unacted_reward
        episode.log("total", episode.return_so_far)
        for name, total in self.totals[key].items():
            episode.log(f"of {name}", total)
        episode.log("steps", self.steps[key])


@pytest.mark.parametrize(
    "workers", [Workers(), Workers(num_workers=2, mode="thread", min_batch=1)], ids=["here", "threads"]
)
@pytest.mark.parametrize("make", [lambda: CartPoles(3, 40), Nim, TwoJobs], ids=["parallel", "in turn", "two kinds"])
def test_real_envs_of_many_agents(make: Any, workers: Workers) -> None:
    totals = Totals()
    arena = PoolArena(make, workers) if workers.num_workers else InlineArena(make, 2, workers)
    modules: Any = {f"m{i}": Marked(arena, i) for i in range(len(arena.kinds))}
    kind_of = {arena.agents[slot]: i for i, kind in enumerate(arena.kinds) for slot in kind.slots}
    runner = Runner(arena, modules, module_of=lambda agent, episode: f"m{kind_of[agent]}", seed=1, callbacks=[totals])
    try:
        runner.collect_each(num_steps=150)
        told = runner.take_finished()
    finally:
        runner.close()
    assert len(told.returns) > 2
    np.testing.assert_allclose(told.custom["total"], told.returns)
    if make is Nim:  # a zero-sum game; the second player may never act, or be asked for an action after its end
        assert (told.returns == 0).all()
        assert len(told.custom["of second"]) < len(told.agent_returns["second"]) == len(told.returns)
    else:
        for name, returns in told.agent_returns.items():
            np.testing.assert_allclose(told.custom[f"of {name}"], returns)
        np.testing.assert_array_equal(told.custom["steps"], told.lengths)
    assert all(info == {} for infos in totals.said for info in infos)


def test_one_of_several_agents_must_be_named() -> None:
    class Asks(Callback):
        def on_episode_start(self, episode: RunningEpisode) -> None:
            _ = episode.reward

    arena = InlineArena(TwoJobs)
    modules = {"echo": Marked(arena, 0), "aim": Marked(arena, 1)}
    with pytest.raises(EtudeError, match=r"the episode has the agents \['echo', 'aim'\]: choose one"):
        Runner(arena, modules, callbacks=[Asks]).collect_each(num_steps=1)
