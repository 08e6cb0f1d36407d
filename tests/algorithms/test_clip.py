# SPDX-License-Identifier: Apache-2.0
"""Clips of whole episodes, as frames, as Experience, as files."""

import os
import sys
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image, ImageSequence
from signalling import Signalling
from torch import nn

import etude
from etude.algorithms import PPO, PPOConfig, clips
from etude.algorithms.clips import check_clips, clip, show
from etude.errors import DataError, EnvError, EtudeError, ModuleError, SettingsError
from etude.modules import make_module


class Counting(gym.Env):
    """Shows and draws its steps; an episode is as long as its seed's draw, and pays its action."""

    metadata = {"render_modes": ["rgb_array", "human"], "render_fps": 12}  # noqa: RUF012
    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.closed = 0
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.t, self.length = 0, int(self.np_random.integers(3, 9))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), float(action), False, self.t == self.length, {}

    def render(self):
        return np.full((8, 10), 20 * self.t / 255)

    def close(self):
        self.closed += 1


def make_counting(render_mode=None):
    return Counting(render_mode)


def ppo(env=make_counting, **settings):
    return etude.PPO(etude.PPOConfig(env=env, seed=1, num_envs=2, num_steps=16, minibatch_size=8, **settings))


@pytest.fixture(scope="module")
def algorithm():
    return ppo()


def check_frames(made, episodes):
    """Frames and steps tell the same story."""
    exp = made.experience
    assert len(made.frames) == exp.num_segments == episodes == len(made.returns)
    assert exp.segments.truncated.all()
    for frames, length in zip(made.frames, exp.lengths, strict=True):
        assert (frames.dtype, frames.shape) == (np.uint8, (length + 1, 8, 10, 3))
        np.testing.assert_array_equal(
            frames, np.broadcast_to(20 * np.arange(length + 1)[:, None, None, None], frames.shape)
        )
    np.testing.assert_array_equal(exp.steps["obs"][:, 0], np.concatenate([np.arange(n) for n in exp.lengths]))
    np.testing.assert_array_equal(exp.final_obs["obs"][:, 0], exp.lengths)
    np.testing.assert_array_equal(exp.steps["action"], exp.steps["reward"])
    assert made.num_frames == exp.num_steps + episodes
    np.testing.assert_allclose(made.returns, np.add.reduceat(exp.steps["reward"], exp.offsets[:-1]))


@pytest.mark.parametrize("episodes", [1, 3])
def test_frames_and_the_steps_they_show(algorithm, episodes):
    made = clip(algorithm, episodes=episodes, seed=3, experience=True)
    check_frames(made, episodes)
    assert (made.fps, made.path) == (12.0, None)
    lengths = [len(frames) for frames in made.frames]
    again = clip(algorithm, episodes=episodes, seed=3)
    assert again.experience is None
    assert [len(frames) for frames in again.frames] == lengths
    more = [len(frames) for frames in clip(algorithm, episodes=12, seed=4).frames]
    assert set(more) <= set(range(4, 10))
    assert len(set(more)) > 2


def test_a_clip_plays_as_an_evaluation_does(algorithm):
    made = clip(algorithm, seed=5, episodes=2, explore=True, experience=True)
    assert (made.experience.steps["logp"] < 0).all()
    greedy = clip(algorithm, seed=5, episodes=2, experience=True)
    assert (greedy.experience.steps["logp"] == 0).all()
    found = algorithm.evaluate(1, seed=5)
    assert (found.length_mean, found.return_mean) == (greedy.experience.lengths[0], greedy.returns[0])
    best = int(np.argmax(algorithm.module.actor(explore=False).step(greedy.experience.steps)[1]["dist_inputs"][0]))
    assert greedy.experience.steps["action"][0] == best


def test_the_connectors_of_an_algorithm_are_used():
    seen = []

    def noted(obs):
        seen.append(np.asarray(obs).copy())
        return obs / 100

    made = clip(ppo(connectors=(noted,)), seed=3, experience=True)
    assert max(batch.max() for batch in seen) >= made.experience.num_steps - 1


