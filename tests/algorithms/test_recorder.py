# SPDX-License-Identifier: Apache-2.0
"""What is recorded while an algorithm trains, against what its `collect` gave, step by step."""

import dataclasses
import gc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from many_agent_envs import CartPoles
from preloaded import Preloaded
from signalling import Signalling

import etude
from etude.algorithms import BC, DQN, PPO, SAC, BCConfig, DQNConfig, PPOConfig, SACConfig, Stop
from etude.algorithms.config import RecordConfig
from etude.connectors.pipeline import state_from_json
from etude.errors import DataError, SettingsError
from etude.recordings import Recording, validate

SMALL: dict[str, Any] = {"env": "CartPole-v1", "num_envs": 3, "num_steps": 96, "epochs": 1, "seed": 1}


def rows_of(exp: Any) -> dict[Any, Any]:
    """Each step that is not lookback, by episode, agent and t."""
    found: dict[Any, Any] = {}
    t, trained, segment = exp.t(), exp.trained(), exp.segment_of_step()
    names = sorted(name for name in exp.steps if name.partition("/")[0] in ("obs", "action", "reward", "logp"))
    for row in np.flatnonzero(trained):
        i = segment[row]
        key = (exp.segments.episode_id[i], exp.segments.agent_id[i], int(t[row]))
        assert key not in found, key
        found[key] = tuple(exp.steps[name][row].tolist() for name in names)
    return found


def keeping(cls: Any, config: Any, iterations: int) -> tuple[Any, dict[Any, Any]]:
    """An algorithm that has trained, and all that its `collect` gave."""
    seen: dict[Any, Any] = {}

    class Keeping(cls):  # type: ignore[misc]
        def collect(self, **how: Any) -> Any:
            parts = super().collect(**how)
            for exp in parts.values():
                rows = rows_of(exp)
                assert not rows.keys() & seen.keys()
                seen.update(rows)
            return parts

    algorithm = Keeping(config)
    for _ in range(iterations):
        algorithm.train()
    return algorithm, seen


def read(path: Path) -> dict[Any, Any]:
    return rows_of(Recording.open(path).read())


CASES: dict[str, Any] = {
    "PPO": (PPO, PPOConfig, SMALL),
    "PPO, with lookback": (PPO, PPOConfig, SMALL | {"connectors": ("frame_stack:3", "normalize_obs")}),
    "PPO, whole episodes": (PPO, PPOConfig, SMALL | {"whole_episodes": True}),
    "PPO, cut": (PPO, PPOConfig, SMALL | {"max_trajectory_length": 7}),
    "PPO in workers": (PPO, PPOConfig, SMALL | {"workers": etude.Workers(num_workers=2)}),
    "DQN": (DQN, DQNConfig, {"env": "CartPole-v1", "num_envs": 2, "iteration_steps": 150, "seed": 1}),
    "SAC": (SAC, SACConfig, {"env": "Pendulum-v1", "iteration_steps": 150, "learning_starts": 9999, "seed": 1}),
    "many agents": (PPO, PPOConfig, SMALL | {"env": CartPoles, "modules": ("all",), "module_of": lambda a, e: "all"}),
}


@pytest.mark.parametrize("layout", ["episodes", "table"])
@pytest.mark.parametrize("case", CASES)
def test_all_that_is_collected_is_recorded_once(case: str, layout: Any, tmp_path: Path) -> None:
    cls, config, settings = CASES[case]
    path = tmp_path / "r"
    algorithm, seen = keeping(cls, config(**settings, record=RecordConfig(path=str(path), layout=layout)), 3)
    algorithm.close()
    assert read(path) == seen
    recording = Recording.open(path)
    assert (recording.env, recording.meta["explore"]) == (env_of(settings), True)
    if layout == "episodes":
        pieces = next(iter(recording.stream())).segments
        keys = list(zip(pieces.episode_id, pieces.agent_id, strict=True))
        assert len(set(keys)) == len(keys)  # each is in one piece
        changes = sum(a != b for a, b in zip(pieces.episode_id, pieces.episode_id[1:], strict=False))
        assert changes == len(set(pieces.episode_id)) - 1  # its agents stand together
    assert validate(path).ok


def env_of(settings: Any) -> str:
    return settings["env"] if isinstance(settings["env"], str) else f"many_agent_envs:{settings['env'].__qualname__}"


