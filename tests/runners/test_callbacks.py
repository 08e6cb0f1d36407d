# SPDX-License-Identifier: Apache-2.0
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from matplotlib.figure import Figure
from numbered_experience import module_for
from PIL import Image, ImageSequence
from some_envs import LendingVectorEnv, Numbered, numbered
from watching import Diary, Seen, actions_in, naive

from etude.connectors import Pipeline
from etude.envs import InlineArena, PoolArena, Turn, VectorArena, Workers, make_arena
from etude.errors import DataError, EnvError, EtudeError, SettingsError
from etude.experience import Experience
from etude.modules import make_module
from etude.policies import Policy
from etude.runners import Callback, GameReturns, Lengths, Runner, RunningEpisode, callbacks

MODES = tuple(AutoresetMode)


def pool(num_envs: int, kind: str = "box") -> InlineArena:
    copies = iter(range(num_envs))
    return InlineArena(lambda: Numbered(next(copies), kind), num_envs)


ARENAS: dict[str, Callable[[int], Any]] = {
    **{f"sync {m.name}": lambda n, m=m: VectorArena(numbered(n, m), n) for m in MODES},
    **{f"dict {m.name}": lambda n, m=m: VectorArena(numbered(n, m, "dict"), n) for m in MODES},
    **{f"lending {m.name}": lambda n, m=m: VectorArena(LendingVectorEnv(n, m), n) for m in MODES},
    "pool": pool,
    "pool of tuples": lambda n: pool(n, "tuple"),
}


def runner_on(arena: Any, callbacks: Any, seed: int = 3) -> Runner:
    kind = arena.kinds[0]
    arena.obs_space, arena.action_space = kind.obs_space, kind.action_space
    return Runner(arena, module_for(arena), seed=seed, callbacks=callbacks)


# -- the order of calls, and what is there in each ------------------------------------------------------------------


@pytest.mark.parametrize("name", ARENAS)
@pytest.mark.parametrize("num_envs", [1, 4])
def test_each_copy_is_told_its_life_in_order(name: str, num_envs: int) -> None:
    diary = Diary()
    runner = runner_on(ARENAS[name](num_envs), [diary])
    exp = Experience.concat([runner.collect(num_steps=n) for n in (1, 3, 7, 40, 1, 5)])
    steps = 0
    for copy in range(num_envs):
        assert diary.seen[copy] == naive(copy, len(diary.seen[copy]))
        steps += sum(entry.event == "step" for entry in diary.seen[copy])
    assert 57 <= steps < 57 + num_envs
    if "obs" in exp.steps:
        given = actions_in(exp)
        assert len(given) == 57
        for key, action in given.items():
            np.testing.assert_array_equal(diary.actions[key], action)
            assert diary.actions[key].dtype == action.dtype


@pytest.mark.parametrize("name", [f"sync {mode.name}" for mode in MODES] + ["pool"])
def test_infos_are_those_of_the_step(name: str) -> None:
    class Infos(Callback):
        def __init__(self) -> None:
            self.starts: list[Any] = []
            self.ends: list[Any] = []

        def on_episode_start(self, episode: RunningEpisode) -> None:
            self.starts.append(episode.info)

        def on_episode_end(self, episode: RunningEpisode) -> None:
            self.ends.append((episode.t, episode.info))

    diary, infos = Diary(), Infos()
    runner_on(ARENAS[name](3), [diary, infos]).collect(num_steps=60)
    assert all(info == {"t": t} for t, info in [*diary.infos, *infos.ends])
    assert len(diary.infos) >= 60
    assert len(infos.ends) > 10
    assert set(map(str, infos.starts)) == {"{}"}


def test_the_env_the_modules_and_the_clock_are_there() -> None:
    seen: list[tuple[Any, Any, float, float]] = []

    class Look(Callback):
        def on_episode_step(self, episode: RunningEpisode) -> None:
            seen.append((episode.env, episode.modules, episode.duration, episode.env_index))

    env = numbered(3, AutoresetMode.NEXT_STEP)
    runner = runner_on(VectorArena(env, 3), [Look])
    runner.collect(num_steps=30)
    assert isinstance(env, SyncVectorEnv)
    assert all(found is env.envs[i] for found, _, _, i in seen)
    assert all(modules == {None: runner.policies[None].module} and duration > 0 for _, modules, duration, _ in seen)
    seen.clear()
    lending = LendingVectorEnv(2, AutoresetMode.NEXT_STEP)
    runner_on(VectorArena(lending, 2), [Look]).collect(num_steps=4)
    assert {id(found) for found, *_ in seen} == {id(lending)}
    seen.clear()
    runner_on(pool(2), [Look]).collect(num_steps=4)
    assert all(isinstance(found, Numbered) and found.copy == i for found, _, _, i in seen)


