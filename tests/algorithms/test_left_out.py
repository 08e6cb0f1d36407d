# SPDX-License-Identifier: Apache-2.0
"""Whatever of a run can't be saved, the weights are, and what was left out is said: when saving, and when loading."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from some_envs import Simulated
from toy_envs import Echo

import etude
from etude.algorithms.checkpoint import Component
from etude.checkpoints import load_meta
from etude.connectors import Connector
from etude.errors import CheckpointError, DataError


def ppo(**given: Any) -> etude.PPO:
    small: dict[str, Any] = {"env": Echo, "num_envs": 2, "num_steps": 64, "minibatch_size": 32, "epochs": 1, "seed": 1}
    return etude.PPO(etude.PPOConfig(**{**small, **given}))


def assert_weights_are_in(path: Path, algorithm: etude.PPO) -> None:
    other = ppo(seed=2)
    other.load(path, "modules")
    for name, weights in algorithm.module.state_dict().items():
        assert torch.equal(weights, other.module.state_dict()[name])


def said(caplog: pytest.LogCaptureFixture, *words: str) -> int:
    """How many warnings have all of the words."""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return sum(all(word in text for word in words) for text in texts)


def test_an_env_that_can_not_be_captured_begins_anew_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = ppo(env=Simulated)
    algorithm.train()
    assert said(caplog, "new episodes", "simulator") == 1
    for _ in range(3):
        algorithm.train()
        algorithm.save(tmp_path / "run")
    assert said(caplog, "new episodes") == 1
    caplog.clear()
    again = etude.load(tmp_path / "run", env=Simulated)
    result = again.train()
    assert str(result.resumed).startswith("new episodes: ")
    assert "simulator" in str(result.resumed)
    assert result.env_steps == 5 * 64
    again.train()
    assert said(caplog, "new episodes", "simulator") == 1
    assert said(caplog) == 1


def test_of_an_env_that_can_be_captured_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    algorithm = ppo()
    algorithm.train()
    algorithm.save(tmp_path / "run")
    assert etude.load(tmp_path / "run", env=Echo).train().resumed == "snapshot"
    assert said(caplog) == 0


class Counts(etude.Callback):
    def __init__(self) -> None:
        self.episodes = 0

    def on_episode_end(self, episode: Any) -> None:
        self.episodes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.episodes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.episodes = state["episodes"]


class Fails(Counts):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("lost")


class HoldsALock(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"episodes": 0, "lock": iter([1])}


class HoldsItself(Counts):
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        state["itself"] = state
        return state


class Exits(Counts):
    def state_dict(self) -> dict[str, Any]:
        raise SystemExit("no more")


class ExitsWhenRead(Counts):
    def state_dict(self) -> dict[str, Any]:
        class State(dict[str, Any]):
            def items(self) -> Any:
                raise SystemExit("no more")

        return State(x=1)


@pytest.mark.parametrize("callback", [Fails, HoldsALock, HoldsItself, Exits, ExitsWhenRead])
def test_a_callback_that_can_not_be_saved_is_left_out_alone(
    callback: type[Counts], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = ppo(callbacks=(callback, Counts))
    algorithm.train()
    algorithm.save(tmp_path / "run")
    algorithm.save(tmp_path / "run")
    name = f"callbacks/{callback.__name__}"
    assert said(caplog, name, str(tmp_path / "run")) == 1
    assert list(load_meta(tmp_path / "run")["left_out"]) == [name]
    assert_weights_are_in(tmp_path / "run", algorithm)
    caplog.clear()
    again = etude.load(tmp_path / "run", env=Echo)
    assert said(caplog, name) == 1
    result = again.train()
    assert result.resumed == "snapshot"  # and the episodes go on
    assert again.callbacks[1].episodes > again.callbacks[0].episodes > 0  # type: ignore[attr-defined]


class Forgetful(Connector):
    def state_dict(self) -> dict[str, Any]:
        raise OSError("gone")


class Odd(Connector):
    def state_dict(self) -> dict[str, Any]:
        return {"x": object()}


class Cancelled(Connector):
    def state_dict(self) -> dict[str, Any]:
        raise asyncio.CancelledError


@pytest.mark.parametrize("connector", [Forgetful, Odd, Cancelled])
def test_a_connector_that_can_not_be_saved(
    connector: type[Connector], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = ppo(connectors=(connector,))
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path / "run")
    assert said(caplog, "connectors/main")
    assert_weights_are_in(tmp_path / "run", algorithm)
    caplog.clear()
    again = etude.load(tmp_path / "run", env=Echo)
    assert said(caplog, "connectors/main")
    result = again.train()
    assert str(result.resumed).startswith("new episodes: ")
    assert (result.env_steps, result.iteration) == (4 * 64, 4)
    assert again.train().env_steps == 5 * 64


class Holder(etude.PPO):
    """Keeps a part of its own that can't be saved."""

    def components(self) -> dict[str, Component]:
        def get() -> Any:
            raise RuntimeError("no")

        return {**super().components(), "mine": Component(get, lambda state: None)}


def test_a_part_of_ones_own_that_can_not_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ppo().config
    algorithm = Holder(config)
    algorithm.train()
    algorithm.save(tmp_path / "run")
    assert said(caplog, "mine", "RuntimeError") == 1
    again = etude.load(tmp_path / "run", env=Echo)
    assert isinstance(again, Holder)
    assert again.train().resumed == "snapshot"


def test_a_checkpoint_without_weights_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = ppo()
    algorithm.train()
    algorithm.save(tmp_path / "run")
    monkeypatch.setattr(algorithm.module, "state_dict", lambda: {"weights": object()})
    with pytest.raises((CheckpointError, AttributeError)):
        algorithm.save(tmp_path / "run")
    monkeypatch.undo()
    assert_weights_are_in(tmp_path / "run", algorithm)


def test_steps_that_can_not_be_recorded_end_the_run_once_the_weights_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = ppo(record=etude.RecordConfig(path=str(tmp_path / "data")))
    algorithm.train()

    def full(*args: Any) -> Any:
        raise DataError("the disk is full")

    monkeypatch.setattr(algorithm.recorder, "state_dict", full)
    with pytest.raises(DataError, match="the disk is full"):
        algorithm.save(tmp_path / "run")
    assert_weights_are_in(tmp_path / "run", algorithm)


def test_parts_that_were_not_asked_for_are_still_missing(tmp_path: Path) -> None:
    algorithm = ppo()
    algorithm.train()
    algorithm.save(tmp_path / "run", not_components="optimizers")
    with pytest.raises(CheckpointError, match="lacks optimizers/main"):
        etude.load(tmp_path / "run", env=Echo)
