# SPDX-License-Identifier: Apache-2.0
"""Recordings say whether the env got their actions as they are; what does not agree is not joined."""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import some_rllib_table
from gymnasium.spaces import Box, Discrete

import etude
from etude.cli.main import main
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, Source, convert, filter_recording, merge_recordings
from etude.recordings.action_units import of_modules
from etude.spaces import NamedDiscrete, space_to_json

OBS, INSIDE = Box(-np.inf, np.inf, (3,)), Box(-1, 1, (1,))
RESCALE = ("rescale_action",)


def steps(num: int = 30) -> Experience:
    rng = np.random.default_rng(num)
    columns = {
        "obs": rng.normal(size=(num, 3)).astype(np.float32),
        "action": rng.uniform(-1, 1, (num, 1)).astype(np.float32),
        "reward": rng.normal(size=num).astype(np.float32),
    }
    segments = Segments.of(1, episode_id=[f"e{num}"], terminated=np.ones(1, bool))
    return Experience(columns, np.asarray([0, num]), segments, {"obs": np.zeros((1, 3), np.float32)})


def write(path: Path, outside: float | None, *, by_name: bool = False, **options: Any) -> Path:
    """Actions from -1 to 1, which connectors mapped to bounds ``outside``, or to none."""
    meta: dict[str, Any] = {}
    if outside is not None:
        space = space_to_json(Box(-outside, outside, (1,)))
        meta = {"env_action_space": {"red": space, "blue": space} if by_name else space}
    with RecordingWriter(path, obs_space=OBS, action_space=INSIDE, meta=meta, **options) as writer:
        writer.write(steps(30 + len(list(path.glob("*.parquet")))))
    return path


