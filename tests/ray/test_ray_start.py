# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("ray")

from etude.errors import EngineError
from etude.ray.cluster import check_room, ensure_started
from etude.recordings import Recording


def run(code, folder, *arguments, **environment):
    """What a process of its own prints."""
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


OURS = """
import signal, sys
from etude.ray.cluster import check_room, ensure_started, release_cluster
sys.path.append("elsewhere")
import apart  # found because of the line above
handler = lambda number, frame: None
signal.signal(signal.SIGTERM, handler)
print(ensure_started(num_cpus=37.5))
import os, pathlib
def parent(pid):
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # ended meanwhile
children = [int(name) for name in os.listdir("/proc") if name.isdecimal() and parent(name) == os.getpid()]
print(len(children) > 1, os.getpgid(0) in map(os.getpgid, children))  # a signal to the group does not end the cluster
print(signal.getsignal(signal.SIGTERM) is handler, "PYTHONPATH" in __import__("os").environ)
print(ensure_started())
import ray
@ray.remote
def there():
    import apart, beside, etude, os, threading
    return apart.NAME, beside.NAME, etude.__name__, os.environ["OMP_NUM_THREADS"]
print(*ray.get(there.remote()))
cpus = ray.cluster_resources()["CPU"]
check_room([{"CPU": 1.0}] * int(cpus), can_grow=False)
try:
    check_room([{"CPU": 1.0}] * (int(cpus) + 1), can_grow=False)
except Exception as error:
    print(type(error).__name__, error)
release_cluster()
print(ray.is_initialized())
release_cluster()
print(ray.is_initialized())
release_cluster()
"""


def test_a_cluster_is_started_where_there_is_none_and_finds_what_this_process_finds(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "apart.py").write_text("NAME = 'apart'\n")
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    environment = dict.fromkeys(("RAY_ADDRESS", "PYTHONPATH"), "")
    out, err = run(OURS.replace('"elsewhere"', repr(str(tmp_path / "elsewhere"))), tmp_path, **environment)
    assert out[:5] == ["True", "True False", "True True", "True", "apart beside etude 1"]
    assert out[5].startswith("EngineError the cluster has 38 CPU in all, but 39 are asked for: ")
    assert "ask for less (fewer runners or learners" in out[5]
    assert out[6:] == ["True", "False"]  # the last of the two ends it
    assert "Started a local Ray instance" not in err


ELSEWHERE = """
import ray, subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": 100_000_000})
code = '''
from etude.ray.cluster import ensure_started
print(ensure_started(), __import__("ray").cluster_resources()["CPU"])
'''
import os
print(subprocess.run([sys.executable, "-c", code], env={**os.environ, "RAY_ADDRESS": cluster.address},
                     capture_output=True, text=True).stdout.strip())
from etude.ray.cluster import ensure_started
print(ensure_started(cluster.address), ray.cluster_resources()["CPU"])
ray.shutdown()
command = [
    sys.executable, "-m", "etude", "train", "ppo", "--env", "brought:make", "--num-envs", "2", "--num-steps", "64",
    "--engine", "ray", "--num-runners", "2", "--ray.address", cluster.address,
    "--ray.runtime-env", "working_dir=brought", 'env_vars={"LENGTH": "7"}',
    "--record.path", sys.argv[1], "--stop.env-steps", "128", "--out", "run", "--json",
]
env = {**os.environ, "PYTHONPATH": "brought", "LENGTH": "0"}
done = subprocess.run(command, env=env, capture_output=True, text=True)
print(done.returncode, done.stderr if done.returncode else done.stdout)
cluster.shutdown()
"""

BROUGHT = """
import os
import gymnasium as gym

def make():
    return gym.make("CartPole-v1", max_episode_steps=int(os.environ["LENGTH"]))
"""


def test_a_cluster_that_is_there_is_used_by_address_or_environment_and_records_to_a_bucket(tmp_path, s3):
    """Its processes find what the runtime environment brings."""
    (tmp_path / "brought").mkdir()
    (tmp_path / "brought" / "brought.py").write_text(BROUGHT)
    out, _ = run(ELSEWHERE, tmp_path, f"{s3.url}/run", RAY_ADDRESS="")
    assert out[:2] == ["False 3.0", "False 3.0"]
    assert out[2].startswith("0 "), out[2:]
    recording = Recording.open(f"{s3.url}/run")
    assert 128 <= recording.num_steps < 256
    assert recording.read().lengths.max() == 7


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at '127.0.0.1:1': [Errno 111] Connection refused. Start one"),
        ("ray://127.0.0.1:1", "there is no Ray cluster at 'ray://127.0.0.1:1': [Errno 111] Connection refused"),
        ("nonsense", "there is no Ray cluster at 'nonsense': Invalid address format: nonsense. Start one"),
    ],
)
def test_what_can_not_be_connected_to_is_told_at_once(tmp_path, address, message):
    code = f"""
from etude.ray.cluster import ensure_started
try:
    ensure_started({address!r})
except Exception as error:
    print(type(error).__name__, error)
"""
    begin = time.monotonic()
    out, _ = run(code, tmp_path)
    assert out[0].startswith(f"EngineError {message}")
    assert "If there is one and it asks for a token, set RAY_AUTH_MODE=token here" in out[0]
    assert time.monotonic() - begin < 30  # Ray itself takes 80 s


def test_the_environment_is_named_where_it_names_no_cluster(tmp_path):
    code = """
from etude.ray.cluster import ensure_started
try:
    ensure_started()
except Exception as error:
    print(error)
"""
    out, _ = run(code, tmp_path, RAY_ADDRESS="127.0.0.1:1")
    assert out[0].startswith(
        "there is no Ray cluster at '127.0.0.1:1', which the environment variable RAY_ADDRESS names"
    )


def test_one_is_connected_already(cluster):
    assert not ensure_started()
    assert not ensure_started("auto")
    with pytest.warns(UserWarning, match="`ray.runtime_env` is ignored, because this process is connected"):
        assert not ensure_started(runtime_env={"env_vars": {"A": "1"}})


def test_room_is_there(cluster):
    check_room([], can_grow=False)
    check_room([{"CPU": 8.0}], can_grow=False)
    check_room([{"CPU": 0.5, "GPU": 0.0}] * 16, can_grow=False)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([{"CPU": 1.0}] * 9, "the cluster has 8 CPU in all, but 9 are asked for: ask for less"),
        ([{"CPU": 1.0}, {"GPU": 1.0}, {"GPU": 0.25}], "the cluster has 1 GPU in all, but 1.25 are asked for"),
        ([{"simulator": 2.0}], "the cluster has 0 simulator in all, but 2 are asked for"),
    ],
)
def test_room_that_is_not_there(cluster, wanted, message):
    with pytest.raises(EngineError) as error:
        check_room(wanted, can_grow=False)
    assert message in str(error.value)
    with pytest.warns(UserWarning, match=message) as warned:
        check_room(wanted, can_grow=True)
    assert "processes without room wait for them" in str(warned[0].message)
