# SPDX-License-Identifier: Apache-2.0
"""No setting is accepted without an effect: each field of each algorithm's settings, and each that `overrides` takes.

Two short runs differ in one setting alone. What they did, learned and said must differ too, or the setting must be
refused in words that name it. A new setting needs a line in `CASES`, or the test of it fails.
"""

import dataclasses
import hashlib
import math
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from setting_envs import (
    Camera,
    Choice,
    ChoiceCamera,
    Costly,
    FailsAtFirst,
    Flaky,
    Longer,
    LongerChoice,
    NumberFlags,
    Stalls,
    Tidy,
    Two,
    TwoCameras,
    TwoChoiceCameras,
    TwoChoices,
    Walk,
)
from torch import nn

import etude
from etude import Experience, NetworkConfig
from etude.errors import EtudeError
from etude.settings import leaves_of, own_paths

# -- what settings may name -----------------------------------------------------------------------------------------


class Weird(etude.Callback):
    """Logs something."""

    def on_episode_end(self, episode: Any) -> None:
        episode.log("weird", 1.0)


class Flat(nn.Module):
    """Each observation as numbers in a row, of whatever dtype and shape it was."""

    def __init__(self, num_dims: int) -> None:
        super().__init__()
        self.num_dims = num_dims

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.float().flatten(-self.num_dims)


class Taught(etude.Task):  # type: ignore[type-arg]
    """A task whose loss is of the mean of the action."""

    Config = etude.TaskConfig

    def network(self, obs_space: Any, action_space: Any) -> nn.Module:
        return nn.Sequential(Flat(len(obs_space.shape)), nn.Linear(int(np.prod(obs_space.shape)), 1))

    def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
        return (module(obs) + 0.3 * torch.randn(len(obs), 1)).clamp(-1, 1)

    def loss(self, module: nn.Module, batch: Any, output: Any) -> Any:
        wanted = self.config.gamma * batch.reward.unsqueeze(-1)
        return ((output - wanted).square().squeeze(-1) * batch.mask).sum() / batch.mask.sum()


def fails(obs_space: Any, action_space: Any) -> nn.Module:
    raise RuntimeError("this network can't be made")


def swapped(agent: Any, episode: Any) -> str:
    return "right" if agent == "left" else "left"


def early(exp: Experience, connect: Any) -> Experience:
    return connect(exp.with_steps(reward=exp.steps["reward"] * 0.5, action=exp.steps["action"] * 0))  # type: ignore[no-any-return]


# -- what is tried --------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A value of a setting, and settings without which it says nothing."""

    value: Any
    context: dict[str, Any] = {}  # noqa: RUF012  never changed


NET = {"hidden": (6,)}
RECURRENT = {"network": NetworkConfig(hidden=(6,), recurrent="gru", recurrent_size=4)}
PICTURES = {"env": Camera, "network": NetworkConfig(hidden=(6,), conv=((2, 3, 1),), conv_width=4)}
AGENTS: dict[str, Any] = {"env": Two, "modules": ("left", "right")}
EVALUATED = {"evaluation_interval": 1, "evaluation_episodes": 3}
THREADS = {"workers": etude.Workers(num_workers=2, envs_per_worker=1, mode="thread", min_batch=2)}
ONE_THREAD = {"workers": etude.Workers(num_workers=1, envs_per_worker=1, mode="thread")}
"""For envs that fail: of two workers, either may fail first."""
RECORDED = {"record": etude.RecordConfig(path="OUT")}

