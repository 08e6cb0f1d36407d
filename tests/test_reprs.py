# SPDX-License-Identifier: Apache-2.0
"""Every public thing says what it is in one short line; a notebook gets small tables."""

import dataclasses
import inspect
import math
from html.parser import HTMLParser

import gymnasium as gym
import numpy as np
import pytest
import torch

import etude
from etude.display import rounded, short, table
from etude.modules import make_module

BOX, TWO = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)
LONG = "x" * 500


def test_settings_show_what_differs_by_names_that_make_them_again():
    assert repr(etude.Stop(env_steps=2_000)) == "Stop(env_steps=2000)"
    assert repr(etude.Stop()) == "Stop()"
    config = etude.PPOConfig(
        env="CartPole-v1", lr=1e-4, grad_clip=1.0, num_workers=2, hidden=(8,), adam_betas=(0.5, 0.9)
    )
    text = repr(config)
    for words in ("env='CartPole-v1'", "lr=0.0001", "grad_clip=1", "num_workers=2", "hidden=(8,)", "(0.5, 0.9)"):
        assert words in text
    assert eval(text, {"PPOConfig": etude.PPOConfig}) == config
    assert "make_env" in repr(etude.PPOConfig(env=make_env))


def make_env():
    return gym.make("CartPole-v1")


def made(tmp_path):
    """One of each public class that is not merely settings or a connector, by its name; as long as it gets."""
    ppo = etude.PPO(etude.PPOConfig(env=make_env, num_steps=64, num_envs=2, minibatch_size=64, epochs=1, seed=1))
    result = ppo.train()
    ppo.record(tmp_path / ("r" * 200), num_episodes=1)
    recording = etude.Recording.open(tmp_path / ("r" * 200))
    exp = recording.read()
    replay, dataset = etude.Replay(100), etude.ReplayDataset(4)
    dataset.add(exp)
    replay.add(exp)
    module = make_module(None, BOX, TWO)
    writer = etude.RecordingWriter(tmp_path / "w", obs_space=BOX, action_space=TWO)
    writer.close()
    arena = etude.make_arena("CartPole-v1", 2)
    table = tmp_path / "t.parquet"
    pool = etude.make_arena("CartPole-v1", 2, workers=etude.Workers(num_workers=2, mode="thread"))
    pool.close()
    external = etude.ExternalEnv(BOX, TWO, num_envs=3)
    external.close()
    names = {f"{LONG}{i}": 1.0 for i in range(40)}
    estimate = etude.Estimate(1.0, 0.5, math.nan)
    return [
        ppo, ppo.policy, ppo.learner, ppo.module, ppo.learner.only, result, ppo.evaluate(1), recording, exp,
        dataclasses.replace(result, losses=names, custom=dict.fromkeys(names, names)), exp.segments, replay,
        dataset, writer, arena, etude.VectorArena("CartPole-v1", 2), pool, external, etude.Runner(arena, ppo.policy),
        etude.Checkpoints(tmp_path / LONG[:200]),
        etude.Batch({LONG: torch.zeros(9, 4)}, module), etude.Output(torch.zeros(999, 99), torch.zeros(999)),
        etude.Loss(**{f"{LONG}{i}": torch.zeros(()) for i in range(9)}), etude.RawRow("p", b"x" * 10_000, 1),
        etude.Pipeline(["normalize_obs", "frame_stack:4", "clip_reward"]), etude.Episode("a" * 32, 1, 2), estimate,
        etude.OffPolicyEvaluation(
            estimates=dict.fromkeys(["is", "wis", "pdis", "wpdis", "dm", "dr", "wdr", "fqe"], estimate),
            behaviour=estimate, episodes=1, steps=9, gamma=0.9, confidence=0.9, seed=0, module="main", explore=True,
            behaviour_policy=None, mean_weight=None, trusted=None, distrust=LONG, notes=(LONG, "two\nlines"),
        ),
        etude.Clip(
            frames=[np.zeros((9, 9, 9, 3), np.uint8)], fps=30.0, num_frames=9, returns=np.zeros(99),
            experience=exp, path=None,
        ),
        etude.Source(str(table), columns={"obs": [f"{LONG}{i}" for i in range(50)], "action": "a"}),
        *etude.find_presets()[:2],
        etude.SeedRun(seed=1, path="runs/ppo/seed-1", result=result),
        etude.PPOConfig(env=LONG, connectors=tuple(["frame_stack:4"] * 50), callbacks=tuple([LONG] * 50)),
        *[kind() for kind in (etude.GameReturns, etude.Callback, etude.Drop, etude.NormalizeObs, etude.GAE)],
    ]  # fmt: skip


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    return made(tmp_path_factory.mktemp("reprs"))


def test_all_are_one_short_line(things):
    for thing in things:
        text = repr(thing)
        assert len(text) < 200, text
        assert text.isprintable(), text
        assert type(thing).__name__.lower() in text.lower().replace("_", ""), text
    shown = {base for thing in things for base in type(thing).__mro__}
    public = {value for value in map(etude.__dict__.get, etude.__all__) if inspect.isclass(value)}
    public |= {getattr(etude, name) for name in etude.__all__ if inspect.isclass(getattr(etude, name))}
    simple = (etude.Connector, etude.Algorithm, Exception, etude.Callback)
    left = [
        cls.__name__
        for cls in public - shown
        if not issubclass(cls, simple) and cls.__repr__ is not etude.Stop.__repr__  # settings, which are seen above
    ]
    assert set(left) <= {"InfoActionMask", "MultiAgentEnv", "PreLearner", "RunningEpisode"}, left


def test_what_they_say(things):
    said = [repr(thing) for thing in things]
    assert said[0] == "PPO(on test_reprs:make_env, iteration=1, env_steps=64, updates=1)"
    assert said[1] == "Policy(Box[4] -> Discrete(2), connectors=['clip_action'])"
    assert said[3].startswith("Module(Box[4] -> Discrete(2), net=")
    assert said[5].startswith("Result(iteration=1, env_steps=64, updates=1, episodes=")


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_notebooks_get_small_tables_whose_texts_are_escaped(things):
    for thing in things:
        if isinstance(thing, etude.Result | etude.Experience | etude.Recording):
            page = thing._repr_html_()
            cells = Cells()
            cells.feed(page)
            assert {*cells.tags} == {"table", "caption", "tr", "th", "td"}
            assert any("make_env" in text or "iteration" in text or "float32[4]" in text for text in cells.texts)
    cells = Cells()
    cells.feed(table("<b>title</b>", {"<script>": "1 & 2\x1b"}))
    assert cells.texts == ["<b>title</b>", "<script>", "1 & 2\\x1b"]


def test_what_is_too_long_is_counted():
    text = short(object(), **{f"name_{i}": i for i in range(100)})
    assert text.startswith("object(name_0=0, name_1=1, ")
    assert text.endswith(" more)")
    assert len(text) < 200


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9550001, "0.955"),
        (-0.0123456, "-0.0123"),
        (9.42, "9.42"),
        (22.53333, "22.5"),
        (1234.56, "1,234.6"),
        (0.0, "0.0"),
        (1e-9, "0.0"),
        (-3.0, "-3.0"),
        (9.999, "10.0"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_figures_have_about_three_digits(value: float, text: str) -> None:
    assert rounded(value) == text
