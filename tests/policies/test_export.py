# SPDX-License-Identifier: Apache-2.0
"""Exported policies choose what the policy chooses, run by onnxruntime in a process without Etude and torch."""

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from onnx_alone import OnnxAlone

import etude
from etude.algorithms.cql import ConservativeModule
from etude.algorithms.decision_transformer import DecisionTransformerConfig, ReturnTransformer
from etude.algorithms.qr_dqn import QuantileGreedy, QuantileModule
from etude.algorithms.td3 import DeterministicModule, NoisyTanh
from etude.connectors import Connector, History, Pipeline, ReturnToGo
from etude.errors import ModuleError, SettingsError
from etude.modules import Module, NetworkConfig, make_module
from etude.modules.actors import NoisyNetwork, RandomModule
from etude.modules.distributions import Categorical
from etude.modules.network import Network
from etude.policies import Policy

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
WIDE = spaces.Box(-np.inf, np.inf, (3,), np.float64)
PIXELS = spaces.Box(0, 255, (12, 12, 1), np.uint8)
COUNTS = spaces.Box(-300, 300, (2,), np.int16)
PUSH = spaces.Box(np.array([-2, 0], np.float32), np.array([5, 1], np.float32))
NESTED = spaces.Dict(
    {
        "at": spaces.Discrete(5, start=2),
        "codes": spaces.MultiDiscrete([3, 2]),
        "bits": spaces.MultiBinary(4),
        "view": PIXELS,
        "parts": spaces.Tuple([VECTOR, spaces.Box(-3, 3, (), np.float32)]),
    }
)
MASKED = spaces.Dict({"x": VECTOR, "action_mask": spaces.MultiBinary(5)})
ACTIONS = spaces.Dict(
    {
        "go": spaces.MultiDiscrete([3, 2]),
        "bits": spaces.MultiBinary(2),
        "push": PUSH,
        "one": spaces.Discrete(3, start=1),
    }
)


@pytest.fixture(scope="module")
def onnx() -> Iterator[OnnxAlone]:
    with OnnxAlone() as process:
        yield process


def policy_of(obs: Any, action: Any, connectors: list[Any], make: Any = None, **given: Any) -> Policy:
    torch.manual_seed(0)
    pipeline = Pipeline(connectors)
    seen, chosen = pipeline.spaces(obs, action)
    module = make_module(None, seen, chosen, **given) if make is None else make(seen, chosen)
    with torch.no_grad():
        for parameter in module.parameters():
            inputs = max(1, parameter[0].numel()) if parameter.dim() > 1 else 25
            parameter += torch.randn(parameter.shape) / inputs**0.5  # no two actions are equally good
    return Policy(module, pipeline, obs_space=obs, action_space=action)


def td3(seen: Any, chosen: Any) -> Any:
    config = NetworkConfig()
    dist = NoisyTanh(chosen, "action")
    return DeterministicModule(Network(seen, chosen, config, dist, value=False), seen, chosen, config)


def cql(seen: Any, chosen: Any) -> Any:
    config = NetworkConfig(state_dependent_std=True)
    made = make_module(None, seen, chosen, config, squash=True, value=False)
    return ConservativeModule(made.net, seen, chosen, made.dist, config, 1.0, 5.0)


def qr_dqn(seen: Any, chosen: Any) -> Any:
    dist = QuantileGreedy(chosen, "action", 3)
    return QuantileModule(NoisyNetwork(seen, chosen, NetworkConfig(), dist, value=True), seen, chosen, dist)


def transformer(seen: Any, chosen: Any) -> Any:
    config = DecisionTransformerConfig(env="CartPole-v1", embedding_size=8, num_layers=1)
    return make_module(partial(ReturnTransformer, config=config), seen, chosen)


POLICIES: dict[str, Any] = {
    "vector": lambda: policy_of(VECTOR, spaces.Discrete(4), ["clip_action", "normalize_obs"]),
    "float64, units": lambda: policy_of(WIDE, PUSH, ["rescale_action", "normalize_obs:0.5"]),
    "squashed": lambda: policy_of(VECTOR, PUSH, ["clip_action"], squash=True),
    "nested": lambda: policy_of(NESTED, ACTIONS, ["clip_action", "drop:view"]),
    "pixels": lambda: policy_of(PIXELS, spaces.Discrete(3), ["frame_stack:3"]),
    "masked": lambda: policy_of(MASKED, spaces.MultiDiscrete([3, 2]), []),
    "steps before": lambda: policy_of(
        VECTOR, ACTIONS, ["clip_reward", "normalize_reward", "prev_action_reward", "history:2"]
    ),
    "lstm": lambda: policy_of(VECTOR, spaces.Discrete(4), ["frame_stack:2"], config=NetworkConfig(recurrent="lstm")),
    "gru": lambda: policy_of(
        NESTED, PUSH, ["prev_action_reward"], config=NetworkConfig(recurrent="gru", separate=False)
    ),
    "td3": lambda: policy_of(VECTOR, PUSH, [], td3),
    "cql": lambda: policy_of(VECTOR, PUSH, [], cql),
    "qr_dqn": lambda: policy_of(MASKED, spaces.Discrete(5), [], qr_dqn),
    "int16": lambda: policy_of(COUNTS, spaces.Discrete(3), ["frame_stack:2"]),
    "uint16, steps before": lambda: policy_of(spaces.Box(0, 300, (2,), np.uint16), spaces.Discrete(3), ["history:2"]),
    "transformer": lambda: policy_of(VECTOR, PUSH, [ReturnToGo(20.0, 10.0), History(3)], transformer),
}