CASES: dict[str, Case] = {
    "env": Case(Longer),
    "seed": Case(2),
    "module": Case(fails),
    "agents.modules": Case(("one",)),
    "agents.module_of": Case(swapped, AGENTS),
    "network.hidden": Case((5, 5)),
    "network.activation": Case("relu"),
    "network.separate": Case(False),
    "network.weight_init": Case("torch"),
    "network.log_std_init": Case(-1.0),
    "network.state_dependent_std": Case(True),
    "network.conv": Case(((4, 3, 1),), PICTURES),
    "network.conv_width": Case(8, PICTURES),
    "network.recurrent": Case("gru"),
    "network.recurrent_size": Case(3, RECURRENT),
    "network.squash": Case(True),
    "connectors": Case(("frame_stack:2",)),
    "lr": Case(0.05),
    "optimizer.actor_lr": Case(0.05),
    "optimizer.critic_lr": Case(0.05),
    "temperature_lr": Case(0.05),
    "penalty.alpha_lr": Case(0.05, {"threshold": 1.0}),
    "optimizer.eps": Case(0.1),
    "optimizer.betas": Case((0.5, 0.6)),
    "optimizer.grad_clip": Case(1e-3),
    "optimizer.grad_clip_by": Case("value", {"grad_clip": 1e-3}),
    "optimizer.log_grad_norms": Case(True, {"grad_clip": None}),
    "optimizer.accumulate": Case(2),
    "compute.precision": Case("bfloat16"),
    "optimizer.max_skipped": Case(1, {"max_skipped": 1000}),
    "agents.overrides": Case({"left": {"lr": 0.05}}, AGENTS),
    "agents.modules_to_train": Case(("left",), AGENTS),
    "compute.compile": Case(True),
    "compute.device": Case("nowhere"),
    "compute.threads": Case(2),
    "evaluation.episodes": Case(5, EVALUATED),
    "callbacks": Case((Weird,), EVALUATED),
    "metrics.smoothing": Case("ema", EVALUATED),
    "record.path": Case("OUT", EVALUATED),
    "record.layout": Case("table", EVALUATED | RECORDED),
    "record.compression": Case("zstd:19", EVALUATED | RECORDED),
    "record.max_rows_per_file": Case(7, EVALUATED | RECORDED),
    "record.max_file_size": Case(700, EVALUATED | RECORDED),
    "record.append": Case(True, EVALUATED | RECORDED),
    # acting
    "num_envs": Case(3),
    "workers.num_workers": Case(1, {"workers": etude.Workers(mode="thread")}),
    "workers.envs_per_worker": Case(2, THREADS),
    "workers.mode": Case("process", THREADS),
    "workers.max_steps": Case(2),
    "workers.step_timeout": Case(0.1, ONE_THREAD | {"env": Stalls}),
    "workers.restart_failed": Case(False, ONE_THREAD | {"env": Flaky}),
    "workers.max_restarts": Case(0, ONE_THREAD | {"env": FailsAtFirst}),
    "workers.max_failure_rate": Case(0.0, ONE_THREAD | {"env": Flaky}),
    "workers.cleanup_time": Case(0.0, {"workers": etude.Workers(num_workers=2, min_batch=2), "env": Tidy}),
    "workers.check": Case(0, {"env": NumberFlags}),
    "num_steps": Case(24),
    "trajectories.min_length": Case(6),
    "trajectories.max_length": Case(4),
    "trajectories.at_max_length": Case("reset", {"max_trajectory_length": 4}),
    "trajectories.count_steps_by": Case("agent_steps", AGENTS),
    "gamma": Case(0.5),
    "metrics.window": Case(2),
    "evaluation.interval": Case(2, {"evaluation_interval": 1}),
    # on-policy
    "trajectories.whole_episodes": Case(True),
    "epochs": Case(3),
    "minibatch_size": Case(8, {"num_minibatches": None}),
    "num_minibatches": Case(3),
    "sequences.max_len": Case(2, RECURRENT),
    # From zeros: where nothing is learned between, states computed anew are those recorded, up to bits of one CPU.
    "sequences.burn_in": Case(
        2, RECURRENT | {"burn_in": 0, "max_seq_len": 3, "max_segment_length": 3, "sequence_start": "zeros"}
    ),
    "sequences.start": Case("zeros", RECURRENT | {"max_seq_len": 2, "burn_in": 0}),
    "lambda_": Case(0.2),
    "clip": Case(0.001, {"epochs": 3}),
    "value_clip": Case(0.001, {"epochs": 3}),
    "value_weight": Case(0.1, {"network": NetworkConfig(hidden=(6,), separate=False), "grad_clip": None}),
    "entropy_weight": Case(0.5),
    "normalize_advantages": Case(False),
    "lift_advantages": Case(False, {"env": Costly}),
    "kl_target": Case(1e-12, {"epochs": 3}),
    "vtrace.rho_bar": Case(0.5, {"c_bar": 0.5}),
    "vtrace.c_bar": Case(0.5),
    "target.interval": Case(2),
    "tau": Case(0.3),
    "target.tau": Case(0.3, {"target_interval": 1}),
    # replay
    "updates_per_step": Case(0.5),
    "iteration_steps": Case(40),
    "replay.learning_starts": Case(30),
    "batch_size": Case(6),
    "replay.capacity": Case(20),
    "n_step": Case(2),
    "replay.prioritized": Case(True),
    "replay.priority_alpha": Case(0.1, {"prioritized": True}),
    "replay.priority_beta": Case(1.0, {"prioritized": True}),
    "target.double": Case(False, {"lr": 0.05}),
    "dueling": Case(True),
    "epsilon": Case(0.5),
    "noisy": Case(True),
    "num_quantiles": Case(3),
    "temperature": Case(0.5),
    "target_entropy": Case(0.5),
    "action_noise": Case(0.9),
    # offline
    "data": Case("OTHER"),
    "updates_per_iteration": Case(3),
    "reading.mode": Case("stream"),
    "reading.buffer_size": Case(10, {"mode": "stream"}),
    "reading.num_workers": Case(2, {"mode": "stream"}),
    "reading.worker_kind": Case("processes", {"mode": "stream", "num_workers": 1}),
    "reading.prefetch": Case(0, {"mode": "stream", "num_workers": 1}),
    "prelearner": Case(early),
    "filter": Case("t > 2"),
    "reading.on_bad": Case("skip", {"data": "BAD"}),
    "reading.obs_filter": Case("stored", {"connectors": ("normalize_obs",)}),
    "evaluation.beside": Case(True, EVALUATED),
    "beta": Case(0.5),
    "average_rate": Case(0.9),
    "max_weight": Case(1.0),
    "expectile": Case(0.9),
    "alpha": Case(0.5),
    "penalty.alpha": Case(0.5),
    "penalty.threshold": Case(1.0),
    "penalty.num_actions": Case(3),
    "penalty.gradient_actions": Case(2),
    "policy_delay": Case(3),
    "target_noise": Case(0.9),
    "target_noise_clip": Case(0.01),
    "context_length": Case(2),
    "target_return": Case(50.0, EVALUATED),
    "return_scale": Case(7.0),
    "embedding_size": Case(4),
    "num_layers": Case(2),
    "num_heads": Case(2),
    "dropout": Case(0.5),
    "max_timestep": Case(2),
    # tasks
    "num_samples": Case(3),
    "stride": Case(1, {"num_samples": 2}),
    "replay_epochs": Case(2),
    "num_update_steps": Case(3),
}