def test_several_are_called_in_order_and_only_where_they_override() -> None:
    calls: list[str] = []

    class First(Callback):
        def on_episode_start(self, episode: RunningEpisode) -> None:
            calls.append("first start")

        def on_episode_end(self, episode: RunningEpisode) -> None:
            calls.append("first end")

    class Second(First):
        def on_episode_end(self, episode: RunningEpisode) -> None:
            calls.append("second end")
            super().on_episode_end(episode)

    runner_on(pool(1), [First(), Second, Callback()]).collect(num_episodes=1)
    assert calls[:5] == ["first start", "first start", "first end", "second end", "first end"]


def test_many_collections_call_as_one() -> None:
    diaries = [Diary(), Diary()]
    runners = [runner_on(ARENAS["lending SAME_STEP"](3), [diary]) for diary in diaries]
    for n in (1, 2, 3, 4, 5, 6):
        runners[0].collect(num_steps=n)
    runners[1].collect(num_steps=21)
    for env in range(3):
        assert diaries[0].seen[env] == diaries[1].seen[env]


# -- whole episodes -------------------------------------------------------------------------------------------------


class Log(Callback):
    """Logs what `Finished` says by itself, too; and a figure at each step."""

    def on_episode_step(self, episode: RunningEpisode) -> None:
        episode.log("t", episode.t)
        if episode.t == 3:
            episode.log("third", 1)

    def on_episode_end(self, episode: RunningEpisode) -> None:
        episode.log("return", episode.return_so_far)
        episode.log("length", episode.t)
        episode.log("env", episode.env_index)
        episode.log_histogram("times", np.arange(episode.t))
        episode.log_histogram("times", -1)


@pytest.mark.parametrize("name", ARENAS)
def test_figures_are_of_the_episodes_that_are_told_of(name: str) -> None:
    runner = runner_on(ARENAS[name](3), [Log()])
    whole = [{"num_steps": n, "whole_episodes": True} for n in (30, 1, 20)]
    steps = [{"num_steps": n} for n in (25, 31, 2, 40)]
    for given in (*steps[:2], {"num_episodes": 7}, *steps[2:], *whole, steps[0]):
        runner.collect(**given)
        found = runner.take_finished()
        assert found.custom.keys() <= {"t", "return", "length", "env", "third"}
        np.testing.assert_allclose(found.custom.get("return", []), found.returns, rtol=1e-6)
        np.testing.assert_array_equal(found.custom.get("length", []), found.lengths)
        np.testing.assert_array_equal(found.custom.get("env", []), found.envs)
        np.testing.assert_array_equal(found.custom.get("t", []), (found.lengths + 1) / 2)
        assert len(found.custom.get("third", [])) == np.count_nonzero(found.lengths >= 3)
        times = [np.append(np.arange(length), -1) for length in found.lengths]
        expected = np.concatenate([np.zeros(0), *times])
        np.testing.assert_array_equal(found.histograms.get("times", []), expected)
        if "num_episodes" in given:
            assert len(found.returns) == 7
            np.testing.assert_array_equal(np.bincount(found.envs), [3, 2, 2])
    again = runner.take_finished()
    assert [again.custom, again.histograms, again.media] == [{}, {}, {}]


def test_figures_wait_until_they_are_asked_for_and_episodes_are_let_go() -> None:
    episodes: list[weakref.ref[RunningEpisode]] = []

    class Gathers(Log):
        def on_episode_created(self, episode: RunningEpisode) -> None:
            episodes.append(weakref.ref(episode))

    runner = runner_on(ARENAS["lending NEXT_STEP"](3), [Gathers()])
    for num_steps in range(20, 80):
        runner.collect(num_steps=num_steps)
        runner.collect(num_episodes=2)
        found = runner.take_finished()
        assert len(found.returns) > 4
        np.testing.assert_allclose(found.custom["return"], found.returns, rtol=1e-6)
    gc.collect()
    assert len(episodes) > 1000
    assert sum(ref() is not None for ref in episodes) <= 3