QUICK = ("vector", "lstm", "nested")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in QUICK else [pytest.mark.slow]) for k in POLICIES])
def test_onnxruntime_alone_chooses_what_the_policy_chooses(kind: str, tmp_path: Path, onnx: OnnxAlone) -> None:
    onnx.check(POLICIES[kind](), tmp_path)


def test_a_program_of_torch_does_so_too(tmp_path: Path) -> None:
    policy = POLICIES["lstm"]()
    policy.export(tmp_path / "policy.pt2")
    extra = {"etude": ""}
    program = torch.export.load(tmp_path / "policy.pt2", extra_files=extra).module()
    about = json.loads(extra["etude"])
    obs = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    feed = {i["name"]: torch.zeros(3, *i["shape"], dtype=getattr(torch, i["dtype"])) for i in about["inputs"]}
    feed["state_in/first"][...] = True
    feed["obs"] = torch.from_numpy(obs)
    out = program(*feed.values())
    np.testing.assert_array_equal(out[0].numpy(), policy.act(obs, policy.initial_state(3))[0])


def test_the_folder_is_created_and_torch_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch_log, records = logging.getLogger("torch.onnx"), list[logging.LogRecord]()
    level, handler = torch_log.level, logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    torch_log.addHandler(handler)
    try:
        POLICIES["vector"]().export(tmp_path / "new" / "folder" / "policy.onnx")
    finally:
        torch_log.removeHandler(handler)
    assert (tmp_path / "new" / "folder" / "policy.onnx").stat().st_size > 0
    assert [record.getMessage() for record in records] == []
    assert capfd.readouterr() == ("", "")
    assert torch_log.level == level


class OnlyNumPy(Connector):
    def online(self, inputs: Any) -> Any:
        return inputs.with_obs({name: np.sin(column) for name, column in inputs.obs.items()})


class Doubles(Connector):
    takes_tensors = True

    def online(self, inputs: Any) -> Any:
        return inputs.with_obs({name: column * 2 for name, column in inputs.obs.items()})


def test_actions_of_small_whole_numbers_are_exported(tmp_path: Path, onnx: OnnxAlone) -> None:
    onnx.check(policy_of(VECTOR, spaces.MultiDiscrete([3, 2], dtype=np.int16), ["prev_action_reward"]), tmp_path)


class Linear(etude.Task[etude.TaskConfig]):
    def network(self, obs_space: Any, action_space: Any) -> Any:
        return torch.nn.Linear(4, 2)

    def act(self, module: Any, obs: Any, optimal: bool) -> Any:
        return module(obs).argmax(-1)

    def loss(self, module: Any, batch: Any, output: Any) -> Any:
        return output.square().mean()


def test_a_task_can_not_be_exported(tmp_path: Path) -> None:
    task = Linear(etude.TaskConfig(env="CartPole-v1", num_steps=64, seed=1))
    task.train()
    with pytest.raises(
        SettingsError, match=r"TaskModule acts by code of your own, which can't be exported: export its"
    ):
        task.policy.export(tmp_path / "task.pt2")
    task.close()


class OfNumPy(Categorical):
    """Draws, and takes modes, in NumPy alone."""

    def act(self, inputs: Any, noise: Any) -> Any:
        return {"action": np.argmax(inputs + np.zeros(2), -1)}


class GivesNumPy(Categorical):
    def act(self, inputs: Any, noise: Any) -> Any:
        return {"action": np.asarray(inputs).argmax(-1)}


@pytest.mark.parametrize("kind", [OfNumPy, GivesNumPy])
def test_a_distribution_of_numpy_alone_is_named(kind: type[Categorical], tmp_path: Path) -> None:
    choice = spaces.Discrete(2)
    module = Module(make_module(None, VECTOR, choice).net, VECTOR, choice, kind(choice, "action"))
    policy = Policy(module)
    assert policy.act(np.zeros(3, np.float32)) in choice
    with pytest.raises(SettingsError, match=f"the distribution {kind.__name__} can't be exported.*tensors for tensors"):
        policy.export(tmp_path / "policy.pt2")


def test_what_can_not_be_exported_is_named(tmp_path: Path) -> None:
    policy_of(VECTOR, PUSH, [Doubles()]).export(tmp_path / "mine.pt2")
    for connector, name in ((OnlyNumPy(), "only_num_py"), (_halved, "_halved")):
        with pytest.raises(SettingsError, match=f"the connector `{name}` can't be exported.*takes_tensors = True"):
            policy_of(VECTOR, PUSH, [connector]).export(tmp_path / "mine.pt2")
    policy = POLICIES["vector"]()
    with pytest.raises(SettingsError, match=r"file on this machine that ends in \.onnx or \.pt2"):
        policy.export(tmp_path / "policy.bin")
    for path in (3, None, b"policy.onnx"):
        with pytest.raises(SettingsError, match="path of a file"):
            policy.export(path)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="a file on this machine"):
        policy.export("s3://bucket/policy.onnx")
    with pytest.raises(SettingsError, match=r"mine\.pt2.*can't be written"):
        policy.export(tmp_path / "mine.pt2" / "policy.pt2")
    with pytest.raises(ModuleError):
        Policy(RandomModule(VECTOR, spaces.Discrete(2))).export(tmp_path / "random.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.pt2"]


def _halved(obs: Any) -> Any:
    return obs / 2