ELSEWHERE = {
    "engine": "tests/ray",
    "workers.min_batch": "tests/envs/test_pool_waiting.py",
    "workers.max_batch": "tests/envs/test_pool_waiting.py",
    "workers.max_wait": "tests/envs/test_pool_waiting.py",
}
"""What a comparison of two runs can't show: it is tried there."""

ACTING = {"env": Walk, "num_envs": 2, "num_steps": 32}
ON_POLICY = ACTING | {"epochs": 1, "minibatch_size": 16}
REPLAY = ACTING | {"num_steps": 8, "iteration_steps": 32, "learning_starts": 8, "batch_size": 8, "capacity": 200}
REPLAY |= {"updates_per_step": 0.25}
OFFLINE = {"data": "DATA", "batch_size": 16, "updates_per_iteration": 2, "evaluation_interval": 1}

ALGORITHMS: dict[type[etude.Algorithm[Any]], dict[str, Any]] = {
    etude.PPO: ON_POLICY,
    etude.A2C: ACTING,
    etude.IMPALA: {name: value for name, value in ON_POLICY.items() if name != "minibatch_size"},
    etude.APPO: ON_POLICY,
    etude.DQN: REPLAY | {"env": Choice},
    etude.QRDQN: REPLAY | {"env": Choice},
    etude.SAC: REPLAY,
    etude.TD3: REPLAY,
    Taught: ACTING | {"num_update_steps": 2, "batch_size": 8},
    etude.BC: OFFLINE,
    etude.MARWIL: OFFLINE,
    etude.IQL: OFFLINE,
    etude.AWAC: OFFLINE,
    etude.CQL: OFFLINE,
    etude.TD3BC: OFFLINE,
    etude.DecisionTransformer: OFFLINE
    | {"network": NetworkConfig(), "embedding_size": 8, "num_layers": 1, "context_length": 3},
}