def test_turns_are_let_go() -> None:
    before = sum(type(thing) is Turn for thing in gc.get_objects())
    runner = runner_on(ARENAS["pool"](2), [Diary()])
    runner.collect(num_steps=400)
    gc.collect()
    assert sum(type(thing) is Turn for thing in gc.get_objects()) < before + 20


def test_episodes_that_nobody_asked_for_are_not_followed() -> None:
    diary = Diary()
    runner = runner_on(ARENAS["lending NEXT_STEP"](3), [diary])
    runner.collect(num_episodes=4)
    ends = {env: sum(entry.event == "end" for entry in seen) for env, seen in diary.seen.items()}
    assert ends == {0: 2, 1: 1, 2: 1}
    for env, seen in diary.seen.items():
        assert seen == naive(env, len(seen))
        assert seen[-1].event == "end"
    diary.seen.clear()
    runner.collect(num_steps=9)
    for env, seen in diary.seen.items():
        begun = runner.collect(num_steps=1) and seen[0].episode
        assert seen[0] == Seen("created", begun)
        assert seen[1].obs[:1] == (env,)


# -- segments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lending NEXT_STEP", "lending SAME_STEP", "sync DISABLED", "pool"])
def test_segments_are_those_that_are_given_with_their_episodes(name: str) -> None:
    class Segments(Callback):
        def __init__(self) -> None:
            self.given: list[tuple[Experience, RunningEpisode, bool, float]] = []

        def on_segment(self, segment: Experience, episode: RunningEpisode) -> None:
            self.given.append((segment, episode, episode.is_over, episode.return_so_far))
            assert (episode.obs, episode.action, episode.info) == (None, None, None)

    callback = Segments()
    runner = runner_on(ARENAS[name](4), [callback])
    over = 0
    for num_steps in (3, 30, 1, 9, 2, 2):
        callback.given.clear()
        exp = runner.collect(num_steps=num_steps)
        assert len(callback.given) == exp.num_segments
        for i, (segment, episode, is_over, total) in enumerate(callback.given):
            np.testing.assert_array_equal(segment.steps["obs"], exp[i].steps["obs"])
            assert np.shares_memory(segment.steps["reward"], exp.steps["reward"])
            assert segment.segments.episode_id[0] == episode.id
            assert is_over or not segment.segments.done[0]
            if segment.segments.done[0]:
                over += 1
                assert episode.t == segment.segments.t_start[0] + segment.num_steps
                if segment.segments.t_start[0] == 0:
                    assert total == segment.steps["reward"].sum()
                assert episode.truncated == segment.segments.truncated[0]
        runner.take_finished()
    assert over > 8


def test_segments_are_cut_and_dropped_as_asked_for() -> None:
    lengths = []

    class Sees(Callback):
        def on_segment(self, segment: Experience, episode: RunningEpisode) -> None:
            lengths.append(segment.num_steps)

    arena = ARENAS["lending NEXT_STEP"](3)
    runner = Runner(arena, module_for(arena), seed=1, callbacks=[Sees()], lengths=Lengths(2, 4))
    exp = runner.collect(num_steps=50)
    assert lengths == exp.lengths.tolist()
    assert set(lengths) == {2, 3, 4}


def test_segments_come_with_their_lookback() -> None:
    lookbacks = []

    class Lookback(Callback):
        def on_segment(self, segment: Experience, episode: RunningEpisode) -> None:
            lookbacks.append(int(segment.segments.lookback[0]))

    arena = VectorArena("CartPole-v1", 2)
    pipeline = Pipeline(["frame_stack:3"])
    module = make_module(None, *pipeline.spaces(arena.obs_space, arena.action_space))
    runner = Runner(arena, Policy(module, pipeline), seed=1, callbacks=[Lookback()])
    runner.collect(num_steps=6)
    runner.collect(num_steps=6)
    assert lookbacks == [0, 0, 2, 2]