def test_modules_of_different_spaces_have_recordings_of_their_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env": Signalling, "modules": ("speaker", "listener"), "num_envs": 2, "num_steps": 40}
    record = RecordConfig(path=str(tmp_path / "r"))
    connectors = ("normalize_obs",)
    algorithm, seen = keeping(PPO, PPOConfig(**settings, epochs=1, record=record, connectors=connectors), 2)
    algorithm.close()
    speaker, listener = (read(tmp_path / "r" / name) for name in ("speaker", "listener"))
    assert {**speaker, **listener} == seen
    assert {key[0] for key in speaker} == {key[0] for key in listener}
    stored = Recording.open(tmp_path / "r" / "speaker").meta["filter"]
    assert set(stored) == {"speaker", "listener"}


def test_what_the_connectors_know_is_stored(tmp_path: Path) -> None:
    record = RecordConfig(path=str(tmp_path / "r"))
    algorithm = PPO(PPOConfig(**SMALL, connectors=("normalize_obs",), record=record))
    algorithm.train()
    algorithm.train()
    algorithm.record(tmp_path / "played", 2, seed=1)
    algorithm.close()
    known = repr(algorithm.connectors.state_dict())
    for name in ("r", "played"):
        fresh = etude.Pipeline(("clip_action", "normalize_obs"))
        fresh.spaces(*algorithm.spaces["main"])
        state_from_json(fresh, Recording.open(tmp_path / name).meta["filter"])
        assert repr(fresh.state_dict()) == known
    PPO(PPOConfig(**SMALL)).record(tmp_path / "plain", 1, seed=1)
    assert "filter" not in Recording.open(tmp_path / "plain").meta


# -- going on -------------------------------------------------------------------------------------------------------


def run(path: Path, iterations: int, **more: Any) -> PPO:
    algorithm = PPO(PPOConfig(**SMALL | {"record": RecordConfig(path=str(path), **more)}))
    for _ in range(iterations):
        algorithm.train()
    return algorithm


@pytest.mark.parametrize("layout", ["episodes", "table"])
@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_a_resumed_run_writes_nothing_twice(layout: Any, ends: str, tmp_path: Path, preloaded: Preloaded) -> None:
    whole = run(tmp_path / "whole", 6, layout=layout)
    whole.close()
    path = tmp_path / "r"
    code = f"""
import os, signal
import etude
from etude.algorithms.config import RecordConfig
record = RecordConfig(path={str(path)!r}, layout={layout!r}, max_rows_per_file=30)
algorithm = etude.PPO(etude.PPOConfig(**{SMALL!r}, record=record))
for i in range(5):
    algorithm.train()
    if i == 2:
        algorithm.save({str(tmp_path / "run")!r})
if {ends == "killed"}:
    os.kill(os.getpid(), signal.SIGKILL)
algorithm.close()
"""
    done = preloaded.run(code)
    assert done.returncode == (-9 if ends == "killed" else 0), done.stderr
    before = Recording.open(path).num_steps
    assert 0 < before < (6 if ends == "closed" else 5) * 96
    assert validate(path).ok
    resumed = etude.load(tmp_path / "run")
    for _ in range(3):
        resumed.train()
    resumed.close()
    assert read(path) == read(tmp_path / "whole")
    assert validate(path).ok


@pytest.mark.parametrize("layout", ["episodes", "table"])
def test_a_run_that_is_killed_again_before_it_has_come_as_far_writes_nothing_twice(layout: Any, tmp_path: Path) -> None:
    """Each session goes on from the last checkpoint; what it does after its own checkpoint is lost to training."""
    whole = run(tmp_path / "whole", 8, layout=layout)
    whole.close()
    algorithm = run(tmp_path / "r", 1, layout=layout)
    for before, after in [(0, 4), (1, 0), (1, 1), (1, 4), (0, 0)]:
        for _ in range(before):
            algorithm.train()
        algorithm.save(tmp_path / "run")
        for _ in range(after):
            algorithm.train()
        algorithm.close()
        algorithm = etude.load(tmp_path / "run")
    for _ in range(4):
        algorithm.train()
    algorithm.close()
    assert read(tmp_path / "r") == read(tmp_path / "whole")
    assert validate(tmp_path / "r").ok


def test_going_back_to_a_state_writes_nothing_twice(tmp_path: Path) -> None:
    algorithm = run(tmp_path / "r", 2)
    state = algorithm.get_state()
    algorithm.train()
    algorithm.set_state(state)
    algorithm.train()
    algorithm.close()
    other = run(tmp_path / "other", 3)
    other.close()
    assert read(tmp_path / "r").keys() >= read(tmp_path / "other").keys()
    assert validate(tmp_path / "r").ok