OWN: dict[tuple[type[etude.Algorithm[Any]], str], Case] = {
    (etude.DQN, "network.separate"): Case(True, {"dueling": True}),
    (etude.IMPALA, "optimizer.accumulate"): Case(2, {"num_minibatches": 2}),
    (etude.QRDQN, "network.separate"): Case(True, {"dueling": True}),
    (etude.SAC, "network.state_dependent_std"): Case(False),
    **{(cls, "network.squash"): Case(False) for cls in (etude.SAC, etude.TD3, etude.CQL, etude.TD3BC)},
    (etude.MARWIL, "sequences.max_len"): Case(2),
    (etude.MARWIL, "sequences.burn_in"): Case(2, RECURRENT | {"beta": 0.0, "max_segment_length": 3}),
    (etude.CQL, "network.separate"): Case(True, {"dueling": True, "data": "CHOICES"}),
    (Taught, "trajectories.max_length"): Case(4, {"num_samples": 3}),
    (etude.CQL, "dueling"): Case(True, {"data": "CHOICES"}),
    (etude.DecisionTransformer, "network.conv"): Case(
        ((4, 3, 1),), {"env": Camera, "network": NetworkConfig(conv=((2, 3, 1),), conv_width=4)}
    ),
    (etude.DecisionTransformer, "network.conv_width"): Case(
        8, {"env": Camera, "network": NetworkConfig(conv=((2, 3, 1),), conv_width=4)}
    ),
}
"""Of single algorithms."""

SHARED = (etude.Workers, etude.RecordConfig)
"""Settings inside others, which the same code reads for all algorithms: they are tried with one that acts, and with one
that learns from recordings."""

ALIKE = ("reading.worker_kind",)
"""Likewise, of all that learn from recordings: a process that reads takes seconds to start."""