def test_a_module_by_itself(algorithm):
    module = make_module(None, Counting.observation_space, Counting.action_space)
    check_frames(clip(module, make_counting, seed=1, explore=True, episodes=2, experience=True), 2)
    mine = Counting("rgb_array")
    check_frames(clip(algorithm.module, mine, experience=True), 1)
    assert mine.closed == 0
    assert "step" not in vars(mine)


class Moving(gym.Env):
    """Says what it was asked to do."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(4), "x": spaces.Box(-10, 10, (2,), np.float32)})
    action_space = spaces.Dict({"go": spaces.Discrete(4, start=2), "by": spaces.Box(-0.5, 2, (2,), np.float32)})

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def _look(self):
        return {"action_mask": np.array([1, 0, 1, 1], np.int8), "x": np.zeros(2, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self._look(), 1.0, self.t == 300, False, {}

    def render(self):
        return np.zeros((3, 2, 2), np.float32)


def test_random_actions_are_the_space_s_own_but_those_that_are_masked():
    made = clip(None, Moving, seed=1, experience=True)
    steps = made.experience.steps
    assert np.bincount(steps["action/go"]).tolist() == pytest.approx([0, 0, 100, 0, 100, 100], abs=40)
    by = steps["action/by"]
    assert by.dtype == np.float32
    assert by.mean() == pytest.approx(0.75, abs=0.15)
    assert (by.min(), by.max()) == (pytest.approx(-0.5, abs=0.05), pytest.approx(2, abs=0.05))
    assert "logp" not in steps
    again = clip(None, Moving, seed=1, experience=True)
    np.testing.assert_array_equal(again.experience.steps["action/by"], by)
    assert made.frames[0].shape == (301, 2, 2, 3)
    assert made.fps == 30.0


def test_episodes_can_be_cut(algorithm):
    for policy, env in ((algorithm, None), (None, "CartPole-v1")):
        found = etude.clip(policy, env, episodes=2, seed=0, max_steps=2)
        assert [len(frames) for frames in found.frames] == [3, 3]


def test_a_file_holds_all_frames(algorithm, tmp_path):
    path = tmp_path / "new" / "clip.gif"
    held = clip(algorithm, seed=3, episodes=2, size="20x20", fps=5)
    made = clip(algorithm, path, seed=3, episodes=2, size="20x20", fps=5, experience=True)
    assert (made.frames, made.path, made.fps) == ([], path, 5)
    assert made.num_frames == held.num_frames == made.experience.num_steps + 2
    with Image.open(path) as image:
        seen = np.array([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
        assert image.info["duration"] == 200
    np.testing.assert_array_equal(seen, np.concatenate(held.frames))
    assert seen[5][:2].max() == 0  # the black above
    assert os.listdir(path.parent) == ["clip.gif"]


def test_a_gif_says_how_fast_it_is_shown(algorithm, tmp_path):
    made = clip(algorithm, tmp_path / "clip.gif", seed=3, size="20x20", fps=125)
    with Image.open(tmp_path / "clip.gif") as image:
        assert 1000 / image.info["duration"] == made.fps == 50


@pytest.mark.parametrize("name", ["clip.mp4", "clip.webm"])
def test_file_names_in_any_place(algorithm, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for make in (
        lambda: clip(algorithm, name),
        lambda: clip(algorithm, None, name),
        lambda: clip(algorithm, make_counting, name),
        lambda: clip(algorithm.module, env=make_counting, to=tmp_path / name),
    ):
        assert make().num_frames > 3
        assert os.listdir(tmp_path) == [name]
        os.unlink(name)


@pytest.mark.parametrize("to", ["clip.avi", "a/b.mkv"])
def test_files_of_other_kinds_are_refused(algorithm, to):
    with pytest.raises(SettingsError, match=r"its name must end in \.mp4, \.webm or \.gif"):
        clip(algorithm, to)


class Frail(Counting):
    made = ()

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        Frail.made = (*Frail.made, self)

    def render(self):
        return None if self.t == 2 else super().render()


def test_an_env_that_fails_leaves_no_file_and_is_closed(algorithm, tmp_path):
    with pytest.raises(EnvError, match=r"^render\(\) gave None"):
        clip(algorithm, Frail, tmp_path / "clip.mp4")
    assert os.listdir(tmp_path) == []
    assert [env.closed > 0 for env in Frail.made] == [True]


def test_a_file_that_can_not_be_written_is_named(algorithm, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"can't write the clip .*clip\.gif: (Not a directory|File exists)"):
        clip(algorithm, tmp_path / "file" / "clip.gif")


def test_a_real_env_is_drawn():
    made = clip(None, "CartPole-v1", seed=1, experience=True)
    assert made.frames[0].shape == (made.experience.num_steps + 1, 400, 600, 3)
    assert made.fps == 50
    assert made.frames[0][0].min() < 60 < 200 < made.frames[0][0].max()
    assert (made.frames[0][0] != made.frames[0][-1]).any()


# -- many agents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "agents"), [("tictactoe.tictactoe:env", 2), ("rps.rps:parallel_env", 2)])
def test_pettingzoo_s_envs_are_filmed(env, agents):
    made = clip(None, f"pettingzoo.classic.{env}", episodes=2, seed=1, size="30x30", experience=True)
    exp = made.experience
    clocks = [
        exp.steps["env_t"][exp.segments.episode_id.repeat(exp.lengths) == name] for name in exp.segments.episode_id
    ]
    assert exp.num_segments == 2 * agents
    assert [len(frames) for frames in made.frames] == [clock.max() + 2 for clock in clocks[::agents]]
    assert made.frames[0].shape[1:] == (30, 30, 3)


class Relay:
    """Three agents with spaces of two kinds: the first acts alone, then the others at once, for three rounds."""

    metadata = {"render_fps": 4}  # noqa: RUF012
    possible_agents = ("a", "b", "c")
    observation_spaces = {agent: spaces.Box(0, 9, (1 + (agent == "a"),), np.float32) for agent in "abc"}  # noqa: RUF012
    action_spaces = dict(a=spaces.Discrete(2), b=spaces.Discrete(3), c=spaces.Discrete(3))  # noqa: RUF012, C408

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.closed = False

    def _turn(self):
        return {agent: np.full(1 + (agent == "a"), self.t, np.float32) for agent in ("bc" if self.t % 2 else "a")}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._turn(), {}

    def step(self, action):
        assert set(action) == set(self._turn())
        assert all(self.action_spaces[agent].contains(choice) for agent, choice in action.items())
        self.t += 1
        over = self.t == 6
        return self._turn(), dict.fromkeys(action, 1.0), {"__all__": over}, {}, {}

    def render(self):
        return np.full((3, 3), self.t)

    def close(self):
        self.closed = True


def test_agents_with_spaces_of_their_own_are_filmed():
    made = clip(None, Relay, episodes=2)
    assert [frames[:, 0, 0, 0].tolist() for frames in made.frames] == [[0, 1, 2, 3, 4, 5, 6]] * 2
    assert made.returns.tolist() == [9, 9]
    assert made.fps == 4
    with pytest.raises(EtudeError, match="columns that don't fit into one Experience"):
        clip(None, Relay, experience=True)
    mine = Relay("rgb_array")
    assert clip(None, mine).num_frames == 7
    assert not mine.closed
    assert "step" not in vars(mine)


class NoClose(Relay):
    close = None


def test_an_env_without_close_is_filmed():
    assert clip(None, NoClose, episodes=1).num_frames == 7
    with pytest.raises(EnvError, match="has render_mode None, but 'rgb_array' is needed"):
        clip(None, lambda: NoClose())


def test_one_object_with_several_agents_is_an_env():
    with closing(PPO(PPOConfig(env=Signalling(), modules=("speaker", "listener"), num_envs=1, num_steps=16))) as ppo:
        assert ppo.train().env_steps == 16
        assert ppo.evaluate(3, env=Signalling()).episodes == 3


def test_episodes_of_a_clip_are_numbered_one_after_the_other():
    """So that in self-play each side is seen in turn; Experience is in that order."""

    class Filmed(Signalling):
        metadata = {"render_fps": 4, "name": "filmed"}  # noqa: RUF012
        action_spaces = {agent: spaces.Discrete(4) for agent in ("speaker", "listener")}  # noqa: RUF012
        render_mode = "rgb_array"

        def render(self):
            return np.zeros((4, 4, 3), np.uint8)

    numbers = []

    def module_of(agent, episode):
        numbers.append(episode.number)
        return agent

    config = PPOConfig(env=Filmed, modules=("speaker", "listener"), module_of=module_of, num_envs=1, num_steps=16)
    with closing(PPO(config)) as ppo:
        ppo.train()
        numbers.clear()
        clip(ppo, episodes=5, seed=1)
    assert sorted({*numbers}) == [0, 1, 2, 3, 4, 5]  # the one that follows has begun


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"episodes": 0}, SettingsError, "`episodes` is 0, but must be at least 1"),
        ({"size": "wide"}, SettingsError, "`size` is 'wide', but must be width and height"),
        ({"fps": 0}, SettingsError, "`fps` is 0, but must be between"),
        ({"env": lambda: Counting()}, EnvError, "has render_mode None, but 'rgb_array' is needed"),
        ({"env": "CartPole-v1"}, SettingsError, "the env CartPole-v1 does not fit the module"),
    ],
)
def test_what_is_wrong_is_named(algorithm, settings, error, message):
    with pytest.raises(error, match=message):
        clip(algorithm, **settings)


def test_policies_and_envs_that_are_none(algorithm):
    with pytest.raises(SettingsError, match="there is no env to act in: give one, as env="):
        clip(algorithm.module)
    with pytest.raises(SettingsError, match="there is no env to act in"):
        clip(None, "clip.gif")
    with pytest.raises(ModuleError, match="None for random actions, not a Linear"):
        clip(nn.Linear(1, 3), make_counting)
    with pytest.raises(SettingsError, match="one Counting object, which training is in the middle of: give an env="):
        clip(etude.PPO(etude.PPOConfig(env=Counting("rgb_array"), num_envs=1, num_steps=16)))


def test_training_goes_on_as_if_no_clip_had_been_made():
    with_clips, without = ppo(), ppo()
    for _ in range(2):
        results = [a.train().losses for a in (with_clips, without)]
        clip(with_clips, seed=0)
        assert results[0] == results[1]


def test_clips_are_tried_before_they_are_needed(algorithm):
    check_clips(algorithm)
    with pytest.raises(EnvError, match="render_mode None"):
        check_clips(ppo(lambda: Counting()))


def test_a_window_is_opened_where_there_is_a_screen(algorithm, monkeypatch):
    monkeypatch.setattr(clips, "check_screen", lambda: None)
    opened = []

    def make(render_mode=None):
        opened.append(Counting(render_mode))
        return opened[-1]

    returns = show(algorithm, make, episodes=2, seed=3)
    np.testing.assert_array_equal(returns, clip(algorithm, make, episodes=2, seed=3).returns)
    assert (opened[0].render_mode, opened[0].closed) == ("human", 1)
    opened.clear()
    with pytest.raises(EnvError, match="has render_mode None, but 'human' is needed"):
        show(None, lambda render_mode: Moving())


def test_a_window_that_can_not_be_opened_is_named(algorithm, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":no-such")
    monkeypatch.setattr(sys, "platform", "linux")
    env = Counting("human")
    env.reset = lambda **kwargs: 1 / 0
    with pytest.raises(EnvError, match="the env's window can't be opened: ZeroDivisionError"):
        show(algorithm, env)
