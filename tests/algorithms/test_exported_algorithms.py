# SPDX-License-Identifier: Apache-2.0
"""Every built-in algorithm's policy, trained a little and exported, chooses in onnxruntime what it chooses here."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from onnx_alone import OnnxAlone
from setting_envs import Choice, Walk

import etude
from etude.algorithms import ALGORITHMS

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ACTING = {"num_envs": 2, "num_steps": 32}
ON_POLICY = ACTING | {"epochs": 2, "minibatch_size": 16}
REPLAY = ACTING | {"num_steps": 8, "iteration_steps": 32, "learning_starts": 8, "batch_size": 8, "capacity": 200}
OFFLINE = {"batch_size": 16, "updates_per_iteration": 4}
TRANSFORMER = {"embedding_size": 8, "num_layers": 1, "context_length": 3}
BOX, CHOICE = Walk, Choice

RECURRENT: dict[str, Any] = {"recurrent": "gru", "recurrent_size": 4}
CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...], bool]] = {
    "ppo": (ON_POLICY, (BOX, CHOICE), True),
    "a2c": (ACTING, (BOX, CHOICE), True),
    "impala": (ACTING, (BOX, CHOICE), True),
    "appo": (ON_POLICY, (BOX, CHOICE), True),
    "dqn": (REPLAY, (CHOICE,), True),
    "qr_dqn": (REPLAY, (CHOICE,), True),
    "sac": (REPLAY, (BOX,), True),
    "td3": (REPLAY, (BOX,), True),
    "bc": (OFFLINE, (BOX, CHOICE), True),
    "marwil": (OFFLINE, (BOX, CHOICE), False),
    "iql": (OFFLINE, (BOX, CHOICE), False),
    "awac": (OFFLINE, (BOX,), False),
    "cql": (OFFLINE, (BOX, CHOICE), False),
    "td3_bc": (OFFLINE, (BOX,), False),
    "decision_transformer": (OFFLINE | TRANSFORMER, (BOX, CHOICE), False),
}
"""By algorithm: its settings, where it acts, and whether it may have a recurrent network."""
TRIED = [
    pytest.param(name, kind, is_recurrent, marks=[pytest.mark.slow] * (is_recurrent or kind is not kinds[0]))
    for name, (_, kinds, may_be) in CASES.items()
    for kind in kinds
    for is_recurrent in (False, True)[: 1 + (may_be and kind is kinds[-1])]
]


@pytest.fixture(scope="module")
def onnx() -> Iterator[OnnxAlone]:
    with OnnxAlone() as process:
        yield process


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    """Random actions in either env, for algorithms that learn from recordings."""
    return {kind: recorded(kind, str(tmp_path_factory.mktemp("data") / kind.__name__)) for kind in (BOX, CHOICE)}


def recorded(kind: Any, path: str) -> str:
    config = etude.PPOConfig(env=kind, num_envs=1, num_steps=8, seed=1)
    with closing(etude.PPO(config)) as player:
        player.record(path, 12, seed=1, explore=True)
    return path


def test_no_algorithm_is_left_out() -> None:
    assert CASES.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize(("name", "kind", "is_recurrent"), TRIED)
def test_an_exported_policy_is_the_policy(
    name: str, kind: Any, is_recurrent: bool, recordings: dict[Any, str], tmp_path: Path, onnx: OnnxAlone
) -> None:
    settings, _, _ = CASES[name]
    learns_from = {"data": recordings[kind]} if "updates_per_iteration" in settings else {"env": kind}
    if name != "decision_transformer":
        network = etude.NetworkConfig(hidden=(8,), **(RECURRENT if is_recurrent else {}))
        settings = settings | {"network": network}
    with closing(ALGORITHMS[name](ALGORITHMS[name].Config(seed=1, **learns_from, **settings))) as algorithm:
        algorithm.train()
        algorithm.train()
        policy = algorithm.policy
        assert policy.remembers == (is_recurrent or name == "decision_transformer")
        onnx.check(policy, tmp_path)


def test_no_other_algorithm_has_a_recurrent_network(recordings: dict[Any, str]) -> None:
    network = etude.NetworkConfig(**RECURRENT)
    for name in [name for name, (_, _, may_be) in CASES.items() if not may_be]:
        with pytest.raises(etude.EtudeError, match="recurrent"):
            ALGORITHMS[name](ALGORITHMS[name].Config(data=recordings[BOX], network=network)).train()