def test_a_loaded_run_may_stop_recording_or_record_elsewhere(tmp_path: Path) -> None:
    first = run(tmp_path / "r", 1)
    first.save(tmp_path / "run")
    first.close()
    rows = Recording.open(tmp_path / "r").num_steps
    silent = etude.load(tmp_path / "run", record={"path": None})
    silent.train()
    silent.close()
    elsewhere = etude.load(tmp_path / "run", record={"path": str(tmp_path / "other")})
    elsewhere.train()
    elsewhere.close()
    assert Recording.open(tmp_path / "other").num_steps == 96
    played = etude.load(tmp_path / "run")
    played.evaluate(2)
    played.close()
    assert Recording.open(tmp_path / "r").num_steps == rows
    plain = PPO(PPOConfig(**SMALL))
    plain.load(tmp_path / "run")  # of a run that recorded, into one that does not
    plain.close()
    mine = run(tmp_path / "mine", 1)
    mine.load(tmp_path / "run")  # into one with a recording of its own, which goes on
    mine.train()
    mine.close()
    assert Recording.open(tmp_path / "mine").num_steps == 2 * 96


def test_a_recording_that_is_there_is_an_error_or_added_to(tmp_path: Path) -> None:
    run(tmp_path / "r", 2).close()
    with pytest.raises(DataError, match="holds a recording of 1 file already"):
        run(tmp_path / "r", 0)
    once = Recording.open(tmp_path / "r").num_episodes
    run(tmp_path / "r", 2, append=True).close()  # the same seed: the same episodes once more, under other names
    assert Recording.open(tmp_path / "r").num_steps == 4 * 96
    assert Recording.open(tmp_path / "r").num_episodes == 2 * once
    assert validate(tmp_path / "r").ok


def test_observations_without_numbers_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    class Empty(gym.Env[Any, Any]):
        observation_space = gym.spaces.Dict(none=gym.spaces.Box(-1, 1, (0,)), two=gym.spaces.Box(-1, 1, (2,)))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            return self.observation_space.sample(), 1.0, True, False, {}

    path = tmp_path / "data"
    given: dict[str, Any] = SMALL | {"record": RecordConfig(path=str(path))}
    with pytest.raises(DataError, match=r"`obs/none` has the shape \[0\].*gymnasium.wrappers.FilterObservation"):
        PPO(PPOConfig(**given | {"env": Empty, "connectors": ("drop:none",)}))
    assert not path.exists()
    ppo = PPO(PPOConfig(**given | {"env": lambda: gym.wrappers.FilterObservation(Empty(), ["two"])}))
    ppo.train()
    ppo.close()
    assert Recording.open(path).num_steps == 96


def test_what_is_not_closed_is_written_when_it_goes(tmp_path: Path) -> None:
    algorithm, seen = keeping(PPO, PPOConfig(**SMALL, record=RecordConfig(path=str(tmp_path / "r"))), 2)
    del algorithm
    gc.collect()
    assert read(tmp_path / "r") == seen


def test_a_league_goes_on_in_one_recording(tmp_path: Path) -> None:
    settings = SMALL | {"env": CartPoles, "modules": ("a",), "module_of": lambda agent, episode: "a"}
    algorithm, seen = keeping(PPO, PPOConfig(**settings, record=RecordConfig(path=str(tmp_path / "r"))), 1)
    algorithm.add_module("b", like="a", module_of=lambda agent, episode: "b" if agent == "cart_0" else "a")
    algorithm.train()
    algorithm.close()
    assert read(tmp_path / "r") == seen
    assert set(Recording.open(tmp_path / "r").read().segments.module_id) == {"a", "b"}


# -- evaluations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True])
def test_evaluations_of_what_learns_offline(beside: bool, tmp_path: Path) -> None:
    PPO(PPOConfig(**SMALL)).record(tmp_path / "data", 3, seed=1, explore=True)
    config = BCConfig(
        env="CartPole-v1",
        data=str(tmp_path / "data"),
        updates_per_iteration=5,
        batch_size=32,
        evaluation_episodes=2,
        evaluate_beside=beside,
        evaluation_interval=1,
        seed=1,
        record=RecordConfig(path=str(tmp_path / "r")),
    )
    bc = BC(config)
    for _ in range(3):
        bc.train()
    bc.save(tmp_path / "run")
    bc.close()
    resumed = etude.load(tmp_path / "run")
    resumed.train()
    resumed.close()
    recording = Recording.open(tmp_path / "r")
    assert recording.num_episodes == (4 if beside else 8)
    assert recording.info()["unfinished"] == 0
    assert recording.meta["explore"] is False
    assert {name.partition("@")[2] for name in recording.read().segments.episode_id} == (
        {"5", "10"} if beside else {"5", "10", "15", "20"}
    )