# -- what is logged -------------------------------------------------------------------------------------------------


def test_media_are_pictures_and_clips_and_the_newest_of_a_name() -> None:
    figure = Figure((2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    frames = [np.full((6, 8, 3), 40 * i, np.uint8) for i in range(5)]

    class Media(Callback):
        def on_episode_end(self, episode: RunningEpisode) -> None:
            episode.log_media("frame", np.full((4, 5), episode.number / 4))
            episode.log_media("frames", frames[: 1 + episode.number % 5], fps=10)
            episode.log_media("stack", np.stack(frames))
            episode.log_media("figure", figure)

    runner = runner_on(pool(1), [Media])
    runner.collect(num_episodes=4)
    media = runner.take_finished().media
    assert set(media) == {"frame", "frames", "stack", "figure"}
    with Image.open(io.BytesIO(media["frame"])) as image:
        assert image.format == "PNG"
        np.testing.assert_array_equal(np.asarray(image), np.full((4, 5, 3), round(255 * 3 / 4)))
    counts = {}
    for name in ("frames", "stack"):
        with Image.open(io.BytesIO(media[name])) as image:
            assert image.format == "GIF"
            shown = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
        counts[name] = len(shown)
        np.testing.assert_array_equal(shown, frames[: len(shown)])
    assert counts == {"frames": 4, "stack": 5}
    with Image.open(io.BytesIO(media["figure"])) as image:
        assert image.size == (100, 50)
    assert not runner.take_finished().media


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda e: e.log("x", np.nan), r"episode.log\('x', nan\): the value must be a finite number"),
        (lambda e: e.log("x", "much"), r"episode.log\('x', 'much'\): the value must be a finite number"),
        (lambda e: e.log("x", 10**400), r"episode.log\('x', 1000*\): the value must be a finite number"),
        (lambda e: e.log_histogram("h", [1, np.inf]), r"log_histogram\('h', ...\): the values must be finite"),
        (lambda e: e.log_histogram("h", "abc"), r"log_histogram\('h', ...\): the values must be finite"),
        (
            lambda e: e.log_media("m", np.zeros(3)),
            r"log_media\('m', ...\) takes a frame, .*it is ndarray of shape \(3,\), not a frame",
        ),
        (lambda e: e.log_media("m", []), r"log_media\('m', ...\) takes .*its frames have the shapes \[\]: give one"),
        (lambda e: e.log_media("m", [np.zeros((2, 2)), np.zeros((2, 3))]), r"shapes \[\(2, 2, 3\), \(2, 3, 3\)\]"),
    ],
)
def test_what_cannot_be_logged_is_refused(log: Any, message: str) -> None:
    class Wrong(Callback):
        def on_episode_start(self, episode: RunningEpisode) -> None:
            log(episode)

    with pytest.raises(DataError, match=message):
        runner_on(pool(1), [Wrong()]).collect(num_steps=1)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_goes_through_with_a_note_and_the_runner_goes_on() -> None:
    class Fails(Diary):
        fails = True

        def on_episode_step(self, episode: RunningEpisode) -> None:
            super().on_episode_step(episode)
            if self.fails and episode.env_index == 1 and episode.t == 2:
                raise ZeroDivisionError("mine")

    callback = Fails()
    runner = runner_on(ARENAS["lending NEXT_STEP"](3), [Log(), callback])
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        runner.collect(num_steps=30)
    (note,) = caught.value.__notes__
    number = callback.seen[1][-1].episode
    assert note.startswith("in Fails.on_episode_step, for the episode ")
    assert note.endswith(f"-1-{number} of env 1, after 2 steps")
    callback.fails = False
    callback.seen.clear()
    runner.collect(num_steps=30)
    for seen in callback.seen.values():
        assert [entry.event for entry in seen[:2]] == ["created", "start"]
    assert runner.take_finished().custom["return"].size


