# SPDX-License-Identifier: Apache-2.0
"""Spaces that are given for data that does not state its own."""

import dataclasses
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import etude
from etude.errors import DataError, SettingsError, SpaceError
from etude.evaluation import FQEConfig, evaluate_on
from etude.recordings import Recording, Source, convert, merge_recordings, validate

ENV = gym.make("Pendulum-v1")
OBS, ACTION = ENV.observation_space, ENV.action_space
SPACES = {"obs_space": OBS, "action_space": ACTION}
QUICKLY: Any = {"methods": ("dm",), "fqe": FQEConfig(members=2, steps=5)}
"""How policies are evaluated where only what is read matters."""


def arrays(rows: int = 60, *, episode: int = 20, scale: float = 2.0, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    obs = rng.uniform(-1, 1, (rows, 3)).astype(np.float32)
    return {
        "observations": obs,
        "next_observations": np.roll(obs, -1, axis=0),
        "actions": rng.uniform(-scale, scale, (rows, 1)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminals": np.zeros(rows, bool),
        "timeouts": np.arange(rows) % episode == episode - 1,
    }


def npz(path: Path, **changes: Any) -> Path:
    np.savez(path, **(arrays() | changes))
    return path


def lerobot(folder: Path) -> Path:
    """A LeRobot dataset as other tools write it, without Etude's spaces."""
    convert(npz(folder.with_suffix(".npz")), folder, "lerobot")
    info = folder / "meta" / "info.json"
    told = json.loads(info.read_text())
    del told["etude"]
    info.write_text(json.dumps(told))
    return folder


def rllib_table(folder: Path) -> Path:
    convert(npz(folder.with_suffix(".npz")), folder, "rllib-table")
    return folder


def inferred(folder: Path) -> Path:
    """A recording of Etude's, converted from data without spaces."""
    convert(npz(folder.with_suffix(".npz")), folder)
    return folder


def table(_: Path) -> Source:
    """One number an action, as a column of a table."""
    found = arrays()
    columns: dict[str, Any] = {name: pa.array(values) for name, values in found.items() if values.ndim == 1}
    columns |= {f"s{i}": pa.array(found["observations"][:, i].astype(np.float64)) for i in range(3)}
    columns["torque"] = pa.array(found["actions"][:, 0].astype(np.float64))
    names = {"obs": ["s0", "s1", "s2"], "action": "torque", "reward": "rewards", "truncated": "timeouts"}
    return Source(pa.table(columns), names)


KINDS = {"npz": npz, "lerobot": lerobot, "rllib-table": rllib_table, "etude-recording": inferred, "table": table}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_steps_with_the_given_spaces(kind: str, tmp_path: Path) -> None:
    data: Any = KINDS[kind](tmp_path / ("a.npz" if kind == "npz" else "a"))
    plain, given = Recording.open(data), Recording.open(data, **SPACES)
    assert plain.format == given.format == kind
    assert not np.isfinite(plain.action_space.high).any()  # type: ignore[attr-defined]
    assert (given.obs_space, given.action_space) == (OBS, ACTION)
    assert not {"obs", "action"} & set(given.meta.get("inferred", ()))
    first, second = plain.read(), given.read()
    assert second.steps["action"].shape == (60, 1)
    for name in ("obs", "action", "reward"):
        np.testing.assert_array_equal(first.steps[name].reshape(second.steps[name].shape), second.steps[name])
    np.testing.assert_array_equal(second.steps["action"], arrays()["actions"])
    np.testing.assert_array_equal(first.offsets, second.offsets)
    again = pickle.loads(pickle.dumps(given))  # noqa: S301 - as for a worker
    np.testing.assert_array_equal(next(again.batches(8, seed=1))["action"], next(given.batches(8, seed=1))["action"])
    filtered = given.read(filter="reward > 0")
    np.testing.assert_array_equal(filtered.steps["reward"], first.steps["reward"][first.steps["reward"] > 0])


def test_data_that_states_its_spaces_takes_no_others(tmp_path: Path) -> None:
    convert(Recording.open(npz(tmp_path / "a.npz"), **SPACES), tmp_path / "own")
    assert Recording.open(tmp_path / "own", **SPACES).action_space == ACTION
    with pytest.raises(DataError, match="states its `action` space, Box.*leave out action_space=Box"):
        Recording.open(tmp_path / "own", action_space=Box(-9, 9, (1,)))
    held = Source(
        arrays() | {"obs": arrays()["observations"]}, {"obs": "obs", "action": "actions", "truncated": "timeouts"}
    )
    with pytest.raises(DataError, match="states its `obs` space"):
        Recording.open(dataclasses.replace(held, obs_space=OBS), obs_space=Box(-9, 9, (3,)))


@pytest.mark.parametrize("space", [Box(-2, 2, (2,)), Discrete(3), gym.spaces.Dict(a=ACTION)])
def test_spaces_that_do_not_fit(space: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.npz: its `action` looks like Box.* does not fit the space given"):
        Recording.open(npz(tmp_path / "a.npz"), action_space=space)


def test_whole_numbers_are_held_by_their_space_or_refused(tmp_path: Path) -> None:
    whole = np.arange(60, dtype=np.int64)[:, None] * 10
    path = npz(tmp_path / "a.npz", observations=whole, next_observations=whole)
    space = Box(0, 255, (1,), np.uint8)
    with pytest.raises(DataError, match="`obs` has numbers that its space, Box.*can't hold"):
        Recording.open(path, obs_space=space).read()
    path = npz(tmp_path / "b.npz", observations=whole // 10, next_observations=whole // 10)
    read = Recording.open(path, obs_space=space).read()
    assert read.steps["obs"].dtype == np.uint8
    assert read.steps["obs"].tolist() == (whole // 10).tolist()


def test_choices_that_no_row_has(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", actions=np.arange(60) % 2)
    assert Recording.open(path).action_space == Discrete(2)
    assert Recording.open(path, action_space=Discrete(4)).action_space == Discrete(4)
    with pytest.raises(DataError, match="outside its space"):
        Recording.open(npz(tmp_path / "b.npz", actions=np.arange(60) % 5), action_space=Discrete(4)).read()
    path = npz(tmp_path / "c.npz", actions=np.arange(120).reshape(60, 2) % 3)
    assert Recording.open(path, action_space=MultiDiscrete([3, 7])).action_space == MultiDiscrete([3, 7])


@pytest.mark.parametrize("on_bad", ["strict", "repair", "skip"])
def test_actions_in_other_units_are_warned_of(on_bad: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Actions of twice the env's range, and with a rounding error at the bound."""
    with caplog.at_level(logging.WARNING, "etude.recordings"):
        assert (
            Recording.open(npz(tmp_path / "a.npz", **arrays(scale=4)), on_bad=on_bad, **SPACES).read().num_steps == 60
        )
        assert "`action` is" in caplog.text
        assert "outside the bounds" in caplog.text
        caplog.clear()
        actions = arrays()["actions"]
        actions[0] = 2.0000005
        Recording.open(npz(tmp_path / "b.npz", actions=actions), on_bad=on_bad, **SPACES).read()
        Recording.open(npz(tmp_path / "c.npz", **arrays(scale=4)), on_bad=on_bad).read()
        assert "bounds" not in caplog.text


def test_algorithms_take_the_spaces_of_their_env(tmp_path: Path) -> None:
    path = str(npz(tmp_path / "a.npz"))
    with pytest.raises(SpaceError, match=r"set `env`, whose spaces it gets, or open it with Recording\.open"):
        etude.TD3BC(etude.TD3BCConfig(data=path))
    config: dict[str, Any] = {"env": "Pendulum-v1", "batch_size": 16, "seed": 0}
    td3_bc = etude.TD3BC(etude.TD3BCConfig(data=path, updates_per_iteration=2, on_bad="repair", **config))
    td3_bc.train()
    td3_bc.save(tmp_path / "run")
    again = etude.load(tmp_path / "run")
    assert again.policy.action_space == ACTION
    again.train()
    bc = etude.BC(
        etude.BCConfig(
            data=path, updates_per_iteration=2, evaluation=etude.EvaluationConfig(interval=1, episodes=1), **config
        )
    )
    assert bc.train().evaluation is not None
    etude.BC(etude.BCConfig(data=path)).save(tmp_path / "blind")
    with pytest.raises(SettingsError, match="does not state the bounds of actions: set `env` when training begins"):
        etude.load(tmp_path / "blind", env="Pendulum-v1").evaluate(1)


def test_an_env_object_is_not_closed_for_its_spaces(tmp_path: Path) -> None:
    class Closing(gym.Wrapper[Any, Any, Any, Any]):
        closed = False

        def close(self) -> None:
            self.closed = True

    env = Closing(gym.make("Pendulum-v1"))
    bc = etude.BC(
        etude.BCConfig(data=str(npz(tmp_path / "a.npz")), env=env, evaluation=etude.EvaluationConfig(interval=0))
    )
    assert bc.recording.action_space == ACTION
    assert not env.closed


def test_data_of_another_env_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"its `obs` looks like .*, which does not fit the space given \(if there is an `env`"
    ):
        etude.BC(etude.BCConfig(data=str(npz(tmp_path / "a.npz")), env="MountainCarContinuous-v0"))


def test_an_open_recording_takes_the_spaces_of_the_env(tmp_path: Path) -> None:
    opened = Recording.open(npz(tmp_path / "a.npz"), on_bad="repair")
    td3_bc = etude.TD3BC(etude.TD3BCConfig(data=opened, env="Pendulum-v1"))
    assert (td3_bc.recording.action_space, td3_bc.recording.leaves_out) == (ACTION, True)
    given = Recording.open(npz(tmp_path / "a.npz"), **SPACES)
    assert etude.BC(etude.BCConfig(data=given, env="Pendulum-v1")).recording is given


def test_recordings_of_several_kinds_have_one_dtype(tmp_path: Path) -> None:
    """One was converted from a table of float64, and the other is such a table."""
    convert(table(tmp_path), tmp_path / "own")
    bc = etude.BC(etude.BCConfig(data=[str(tmp_path / "own"), table(tmp_path)], env="Pendulum-v1"))
    assert bc.recording.read().steps["obs"].dtype == np.float32
    assert bc.recording.num_steps == 120


def test_actions_that_rllib_maps_to_bounds_are_not_taken_for_those_of_the_env(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RLlib records actions from -1 to 1, and maps them to the env's bounds afterwards."""
    actions = arrays(scale=1)["actions"]
    convert(npz(tmp_path / "a.npz", actions=actions), tmp_path / "rllib", "rllib-table")
    with pytest.raises(SettingsError, match=r"put a connector such as rescale_action between"):
        etude.BC(etude.BCConfig(data=str(tmp_path / "rllib"), env="Pendulum-v1", evaluation_interval=1))
    config = {"data": str(tmp_path / "rllib"), "env": "Pendulum-v1", "connectors": ("rescale_action",)}
    bc = etude.BC(etude.BCConfig(**config, evaluation_interval=1))
    assert bc.recording.action_space == bc.policy.module.action_space == Box(-1, 1, (1,))
    assert Recording.open(tmp_path / "rllib", action_space=ACTION).action_space == ACTION
    convert(Recording.open(npz(tmp_path / "b.npz", actions=actions), **SPACES), tmp_path / "episodes", "rllib-episodes")
    with caplog.at_level(logging.WARNING, "etude.recordings"):
        etude.BC(etude.BCConfig(data=str(tmp_path / "episodes"), env="Pendulum-v1"))
        assert "add the connector `rescale_action`" in caplog.text
        caplog.clear()
        etude.BC(etude.BCConfig(data=str(tmp_path / "episodes")))  # to be served, where no env shows it
    assert "add the connector `rescale_action`" in caplog.text
    caplog.clear()
    opened = Recording.open(tmp_path / "episodes", action_space=Box(-1, 1, (1,)))
    with caplog.at_level(logging.WARNING, "etude.recordings"):
        bc = etude.BC(etude.BCConfig(**config | {"data": opened}, evaluation_interval=1))
    assert bc.recording.action_space == Box(-1, 1, (1,))
    assert not caplog.text


def test_images_of_bytes_are_not_those_of_fractions(tmp_path: Path) -> None:
    images = np.zeros((60, 4, 4, 1), np.uint8)
    path = npz(tmp_path / "a.npz", observations=images, next_observations=images)
    with pytest.raises(DataError, match="does not fit the space given"):
        Recording.open(path, obs_space=Box(0, 1, (4, 4, 1), np.float32))
    assert Recording.open(path, obs_space=Box(0, 255, (4, 4, 1), np.uint8)).read().steps["obs"].dtype == np.uint8


def test_a_recording_of_other_precision_and_steps_of_the_env_share_a_replay(tmp_path: Path) -> None:
    recorded = Recording.open(npz(tmp_path / "a.npz"), **SPACES).read(next_obs=True)
    assert recorded.steps["reward"].dtype == np.float32
    td3 = etude.TD3(etude.TD3Config(env="Pendulum-v1", learning_starts=10_000, iteration_steps=50, seed=0))
    td3.replay.add(recorded)
    td3.train()
    assert td3.replay.num_steps == 110


def episodes(path: Path, actions: np.ndarray[Any, Any] | None = None) -> Path:
    """Episodes of RLlib, which state the env's spaces."""
    data = npz(path.with_suffix(".npz"), **({} if actions is None else {"actions": actions}))
    convert(Recording.open(data, **SPACES), path, "rllib-episodes")
    return path


def test_of_what_rllib_states_only_the_bounds_that_it_maps_to_are_replaced(tmp_path: Path) -> None:
    path = episodes(tmp_path / "a")
    for other in (Box(-9, 9, (1,)), Discrete(9)):
        with pytest.raises(DataError, match="states its `action` space"):
            Recording.open(path, action_space=other)
    assert Recording.open(path, action_space=Box(-1, 1, (1,))).action_space == Box(-1, 1, (1,))
    discrete = npz(tmp_path / "b.npz", actions=np.arange(60) % 2)
    convert(Recording.open(discrete, obs_space=OBS, action_space=Discrete(2)), tmp_path / "c", "rllib-episodes")
    with pytest.raises(DataError, match="states its `action` space, Discrete"):
        Recording.open(tmp_path / "c", action_space=Discrete(9))


def test_spaces_that_were_given_stay_when_the_env_gives_the_others(tmp_path: Path) -> None:
    convert(npz(tmp_path / "a.npz"), tmp_path / "table", "rllib-table")
    opened = Recording.open(tmp_path / "table", action_space=ACTION)
    bc = etude.BC(etude.BCConfig(data=opened, env="Pendulum-v1", evaluation_interval=1))
    assert (bc.recording.action_space, bc.recording.obs_space) == (ACTION, OBS)
    wide = Recording.open(npz(tmp_path / "b.npz"), obs_space=Box(-5, 5, (3,)))
    td3_bc = etude.TD3BC(etude.TD3BCConfig(data=wide, env="Pendulum-v1"))
    assert (td3_bc.recording.action_space, td3_bc.recording.obs_space) == (ACTION, Box(-5, 5, (3,)))


def test_an_open_recording_is_not_opened_again_for_nothing(tmp_path: Path) -> None:
    opened = Recording.open(npz(tmp_path / "a.npz"))
    assert etude.BC(etude.BCConfig(data=opened)).recording is opened
    stated = Recording.open(episodes(tmp_path / "b"))
    assert etude.BC(etude.BCConfig(data=stated, env="Pendulum-v1")).recording is stated


def test_a_run_goes_on_by_path_with_the_spaces_it_was_given(tmp_path: Path) -> None:
    path = episodes(tmp_path / "a", arrays(scale=1)["actions"])
    opened = Recording.open(path, action_space=Box(-1, 1, (1,)))
    config: dict[str, Any] = {"env": "Pendulum-v1", "connectors": ("rescale_action",), "updates_per_iteration": 2}
    bc = etude.BC(etude.BCConfig(data=opened, **config))
    bc.train()
    bc.save(tmp_path / "run")
    again = etude.load(tmp_path / "run", data=str(path))
    again.train()
    assert again.recording.action_space == Box(-1, 1, (1,))


def test_a_run_goes_on_with_a_recording_that_is_open_without_spaces(tmp_path: Path) -> None:
    """It learned from actions of RLlib that are the env's, as was said when the recording was opened."""
    convert(npz(tmp_path / "a.npz"), tmp_path / "table", "rllib-table")
    opened = Recording.open(tmp_path / "table", action_space=ACTION)
    config: dict[str, Any] = {"env": "Pendulum-v1", "updates_per_iteration": 2}
    etude.BC(etude.BCConfig(data=opened, **config)).save(tmp_path / "run")
    again = etude.load(tmp_path / "run", data=Recording.open(tmp_path / "table"))
    assert again.recording.action_space == ACTION


def test_off_policy_evaluation_takes_actions_that_rllib_maps_for_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(npz(tmp_path / "a.npz", actions=arrays(scale=1)["actions"]), tmp_path / "table", "rllib-table")
    ppo = etude.PPO(etude.PPOConfig(env="Pendulum-v1", seed=0))
    with pytest.raises(DataError, match=r"Box\(-1\.0, 1\.0"):
        evaluate_on(ppo, str(tmp_path / "table"), **QUICKLY)
    with caplog.at_level(logging.WARNING, "etude.recordings"):
        evaluate_on(ppo, str(episodes(tmp_path / "b")), **QUICKLY)
    assert "RLlib records such actions" in caplog.text


def test_bounds_as_large_as_the_largest_number(tmp_path: Path) -> None:
    largest = np.finfo(np.float32).max
    space = Box(-largest, largest, (3,), np.float32)
    assert Recording.open(npz(tmp_path / "a.npz"), obs_space=space, action_space=ACTION).read().num_steps == 60


def test_bytes_that_are_no_images_fit_numbers(tmp_path: Path) -> None:
    """One choice among several, as vectors of 0 and 1."""
    chosen = np.eye(4, dtype=np.uint8)[np.arange(60) % 4]
    path = npz(tmp_path / "a.npz", observations=chosen, next_observations=np.roll(chosen, -1, axis=0))
    read = Recording.open(path, obs_space=Box(0, 1, (4,), np.float32)).read()
    assert read.steps["obs"].dtype == np.float32
    np.testing.assert_array_equal(read.steps["obs"], chosen)


class WideEnv(gym.Env[Any, Any]):
    """An env with actions and observations in float64."""

    observation_space = Box(-1, 1, (3,), np.float64)
    action_space = Box(-2, 2, (1,), np.float64)


def test_the_spaces_that_rllib_maps_to_may_be_given_in_another_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = {"obs_space": Box(-1, 1, (3,), np.float64), "action_space": Box(-2, 2, (1,), np.float64)}
    found = {name: own.astype(np.float64) if own.dtype.kind == "f" else own for name, own in arrays(scale=1).items()}
    convert(Recording.open(npz(tmp_path / "a.npz", **found), **wide), tmp_path / "b", "rllib-episodes")
    with caplog.at_level(logging.WARNING, "etude.recordings"):
        Recording.open(tmp_path / "b").warn_of_mapped_actions()
    assert 'data=Recording.open(path, action_space=Box(-1.0, 1.0, (1,), "float64")) and add' in caplog.text
    told: dict[str, Any] = {"env": WideEnv, "connectors": ("rescale_action",), "evaluation_interval": 1}
    as_told = Recording.open(tmp_path / "b", action_space=Box(-1.0, 1.0, (1,), "float64"))  # type: ignore[arg-type]
    assert etude.BC(etude.BCConfig(data=as_told, **told)).spaces["main"][1] == wide["action_space"]
    opened = Recording.open(tmp_path / "b", action_space=Box(-1.0, 1.0, (1,)))
    assert opened.action_space == Box(-1, 1, (1,), np.float32)
    assert opened.read().steps["action"].dtype == np.float32
    with pytest.raises(DataError, match="states its `action` space"):
        Recording.open(tmp_path / "b", action_space=Box(-0.5, 1, (1,)))


def test_fractions_as_choices_are_told_what_to_do(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", actions=(np.arange(60) % 3).astype(np.float32)[:, None])
    with pytest.raises(DataError, match=r"Discrete\(3\)\. If these are choices, convert them to integers\.$"):
        Recording.open(path, action_space=Discrete(3))


def test_validate_checks_by_the_spaces_that_were_given(tmp_path: Path) -> None:
    opened = Recording.open(npz(tmp_path / "a.npz", actions=np.arange(60) % 4), action_space=Discrete(3))
    with pytest.raises(DataError, match=r"`etude data validate \S*a\.npz --env ENV` lists all problems"):
        opened.read()
    assert [problem.kind for problem in opened.validate().errors] == ["out_of_space"]
    assert validate(tmp_path / "a.npz").ok
    assert not validate(tmp_path / "a.npz", action_space=Discrete(3)).ok
    with pytest.raises(DataError, match="does not fit the space given"):
        validate(tmp_path / "a.npz", action_space=Box(-2, 2, (2,)))
    data = arrays(scale=4)
    data["observations"][7] = data["next_observations"][6] = 100
    beyond = Recording.open(npz(tmp_path / "b.npz", **data), **SPACES)
    obs, action = beyond.validate().warnings[:2]
    assert (obs.kind, obs.column, action.kind, action.column) == ("out_of_bounds", "obs", "out_of_bounds", "action")
    assert "Recording.open(path, obs_space=...)" in obs.message
    assert "Recording.open(path, action_space=...)" in action.message
    source = dataclasses.replace(table(tmp_path), obs_space=OBS)
    assert Recording.open(source, action_space=ACTION).validate().ok


def test_actions_beyond_the_bounds_that_a_recording_states_are_no_fault_beside_a_source(tmp_path: Path) -> None:
    columns = {"obs": np.zeros((3, 3), np.float32), "action": np.full((3, 1), 5, np.float32)}
    source = Source(columns | {"terminated": [False, False, True]}, obs_space=OBS, action_space=ACTION)
    convert(Recording.open(source), tmp_path / "own")
    inside = dataclasses.replace(source, data=columns | {"action": columns["action"] / 5, "terminated": [True] * 3})
    assert not Recording.open([tmp_path / "own", inside]).validate().warnings


def test_values_are_checked_by_the_bounds_of_a_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"obs": [0.5, 30.0, 0.1], "action": [0.2, 0.9, 70.0], "terminated": [False, False, True]}
    share = Box(0, 1, (), np.float32)
    for told in ({"action"}, {"obs", "action"}):
        source = Source(columns, **{f"{name}_space": share for name in told})
        found = Recording.open(source).validate()
        assert {(p.kind, p.column) for p in found.warnings} == {("out_of_bounds", name) for name in told}
        caplog.clear()
        converted = convert(Recording.open(source), tmp_path / str(len(told)))
        assert {name for name in ("obs", "action") if f"column `{name}` is" in caplog.text} == told
        assert not converted.validate().warnings  # the data states its spaces now


def test_what_is_left_out_of_an_open_recording_is_told_by_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Although the algorithm reads it by its env's spaces; what was told when it was opened is not told again."""
    data = arrays()
    data["observations"][7] = np.nan
    opened = Recording.open(npz(tmp_path / "a.npz", **data), on_bad="repair")
    assert opened.left_out == {}
    config: dict[str, Any] = {"env": "Pendulum-v1", "batch_size": 16, "updates_per_iteration": 2}
    bc = etude.BC(etude.BCConfig(data=opened, **config))
    with caplog.at_level(logging.WARNING, "etude.recordings"):
        bc.train()
        assert bc.recording is not opened
        assert opened.left_out == bc.recording.left_out == {"nan": 2}
        opened.read()
        assert opened.left_out == {"nan": 2}
        assert caplog.text.count("is not the `obs` of the step that follows") == 1
        caplog.clear()
        actions = (np.arange(60) % 3).astype(np.float32)
        chosen = Recording.open(npz(tmp_path / "b.npz", actions=actions))
        bc = etude.BC(etude.BCConfig(data=chosen, **config))
        assert bc.recording.action_space == ACTION
        assert caplog.text.count("they are read as continuous") == 1


class Debugged(gym.Env[Any, Any]):
    """Shows more than is recorded."""

    def __init__(self) -> None:
        part = Box(-20, 20, (1,), np.float32)
        self.observation_space = gym.spaces.Dict(x=part, y=part, debug=part)
        self.action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, True, False, {}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("has_part", [False, True])
def test_parts_that_are_dropped_need_not_be_recorded(is_open: bool, has_part: bool) -> None:
    data: dict[str, Any] = {name: np.arange(60.0)[:, None] % 5 for name in ("x", "y", "debug")}
    data |= {"a": np.arange(60) % 2, "r": np.zeros(60), "done": np.arange(60) % 20 == 19}
    parts = ("x", "y", "debug") if has_part else ("x", "y")
    source = Source(
        data, {f"obs/{name}": name for name in parts} | {"action": "a", "reward": "r", "terminated": "done"}
    )
    opened: Any = Recording.open(source) if is_open else source
    bc = etude.BC(
        etude.BCConfig(data=opened, env=Debugged, connectors=("drop:debug",), batch_size=16, evaluation_interval=1)
    )
    assert list(bc.recording.obs_space.spaces) == list(parts)  # type: ignore[attr-defined]
    assert list(bc.policy.module.obs_space.spaces) == ["x", "y"]  # type: ignore[attr-defined]
    assert bc.recording.obs_space["x"] == Box(-20, 20, (1,), np.float32)  # type: ignore[index]
    assert bc.train().evaluation is not None


HEAT = {"obs": ["temp", "flow"], "action": "a", "reward": "r", "episode_id": "batch", "terminated": "last-row"}


def heated(seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    numbers = {"temp": rng.uniform(0, 80, 40), "flow": rng.random(40), "r": rng.random(40)}
    choices = {name: np.append(rng.integers(0, 4, 39), 4) for name in ("iv", "vaso")}
    return pa.table(numbers | choices | {"a": rng.integers(0, 2, 40), "batch": np.arange(40) // 10})


@pytest.mark.parametrize("swapped", ["obs", "action", "parts", "choices"])
def test_columns_in_another_order_are_refused_wherever_a_policy_meets_them(swapped: str, tmp_path: Path) -> None:
    changed: dict[str, dict[str, Any]] = {
        "obs": {"obs": ["temp", "flow"]},
        "parts": {"obs": ["temp", "a", "flow"]},
        "action": {"obs": "r", "action": ["temp", "flow"]},
        "choices": {"action": ["iv", "vaso"]},
    }
    columns = HEAT | changed[swapped]
    root = "obs" if swapped in ("obs", "parts") else "action"
    other = columns | {root: columns[root][::-1]}
    words = pa.array(["x", "y"] * 20)
    tables = [table.drop_columns("a").append_column("a", words) for table in map(heated, (0, 1))]
    right, wrong = Source(tables[1], columns), Source(tables[1], other)
    bc = etude.BC(etude.BCConfig(data=Source(tables[0], columns), batch_size=8, updates_per_iteration=1))
    bc.save(tmp_path / "run")
    convert(Source(tables[0], columns), tmp_path / "first")
    convert(right, tmp_path / "right")
    convert(wrong, tmp_path / "wrong")
    for good, bad in ((right, wrong), (str(tmp_path / "right"), str(tmp_path / "wrong"))):
        evaluate_on(bc, good, **QUICKLY)
        with pytest.raises(DataError, match=r"in another order|Map the columns in the same order"):
            evaluate_on(bc, bad, **QUICKLY)
        etude.load(tmp_path / "run", data=good).train()
        with pytest.raises(DataError, match=r"in another order|Map the columns in the same order"):
            etude.load(tmp_path / "run", data=bad).train()
    assert Recording.open([tmp_path / "first", tmp_path / "right"]).num_steps == 80
    with pytest.raises(DataError, match="can't be read as one recording"):
        Recording.open([tmp_path / "first", tmp_path / "wrong"])
    with pytest.raises(DataError, match="Only recordings of equal spaces and units can be merged"):
        merge_recordings([tmp_path / "first", tmp_path / "wrong"], tmp_path / "merged")


def test_columns_of_other_names_are_read(tmp_path: Path) -> None:
    """An export that names its columns anew can't be told from one with others."""
    bc = etude.BC(etude.BCConfig(data=Source(heated(0), HEAT), batch_size=8, updates_per_iteration=1))
    table = heated(1).rename_columns(["TI101", "FI101", *heated(1).column_names[2:]])
    evaluate_on(bc, Source(table, HEAT | {"obs": ["TI101", "FI101"]}), **QUICKLY)


def test_a_column_that_is_not_known_before_the_action_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "r"):
        caplog.clear()
        Recording.open(Source(heated(0), HEAT | {"obs": ["temp", name]}))
        assert f"column `{name}` is mapped as both `obs` and `{'action' if name == 'a' else 'reward'}`" in caplog.text
    caplog.clear()
    Recording.open(Source(heated(0), HEAT))
    assert not caplog.text


def test_what_learned_from_columns_plays_and_goes_with_recordings_of_the_env(tmp_path: Path) -> None:
    ppo = etude.PPO(etude.PPOConfig(env="CartPole-v1", seed=0, num_envs=1))
    ppo.record(tmp_path / "played", num_episodes=4, seed=0, explore=True)
    exp = Recording.open(tmp_path / "played").read()
    names = ["x", "v", "angle", "w"]
    table = pa.table({name: exp.steps["obs"][:, i] for i, name in enumerate(names)}).append_column(
        "a", pa.array(exp.steps["action"])
    )
    table = table.append_column("r", pa.array(exp.steps["reward"]))
    table = table.append_column("ep", pa.array(exp.segment_of_step()))
    columns = {"obs": names, "action": "a", "reward": "r", "episode_id": "ep", "terminated": "last-row"}
    config = etude.BCConfig(data=Source(table, columns), env="CartPole-v1", batch_size=8, updates_per_iteration=1)
    bc = etude.BC(dataclasses.replace(config, evaluation=etude.EvaluationConfig(interval=1, episodes=1)))
    bc.train()
    assert bc.evaluate(2).episodes == 2
    bc.record(tmp_path / "cloned", num_episodes=2, seed=0)
    spaced = Source(table, columns, obs_space=ppo.spaces["main"][0], action_space=ppo.spaces["main"][1])
    convert(spaced, tmp_path / "table")
    assert Recording.open(tmp_path / "table").obs_space.names == tuple(names)  # type: ignore[attr-defined]
    merged = merge_recordings([tmp_path / "played", tmp_path / "cloned", tmp_path / "table"], tmp_path / "all")
    assert merged is not None
    assert Recording.open(tmp_path / "all").num_episodes == 10


@pytest.mark.parametrize(("most", "is_told"), [(0.999, True), (1.7, False), (0.4, False)])
def test_actions_that_were_scaled_before_they_were_stored_are_told_of(
    most: float, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Replay buffers of Stable-Baselines3 hold the actions of SAC and TD3 in [-1, 1]."""
    actions = np.random.default_rng(0).uniform(-most, most, (60, 1)).astype(np.float32)
    actions[7] = most
    etude.BC(etude.BCConfig(data=npz(tmp_path / "a.npz", actions=actions), env="Pendulum-v1", batch_size=8))
    assert ("actions may be in [-1, 1], as a policy chose them" in caplog.text) is is_told
