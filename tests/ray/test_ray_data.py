# SPDX-License-Identifier: Apache-2.0
import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import etude
from etude.algorithms import Ray
from etude.algorithms.feed import feed_of as local_feed_of
from etude.algorithms.feed import plan_of
from etude.errors import DataError, EngineError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, convert

ray = pytest.importorskip("ray")

from etude.ray import data as ray_data  # noqa: E402
from etude.ray.data import Shard, open_shards, report_of, unshared  # noqa: E402
from etude.ray.data import feeds_of as feeds_from  # noqa: E402

OBS, ACTION = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), gym.spaces.Discrete(7)
LENGTHS = [1, 9, 30, 4, 200, 17, 2, 60, 33, 120]
NUM_STEPS = sum(LENGTHS)
EVERY = sorted((i, t) for i, length in enumerate(LENGTHS) for t in range(length))


def episodes(lengths: list[int], **facts: Any) -> Experience:
    """Observations are [episode, t]."""
    offsets = np.cumsum([0, *lengths])
    rows = np.array([(i, t) for i, length in enumerate(lengths) for t in range(length)], np.float32)
    final = np.array([(i, length) for i, length in enumerate(lengths)], np.float32)
    known = {"episode_id": [f"e{i}" for i in range(len(lengths))], "terminated": True} | facts
    steps = {"obs": rows, "action": (rows[:, 1] % 7).astype(np.int64), "reward": rows[:, 0] + rows[:, 1] / 1000}
    return Experience(steps, offsets, Segments.of(len(lengths), **known), {"obs": final})


def record(path: Path, exp: Experience, **options: Any) -> str:
    with RecordingWriter(path, obs_space=OBS, action_space=ACTION, env="Numbered-v0", **options) as writer:
        writer.write(exp)
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> str:
    """Ten episodes in several files of at most 50 rows, which cut the longer ones."""
    path = record(tmp_path_factory.mktemp("ray-data") / "data", episodes(LENGTHS), max_rows_per_file=50)
    assert Recording.open(path).num_parts > 8
    return path


def bc(data: Any, **settings: Any) -> etude.BC:
    """An algorithm that reads nothing in this process."""
    usual = {"seed": 3, "batch_size": 14, "buffer_size": 64, "engine": Ray(num_learners=1)}
    return etude.BC(etude.BCConfig(data=data, **usual | settings))


def taken(feed: Any, num: int) -> list[Any]:
    return list(feed.take(num))


def rows(batches: list[Any]) -> list[tuple[int, int]]:
    columns = [batch.steps if isinstance(batch, Experience) else batch for batch in batches]
    return [(int(a), int(b)) for batch in columns for a, b in np.asarray(batch["obs"])[:, :2]]


def feed_of(algorithm: Any, name: str = "main") -> Any:
    """What feeds a single learner."""
    return feeds_of(algorithm)[name]


_OPENED: list[Any] = []


def feeds_of(algorithm: Any) -> dict[str, Any]:
    """What feeds a single learner, by module; closed after the test, since their threads must not outlive Ray."""
    (shard,) = open_shards(algorithm, Ray(num_learners=1))
    feeds: dict[str, Any] = feeds_from(shard, algorithm)
    _OPENED.extend(feeds.values())
    return feeds


@pytest.fixture(autouse=True)
def feeds_are_closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def late(exp: Experience, connect: Any) -> Experience:
    return connect(exp.select(exp.segments.episode_id != "e4"))