# -- how it is written ----------------------------------------------------------------------------------------------


def test_compression_and_sizes(tmp_path: Path) -> None:
    algorithm = PPO(PPOConfig(**SMALL))
    how: dict[str, Any] = {"compression": {"obs": "zstd:5", "reward": "none"}, "max_rows_per_file": 100}
    algorithm.record(tmp_path / "r", 20, seed=1, explore=True, **how)
    files = Recording.open(tmp_path / "r").files
    assert len(files) > 2
    for file in files:
        group = pq.read_metadata(file).row_group(0)
        columns = [group.column(i) for i in range(group.num_columns)]
        found = {column.path_in_schema.partition(".")[0]: column.compression for column in columns}
        assert (found["obs"], found["final_obs"], found["reward"], found["logp"]) == (
            "ZSTD",
            "ZSTD",
            "UNCOMPRESSED",
            "LZ4",
        )
        assert group.num_rows <= 100
    with pytest.raises(DataError, match="`compression` names `observation`, but there is no such column: obs, action"):
        algorithm.record(tmp_path / "s", 1, compression={"observation": "lz4"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compression": "zip"}, r"`compression` is 'zip'; known are none, snappy, lz4, gzip, brotli, zstd"),
        ({"compression": {"obs": "zstd:99"}}, r"of `obs` is 'zstd:99'; known are .* with a level.*zstd 1 to 22"),
        (
            {"compression": "obs=lz4,snappy:3"},
            "`compression` is 'snappy:3'; known are none, snappy, .* some of them with a level",
        ),
        ({"compression": "zst:3"}, "Nearest: `zstd`"),
        ({"max_rows_per_file": 0}, "`max_rows_per_file` is 0, but must be at least 1"),
        ({"layout": "rows"}, "RecordConfig.layout is 'rows'"),
    ],
)
def test_settings_that_can_not_be(given: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        RecordConfig(path="data", **given)


def test_without_recording_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, etude; a = etude.PPO(etude.PPOConfig(env='CartPole-v1', num_steps=64)); a.train(); a.close(); "
        "assert not a.recorder.is_on; assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("append", [False, True])
def test_a_second_run_does_not_record_where_another_one_does(tmp_path: Path, append: bool) -> None:
    path = tmp_path / "r"
    first, seen = keeping(PPO, PPOConfig(**SMALL, record=RecordConfig(path=str(path))), 1)
    second = PPOConfig(**SMALL, record=RecordConfig(path=str(path), append=append))
    with pytest.raises(DataError, match=r"another writer is using this folder .*close it"):
        PPO(second)
    first.train()
    first.close()
    assert read(path).keys() == seen.keys()
    assert validate(path).ok


def test_a_recording_that_is_removed_during_a_run_is_an_error(tmp_path: Path) -> None:
    algorithm = PPO(PPOConfig(**SMALL, record=RecordConfig(path=str(tmp_path / "r"))))
    algorithm.train()
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(DataError, match="removed or moved"):
        algorithm.fit(Stop(updates=10_000))
    with pytest.raises(DataError, match="removed or moved"):
        algorithm.close()
    assert not (tmp_path / "r").exists()


class Tells(gym.Env[Any, Any]):
    """Observations show the step and the action before; episodes have 50 steps."""

    observation_space = gym.spaces.Box(-1, 99, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.array([0, -1], np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array([self.t, action], np.float32), float(action == 1), False, self.t == 50, {}


@pytest.mark.parametrize("layout", ["episodes", "table"])
def test_a_run_that_resumes_with_other_settings_is_not_mixed_with_what_it_did_before(
    layout: Any, tmp_path: Path
) -> None:
    config = PPOConfig(env=Tells, num_envs=2, num_steps=140, epochs=20, seed=1)
    record = RecordConfig(path=str(tmp_path / "data"), layout=layout)
    algorithm = PPO(dataclasses.replace(config, record=record))
    algorithm.train()
    algorithm.save(tmp_path / "run")
    for _ in range(2):  # what a killed run did after its checkpoint
        algorithm.train()
    algorithm.close()
    same = etude.load(tmp_path / "run", env=Tells)
    assert not same.recorder.has_new_settings
    same.close()
    resumed = etude.load(tmp_path / "run", env=Tells, lr=0.05)
    for _ in range(3):
        resumed.train()
    resumed.close()
    assert validate(tmp_path / "data").ok
    exp = Recording.open(tmp_path / "data").read()
    twice = 0 if layout == "table" else 40  # the first steps of the running episodes, in both courses
    assert exp.num_steps == 2 * 3 * 140 + twice
    for i in range(exp.num_segments):
        one = exp[i]
        np.testing.assert_array_equal(one.steps["obs"][1:, 1], one.steps["action"][:-1])
        if layout == "episodes" and one.segments.done[0]:
            assert one.num_steps == 50


class Draws(gym.Env[Any, Any]):
    """Each observation is drawn, so that no two steps are alike; the reward is that of the action."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(5, 90))
        return self.np_random.random(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.np_random.random(4, np.float32), float(action), self.left == 0, False, {}


def watched(algorithm: Any, seen: dict[Any, Any]) -> Any:
    """The algorithm, which adds what its `collect` gives to ``seen``."""
    collect = algorithm.collect

    def watching(**how: Any) -> Any:
        parts = collect(**how)
        for exp in parts.values():
            seen.update(rows_of(exp))
        return parts

    algorithm.collect = watching
    return algorithm


def killed(algorithm: Any, path: Path) -> None:
    """Leave the folder as it is now, as a kill does; the algorithm is closed."""
    there = path.with_name(f"{path.name}-then")
    shutil.copytree(path, there)
    algorithm.close()
    shutil.rmtree(path)
    there.rename(path)


TWO: dict[str, Any] = {"env": Signalling, "modules": ("speaker", "listener")}
RESUMED: dict[str, Any] = {
    "PPO": (PPO, PPOConfig, SMALL | {"env": Draws}),
    "PPO in threads": (
        PPO,
        PPOConfig,
        SMALL | {"env": Draws, "workers": etude.Workers(num_workers=2, envs_per_worker=2, mode="thread")},
    ),
    "DQN": (DQN, DQNConfig, {"env": Draws, "num_envs": 2, "iteration_steps": 150, "seed": 1}),
    "many agents": CASES["many agents"],
    "two modules": (PPO, PPOConfig, TWO | {"num_envs": 2, "num_steps": 40, "epochs": 1, "seed": 1}),
}


@pytest.mark.parametrize("layout", ["episodes", "table"])
@pytest.mark.parametrize("ends", ["closed", "killed"])
@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_ended_at_its_checkpoint_goes_on_with_other_settings_and_writes_nothing_twice(
    case: str, ends: str, layout: Any, tmp_path: Path
) -> None:
    """What a run writes when it is closed is in its checkpoint, too, and is not of another course of the run."""
    cls, config, settings = RESUMED[case]
    path, code = tmp_path / "r", {name: settings[name] for name in ("env", "module_of") if name in settings}
    seen: dict[Any, Any] = {}
    algorithm = watched(cls(config(**settings, record=RecordConfig(path=str(path), layout=layout))), seen)
    algorithm.train()
    for session in range(3):
        algorithm.save(tmp_path / "run")
        if ends == "killed":
            killed(algorithm, path)
        else:
            algorithm.close()
        algorithm = watched(etude.load(tmp_path / "run", **code, lr=10.0 ** (-4 - session)), seen)
        assert algorithm.recorder.has_new_settings
        algorithm.train()
    algorithm.close()
    folders = [path / name for name in ("speaker", "listener")] if case == "two modules" else [path]
    found = [read(folder) for folder in folders]  # which checks that no step is there twice
    assert {key: row for rows in found for key, row in rows.items()} == seen
    assert sum(map(len, found)) == len(seen) == algorithm.agent_steps
    for folder in folders:
        assert validate(folder).ok
        exp = Recording.open(folder).read().join()
        assert (exp.segments.t_start == 0).all()  # no episode goes on under another id
        assert case not in ("PPO", "DQN") or len(np.unique(exp.steps["obs"], axis=0)) == exp.num_steps


@pytest.mark.parametrize("layout", ["episodes", "table"])
@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_two_runs_that_resume_from_one_checkpoint_with_other_settings(ends: str, layout: Any, tmp_path: Path) -> None:
    """The first goes on with the episodes. The second can't, and has them from their start under other ids."""
    config, path = PPOConfig(env=Tells, num_envs=2, num_steps=140, epochs=20, seed=1), tmp_path / "data"
    algorithm = PPO(dataclasses.replace(config, record=RecordConfig(path=str(path), layout=layout)))
    algorithm.train()
    algorithm.save(tmp_path / "run")
    if ends == "killed":
        killed(algorithm, path)
    else:
        algorithm.close()
    rows = []
    for lr in (0.05, 0.01, 0.02):
        resumed = etude.load(tmp_path / "run", env=Tells, lr=lr)
        resumed.train()
        resumed.train()
        resumed.close()
        assert validate(path).ok
        exp = Recording.open(path).read().join()
        rows.append(exp.num_steps)
        for one in (exp[i] for i in range(exp.num_segments)):
            np.testing.assert_array_equal(one.steps["obs"][1:, 1], one.steps["action"][:-1])  # no episode is mixed
            if layout == "episodes":
                assert one.segments.t_start[0] == 0
                assert one.num_steps == 50 or not one.segments.done[0]
    shared = 40 if layout == "episodes" else 0  # two running episodes, 20 steps of each before the checkpoint
    assert rows == [3 * 140, 5 * 140 + shared, 7 * 140 + 2 * shared]


@pytest.mark.parametrize("ends", ["closed", "killed"])
@pytest.mark.parametrize("first", ["episodes", "table"])
def test_the_layout_may_change_when_a_run_resumes(first: str, ends: str, tmp_path: Path) -> None:
    path = tmp_path / "r"
    seen: dict[Any, Any] = {}
    algorithm = watched(PPO(PPOConfig(**SMALL, record=RecordConfig(path=str(path), layout=first))), seen)
    algorithm.train()
    for layout in ("table", "episodes", "table"):
        algorithm.save(tmp_path / "run")
        if ends == "killed":
            killed(algorithm, path)
        else:
            algorithm.close()
        algorithm = watched(etude.load(tmp_path / "run", record={"layout": layout}), seen)
        algorithm.train()
    algorithm.close()
    assert read(path) == seen
    assert validate(path).ok


def test_a_recording_that_is_not_there_when_a_run_resumes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    algorithm = PPO(PPOConfig(**SMALL, record=RecordConfig(path="data")))
    algorithm.train()
    algorithm.save("run")
    algorithm.close()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="data: the recording that this run writes is not there"):
        etude.load(tmp_path / "run").train()
    assert [*Path().iterdir()] == []


@pytest.mark.parametrize("layout", ["episodes", "table"])
@pytest.mark.parametrize("changes", ["workers", "number of envs"])
def test_each_step_is_recorded_once_however_often_a_run_resumes_in_new_episodes(
    changes: str, layout: Any, tmp_path: Path
) -> None:
    """The steps of episodes that were cut are written when the run stops, and never again."""
    record = RecordConfig(path=str(tmp_path / "data"), layout=layout)
    config = PPOConfig(**{**SMALL, "env": SMALL["env"], "num_envs": 4, "num_steps": 128}, record=record)
    if changes == "workers":
        config = dataclasses.replace(config, workers=etude.Workers(num_workers=2, envs_per_worker=2))
    played = 0
    for session in range(4):
        others = {} if changes == "workers" or not session else {"num_envs": 2 if session % 2 else 4}
        run = etude.load(tmp_path / "run", **others) if session else PPO(config)
        run.train()
        run.save(tmp_path / "run")
        if session == 1:
            run.train()  # after the checkpoint, as of a run that is killed: these steps are lost to training
        played += 128 * (2 if session == 1 else 1)
        run.close()
    recording = Recording.open(tmp_path / "data")
    assert recording.num_steps == played
    assert validate(tmp_path / "data").ok
    steps = recording.read()
    starts = steps.steps["obs"][steps.offsets[:-1]][steps.segments.t_start == 0]
    assert changes == "workers" or len(np.unique(starts, axis=0)) == len(starts)


def test_a_run_without_its_runners_state_does_not_begin_with_its_first_episodes_again(tmp_path: Path) -> None:
    config = PPOConfig(**SMALL, record=RecordConfig(path=str(tmp_path / "data"), append=True))
    algorithm = PPO(config)
    algorithm.train()
    algorithm.save(tmp_path / "run")
    algorithm.close()
    for _ in range(2):
        again = PPO(config)
        again.load(tmp_path / "run", not_components="runner")
        again.train()
        again.save(tmp_path / "run")
        again.close()
    steps = Recording.open(tmp_path / "data").read()
    starts = steps.steps["obs"][steps.offsets[:-1]][steps.segments.t_start == 0]
    assert len(np.unique(starts, axis=0)) == len(starts)