TRIED = [
    (cls, ".".join(leaf.path))
    for cls in ALGORITHMS
    for leaf in leaves_of(cls.Config)
    if (leaf.owner not in SHARED and ".".join(leaf.path) not in ALIKE) or cls in (etude.PPO, etude.BC)
]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Recordings to learn from, by what the cases call them."""
    folder = tmp_path_factory.mktemp("recordings")
    for i, (name, env) in enumerate((("DATA", Two), ("OTHER", Two), ("CHOICES", TwoChoices), ("PICTURES", TwoCameras))):
        config = etude.PPOConfig(env=env, seed=i, num_envs=1, modules=AGENTS["modules"])
        actor = etude.PPO(config)
        for part in range(3):
            actor.record(folder / name, 3, seed=3 * i + part, explore=True, append=part > 0)
        actor.close()
    shutil.copytree(folder / "DATA", folder / "BAD")
    for path in (folder / "BAD").glob("*.parquet"):
        table = pq.read_table(path)  # type: ignore[no-untyped-call]
        pq.write_table(table.take([i for i in range(len(table)) if i != 3]), path)  # type: ignore[no-untyped-call]
    return {name: str(folder / name) for name in ("DATA", "OTHER", "CHOICES", "PICTURES", "BAD")}


def trace(cls: Any, given: dict[str, Any], out: Path, iterations: int, *, is_sick: bool = False) -> Any:
    """What a run with these settings did, learned and said; or the error that it ended with."""
    notes: set[Any] = set()
    others = set(threading.enumerate())  # those of other tests that hang, too

    class Noting(cls):  # type: ignore[misc]
        name = cls.name

        def loss(self, *args: Any) -> Any:
            notes.add(("threads", torch.get_num_threads()))
            started = set(threading.enumerate()) - others
            notes.add(tuple(sorted({t.name.rstrip("0123456789-_") for t in started})))
            made = super().loss(*args)
            if is_sick:
                return etude.Loss(sick=sum(p.sum() for p in args[0].parameters() if p.requires_grad) * math.nan)
            return made

    os.environ["ETUDE_TEST_OUT"] = str(out)
    FailsAtFirst.failed = False
    out.mkdir(exist_ok=True)
    algorithm, results = None, []
    try:
        algorithm = Noting(cls.Config(**given))
        for _ in range(iterations):
            results.append({k: v for k, v in algorithm.train().to_dict().items() if not k.startswith(CLOCKS)})
    except EtudeError as error:
        return error
    finally:
        if algorithm is not None:
            algorithm.close()
    weights = [policy.module.state_dict() for policy in algorithm.policies.values()]
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for own in weights for w in own.values())).hexdigest()
    shapes = [[tuple(w.shape) for w in own.values()] for own in weights]
    files = sorted((str(path.relative_to(out)), path.stat().st_size) for path in out.rglob("*") if path.is_file())
    metrics = [{k: v for k, v in row.pop("metrics").items() if "seconds" not in k} for row in results]
    return repr((results, metrics, digest, shapes, sorted(map(str, notes)), files, algorithm.env_steps))


CLOCKS = ("seconds", "times", "sample_steps_per_s", "duration", "turn_ms", "data", "bottleneck")
"""What the fields of results begin with that depend on how fast the machine is."""


def compiles(*args: Any, **kwargs: Any) -> Any:
    raise EtudeError("this is where it would be compiled")


def in_full(cls: Any, given: dict[str, Any], recordings: dict[str, str], out: Path) -> dict[str, Any]:
    """Settings of an algorithm, without those that it does not have; with paths in place of what stands for them."""
    full = {"seed": 1, "threads": 1, "network": NetworkConfig(hidden=(6,)), **ALGORITHMS[cls], **given}
    if cls is Taught:
        full.pop("network")
    if issubclass(cls, etude.OfflineAlgorithm):
        if given.get("env") in (Camera, TwoCameras):
            full["data"] = "PICTURES"
        elif "evaluation_interval" in given:
            full["env"] = Two
    for name in ("env", "data"):
        full[name] = meant(cls, full.get(name), recordings)
    if getattr(full.get("record"), "path", None) == "OUT":
        full["record"] = etude.RecordConfig(path=str(out / "record"))
    names = {field.name for field in dataclasses.fields(cls.Config)} | own_paths(cls.Config).keys()
    return {name: value for name, value in full.items() if name in names}


def meant(cls: Any, value: Any, recordings: dict[str, str]) -> Any:
    """An env or data that fits an algorithm."""
    if issubclass(cls, etude.DQN):
        discrete = {Walk: Choice, Camera: ChoiceCamera, Longer: LongerChoice, TwoCameras: TwoChoiceCameras}
        value = {**discrete, Two: TwoChoices}.get(value, value)
    if value is Longer and issubclass(cls, etude.OfflineAlgorithm):
        value = Two
    return recordings.get(value, value) if isinstance(value, str) else value


def changed(cls: Any, given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Settings with one of another value."""
    outer, _, inner = path.partition(".")
    own = {".".join(parts): name for name, parts in own_paths(cls.Config).items()}
    if not inner or path in own:
        return {**given, own.get(path, outer): value}
    return {**given, outer: dataclasses.replace(given.get(outer, getattr(cls.Config, outer)), **{inner: value})}