def test_an_error_at_the_beginning_leaves_nothing_of_it() -> None:
    class Fails(Diary):
        fails = True

        def on_episode_created(self, episode: RunningEpisode) -> None:
            super().on_episode_created(episode)
            if self.fails and episode.env_index == 1:
                raise ZeroDivisionError

    callback = Fails()
    runner = runner_on(ARENAS["lending SAME_STEP"](2), [callback])
    with pytest.raises(ZeroDivisionError):
        runner.collect(num_steps=4)
    callback.fails = False
    callback.seen.clear()
    runner.collect(num_steps=1)
    for env in range(2):
        assert [entry[:2] for entry in callback.seen[env][:3]] == [("created", 1), ("start", 1), ("step", 1)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, "3 is not a callback: give an object or a class derived from etude.Callback, or `module:Class`"),
        (print, "is not a callback"),
        (Numbered, "is not a callback"),
        ("nonsense", "the callback 'nonsense' can't be imported .*: write `module:Class`"),
        ("nowhere:Class", "the callback 'nowhere:Class' can't be imported .*No module named 'nowhere'"),
        ("watching:Nobody", "the callback 'watching:Nobody' can't be imported .*has no attribute 'Nobody'"),
        ("watching:naive", "'watching:naive' is not a callback"),
    ],
)
def test_what_is_no_callback_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        runner_on(pool(1), [spec])


def test_a_class_that_wants_arguments_must_be_given_as_an_object() -> None:
    class Wants(Callback):
        def __init__(self, what: int) -> None:
            self.what = what

    with pytest.raises(SettingsError, match="Wants can't be made without arguments: .*'what'. Give an object instead"):
        runner_on(pool(1), [Wants])
    runner_on(pool(1), [Wants(1), "watching:Diary"]).collect(num_steps=1)


@pytest.mark.parametrize("kind", [ValueError, ImportError, AttributeError])
def test_an_error_while_a_callback_is_made_is_the_users_own(kind: type[Exception]) -> None:
    class Fails(Callback):
        def __init__(self) -> None:
            raise kind("the user's own")

    with pytest.raises(kind, match="the user's own"):
        runner_on(pool(1), [Fails])


def test_what_is_not_there_yet_is_said() -> None:
    class Early(Callback):
        def on_episode_created(self, episode: RunningEpisode) -> None:
            assert episode.return_so_far == 0
            _ = episode.obs

    with pytest.raises(EtudeError, match="no agent is in the episode yet: wait for on_episode_start"):
        runner_on(pool(1), [Early]).collect(num_steps=1)


# -- time -----------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that only what is told moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in ("runner", "rollout", "callbacks"):
            monkeypatch.setattr(f"etude.runners.{module}.perf_counter", lambda: self.now)


@pytest.mark.parametrize("mode", MODES)
def test_durations_and_times_by_the_clock(mode: AutoresetMode, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Slow(Numbered):
        def step(self, action: Any) -> Any:
            clock.now += 2.0 + self.copy
            return super().step(action)

        def render(self) -> Any:
            clock.now += 0.25
            return np.zeros((2, 2, 3), np.uint8)

    durations = []

    class Looks(Callback):
        def on_episode_end(self, episode: RunningEpisode) -> None:
            durations.append(episode.duration)
            clock.now += 0.5
            assert episode.render().shape == (2, 2, 3)

    env = SyncVectorEnv([Slow], autoreset_mode=mode)
    runner = runner_on(VectorArena(env, 1), [Looks()])
    runner.collect(num_steps=3)
    clock.now += 1000  # nothing is collected meanwhile
    runner.collect(num_steps=3)
    clock.now += 1000
    runner.collect(num_steps=20)
    found = runner.take_finished()
    pause = 0.0 if mode is AutoresetMode.NEXT_STEP else 0.75  # for the callback, while the next episode is there
    expected = 2 * found.lengths + pause * (np.arange(len(found.lengths)) > 0)
    np.testing.assert_allclose(found.durations, expected)
    np.testing.assert_allclose(durations, expected)
    assert len(durations) > 5
    times = runner.times
    assert times["env"] == 2 * 26
    assert times["callbacks"] == pytest.approx(0.5 * len(durations))
    assert times["render"] == pytest.approx(0.25 * len(durations))
    assert times["note"] == pytest.approx(0)


def test_durations_of_many_envs_go_on_over_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Slow(LendingVectorEnv):
        def step(self, actions: Any) -> Any:
            clock.now += 1.0
            return super().step(actions)

    plain, parts = runner_on(VectorArena(Slow(4, AutoresetMode.SAME_STEP), 4), []), []
    for n in (1, 2, 3, 30, 5, 1, 50):
        plain.collect(num_steps=n)
        clock.now += 77.0
        parts.append(plain.take_finished())
    for part in parts:
        np.testing.assert_allclose(part.durations, part.lengths)
    assert "callbacks" not in plain.times
    assert "render" not in plain.times


def test_what_lives_in_another_process_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VectorArena, "env_at", lambda self, env: None)

    class Draws(Callback):
        def on_episode_start(self, episode: RunningEpisode) -> None:
            assert episode.env is None
            episode.render()

    with pytest.raises(EnvError, match="can't render an env in a worker process: use no workers"):
        runner_on(ARENAS["lending SAME_STEP"](1), [Draws]).collect(num_steps=1)