def test_every_step_comes_once_an_epoch(data: str) -> None:
    algorithm = bc(data, mode="stream")
    feed = feed_of(algorithm)
    found = rows(taken(feed, 2 * NUM_STEPS // 14))
    assert sorted(found[:NUM_STEPS]) == EVERY
    assert sorted(found[NUM_STEPS:]) == EVERY
    assert found[:NUM_STEPS] != found[NUM_STEPS:]


@pytest.mark.parametrize("format", ["rllib-episodes", "minari"])
def test_other_formats(data: str, tmp_path: Path, format: str) -> None:
    convert(Recording.open(data), tmp_path / "other-v0", format=format)
    assert sorted(rows(taken(feed_of(bc(tmp_path / "other-v0", mode="stream")), NUM_STEPS // 14))) == EVERY


def test_relative_paths_are_found_by_other_processes(
    data: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(Path(data).parent)
    assert len(rows(taken(feed_of(bc("data", mode="stream")), 3))) == 3 * 14


class Scaled(etude.PreLearner):
    """Says which process it was made in."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, exp: Experience, connect: Any) -> Experience:
        exp = connect(exp)
        return exp.with_steps(obs=np.asarray(exp.steps["obs"]) * np.float32(self.factor))


def test_a_prelearner_works_in_tasks(data: str) -> None:
    found = rows(taken(feed_of(bc(data, mode="stream", prelearner=Scaled(2.0))), NUM_STEPS // 14))
    assert sorted(found) == sorted((2 * i, 2 * t) for i, t in EVERY)


class Failing(etude.PreLearner):
    def __call__(self, exp: Experience, connect: Any) -> Experience:
        raise ValueError("no such thing")


def test_errors_arrive_as_themselves(data: str) -> None:
    algorithm = bc(data, mode="stream", prelearner=Failing())
    feed = feed_of(algorithm)
    with pytest.raises(DataError, match=r"^the prelearner .*Failing.* fails on episode .* and others: ValueError: no"):
        taken(feed, 1)


def test_a_recording_without_steps_that_are_wanted(data: str) -> None:
    feed = feed_of(bc(data, mode="stream", filter="t > 1000"))
    with pytest.raises(DataError, match="there are no steps to make batches of"):
        taken(feed, 1)


class Unfindable(etude.PreLearner):
    """Processes that read can't make it."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("only_where_it_trains",)

    def __deepcopy__(self, memo: Any) -> "Unfindable":
        return self

    def __call__(self, exp: Experience, connect: Any) -> Experience:
        raise AssertionError


class Unsendable(Unfindable):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


def test_what_processes_cant_import(data: str) -> None:
    """Ray Data would try again without end."""
    feed = feed_of(bc(data, mode="stream", prelearner=Unfindable()))
    with pytest.raises(
        EngineError, match=r"can't create the prelearner.* No module named 'only_where.*`ray.runtime_env`"
    ):
        taken(feed, 1)


def test_what_cant_be_sent_to_processes(data: str) -> None:
    with pytest.raises(SettingsError, match=r"can't be sent to the tasks of Ray Data: cannot be sent"):
        feed_of(bc(data, mode="stream", prelearner=Unsendable()))


class DiesOnce(etude.PreLearner):
    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __call__(self, exp: Experience, connect: Any) -> Experience:
        if not os.path.exists(self.flag) and "e4" in exp.segments.episode_id:
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return connect(exp)


def test_work_of_a_process_that_dies_is_done_again(data: str, tmp_path: Path) -> None:
    algorithm = bc(data, mode="stream", prelearner=DiesOnce(str(tmp_path / "flag")))
    feed = feed_of(algorithm)
    assert sorted(rows(taken(feed, NUM_STEPS // 14))) == EVERY
    assert (tmp_path / "flag").exists()


def test_what_is_bad_is_counted(tmp_path: Path, cluster: None) -> None:
    exp = episodes(LENGTHS)
    exp.steps["reward"][[5, 100, 101]] = np.nan
    path = record(tmp_path / "bad", exp, max_rows_per_file=50)
    algorithm, local = (
        bc(path, mode="stream", on_bad="skip", connectors=(), prelearner=late, engine=engine, updates_per_iteration=60)
        for engine in (Ray(num_learners=1), "local")
    )
    with contextlib.closing(algorithm), contextlib.closing(local):
        for _ in range(2):
            found, expected = (
                {name: count for name, count in one.train().metrics.items() if name.startswith("left_out")}
                for one in (algorithm, local)
            )
        assert found == expected | {"left_out/early_or_dropped": found["left_out/early_or_dropped"]}
        assert found["left_out/early_or_dropped"] > 0
        assert algorithm.recording.left_out == local.recording.left_out != {}


def test_a_run_goes_on_with_the_next_batch(data: str) -> None:
    algorithm = bc(data, mode="stream")
    feed = feed_of(algorithm)
    wanted = taken(feed, 60)[50:]
    algorithm.epoch_sizes = {"main": feed.pipeline.epoch_size}
    algorithm.learner.modules["main"].updates = 50
    feed = feed_of(algorithm)
    assert rows(taken(feed, 10)) == rows(wanted)


def test_figures_of_the_flow(data: str) -> None:
    algorithm = etude.BC(
        etude.BCConfig(data=data, engine=Ray(), mode="stream", batch_size=14, updates_per_iteration=100, seed=0)
    )
    result = algorithm.train()
    algorithm.close()
    assert result.updates == 100
    assert result.data["load"] > 0
    assert result.data["steps_per_s"] > 0
    assert result.bottleneck in ("load", "connectors", "shuffle", "update")


# -- several learners -------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Learner:
    """Takes batches, and does not learn."""

    def __init__(self, kind: type, config: Any, spaces: Any, shard: Shard) -> None:
        self.algorithm = kind(config, saved_spaces=spaces)
        self.feeds = feeds_from(shard, self.algorithm)

    def take(self, num: int, name: str = "main") -> list[Any]:
        return taken(self.feeds[name], num)

    def told(self) -> Any:
        return report_of(self.feeds)


def learners(algorithm: Any, num: int, **settings: Any) -> list[Any]:
    shards = open_shards(algorithm, Ray(num_learners=num, **settings))
    spaces = algorithm.module_spaces()
    return [Learner.remote(type(algorithm), algorithm.config, spaces, shard) for shard in shards]


@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_learners_have_different_equal_shares(data: str, mode: str) -> None:
    actors = learners(bc(data, mode=mode), 2)
    share = NUM_STEPS // 2 // 7  # batches of 7 steps each
    for _ in range(3):
        a, b = (rows(batches) for batches in ray.get([actor.take.remote(share) for actor in actors]))
        assert len(a) == len(b) == NUM_STEPS // 2
        assert sorted(a + b) == EVERY
    assert [one.epochs for one in ray.get([actor.told.remote() for actor in actors])] == [{"main": NUM_STEPS // 2}] * 2


def test_no_more_is_dropped_than_learners_cant_share(data: str) -> None:
    actors = learners(bc(data, mode="stream", batch_size=15), 3)
    share = NUM_STEPS // 3  # 158, and 2 of 476 steps are left
    found = ray.get([actor.take.remote(share // 5 + 1) for actor in actors])
    steps = [step for batches in found for step in rows(batches)[:share]]
    assert len(set(steps)) == 3 * share
    assert set(steps) <= set(EVERY)
    assert unshared(ray.get([actor.told.remote() for actor in actors])) == NUM_STEPS - 3 * share == 2


def test_a_node_that_goes_with_blocks_on_it(tmp_path: Path) -> None:
    """It had read most of them: the cluster's other CPU is but one of four."""
    path = record(tmp_path / "data", episodes([50] * 40), max_rows_per_file=50)
    script = Path(__file__).with_name("lost_data_node.py")
    done = subprocess.run(
        [sys.executable, str(script), path, "2", "2000"], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray has things to say, too
    assert json.loads(told[-1]) == {"steps": 2000, "most": 1}


def test_batches_that_cant_be_shared(data: str) -> None:
    with pytest.raises(SettingsError, match="`batch_size` is 14, but must be a multiple of 3 learners"):
        open_shards(bc(data), Ray(num_learners=3))


def marwil(data: str, **settings: Any) -> etude.MARWIL:
    given = {"mode": "stream", "seed": 3, "batch_size": 64, "buffer_size": 64, "max_segment_length": 10}
    return etude.MARWIL(etude.MARWILConfig(data=data, **given | settings))


def test_segments_are_never_cut_by_shares(data: str) -> None:
    actors = learners(marwil(data), 2)
    a, b = ray.get([actor.take.remote(40) for actor in actors])
    assert {"advantage", "obs", "action"} <= a[0].keys()
    assert set(rows(a) + rows(b)) == set(EVERY)


def test_a_batch_of_whole_segments_has_its_steps_on_average(tmp_path: Path, cluster: None) -> None:
    path = record(tmp_path / "data", episodes([10] * 60 + [100] * 20), max_rows_per_file=200)  # 2,600 steps
    actors = learners(marwil(path, batch_size=128, max_segment_length=128, buffer_size=10_000), 2)
    batches = ray.get([actor.take.remote(40) for actor in actors])
    assert np.mean([len(a["obs"]) + len(b["obs"]) for a, b in zip(*batches, strict=True)]) == pytest.approx(128, 0.03)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, 2600 / 80),
        ({"max_segment_length": 64}, 2600 / 100),
        ({"filter": "t < 50"}, 1600 / 80),
        ({"connectors": ("frame_stack:2",)}, 2600 / 80),
        ({"prelearner": late}, 2590 / 79),
    ],
)
@pytest.mark.parametrize("format", [None, "rllib-table"])
def test_the_mean_length_of_segments_is_that_of_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, length: float, format: str | None
) -> None:
    path = tmp_path / "data"
    record(path, episodes([10] * 60 + [100] * 20), max_rows_per_file=200)
    if format is not None:
        convert(Recording.open(path), tmp_path / "other", format=format)
        path = tmp_path / "other"
    plan = plan_of(
        marwil(str(path), **{"batch_size": 256, "max_segment_length": 128} | settings), "main", {}, loads_here=False
    )
    assert ray_data._mean_length(plan) == pytest.approx(length)
    share, by_segments = ray_data._share_of_batch(plan, 2)
    assert by_segments
    assert share == pytest.approx(128 / length)
    monkeypatch.setattr(ray_data, "_COUNTED_PARTS", 6)
    monkeypatch.setattr(ray_data, "_SAMPLED_PARTS", 6)
    assert ray_data._mean_length(plan) == pytest.approx(length, 0.3)


def test_batches_smaller_than_the_learners_segments_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = record(tmp_path / "data", episodes([50] * 4))
    plan = plan_of(marwil(path, max_segment_length=50), "main", {}, loads_here=False)
    assert ray_data._share_of_batch(plan, 2) == (1.0, True)
    assert "`batch_size` is 64, but each of 2 learners takes at least one whole segment, of 50 steps" in caplog.text
    assert "gradient steps have about 100 steps" in caplog.text


def test_recurrent_modules_share_whole_segments(data: str) -> None:
    network = etude.NetworkConfig(hidden=(8,), recurrent="gru", recurrent_size=4)
    algorithm = bc(data, mode="stream", network=network, max_segment_length=10, batch_size=40)
    local = local_feed_of(algorithm, "main", {})
    every = {segment for exp in taken(local, 30) for segment in segments(exp)}
    local.close()
    actors = learners(algorithm, 2)
    a, b = ray.get([actor.take.remote(12) for actor in actors])
    assert {len(exp) for exp in a + b} == {2}
    found = [segment for exp in a + b for segment in segments(exp)]
    assert len(found) == len(set(found)) == 48  # of 50
    assert set(found) <= every
    for exp in a + b:
        exp.validate()


def segments(exp: Experience) -> list[tuple[str, int, int, bool]]:
    """Each by its episode, first step and length, and whether it is known what followed."""
    facts = exp.segments
    names = (facts.episode_id, facts.t_start, exp.lengths, facts.has_final_obs)
    return list(zip(*(column.tolist() for column in names), strict=True))


# -- many modules -----------------------------------------------------------------------------------------------------


def test_each_module_has_a_stream_of_its_own(tmp_path: Path, cluster: None) -> None:
    agents = ["left", "right"] * 5
    path = record(tmp_path / "two", episodes(LENGTHS, agent_id=agents), max_rows_per_file=50)
    algorithm = bc(path, mode="stream", modules=("left", "right"))
    feeds = feeds_of(algorithm)
    for i, (name, feed) in enumerate(feeds.items()):
        own = [pair for pair in EVERY if pair[0] % 2 == i]
        found = rows(taken(feed, len(own) // 14 + 1))[: len(own)]
        assert sorted(found) == own, name


def test_a_file_whose_types_ray_refuses_to_take_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    importlib.import_module("ray.data.extensions")  # registers Ray's types
    told = {b"ARROW:extension:name": b"ray.data.arrow_tensor_v2", b"ARROW:extension:metadata": pickle.dumps((2,))}
    field = pa.field("obs", pa.large_list(pa.float32()), metadata=told)  # as Ray 2.49 to 2.54 have written
    table = pa.Table.from_arrays([pa.array([[1.0, 2.0]], field.type)], schema=pa.schema([field]))
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: a library .* Ray Data, rejects .* by `etude data convert`"):
        Recording.open(tmp_path)