def compared(
    cls: Any, path: str, case: Case, recordings: dict[str, str], folder: Path, *, of_module: str | None = None
) -> None:
    """Fail where two runs that differ in one setting do not differ; those of one module in the settings of it."""
    value = meant(cls, case.value, recordings) if path in ("env", "data") else case.value
    outer, _, inner = path.partition(".")
    refused = [name for base in cls.Config.__mro__ for name in base.__dict__.get("unused", ())]
    if path in refused or outer in refused:
        case = case._replace(context={name: case.context[name] for name in case.context.keys() & {"modules", "env"}})
    if isinstance(value, bool):
        base = in_full(cls, case.context, recordings, folder)
        own = next((name for name, parts in own_paths(cls.Config).items() if ".".join(parts) == path), path)
        usual = base.get(outer, getattr(cls.Config, outer, None))
        if value == base.get(own, getattr(usual, inner) if inner else usual):
            value = not value
    is_sick = path == "optimizer.max_skipped"

    def run(name: str, iterations: int, *, is_other: bool = False) -> tuple[Any, str]:
        out = folder / f"{name}-{iterations}"
        given = in_full(cls, case.context, recordings, out)
        if path == "record.append":
            trace(cls, given, out, iterations)
        if is_other and of_module is None:
            given = changed(cls, given, path, str(out / "record") if path == "record.path" else value)
        elif is_other:
            given["overrides"] = {of_module: {outer: {inner: value} if inner else value}}
        found = trace(cls, given, out, iterations, is_sick=is_sick)
        return found, str(found).replace(str(out), "FOLDER")

    for iterations in (1,) if is_sick else (1, 2):  # most settings show at once
        other, text = run("other", iterations, is_other=True)
        if isinstance(other, etude.SettingsError):
            assert set(path.split(".")) & set(re.findall(r"\w+", text))
            return
        key = (cls, repr(case.context), path if path in ("record.append", "optimizer.max_skipped") else "", iterations)
        if key not in BASES:
            BASES[key] = run("base", iterations)[1]
            kind = (cls.__mro__[1], repr(case.context), iterations)
            if of_module is None and kind not in REPEATED:  # the same settings with modules are as repeatable
                REPEATED.add(kind)
                assert run("again", iterations)[1] == BASES[key], "the run is not repeatable"
        if text != BASES[key]:
            return
    pytest.fail(f"{path} = {value!r} changes nothing")


BASES: dict[Any, str] = {}
"""The traces of runs that are compared with, by algorithm, settings and iterations: many settings are compared with the
same."""

REPEATED: set[Any] = set()
"""What was seen to give the same trace twice: settings and iterations, with one algorithm of each base class."""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, forked_loaders: None) -> None:
    """Nothing is compiled in earnest, which takes long."""
    monkeypatch.setattr(torch, "compile", compiles)
    monkeypatch.setenv("ETUDE_TEST_OUT", "")


@pytest.mark.parametrize(("cls", "path"), TRIED, ids=[f"{cls.__name__}-{path}" for cls, path in TRIED])
def test_each_setting_changes_something(cls: Any, path: str, recordings: dict[str, str], tmp_path: Path) -> None:
    if path in ELSEWHERE:
        where = Path(__file__).parents[2] / ELSEWHERE[path]
        text = "".join(p.read_text() for p in (where.glob("*.py") if where.is_dir() else [where]))
        assert path.rpartition(".")[2] in text
        return
    case = OWN.get((cls, path)) or CASES[path]
    compared(cls, path, case, recordings, tmp_path)


OF_EACH_KIND = {path for cls, path in TRIED if cls in (etude.PPO, etude.SAC, etude.IQL)}
OF_MODULES = [
    (cls, path)
    for cls, path in TRIED
    if path != "agents.overrides"
    and path.partition(".")[0] not in ("record", "workers")
    and (cls in (etude.PPO, etude.SAC, etude.IQL) or path not in OF_EACH_KIND)
]
"""Each setting with one algorithm of each kind, and those that only others have."""


@pytest.mark.parametrize(("cls", "path"), OF_MODULES, ids=[f"{cls.__name__}-{path}" for cls, path in OF_MODULES])
def test_each_setting_of_a_single_module_changes_something(
    cls: Any, path: str, recordings: dict[str, str], tmp_path: Path
) -> None:
    """Or it is refused, as what concerns all modules is."""
    case = OWN.get((cls, path)) or CASES.get(path) or Case("ray")
    context = {**case.context, "modules": ("left", "right")}
    if not issubclass(cls, etude.OfflineAlgorithm) or "env" in context:
        context["env"] = TwoCameras if context.get("env") is Camera else Two
    compared(cls, path, case._replace(context=context), recordings, tmp_path, of_module="left")