@pytest.mark.parametrize("other", [10.0, None])
def test_recordings_of_other_units_are_not_joined(other: float | None, tmp_path: Path) -> None:
    both = [write(tmp_path / "a", 2.0), write(tmp_path / "b", other)]
    with pytest.raises(
        DataError, match=r"before connectors mapped them to Box\(-2\.0, 2\.0.* equal spaces and units can be merged"
    ):
        merge_recordings(both, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(DataError, match=r"can't be read as one recording: the actions of the first are as they were"):
        Recording.open(both)
    with pytest.raises(DataError, match=r"its actions are .*, rather than "):
        write(both[0], other, append=True)
    assert Recording.open(both[0]).num_steps == 30
    write(both[0], 2.0, append=True)
    assert Recording.open(both[0]).num_steps == 61


def test_one_space_of_several_modules_is_the_same_as_one_space(tmp_path: Path) -> None:
    both = [write(tmp_path / "a", 2.0), write(tmp_path / "b", 2.0, by_name=True)]
    merge_recordings(both, tmp_path / "c")
    for data in (tmp_path / "c", both):
        assert Recording.open(data).meta["env_action_space"] == space_to_json(Box(-2, 2, (1,)))
        clone = etude.BC(etude.BCConfig(data=Recording.open(data), connectors=RESCALE, seed=0))
        assert clone.policy.action_space == Box(-2, 2, (1,))


def test_bounds_that_are_those_of_the_module_change_no_units(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An env whose actions are from -1 to 1 gets what `rescale_action` gets."""

    class Unit(gym.Env[Any, Any]):
        observation_space, action_space = Box(-9, 9, (3,)), INSIDE

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(3, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(3, np.float32), 0.0, bool(self.np_random.random() < 0.2), False, {}

    etude.PPO(etude.PPOConfig(env=Unit, connectors=RESCALE, num_envs=1, seed=0)).record(tmp_path / "a", 2, seed=1)
    clone = etude.BC(etude.BCConfig(data=str(tmp_path / "a"), connectors=RESCALE, seed=0))
    assert clone.policy.action_space == INSIDE
    assert "before connectors mapped them" not in caplog.text
    plain = etude.PPO(etude.PPOConfig(env=Unit, num_envs=1, seed=0))
    plain.record(tmp_path / "b", 2, seed=1)
    merge_recordings([tmp_path / "a", tmp_path / "b"], tmp_path / "c")


@pytest.mark.parametrize("alike", [False, True])
def test_a_module_that_does_not_map_actions_has_its_own_bounds(
    alike: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Modules with equal spaces share a recording; others have folders."""

    class Two:
        def __init__(self) -> None:
            self.possible_agents = ["x", "y"]
            self.observation_spaces = {"x": Box(-9, 9, (3,)), "y": Box(-9, 9, (3 if alike else 2,))}
            self.action_spaces = {"x": Box(-5, 5, (1,)), "y": INSIDE}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {agent: np.zeros(space.shape, np.float32) for agent, space in self.observation_spaces.items()}, {}

        def step(self, action: Any) -> Any:
            return self.reset()[0], dict.fromkeys(action, 0.0), {"__all__": True}, {}, {}

    both: Any = {"modules": ("x", "y"), "overrides": {"x": {"connectors": RESCALE}}}
    etude.PPO(etude.PPOConfig(env=Two, num_envs=1, seed=0, **both)).record(tmp_path / "a", 2, seed=1)
    found = {}
    if alike:
        data = {"data": str(tmp_path / "a"), "modules": ("x", "y")}
        clone = etude.BC(etude.BCConfig(**data, connectors=RESCALE, seed=0))
        found = {name: policy.action_space for name, policy in clone.policies.items()}
    for name in () if alike else both["modules"]:
        data = {"data": str(tmp_path / "a" / name)}
        found[name] = etude.BC(etude.BCConfig(**data, connectors=RESCALE, seed=0)).policy.action_space
    assert found == Two().action_spaces
    if not alike:
        etude.BC(etude.BCConfig(data=str(tmp_path / "a" / "y"), seed=0))
        notes = convert(tmp_path / "a" / "y", tmp_path / "y-v0", "minari").notes
        assert "before connectors" not in f"{caplog.text} {notes}"


def test_a_module_that_was_removed_from_the_run_changes_no_units() -> None:
    meta = {"env_action_space": {"x": space_to_json(Box(-5, 5, (1,)))}, "connectors": {"x": ["RescaleAction()"]}}
    assert of_modules(["x", "removed"], meta, INSIDE) == meta


def test_formats_that_can_not_say_the_units_are_named(tmp_path: Path) -> None:
    found = convert(write(tmp_path / "b", 2.0), tmp_path / "b-v0", "minari")
    assert any("minari can't say that they are as they were before connectors" in note for note in found.notes)
    # RLlib's own, whose units are not known
    stated = tmp_path / "stated"
    with RecordingWriter(stated, obs_space=OBS, action_space=Box(-2, 2, (1,))) as writer:
        writer.write(steps())
    convert(stated, tmp_path / "rllib", "rllib-episodes")
    found = convert(tmp_path / "rllib", tmp_path / "c-v0", "minari")
    assert any("RLlib may have mapped them" in note for note in found.notes)
    with pytest.raises(DataError, match="equal spaces and units can be merged"):
        merge_recordings([stated, tmp_path / "rllib"], tmp_path / "d")
    merge_recordings([stated, Recording.open(tmp_path / "rllib", action_space=Box(-2, 2, (1,)))], tmp_path / "d")


def test_bounds_that_rllib_maps_to_are_kept_when_its_data_is_converted(tmp_path: Path) -> None:
    convert(write(tmp_path / "a", None), tmp_path / "rllib", "rllib-table")
    table = Recording.open(tmp_path / "rllib", action_space=INSIDE)
    assert "env_action_space" not in table.meta
    assert main(["data", "convert", str(tmp_path / "rllib"), str(tmp_path / "own"), "--env", "Pendulum-v1"]) == 0
    own = Recording.open(tmp_path / "own")
    assert own.action_space == INSIDE
    clone = etude.BC(etude.BCConfig(data=own, connectors=RESCALE, seed=0))
    assert clone.policy.action_space == Box(-2, 2, (1,))
    assert own.header.units == Recording.open(write(tmp_path / "b", 2.0)).header.units


def test_rewritten_actions_need_their_space_if_connectors_map_them(tmp_path: Path) -> None:
    """pandas drops what says that they are those of the module."""
    write(tmp_path / "a", 2.0)
    (tmp_path / "b").mkdir()
    pd.read_parquet(tmp_path / "a").to_parquet(tmp_path / "b" / "all.parquet")
    config = {"env": "Pendulum-v1", "evaluation_interval": 0, "seed": 0}
    with pytest.raises(DataError, match=r"rewritten it, and dropped what says whether its actions .* Give their space"):
        etude.BC(etude.BCConfig(data=str(tmp_path / "b"), connectors=RESCALE, **config))
    etude.BC(etude.BCConfig(data=str(tmp_path / "b"), **config))  # acts as recorded, whichever units these are
    for space, factor in ((INSIDE, 1.0), (Box(-2, 2, (1,)), 0.5)):
        data = Recording.open(Source(str(tmp_path / "b"), preset="etude", action_space=space))
        bc = etude.BC(etude.BCConfig(data=data, connectors=RESCALE, batch_size=30, **config))
        batch = next(bc.opened_feeds()["main"].take(1))
        np.testing.assert_allclose(
            np.sort(batch["action"].ravel()), np.sort(steps().steps["action"].ravel() * factor), atol=1e-6
        )


def test_a_part_that_another_tool_has_rewritten_has_the_units_of_the_others(tmp_path: Path) -> None:
    for outside in (2.0, None):
        own, rest, new = (tmp_path / f"{name}-{outside}" for name in ("own", "rest", "new"))
        write(own, outside)
        write(rest, outside, append=True)
        new.mkdir()
        pd.read_parquet(rest).to_parquet(new / "all.parquet")
        both = Recording.open([own, new])
        assert both.header.units == Recording.open(own).header.units
        assert both.num_steps == 60


def test_names_and_dtypes_of_choices_are_no_units(tmp_path: Path) -> None:
    path = some_rllib_table.write(tmp_path / "a.parquet", some_rllib_table.rows_of([9, 12])).parent
    for space in (Discrete(2), Discrete(2, dtype=np.int32), NamedDiscrete(("left", "right"))):
        opened = Recording.open(path, action_space=space)
        assert opened.action_space == space
        assert opened.header.units == "those that the env got"


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "float64", "bool"])
def test_masks_of_tables_are_zeros_and_ones(dtype: str) -> None:
    allowed = np.asarray([[1, 1, 0], [0, 1, 1], [1, 0, 1]] * 10)
    table = {"age": np.arange(30.0), "allowed": allowed.astype(dtype), "arm": np.arange(30) % 3}
    columns = {"obs/age": "age", "obs/action_mask": "allowed", "action": "arm", "terminated": "every-row"}
    bc = etude.BC(etude.BCConfig(data=Source(table, columns), seed=0))
    bc.train()
    assert bc.policy.act({"age": 3.0, "action_mask": np.asarray([0, 0, 1], dtype)}) == 2


def test_what_is_inferred_in_all_recordings_is_inferred_in_the_merged_one(tmp_path: Path) -> None:
    exp = steps()
    table = {name: np.asarray(column) for name, column in exp.steps.items()}
    table |= {"done": np.arange(30) % 10 == 9}
    columns = {"obs": "obs", "action": "action", "reward": "reward", "terminated": "done"}
    sources = [Source(table, columns), Source(table, columns, obs_space=Box(-np.inf, np.inf, (3,), np.float32))]
    merge_recordings(sources, tmp_path / "c")
    filter_recording(tmp_path / "c", tmp_path / "d", min_length=1)
    bc = etude.BC(etude.BCConfig(data=str(tmp_path / "d"), env="Pendulum-v1", evaluation_interval=0, seed=0))
    assert bc.recording.action_space == Box(-2, 2, (1,))
    assert json.dumps(Recording.open(tmp_path / "c").meta["inferred"]).count("action") == 1
