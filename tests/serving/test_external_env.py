"""A run whose envs are clients: what it collects is what they report."""

import asyncio
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from http_clients import connected

import etude
from etude.envs import Arena, make_arena
from etude.errors import EnvError, SettingsError
from etude.modules import make_module
from etude.serving.external import ClientService
from etude.serving.protocol import RequestError
from etude.serving.web import Sessions
from etude.spaces import NamedDiscrete

OBS, ACTION = spaces.Box(-10, 10, (1,), np.float32), spaces.Discrete(2)
PLAIN = Path(__file__).with_name("plain_client.py")


def external(**more):
    return etude.ExternalEnv(OBS, ACTION, **more)


def test_ppo_trains_on_a_client_in_plain_python(tmp_path):
    env = external(num_envs=2)
    config = etude.PPOConfig(
        env=env, num_envs=2, num_steps=128, lr=0.02, seed=1, network=etude.NetworkConfig(hidden=(16,))
    )
    with closing(etude.PPO(config)) as ppo:
        client = subprocess.Popen(
            [sys.executable, "-I", str(PLAIN), env.url, "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        results = list(ppo.iterate(etude.Stop(return_mean=7.0, env_steps=8_000)))
        ppo.save(tmp_path / "run")
    out, error = client.communicate(timeout=60)
    assert client.returncode == 0, error
    found = json.loads(out)
    assert found["errors"] == []
    assert results[-1].return_mean >= 7.0  # 4 by chance, 8 at most
    assert results[-1].faulty_episodes == 0
    episodes = results[-1].episodes
    assert episodes > 30
    # Episodes whose end came behind the last step that was collected are the client's alone.
    assert len(found["returns"]) - 2 <= episodes <= len(found["returns"])
    policy = etude.load_policy(tmp_path / "run")  # which needs no env
    assert [int(policy.act([shown])) for shown in (-1.0, 1.0)] == [0, 1]
    assert results[-1].env_steps == 128 * len(results)


class Player:
    """A client in a thread: each call is one request, whose answer may be waited for."""

    def __init__(self, url, thread):
        self.thread = thread
        self.context = connected(url)
        self.client = self.context.__enter__()
        self.session = self.client.open()

    def ask(self, obs, **fields):
        return self.thread.submit(self.client, "/act", {"session": self.session, "obs": obs, **fields})


@pytest.fixture
def players():
    """An arena that was reset, and two clients."""
    env = external(num_envs=2)
    with ThreadPoolExecutor(2) as threads:
        env.reset()
        players = [Player(env.url, threads) for _ in range(2)]
        yield env, *players
        for player in players:
            player.context.__exit__(None, None, None)
        env.close()


def test_turns_are_what_clients_say(players):
    env, first, _ = players
    assert isinstance(env, Arena)
    answer = first.ask([1.5])
    (turn,) = env.recv()
    assert env.recv() == [turn]  # again, before anything is sent
    np.testing.assert_array_equal(turn.obs["obs"], np.array([[1.5]], np.float32))
    assert turn.obs["obs"].dtype == np.float32
    assert (turn.slots.tolist(), turn.first.tolist(), turn.waits) == ([0], [True], True)
    env.send(turn, {"action": np.array([1])})
    assert answer.result() == (200, {"action": 1})
    with pytest.raises(EnvError, match="does not wait for actions"):
        env.send(turn, {"action": np.array([1])})

    answer = first.ask([2.5], reward=3)
    (turn,) = env.recv()
    assert (turn.reward.tolist(), turn.first.tolist()) == ([3.0], [False])
    env.send(turn, {"action": np.array([0])})
    assert answer.result() == (200, {"action": 0})

    assert first.ask(None, reward=-1, terminated=True).result() == (200, {"action": None})
    answer = first.ask([0.0])
    turns = env.recv()
    turns = turns if len(turns) == 2 else [*turns, *env.recv()]
    end, begun = turns
    assert (end.terminated.tolist(), end.truncated.tolist(), end.blind.tolist()) == ([True], [False], [True])
    assert (end.reward.tolist(), end.waits) == ([-1.0], False)
    assert begun.first.tolist() == [True]
    env.send(begun, {"action": np.array([1])})
    assert answer.result()[0] == 200


def test_names_go_to_clients_as_texts():
    with (
        closing(etude.ExternalEnv(NamedDiscrete(["day", "night"]), NamedDiscrete(["work", "sleep"]))) as env,
        ThreadPoolExecutor(1) as threads,
    ):
        env.reset()
        player = Player(env.url, threads)
        answer = player.ask("night")
        (turn,) = env.recv()
        assert turn.obs["obs"].tolist() == [1]
        env.send(turn, {"action": np.array([1])})
        assert answer.result() == (200, {"action": "sleep"})
        player.context.__exit__(None, None, None)


def test_a_client_that_vanishes_costs_its_unfinished_episode(monkeypatch):
    now = [0.0]  # the sessions' clock, which moves while no client acts
    monkeypatch.setattr("etude.serving.external.Sessions", partial(Sessions, clock=lambda: now[0]))
    env = external(session_seconds=60.0)

    def play():
        session = leaves.open()
        for t in range(3):
            leaves.act([5.0 + t], session=session, **({"reward": 1.0} if t else {}))
        now[0] += 61.0
        while not stays.metric("etude_episodes_total"):
            pass  # until the server has seen it
        session = stays.open()  # in the only slot
        while True:  # until the env is closed
            for t in range(4):
                stays.act([float(t)], session=session, **({"reward": 1.0} if t else {}))
            stays.act([4.0], session=session, reward=1.0, truncated=True)

    with ThreadPoolExecutor(1) as threads, connected(env.url) as leaves, connected(env.url) as stays:
        with closing(env):
            task = threads.submit(play)
            task.add_done_callback(lambda _: env.close())  # so that collect ends, too, if it fails
            runner = etude.Runner(env, make_module(None, OBS, ACTION), seed=1)
            exp = runner.collect(num_steps=12)
            stats = runner.stats()
        task.exception()
    assert stats["faulty_episodes"] == 1
    (lost,) = [one for one in exp if one.steps["obs"][0, 0] >= 5]
    assert lost.steps["obs"][:, 0].tolist() == [5.0, 6.0]  # the steps whose results had come
    assert lost.final_obs["obs"].tolist() == [[7.0]]
    assert not lost.segments.terminated.any()


def test_a_reset_lets_clients_begin_anew(players):
    env, first, second = players
    for player in (first, second):
        answer = player.ask([0.0])
        (turn,) = env.recv()
        env.send(turn, {"action": np.array([0])})
        assert answer.result() == (200, {"action": 0})
    waits = second.ask([1.5], reward=1.0)
    env.recv()
    env.reset()
    assert waits.result() == (200, {"action": None})  # it waited
    assert first.ask([0.5], reward=1.0).result() == (200, {"action": None})  # it was acting
    answer = first.ask([0.7])
    (turn,) = env.recv()
    assert (turn.slots.tolist(), turn.first.tolist()) == ([0], [True])
    env.send(turn, {"action": np.array([1])})
    assert answer.result() == (200, {"action": 1})


def test_what_is_wrong_is_refused_and_the_episode_goes_on(players):
    env, first, second = players
    answer = first.ask([0.0])
    (turn,) = env.recv()
    status, found = second.client("/act", {"session": first.session, "obs": [0.0]})
    assert (status, found["field"]) == (409, "session")
    assert second.client("/sessions")[0] == 429
    env.send(turn, {"action": np.array([0])})
    answer.result()
    for fields, field in (({"obs": [1.0]}, "reward"), ({"obs": [1, 2], "reward": 1}, "obs"), ({"reward": 1}, "obs")):
        status, found = first.client("/act", {"session": first.session, **fields})
        assert (status, found["field"]) == (400, field)
    assert second.client("/act", {"obs": [0.0]})[1]["field"] == "session"
    answer = first.ask([1.0], reward=2.0)
    assert env.recv()[0].reward.tolist() == [2.0]
    env.reset()
    answer.result()


def test_the_end_of_a_run_is_said_to_who_waits():
    env = external()
    with ThreadPoolExecutor(1) as thread, connected(env.url) as client:
        env.reset()
        session = client.open()
        answer = thread.submit(client, "/act", {"session": session, "obs": [0.0]})
        env.recv()
        env.close()
        env.close()
        assert answer.result()[0] == 410
    with pytest.raises(EnvError, match="closed"):
        env.recv()


def test_the_end_of_a_run_is_said_to_who_comes():
    service = ClientService(OBS, ACTION, 1, 60.0, 1000, is_local=True)
    session = service.open({})["session"]
    service.shut()
    for call in (lambda: service.open({}), lambda: asyncio.run(service.act({"session": session, "obs": [0.0]}))):
        with pytest.raises(RequestError, match="has ended") as caught:
            call()
        assert caught.value.status == 410


def test_it_is_an_env_of_as_many_copies_as_the_config_says():
    with closing(external(num_envs=2)) as env:
        assert make_arena(env, 2) is env
        with pytest.raises(EnvError, match="has 2 envs, but num_envs is 3"):
            make_arena(env, 3)
        with pytest.raises(EnvError, match="can't be sent to another process"):
            pickle.dumps(env)
        with pytest.raises(EnvError, match="steps its envs itself"):
            make_arena(env, 2, etude.Workers(max_steps=5))
        with (
            closing(etude.PPO(etude.PPOConfig(env=env, num_envs=2, num_steps=8))) as ppo,
            pytest.raises(SettingsError, match="training is in the middle of"),
        ):
            ppo.evaluate(1)
    with closing(make_arena(lambda: external(num_envs=3), 3)) as env:
        assert env.url.startswith("http://127.0.0.1:")
    for wrong in ({"num_envs": 0}, {"num_envs": "2"}, {"port": 70_000}, {"host": None}, {"session_seconds": "1"}):
        with pytest.raises(SettingsError, match=rf"^ExternalEnv\.{next(iter(wrong))} (must be|is) "):
            external(**wrong)
