# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose JSON was changed somewhere: whatever it is, the error is one of Etude's, in words."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_documents import Place, at, places, read, removed, replaced, write

import etude
from etude.algorithms import DQN, PPO, Checkpoints, DQNConfig, PPOConfig
from etude.checkpoints import load_meta, load_tree
from etude.cli.main import main
from etude.connectors import NormalizeObs
from etude.errors import CheckpointError, EtudeError
from etude.modules import NetworkConfig

OTHERS = (
    *(None, True, -1, 0, 3, 2**70, 1.5, 1e300, "x", "", [], {}, [1, 2, 3], {"x": 1}),
    *({"$": "tuple", "items": []}, {"$": "array", "name": "x"}, {"$ref": "os:abort"}),
)


def changes(document: Any, place: Place) -> list[Callable[[], Any]]:
    """What makes documents with a node left out, of another kind, or of another length."""
    node = at(document, place)
    others = [other for other in OTHERS if (type(other), other) != (type(node), node)]
    if isinstance(node, list | str) and node:
        others += [node + node[-1:], node[:-1]]
    if isinstance(node, dict):
        others.append({**node, "another": 1})
    made = [functools.partial(replaced, document, place, other) for other in others]
    return [functools.partial(removed, document, place), *made]


SMALL: dict[str, Any] = {"env": "CartPole-v1", "seed": 1}
PARTS: dict[str, Any] = {
    "num_envs": 2,
    "num_steps": 16,
    "minibatch_size": 16,
    "epochs": 1,
    "network": NetworkConfig(hidden=(4,), recurrent="gru", recurrent_size=4),
    "connectors": ("frame_stack:2", NormalizeObs(clip=5.0), "prev_action_reward"),
    "smoothing": "ema",
}
REPLAY: dict[str, Any] = {"num_envs": 1, "num_steps": 8, "learning_starts": 4, "batch_size": 4, "iteration_steps": 64}
MADE = {
    "ppo": lambda: PPO(PPOConfig(**SMALL, **PARTS)),
    "dqn": lambda: DQN(DQNConfig(**SMALL, **REPLAY, network=NetworkConfig(hidden=(4,)))),
}


@pytest.fixture(scope="module", params=MADE)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("changed") / "run"
    algorithm = MADE[request.param]()
    result = algorithm.train()
    algorithm.save(path, result=result)
    return path


@pytest.fixture
def run(saved: Path) -> Iterator[Path]:
    text = (saved / "checkpoint.json").read_text()
    yield saved
    (saved / "checkpoint.json").write_text(text)


def test_a_change_is_found_by_the_checksum(run: Path) -> None:
    document, draw = read(run), random.Random(1)
    for place in draw.sample(list(places(document)), 30):
        for change in draw.sample(changes(document, place), 2):
            write(run, change(), checksum=False)
            for load in (etude.load, load_tree, load_meta):
                with pytest.raises(CheckpointError, match=str(run)):
                    load(run)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.filterwarnings("ignore")
def test_a_change_with_its_checksum_is_a_checkpoint_error(run: Path, seed: int) -> None:
    document, draw = read(run), random.Random(seed)
    found = 0
    for place in draw.sample(list(places(document)), 60):
        write(run, draw.choice(changes(document, place))())
        try:
            etude.load(run).close()
        except EtudeError:
            found += 1
        with contextlib.suppress(EtudeError):
            etude.load_policy(run)
    assert found > 20


@pytest.mark.filterwarnings("ignore")
def test_counts_and_figures_of_another_kind_are_found_before_training_goes_on(run: Path) -> None:
    document, draw = read(run), random.Random(5)
    beginnings = (("tree", "counters"), ("tree", "figures"), ("tree", "seed"), ("tree", "learners"))
    there = [place for place in places(document) if any(place[: len(begin)] == begin for begin in beginnings)]
    for place in draw.sample(there, 30):
        write(run, draw.choice(changes(document, place))())
        try:
            algorithm = etude.load(run)
        except EtudeError:
            continue
        algorithm.train()
        algorithm.close()


@pytest.mark.filterwarnings("ignore")
def test_what_was_left_out_and_the_steps_of_running_episodes_are_checked(run: Path) -> None:
    document = read(run)
    for other in ("x", ["counters"], 3):
        write(run, replaced(document, ("meta", "left_out"), other))
        with pytest.raises(CheckpointError, match=str(run)):
            etude.load(run)
    begin = ("tree", "runner", "rollouts", 0, "rows")
    columns = [place for place in places(document) if place[:-1] == begin]
    assert columns
    for place in columns:
        for other in (
            {"$": "objects", "shape": [1], "items": [None]},
            {"$": "scalar", "dtype": "<f8", "hex": "00" * 8},
        ):
            write(run, replaced(document, place, other))
            algorithm = etude.load(run)
            with pytest.raises(CheckpointError):
                algorithm.train()
            algorithm.close()


def test_a_checkpoint_without_spaces_or_with_settings_of_another_kind_is_broken(run: Path) -> None:
    document = read(run)
    write(run, replaced(document, ("meta", "spaces"), {}))
    for load in (etude.load, etude.load_policy):
        with pytest.raises(CheckpointError, match="its `spaces` can't be read"):
            load(run)
    for other in ("x", ["main"], 3):
        write(run, replaced(document, ("meta", "config", "agents", "overrides"), other))
        for load in (etude.load, etude.load_policy):
            with pytest.raises(CheckpointError, match="agents"):
                load(run)
    for name in ("seed", "lr"):
        write(run, replaced(document, ("meta", "config", name), 10**400))
        with pytest.raises(CheckpointError, match=f"Config.{name} is 1000"):
            etude.load(run)


def test_a_folder_of_checkpoints_with_a_changed_one_is_an_error(run: Path, tmp_path: Path) -> None:
    document = read(run)
    folder = tmp_path / "checkpoint-000001"
    folder.mkdir()
    for state in run.glob("state-*"):
        (folder / state.name).symlink_to(state)
    for name in ("time", "result"):
        for other in (None, "x", [], 3 if name == "result" else {}):
            write(folder, replaced(document, ("meta", name), other))
            with pytest.raises(CheckpointError, match="checkpoint-000001 was saved without a result"):
                Checkpoints(tmp_path)
        write(folder, removed(document, ("meta", name)))
        with pytest.raises(CheckpointError, match="checkpoint-000001 was saved without a result"):
            Checkpoints(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_commands_end_with_an_error_in_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, draw = read(run), random.Random(3)
    for place in draw.sample([place for place in places(document) if place[0] in ("meta", "state")], 25):
        write(run, draw.choice(changes(document, place))())
        code = main(["evaluate", str(run), "--episodes", "1"])
        assert code in (0, 2)
        assert "Traceback" not in capsys.readouterr().err
