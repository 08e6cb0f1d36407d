"""Served episodes as recordings: what clients have lived through, whole or not at all."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from checkpoint_documents import read, write
from gymnasium import spaces
from http_clients import connected

import etude
from etude.cli.main import main
from etude.errors import DataError, SettingsError
from etude.modules import make_module
from etude.policies import Policy
from etude.serving import PolicyService, ServingConfig, WebServer, serve

OBS, ACTION = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)


def make_policy(obs_space=OBS, action_space=ACTION):
    torch.manual_seed(0)
    return Policy(make_module(None, obs_space, action_space, etude.NetworkConfig(hidden=(8,))).eval())


@contextmanager
def serving(policies, path, **config):
    with WebServer(
        PolicyService(policies, ServingConfig(record=str(path), **config)), "127.0.0.1", 0
    ).running() as server:
        yield server.url


def play(client, session, obs, rewards, **end):
    """An episode; gives its actions and its id."""
    acted = [client.act(obs[0].tolist(), session=session)]
    for t in range(1, len(rewards)):
        acted.append(client.act(obs[t].tolist(), session=session, reward=float(rewards[t - 1])))
    last = None if end.get("blind") else obs[len(rewards)].tolist()
    end.pop("blind", None)
    status, answer = client("/act", {"session": session, "obs": last, "reward": float(rewards[-1]), **end})
    assert (status, answer["action"]) == (200, None)
    return acted, answer["episode_id"]


def test_episodes_are_recorded_as_they_were_and_can_be_learned_from(tmp_path):
    rng, policy = np.random.default_rng(1), make_policy()
    lengths, told = (3, 1, 5), {}
    obs = [rng.uniform(-1, 1, (length + 1, 3)).astype(np.float32) for length in lengths]
    rewards = [rng.normal(size=length) for length in lengths]
    with serving(policy, tmp_path / "data", explore=True, seed=5) as url, connected(url) as client:
        session = client.open()
        for i, end in enumerate(({"terminated": True}, {"truncated": True}, {"terminated": True, "blind": True})):
            acted, name = play(client, session, obs[i], rewards[i], **end)
            told[name] = (i, acted)
        client.act(obs[0][0].tolist(), session=session)  # an episode that never ends
        assert client.metric("etude_episodes_total") == 3
    recording = etude.Recording.open(tmp_path / "data")
    assert recording.validate().problems == ()
    exp = recording.read()
    assert exp.num_segments == 3
    assert exp.segments.terminated.tolist() == [True, False, True]
    assert exp.segments.truncated.tolist() == [False, True, False]
    assert exp.segments.has_final_obs.tolist() == [True, True, False]
    for one in exp:
        i, acted = told[one.segments.episode_id[0]]
        np.testing.assert_array_equal(one.steps["obs"], obs[i][:-1])
        np.testing.assert_array_equal(one.steps["action"], acted)
        np.testing.assert_array_equal(one.steps["reward"], rewards[i])
        with torch.no_grad():
            output = policy.module({"obs": torch.from_numpy(one.steps["obs"])}["obs"])
            logits = output.dist_inputs.double()
        wanted = logits.log_softmax(-1).numpy()[np.arange(len(acted)), acted]
        np.testing.assert_allclose(one.steps["logp"], wanted, atol=1e-5)
        if exp.segments.has_final_obs[i]:
            np.testing.assert_array_equal(one.final_obs["obs"][0], obs[i][-1])
    with closing(etude.BC(etude.BCConfig(data=str(tmp_path / "data"), batch_size=4))) as bc:
        assert all(np.isfinite(value) for value in bc.train().losses.values())


def test_policies_of_other_spaces_have_folders_of_their_own_and_more_is_added(tmp_path):
    policies = {"red": make_policy(), "blue": make_policy(action_space=spaces.Box(-1, 1, (2,), np.float32))}
    for count in (1, 2):
        with serving(policies, tmp_path / "data") as url, connected(url) as client:
            for name in policies:
                play(client, client.open(policy=name), np.zeros((3, 3)), [1.0, 2.0], truncated=True)
        for name in policies:
            exp = etude.Recording.open(tmp_path / "data" / name).read()
            assert set(exp.segments.module_id.tolist()) == {name}
            assert (exp.num_segments, exp.num_steps) == (count, 2 * count)
    with pytest.raises(DataError, match="Only steps of equal spaces and units can be appended"):
        PolicyService(make_policy(spaces.Discrete(3)), ServingConfig(record=str(tmp_path / "data" / "red")))


def test_the_recording_says_what_the_newest_checkpoint_has_learned(tmp_path):
    config = etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=32, connectors=["normalize_obs"], seed=1)
    with closing(etude.PPO(config)) as ppo:
        ppo.train()
        ppo.save(tmp_path / "run")
        own = PolicyService(str(tmp_path / "run"), ServingConfig(record=str(tmp_path / "data")))
        ppo.train()
        ppo.save(tmp_path / "run")

        async def served():
            async with own.running():
                await own.housekeeping()
                session = own.open({})["session"]
                await own.act({"session": session, "obs": [0, 0, 0, 0]})
                await own.act({"session": session, "reward": 1, "terminated": True})

        asyncio.run(served())
    assert etude.Recording.open(tmp_path / "data").env == "CartPole-v1"
    learned = etude.Recording.open(tmp_path / "data").meta["filter"]["connectors"]
    assert [one["state"]["obs"]["count"] for one in learned if one["name"] == "normalize_obs"] == [64]


def test_an_episode_of_many_row_groups_is_in_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.recordings.writer.ROW_GROUP_ROWS", 8)
    data, rewards = tmp_path / "data", np.arange(30.0)
    with serving(make_policy(), data, flush_seconds=1000.0) as url, connected(url) as client:
        for _ in range(2):
            play(client, client.open(), np.zeros((31, 3)), rewards, truncated=True)
        assert not list(data.glob("*.parquet"))  # a file ends between two episodes
    (file,) = etude.Recording.open(data).files
    assert pq.ParquetFile(file).num_row_groups > 6
    exp = etude.Recording.open(data).read().join()
    assert exp.lengths.tolist() == [30, 30]
    np.testing.assert_array_equal(exp.steps["reward"], [*rewards, *rewards])


def test_a_recording_that_fails_keeps_no_other_from_the_disk(tmp_path):
    data = tmp_path / "data"
    policies = {"red": make_policy(), "blue": make_policy(action_space=spaces.Box(-1, 1, (2,), np.float32))}
    own, found = PolicyService(policies, ServingConfig(record=str(data), flush_seconds=0.0)), []

    async def served():
        async with own.running():
            for name in policies:
                session = own.open({"policy": name})["session"]
                await own.act({"session": session, "obs": [0, 0, 0]})
                await own.act({"session": session, "reward": 1, "terminated": True})
            shutil.rmtree(data / "red")
            await own.housekeeping()
            found.extend((data / "blue").glob("*.parquet"))

    with pytest.raises(DataError, match="removed or moved"):
        asyncio.run(served())
    assert len(found) == 1


def test_a_folder_has_one_server_and_one_that_can_not_begin_lets_go_of_it(tmp_path):
    data = str(tmp_path / "data")
    with serving(make_policy(), tmp_path / "other") as url:
        with pytest.raises(SettingsError, match="is taken"):
            serve(make_policy(), port=int(url.rpartition(":")[2]), record=data)
        with serving(make_policy(), data) as second, connected(second) as client:
            with pytest.raises(DataError, match="another writer is using this folder"):
                serve(make_policy(), port=0, record=data)
            play(client, client.open(), np.zeros((3, 3)), [1.0, 2.0], truncated=True)
    assert etude.Recording.open(data).read().num_steps == 2


def test_an_episode_has_a_limit(tmp_path):
    with serving(make_policy(), tmp_path / "data", max_episode_steps=2) as url, connected(url) as client:
        session = client.open()
        client.act([0, 0, 0], session=session)
        client.act([0, 0, 0], session=session, reward=1)
        status, answer = client("/act", {"session": session, "obs": [0, 0, 0], "reward": 1})
        assert (status, answer["field"]) == (400, "session")
        assert client("/act", {"session": session, "obs": [0, 0, 0], "reward": 1, "truncated": True})[0] == 200
    assert etude.Recording.open(tmp_path / "data").read().lengths.tolist() == [2]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "ppo"
    with closing(etude.PPO(etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=16, seed=1))) as ppo:
        ppo.save(path)
    return path


@contextmanager
def command(*words):
    """``etude serve`` in a process of its own, and its URL."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from etude.cli.main import main; sys.exit(main())"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "serve", *map(str, words), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert "Ctrl-C ends it" in line, child.communicate()
        yield child, line.split()[0]
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def is_alone(group):
    """Whether no process is left in a process group."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_sigkill_leaves_whole_episodes_alone(run, tmp_path):
    data, told = tmp_path / "data", {}
    with command(run, "--record", data, "--flush-seconds", "0") as (child, url), connected(url) as client:
        session, deadline = client.open(), time.monotonic() + 60
        while not list(data.glob("*.parquet")):
            length = 1 + len(told) % 7
            _, name = play(client, session, np.zeros((length + 1, 4)), np.ones(length), truncated=True)
            told[name] = length
            assert time.monotonic() < deadline
        client.act([0, 0, 0, 0], session=session)  # in the middle of one
        child.send_signal(signal.SIGKILL)
        child.wait()
    exp = etude.Recording.open(data).read()
    assert etude.Recording.open(data).validate().problems == ()
    found = dict(zip(exp.segments.episode_id.tolist(), exp.lengths.tolist(), strict=True))
    assert found
    assert found.items() <= told.items()
    assert exp.segments.truncated.all()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_finish_the_recording(run, tmp_path, number):
    with command(run, "--record", tmp_path / "data") as (child, url), connected(url) as client:
        session = client.open()
        names = [play(client, session, np.zeros((3, 4)), [1.0, 1.0], terminated=True)[1] for _ in range(5)]
        client.act([0, 0, 0, 0], session=session)
        child.send_signal(number)
        _, error = child.communicate(timeout=60)
        assert (child.returncode, error.strip()) == (0, "ended.")
        assert is_alone(child.pid)
    exp = etude.Recording.open(tmp_path / "data").read()
    assert exp.segments.episode_id.tolist() == names
    assert [path.suffix for path in (tmp_path / "data").iterdir() if not path.name.startswith(".")] == [".parquet"]


@pytest.mark.slow
def test_a_request_that_never_ends_does_not_keep_the_server_from_ending(run):
    with command(run) as (child, url), socket.create_connection(("127.0.0.1", int(url.split(":")[-1]))) as client:
        client.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
        assert (child.returncode, error.splitlines()[-1]) == (0, "ended.")
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["{run}-elsewhere"], "elsewhere"),
        (["{run}", "--port", "70000"], "`port` is 70000"),
        (["{run}", "--host", "no.such.host.example.invalid"], "no.such.host"),
        (["{run}", "--prot", "1"], "port"),
    ],
)
def test_what_is_wrong_with_the_command_is_said(run, words, word, capsys):
    assert main(["serve", *(one.format(run=run) for one in words)]) == 2
    assert word in capsys.readouterr().err


def test_missing_packages_are_named(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(run)]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err


def test_a_run_that_names_code_of_its_own_hints_at_python(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    document = read(tmp_path / "run")
    document["meta"]["algorithm"] = "mine:Mine"
    write(tmp_path / "run", document)
    assert main(["serve", str(tmp_path / "run")]) == 2
    assert "`etude serve` has no such option: load the policy in Python" in capsys.readouterr().err