class Counts(gym.Env[Any, Any]):
    """Counts its steps, of which an episode has five."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == 5, False, {"t": self.t}


@pytest.mark.parametrize("used", [True, False])
def test_the_env_of_an_ended_episode_is_told_to_be_in_its_next(
    used: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_WARNED", set())
    seen = []

    class Looks(Callback):
        def on_episode_step(self, episode: RunningEpisode) -> None:
            if used or not episode.is_last_step:
                seen.append((int(episode.obs[0]), episode.info["t"], episode.env.unwrapped.t, episode.is_last_step))

    runner_on(make_arena(Counts, 1), [Looks]).collect(num_steps=11)
    steps = [(t, t, t, False) for t in (1, 2, 3, 4)] + [(5, 5, 0, True)] * used
    assert seen[: 2 * len(steps)] == steps * 2
    assert caplog.text.count("the env may have begun its next episode there") == used


def test_frames_of_a_vector_env_are_of_the_episode_s_copy() -> None:
    frames = []

    class Draws(Callback):
        def on_episode_start(self, episode: RunningEpisode) -> None:
            frames.append(episode.render())

    class Drawn(LendingVectorEnv):
        def render(self) -> Any:
            return tuple(np.full((2, 2, 3), i, np.uint8) for i in range(self.num_envs))

    runner_on(VectorArena(Drawn(3, AutoresetMode.NEXT_STEP), 3), [Draws]).collect(num_steps=1)
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2]


# -- going on -------------------------------------------------------------------------------------------------------


class Keeps(Log):
    """Keeps notes in the episode and in itself."""

    def __init__(self) -> None:
        self.ends = 0

    def on_episode_start(self, episode: RunningEpisode) -> None:
        episode.data.update(steps=[], array=np.zeros(2))

    def on_episode_step(self, episode: RunningEpisode) -> None:
        super().on_episode_step(episode)
        episode.data["steps"].append(episode.t)
        episode.data["array"] += 1

    def on_episode_end(self, episode: RunningEpisode) -> None:
        super().on_episode_end(episode)
        self.ends += 1
        assert episode.data["steps"] == list(range(1, episode.t + 1))
        assert (episode.data["array"] == episode.t).all()
        episode.log("ends", self.ends)
        episode.log_media("m", np.full((2, 2), episode.t / 10))

    def state_dict(self) -> dict[str, Any]:
        return {"ends": self.ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ends = state["ends"]


@pytest.mark.parametrize("name", [name for name in ARENAS if "of" not in name])
@pytest.mark.parametrize("first", [13, 14, 15, 16, 17, 18])
def test_a_resumed_runner_goes_on_calling_as_if_it_had_never_stopped(name: str, first: int) -> None:
    runner = runner_on(ARENAS[name](3), [Keeps(), Diary()])
    runner.collect(num_steps=first)
    state = runner.state_dict()
    other = runner_on(ARENAS[name](3), [Diary(), Keeps()], seed=8)
    assert other.load_state_dict(state) != "new episodes"
    for one in (runner, other):
        one.collect(num_steps=40)
    mine, its = runner.take_finished(), other.take_finished()
    assert mine.custom.keys() == its.custom.keys()
    np.testing.assert_array_equal(mine.custom["return"], its.custom["return"])
    if name != "pool":  # whose copies are numbered anew
        for key in mine.custom:
            np.testing.assert_array_equal(mine.custom[key], its.custom[key])
    np.testing.assert_array_equal(mine.histograms["times"], its.histograms["times"])
    assert mine.media == its.media


def test_an_episode_with_other_things_in_its_notes_is_not_followed_after_a_resume() -> None:
    class Hoards(Diary):
        def on_episode_start(self, episode: RunningEpisode) -> None:
            if episode.env_index == 1:
                episode.data["what"] = [{"is": object()}]
            super().on_episode_start(episode)

    runner = runner_on(ARENAS["lending NEXT_STEP"](2), [Hoards()])
    runner.collect(num_steps=6)
    diary = Diary()
    other = runner_on(ARENAS["lending NEXT_STEP"](2), [diary])
    other.load_state_dict(runner.state_dict())
    other.collect(num_steps=20)
    assert diary.seen[0][0].event == "step"
    assert diary.seen[1][0].event == "created"
    assert diary.seen[1][0].episode == 2


def test_each_of_a_class_gets_its_own_state_back() -> None:
    runner = runner_on(ARENAS["pool"](1), [Keeps(), Diary(), Keeps()])
    runner._callbacks._callbacks[0].ends, runner._callbacks._callbacks[2].ends = 4, 7
    again = [Keeps(), Keeps(), Diary(), Keeps()]
    runner_on(ARENAS["pool"](1), again).load_state_dict(runner.state_dict())
    assert [callback.ends for callback in again if isinstance(callback, Keeps)] == [4, 7, 0]


def test_new_episodes_after_a_resume_are_followed_from_the_beginning() -> None:
    runner = runner_on(ARENAS["lending NEXT_STEP"](2), [Diary()])
    runner.collect(num_steps=2)
    diary = Diary()
    other = runner_on(ARENAS["lending NEXT_STEP"](2), [diary])
    other.load_state_dict({**runner.state_dict(), "arena": {"how": "new episodes", "why": "so"}})
    other.collect(num_steps=6)
    for env, seen in diary.seen.items():
        assert seen == naive(env, len(seen))


def test_pauses_before_a_run_is_saved_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Slow(LendingVectorEnv):
        def step(self, actions: Any) -> Any:
            clock.now += 1.0
            return super().step(actions)

    def new() -> Runner:
        class Times(Callback):
            def on_episode_end(self, episode: RunningEpisode) -> None:
                episode.log("duration", episode.duration)

        return runner_on(VectorArena(Slow(2, AutoresetMode.SAME_STEP), 2), [Times()])

    runner, other = new(), new()
    runner.collect(num_steps=4)
    clock.now += 500
    state = runner.state_dict()
    clock.now += 500
    other.load_state_dict(state)
    clock.now += 500
    other.collect(num_steps=40)
    found = other.take_finished()
    np.testing.assert_allclose(found.durations, found.lengths)
    np.testing.assert_allclose(found.custom["duration"], found.lengths)


def test_callbacks_may_come_and_go_when_a_run_is_resumed() -> None:
    runner = runner_on(ARENAS["lending NEXT_STEP"](2), [])
    runner.collect(num_steps=5)
    diary = Diary()
    other = runner_on(ARENAS["lending NEXT_STEP"](2), [diary])
    other.load_state_dict(runner.state_dict())
    other.collect(num_steps=20)
    assert all(seen[0].event == "created" for seen in diary.seen.values())
    last = runner_on(ARENAS["lending NEXT_STEP"](2), [])
    last.load_state_dict(other.state_dict())
    a, b = last.collect(num_steps=9), other.collect(num_steps=9)
    np.testing.assert_array_equal(a.steps["obs"], b.steps["obs"])


def test_callbacks_change_nothing_of_what_is_collected() -> None:
    for name in ("lending SAME_STEP", "pool"):
        runners = [runner_on(ARENAS[name](3), callbacks) for callbacks in ([], [Log(), Diary()])]
        for given in ({"num_steps": 17}, {"num_episodes": 4}, {"num_steps": 9}):
            a, b = (runner.collect(**given) for runner in runners)
            assert a.steps.keys() == b.steps.keys()
            for column in a.steps:
                np.testing.assert_array_equal(a.steps[column], b.steps[column])


# -- lives ----------------------------------------------------------------------------------------------------------


class Lives(gym.Env[Any, Any]):
    """A game of several lives, each an episode of its own: as the wrappers of Atari games have it.

    Life ``i`` of game ``g`` has ``1 + (g + i) % 3`` steps, each of which earns ``1 + g``. A fourth game is truncated.
    """

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, *, says_at_reset: bool = True) -> None:
        self.game, self.lives, self.says = -1, 0, says_at_reset
        self.truncated = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.lives == 0 or self.truncated:
            self.game, self.lives, self.truncated = self.game + 1, 3, False
        self.t = 0
        return np.zeros(1, np.float32), {"lives": self.lives} if self.says else {}

    def step(self, action: Any) -> Any:
        self.t += 1
        died = self.t == 1 + (self.game + 3 - self.lives) % 3
        self.lives -= died
        self.truncated = self.game % 4 == 3 and self.lives == 1
        info = {"lives": self.lives}
        return np.zeros(1, np.float32), 1.0 + self.game, died and not self.truncated, self.truncated, info


def games(returns: list[float]) -> list[float]:
    """What the games return whose lives return ``returns``, by the rules of `Lives`."""
    found, lives = [], iter(returns)
    for game in range(len(returns)):
        own = [next(lives, None) for _ in range(2 if game % 4 == 3 else 3)]
        if None in own:
            break
        found.append(sum(value for value in own if value is not None))
    return found


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("where", [*MODES, "pool"])
def test_games_of_several_lives(where: Any, says: bool) -> None:
    def make() -> Lives:
        return Lives(says_at_reset=says)

    arena: Any = InlineArena(make, 2)
    if where != "pool":
        arena = VectorArena(SyncVectorEnv([make] * 2, autoreset_mode=where), 2)
    runner = runner_on(arena, [GameReturns()])
    lives: list[list[float]] = [[], []]
    found: list[float] = []
    for n in (5, 20, 60):
        runner.collect(num_steps=n)
        finished = runner.take_finished()
        for env, value in zip(finished.envs, finished.returns, strict=True):
            lives[env].append(value)
        found += finished.custom.get("game_return", np.zeros(0)).tolist()
    assert sorted(found) == sorted(games(lives[0]) + games(lives[1]))
    assert len(found) > 8
    assert found.count(6.0) == 2  # 1 + 2 + 3 steps, each of which earns 1


def test_games_go_on_after_a_resume_unless_new_ones_begin() -> None:
    def runner() -> Runner:
        env = SyncVectorEnv([Lives], autoreset_mode=AutoresetMode.SAME_STEP)
        return runner_on(VectorArena(env, 1), [GameReturns()])

    one = runner()
    one.collect(num_steps=5)
    state = one.state_dict()
    two = runner()
    two.load_state_dict(state)
    two.collect(num_steps=3)
    assert two.take_finished().custom["game_return"].tolist() == [6.0]
    three = runner()
    three.load_state_dict({**state, "arena": {"how": "new episodes", "why": "so"}})
    three.collect(num_steps=6)
    assert three.take_finished().custom["game_return"].tolist() == [6.0]


def test_games_that_begin_anew_after_a_lost_life_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneLife(Counts):
        """Loses a life at its end, and begins a game of three lives with each reset."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=seed)[0], {"lives": 3}

        def step(self, action: Any) -> Any:
            *results, _ = super().step(action)
            return (*results, {"lives": 3 - results[2]})

    monkeypatch.setattr(callbacks, "_WARNED", set())
    runner = runner_on(make_arena(OneLife, 1), [GameReturns()])
    runner.collect(num_steps=21)
    assert "game_return" not in runner.take_finished().custom
    assert caplog.text.count("a new game began although lives were left") == 1


def test_an_env_without_lives_is_refused() -> None:
    with pytest.raises(EnvError, match=r"GameReturns needs `lives` in the env's info, which has only \['t'\]"):
        runner_on(pool(1), [GameReturns()]).collect(num_steps=9)


def test_infos_that_stay_in_workers_are_said_to() -> None:
    arena = PoolArena(Numbered, Workers(num_workers=1))
    runner = runner_on(arena, [GameReturns()])
    try:
        with pytest.raises(EnvError, match="`lives` in the env's info, which worker processes don't send"):
            runner.collect(num_steps=9)
    finally:
        runner.close()
