# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of older versions load. Each was saved by the Etude that wrote that version, after an iteration."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import etude
from etude.checkpoints import load_tree
from etude.checkpoints.upgrades import UPGRADES, VERSION
from etude.errors import CheckpointError

FIRST, SECOND, THIRD, FOURTH = (Path(__file__).parent / f"version_{n}" for n in (1, 2, 3, 4))


def test_every_older_version_can_be_upgraded():
    assert sorted(UPGRADES) == list(range(1, VERSION))


def test_a_run_of_version_1_goes_on():
    algorithm = etude.load(FIRST)
    (path,) = FIRST.glob("state-*.safetensors")
    stored = load_file(path)
    for name, value in algorithm.module.state_dict().items():
        assert value.tolist() == stored[f"students/main/learner/module/{name}"].tolist()
    (adam,) = algorithm.get_state("optimizers")["optimizers/main"].values()
    assert adam["first_moment"].tolist() == stored["students/main/learner/optimizers/all/first_moment"].tolist()
    assert (algorithm.iteration, algorithm.env_steps, algorithm.updates) == (1, 64, 2)
    assert algorithm.connectors.metrics() == {"normalize_obs/count": 64.0}
    assert algorithm.evaluate(2, seed=1).episodes == 2
    result = algorithm.train()
    assert (result.iteration, result.env_steps, result.updates) == (2, 128, 4)
    assert result.resumed == "new episodes: the checkpoint is of an earlier version"


def test_a_part_of_a_checkpoint_of_version_1_can_be_taken():
    there, config = etude.load(FIRST), etude.load(FIRST).config
    other = etude.PPO(config)
    other.load(FIRST, "modules")
    for name, value in other.module.state_dict().items():
        assert value.tolist() == there.module.state_dict()[name].tolist()
    assert other.iteration == 0


def test_a_broken_checkpoint_of_version_1_is_named(tmp_path):
    shutil.copytree(FIRST, tmp_path / "a")
    (path,) = (tmp_path / "a").glob("state-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is broken: its content does not match its checksum"):
        etude.load(tmp_path / "a")


def test_what_is_not_laid_out_as_its_version_says_is_named(tmp_path):
    shutil.copytree(FIRST, tmp_path / "a")
    document = json.loads((FIRST / "checkpoint.json").read_text())
    del document["tree"]["students"]["main"]["learner"]
    (tmp_path / "a" / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"it says that it is of version 1, but is not laid out so \(KeyError"):
        etude.load(tmp_path / "a")


@pytest.mark.parametrize("version", [0, VERSION + 1, "2", None])
def test_other_versions_are_refused_with_what_to_do(tmp_path, version):
    document = json.loads((FIRST / "checkpoint.json").read_text()) | {"version": version, "etude": "9.1"}
    (tmp_path / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(
        CheckpointError,
        match=rf"of version {version}, written by Etude 9\.1; Etude .* reads versions 1 to {VERSION}\. Load it with an",
    ):
        load_tree(tmp_path)


def test_trees_of_version_1_that_are_not_of_algorithms_stay_as_they_are():
    document = {"tree": {"students": 3}, "meta": {"mine": 1}}
    assert UPGRADES[1](document) is document


def test_offline_algorithms_of_version_1():
    learner = {"module": {"w": 1}, "optimizers": {"all": 2}, "updates": 7, "rng": {"state": 3}}
    tree = {
        "students": {"main": {"learner": learner, "to_learner": {"connectors": []}}},
        "figures": {},
        "seed": 5,
        "counters": {"iteration": 1},
        "mine": [4],
    }
    for connectors in (None, {"connectors": [1]}):
        document = {"tree": {**tree, "connectors": connectors}, "meta": {"algorithm": "a:B"}, "state": 0}
        upgraded = UPGRADES[1](document)
        assert upgraded["state"] == 0
        assert upgraded["tree"] == {
            "modules/main": {"weights": {"w": 1}, "seq_no": 7},
            "optimizers/main": {"all": 2},
            "learners/main": {"updates": 7, "rng": {"state": 3}},
            "connectors/main": {"env": connectors, "learner": {"connectors": []}},
            "data": {"was_seen": connectors is not None},
            "figures": {},
            "seed": 5,
            "counters": {"iteration": 1},
            "mine": [4],
        }


def test_a_run_of_version_2_goes_on(tmp_path):
    algorithm = etude.load(SECOND)
    assert algorithm.config.mode == "stream"  # it said in_memory=False
    gae, weights = algorithm.learner.only.connectors.connectors
    assert (gae.name, weights.mean_square) == ("gae", 79.36725457916259)
    assert (algorithm.iteration, algorithm.updates) == (1, 3)
    etude.PPO(etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, seed=0)).record(
        tmp_path / "data", 4, seed=1, explore=True
    )
    algorithm = etude.load(SECOND, data=str(tmp_path / "data"))
    assert algorithm.train().updates == 6


def test_a_run_of_version_3_goes_on():
    algorithm = etude.load(THIRD)
    stack, normalize = algorithm.config.connectors
    assert (stack, type(normalize), normalize.clip) == ("frame_stack:2", etude.NormalizeObs, 5.0)
    assert algorithm.config.overrides == {"main": {"lr": 1e-4}}
    assert (algorithm.iteration, algorithm.env_steps, algorithm.updates) == (1, 32, 2)
    result = algorithm.train()
    assert (result.iteration, result.env_steps, result.updates, result.episodes) == (2, 64, 4, 2)
    assert result.resumed == "new episodes: the checkpoint is of an earlier version"


def test_a_run_of_version_4_goes_on():
    algorithm = etude.load(FOURTH)
    assert (algorithm.iteration, algorithm.env_steps, algorithm.updates) == (1, 32, 1)
    result = algorithm.train()
    assert (result.iteration, result.env_steps, result.updates, result.episodes) == (2, 64, 2, 2)
    assert result.resumed == "new episodes: the checkpoint is of an earlier version"


def test_what_a_checkpoint_without_a_checksum_says_is_looked_at_all_the_same(tmp_path):
    document = json.loads((THIRD / "checkpoint.json").read_text())
    (state,) = THIRD.glob("state-*")
    shutil.copy(state, tmp_path)
    document["meta"]["config"]["connectors"] = [{"$ref": "os:abort"}]
    (tmp_path / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="`config/connectors/0` names os:abort"):
        etude.load(tmp_path)
