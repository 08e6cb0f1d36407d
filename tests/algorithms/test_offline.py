# SPDX-License-Identifier: Apache-2.0
"""Learning from recordings: where the data is, who learns from what, and what is told of it."""

import itertools
import json
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from many_agent_envs import CartPoles
from toy_envs import Echo

import etude
from etude.algorithms import (
    AWAC,
    BC,
    CQL,
    IQL,
    MARWIL,
    PPO,
    TD3BC,
    AWACConfig,
    BCConfig,
    CQLConfig,
    IQLConfig,
    MARWILConfig,
    OfflineAlgorithm,
    OfflineConfig,
    PPOConfig,
    TD3BCConfig,
)
from etude.algorithms.feed import plan_of
from etude.connectors import GAE, Connect, PreLearner
from etude.errors import CheckpointError, DataError, EnvError, EtudeError, SettingsError
from etude.experience import Experience, Segments
from etude.learners import Batch, Loss
from etude.metrics import read_jsonl
from etude.modules import Module, NetworkConfig
from etude.recordings import Recording, RecordingWriter

BOX = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def written(path: Path, exp: Experience, actions: int = 2, **options: Any) -> str:
    with RecordingWriter(path, obs_space=BOX, action_space=gym.spaces.Discrete(actions), **options) as writer:
        writer.write(exp)
    return str(path)


def shouting(num: int = 20, length: int = 12, **segments: Any) -> Experience:
    """Episodes of two agents: `low` always chooses 0, `high` always 1, whatever is seen."""
    agents = np.array(["low", "high"] * num, object)
    rng = np.random.default_rng(0)
    rows = len(agents) * length
    own = {"episode_id": [f"e{i // 2}" for i in range(len(agents))], "agent_id": agents}
    own["terminated"] = np.ones(len(agents), bool)
    return Experience(
        {
            "obs": rng.normal(size=(rows, 2)).astype(np.float32),
            "action": np.repeat((agents == "high").astype(np.int64), length),
            "reward": np.ones(rows),
        },
        np.arange(0, rows + 1, length),
        Segments.of(len(agents), **(own | segments)),
        {"obs": rng.normal(size=(len(agents), 2)).astype(np.float32)},
    )


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Echo asks for the observed number as the action; this is an expert's recording, as one could write it down."""
    path = tmp_path_factory.mktemp("offline") / "data"
    PPO(PPOConfig(env=Echo, seed=0, num_envs=1)).record(path, 40, seed=1, explore=True)
    return str(path)


def sure(module: Module) -> list[float]:
    """The probability of action 1."""
    with torch.no_grad():
        inputs = module(torch.zeros(1, 2)).dist_inputs
    assert inputs is not None
    return inputs.softmax(-1)[0, 1].item()


# -- many agents ------------------------------------------------------------------------------------------------------

SMALL = NetworkConfig(hidden=(16,))
SHORT: Any = {"seed": 0, "batch_size": 32, "updates_per_iteration": 60, "lr": 0.01}


@pytest.mark.parametrize("mode", ["auto", "stream"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **s: BC(BCConfig(**s)),
        lambda **s: MARWIL(MARWILConfig(**s)),
        lambda **s: IQL(IQLConfig(network=SMALL, **s)),
        lambda **s: CQL(CQLConfig(network=SMALL, alpha=5.0, **s)),
    ],
)
def test_each_module_learns_from_its_agents(make: Any, mode: Any, tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    both = make(data=data, mode=mode, modules=("low", "high"), **SHORT)
    result = both.train()
    low, high = (sure(both.policies[name].module) for name in ("low", "high"))
    assert low < 0.2 < 0.8 < high
    assert {name.partition("/")[0] for name in result.losses} == {"low", "high"}
    together = make(data=data, mode=mode, **SHORT)
    together.train()
    assert 0.3 < sure(together.module) < 0.7


def test_module_of_says_who_learns_from_whom(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())

    def other(agent: Any, episode: Any) -> str:
        assert episode.id.startswith("e")
        return "one" if agent == "high" else "nought"

    swapped = BC(BCConfig(data=data, modules=("nought", "one"), module_of=other, **SHORT))
    swapped.train()
    assert sure(swapped.policies["nought"].module) < 0.1 < 0.9 < sure(swapped.policies["one"].module)


def test_the_recorded_module_says_so_where_there_is_no_module_of(tmp_path: Path) -> None:
    exp = shouting(module_id=np.array(["a", "b"] * 20, object))
    algorithm = BC(BCConfig(data=written(tmp_path / "data", exp), modules=("a", "b"), **SHORT))
    algorithm.train()
    assert sure(algorithm.policies["a"].module) < 0.1 < 0.9 < sure(algorithm.policies["b"].module)


def test_what_one_module_learns_does_not_depend_on_others(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    both = BC(BCConfig(data=data, modules=("low", "high"), **SHORT))
    with pytest.raises(DataError, match="has segments of high, but the `modules` are low.*`filter` can't"):
        BC(BCConfig(data=data, modules=("low",), filter="agent_id == 'low'", **SHORT)).train()
    with pytest.raises(DataError, match="module 'high': there are no steps to make batches of"):
        BC(BCConfig(data=data, modules=("low", "high"), filter="agent_id == 'low'", **SHORT)).train()
    alone = BC(BCConfig(data=data, modules=("low", "high"), modules_to_train=("high",), **SHORT))
    both.train()
    alone.train()
    for a, b in zip(*(x.policies["high"].module.parameters() for x in (both, alone)), strict=True):
        assert torch.equal(a, b)
    assert alone.learner.modules["low"].updates == 0


def test_segments_of_no_module_are_an_error_that_lists_both(tmp_path: Path) -> None:
    algorithm = BC(BCConfig(data=written(tmp_path / "data", shouting()), modules=("low", "other"), **SHORT))
    with pytest.raises(DataError, match="has segments of high, but the `modules` are low, other: let `module_of` say"):
        algorithm.train()


# -- connectors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "stream", "materialize_data", "materialize_mapped_data"])
def test_connectors_see_the_same_wherever_the_data_is(mode: Any, tmp_path: Path) -> None:
    class Seen(BC):
        def loss(self, module: Module, batch: Batch) -> Loss:
            seen.extend(map(tuple, batch["obs"].numpy().round(5).tolist()))
            return super().loss(module, batch)

    seen: list[tuple[float, ...]] = []
    exp = shouting(num=4)
    data = written(tmp_path / "data", exp, max_rows_per_file=30)
    sizes: Any = {"batch_size": 16, "updates_per_iteration": 6}  # 96 steps: an epoch
    Seen(BCConfig(data=data, mode=mode, connectors=("frame_stack:2", "normalize_obs"), **sizes, seed=0)).train()
    obs = exp.steps["obs"].reshape(8, 12, 2)
    stacked = np.concatenate([np.concatenate([obs[:, :1], obs[:, :-1]], 1), obs], -1).reshape(96, 4)
    expected = (stacked - stacked.mean(0)) / stacked.std(0)
    np.testing.assert_allclose(sorted(seen), sorted(map(tuple, expected.tolist())), atol=2e-3)


def test_a_stored_filter_can_be_taken_instead(tmp_path: Path) -> None:
    config = PPOConfig(env=Echo, seed=0, num_envs=2, num_steps=64, connectors=("normalize_obs",))
    ppo = PPO(config)
    ppo.train()
    ppo.record(tmp_path / "data", 5, seed=1)
    same: Any = {"data": str(tmp_path / "data"), "connectors": ("normalize_obs",), "seed": 0}
    stored, own = BC(BCConfig(**same, obs_filter="stored")), BC(BCConfig(**same))
    stored.train()
    own.train()
    assert stored.connectors.metrics() == ppo.connectors.metrics()
    assert own.connectors.metrics() == {"normalize_obs/count": float(Recording.open(tmp_path / "data").num_steps)}


def test_a_filter_of_several_modules_is_none_of_one(tmp_path: Path) -> None:
    both = ("cart_0", "cart_1")
    several = PPO(PPOConfig(env=lambda: CartPoles(2), modules=both, num_envs=1, connectors=("normalize_obs",), seed=0))
    several.record(tmp_path / "several", 3)
    several.close()
    data, how = str(tmp_path / "several"), {"connectors": ("normalize_obs",), "obs_filter": "stored"}
    with pytest.raises(DataError, match=r"of each module \(cart_0, cart_1\), not one for all"):
        BC(BCConfig(data=data, **how))
    with pytest.raises(DataError, match="has no observation filter of module 'other' stored with it"):
        BC(BCConfig(data=data, modules=("cart_0", "other"), module_of=lambda agent, episode: "cart_0", **how))


def test_a_function_chooses_the_modules_that_learn_offline(tmp_path: Path) -> None:
    asked: list[Any] = []

    def learns(module_id: str, exp: Any) -> bool:
        asked.append(exp)
        return module_id == "cart_1"

    several: Any = {"modules": ("cart_0", "cart_1"), "seed": 0}
    ppo = PPO(PPOConfig(env=lambda: CartPoles(2), num_envs=1, **several))
    ppo.record(tmp_path / "data", 3)
    ppo.close()
    algorithm = BC(BCConfig(data=str(tmp_path / "data"), modules_to_train=learns, **{**SHORT, **several}))
    assert {name.partition("/")[0] for name in algorithm.train().losses} == {"cart_1"}
    assert set(asked) == {None}
    algorithm.close()


def test_a_filter_that_was_not_stored_is_an_error(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    with pytest.raises(DataError, match="has no observation filter stored with it: take"):
        BC(BCConfig(data=data, connectors=("normalize_obs",), obs_filter="stored"))


class Advantages(OfflineAlgorithm[OfflineConfig]):
    """An algorithm of one's own whose batches need the module."""

    def learner_connectors(self) -> list[Any]:
        return [GAE(0.9, 1.0)]

    def loss(self, module: Module, batch: Batch) -> Loss:
        value = module(batch.obs).value
        assert value is not None
        self.newest = float((batch["value"] - value.detach()).abs().max())
        return Loss(value=(value - batch["value_target"]).square().mean())


def test_connectors_that_ask_the_module_see_it_as_it_is(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    algorithm = Advantages(OfflineConfig(data=data, batch_size=24, updates_per_iteration=1, lr=0.01, seed=0))
    for _ in range(5):
        algorithm.train()
        assert algorithm.newest < 1e-5


LINE = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


@pytest.mark.parametrize("mode", ["stream", "auto"])
@pytest.mark.parametrize(
    ("algorithm", "config"), [(IQL, IQLConfig), (AWAC, AWACConfig), (CQL, CQLConfig), (TD3BC, TD3BCConfig)]
)
def test_critics_can_look_several_rewards_ahead(algorithm: Any, config: Any, mode: Any, tmp_path: Path) -> None:
    """Episodes of 12 steps that terminate, each of which earns 1."""

    class Seen(algorithm):  # type: ignore[misc]
        def loss(self, module: Module, batch: Batch) -> Loss:
            seen.update(zip(*(batch[name].tolist() for name in names), strict=True))
            return super().loss(module, batch)  # type: ignore[no-any-return]

    seen: set[tuple[float, ...]] = set()
    names = ("reward", "discount", "terminated")
    exp = shouting(num=4)
    exp = exp.with_steps(action=np.random.default_rng(0).uniform(-1, 1, (exp.num_steps, 1)).astype(np.float32))
    with RecordingWriter(tmp_path, obs_space=BOX, action_space=LINE) as writer:
        writer.write(exp)
    how: Any = {"mode": mode, "n_step": 3, "gamma": 0.9, "network": SMALL, "batch_size": 32, "updates_per_iteration": 6}
    Seen(config(data=str(tmp_path), seed=0, **how)).train()
    expected = {(2.71, 0.729, False), (2.71, 0.0, True), (1.9, 0.0, True), (1.0, 0.0, True)}
    assert {tuple(round(x, 3) for x in row) for row in seen} == expected


@pytest.mark.parametrize(("bytes_", "held"), [(200_000, "prepared"), (60_000, "recorded"), (10_000, "nothing")])
def test_auto_holds_what_fits(bytes_: int, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """480 steps are 39 kB as recorded, and 177 kB as 38 frames of them, with 64 bytes for each step's other columns."""
    monkeypatch.setattr("etude.algorithms.feed.MEMORY_LIMIT", bytes_)
    data = written(tmp_path, shouting())
    algorithm = BC(BCConfig(data=data, seed=0, connectors=("frame_stack:38",), updates_per_iteration=1))
    plan = plan_of(algorithm, "main", {})
    assert (plan.hold_prepared, plan.source.is_in_memory) == (held == "prepared", held != "nothing")
    algorithm.train()
    algorithm.close()


# -- a step of one's own ----------------------------------------------------------------------------------------------


class OnlyAction(PreLearner):
    """Keeps the segments in which one action was chosen at first."""

    def __init__(self, action: int) -> None:
        self.action = action

    def __call__(self, exp: Experience, connect: Connect) -> Experience:
        return connect(exp.select(exp.steps["action"][exp.offsets[:-1]] == self.action))


def only_high(exp: Experience, connect: Connect) -> Experience:
    return connect(exp.select(agent_id="high"))


@pytest.mark.parametrize("own", [OnlyAction(1), only_high])
def test_a_prelearner_stands_before_the_learner(own: Any, tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    algorithm = BC(BCConfig(data=data, prelearner=own, num_workers=1, mode="stream", **SHORT))
    result = algorithm.train()
    assert sure(algorithm.module) > 0.9
    assert result.metrics["left_out/early_or_dropped"] == 240
    algorithm.save(tmp_path / "run")
    loaded = etude.load(tmp_path / "run", trust=own is only_high)
    found = loaded.config.prelearner
    assert found is own or (isinstance(found, OnlyAction) and found.action == 1)


def test_a_prelearner_that_cannot_be_saved_is_asked_for(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    BC(BCConfig(data=data, prelearner=lambda exp, connect: connect(exp))).save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="give it when loading, as etude.load\\(path, prelearner=...\\)"):
        etude.load(tmp_path / "run")
    assert etude.load(tmp_path / "run", prelearner=only_high).config.prelearner is only_high


@pytest.mark.parametrize("mode", ["auto", "stream", "materialize_data"])
def test_a_filter_chooses_steps(mode: Any, tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    algorithm = BC(BCConfig(data=data, filter="agent_id == 'high' and t < 6", mode=mode, **SHORT))
    algorithm.train()
    assert sure(algorithm.module) > 0.9
    assert algorithm.get_state("data")["data"]["epochs"] == {"main": 120}
    with pytest.raises(SettingsError, match="the filter 't <' can't be used"):
        BC(BCConfig(data=data, filter="t <"))
    with pytest.raises(SettingsError, match="names the column `rewrd`. There are obs, action, reward.*`reward`"):
        BC(BCConfig(data=data, filter="rewrd > 0", mode=mode, **SHORT)).train()


def test_a_filter_cuts_nothing_off_what_comes_after(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting(), max_rows_per_file=60)
    for mode in ("stream", "auto"):
        given = {**SHORT, "updates_per_iteration": 10}
        algorithm = IQL(IQLConfig(data=data, filter="t == 3 or t > 9", mode=mode, network=SMALL, **given))
        assert np.isfinite(algorithm.train().losses["critic"])
        assert algorithm.get_state("data")["data"]["epochs"] == {"main": 3 * 40}


def test_parts_in_which_no_step_fits_are_not_read(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting(), max_rows_per_file=48)
    read: list[tuple[int, bool]] = []

    class Watched(Recording):
        def part(self, k: int, columns: Any = None, *, finals: bool = True, next_obs: bool = False) -> Experience:
            read.append((k, "obs" in (columns or ())))
            return super().part(k, columns)

    given: Any = {**SHORT, "updates_per_iteration": 5, "mode": "stream", "prefetch": 0}
    algorithm = BC(BCConfig(data=Watched.open(data), filter="episode_id == 'e0'", **given))
    algorithm.train()
    assert {k for k, _ in read} == set(range(10))
    assert {k for k, whole in read if whole} == {0}


def nothing(exp: Experience, connect: Connect) -> Any:
    return None


def broken(exp: Experience, connect: Connect) -> Any:
    raise KeyError("speed")


NO_EXPERIENCE = "the prelearner nothing gives NoneType for episode 'e0' and others: it must give Experience"
BREAKS = "the prelearner broken fails on episode 'e0' and others: KeyError: 'speed'"


@pytest.mark.parametrize(
    ("own", "problem", "kind"),
    [(nothing, NO_EXPERIENCE, "threads"), (broken, BREAKS, "threads"), (broken, BREAKS, "processes")],
)
@pytest.mark.usefixtures("forked_loaders")
def test_a_prelearner_that_fails_is_named(own: Any, problem: str, kind: Any, tmp_path: Path) -> None:
    how: Any = {"mode": "stream", "num_workers": 1, "worker_kind": kind}
    algorithm = BC(BCConfig(data=written(tmp_path / "data", shouting()), prelearner=own, **how, **SHORT))
    with pytest.raises(DataError, match=problem):
        algorithm.train()
    algorithm.close()


def test_a_class_of_prelearners_is_no_prelearner() -> None:
    with pytest.raises(SettingsError, match="`prelearner` is .*must be an object, not the class"):
        BCConfig(data="somewhere", prelearner=OnlyAction)


def failing(agent: Any, episode: Any) -> str:
    return {"low": "a"}[agent]


def test_a_module_of_that_fails_is_named(tmp_path: Path) -> None:
    config = BCConfig(data=written(tmp_path / "data", shouting()), modules=("a", "b"), module_of=failing, **SHORT)
    with pytest.raises(DataError, match="module_of fails for agent 'high' of episode 'e0': KeyError: 'high'"):
        BC(config).train()


@pytest.mark.parametrize("given", [{"filter": "t < 0"}, {"prelearner": OnlyAction(7)}])
@pytest.mark.parametrize("mode", ["stream", "auto"])
@pytest.mark.parametrize("make", [lambda **s: BC(BCConfig(**s)), lambda **s: MARWIL(MARWILConfig(**s))])
def test_nothing_left_to_learn_from_is_an_error(make: Any, mode: Any, given: dict[str, Any], tmp_path: Path) -> None:
    algorithm = make(data=written(tmp_path / "data", shouting()), mode=mode, **given, **SHORT)
    with pytest.raises(
        DataError, match="there are no steps to make batches of: the recording has none, or all of them"
    ):
        algorithm.train()


def double(obs: Any) -> Any:
    return 2 * obs


@pytest.mark.usefixtures("forked_loaders")
def test_functions_as_connectors_and_filters_can_be_sent_to_processes(tmp_path: Path) -> None:
    data = written(tmp_path / "data", shouting())
    how: Any = {"data": data, "mode": "stream", "connectors": (double,), "num_workers": 1, "filter": "t < 3", **SHORT}
    threads, processes = BC(BCConfig(**how)), BC(BCConfig(**how, worker_kind="processes"))
    assert threads.train().losses == processes.train().losses
    threads.close()
    processes.close()


# -- batches of one's own ---------------------------------------------------------------------------------------------


def test_any_iterator_of_batches_can_stand_for_the_pipeline() -> None:
    algorithm = BC(BCConfig(env=Echo, seed=0, updates_per_iteration=10, evaluation_interval=0, lr=0.02))
    assert algorithm.spaces["main"][1] == Echo().action_space
    rng = np.random.default_rng(0)
    shape = algorithm.spaces["main"][0].shape or ()

    def batches() -> Any:
        while True:
            yield {"obs": rng.normal(size=(32, *shape)).astype(np.float32), "action": np.ones(32, np.int64)}

    algorithm.learn_from(batches())
    first, *_, last = (algorithm.train() for _ in range(5))
    assert last.losses["imitation"] < 0.3 < first.losses["imitation"]
    algorithm.learn_from(itertools.islice(batches(), 12))
    algorithm.train()
    algorithm.train()
    with pytest.raises(DataError, match="the batches given have come to their end"):
        algorithm.train()
    with pytest.raises(SettingsError, match="there are batches for \\['other'\\], but the modules are \\['main'\\]"):
        algorithm.learn_from({"other": batches()})
    algorithm.learn_from(None)
    with pytest.raises(SettingsError, match="there is no recording to learn from: set `data`"):
        algorithm.train()


OBS, ACTION = np.zeros((8, 2), np.float32), np.zeros(8, np.int64)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (None, "a batch is a NoneType: give a mapping of columns by name, or Experience"),
        ({"obs": OBS}, "a batch has no column `action`; it has obs"),
        ({"obs": OBS[:0], "action": ACTION[:0]}, "must have equally many rows, at least one"),
        ({"obs": OBS, "action": ACTION[:5]}, "must have equally many rows, at least one; they have .*'action': 5"),
        (
            {"obs": OBS[:, :1], "action": ACTION},
            "column `obs` of a batch has rows of shape \\(1,\\), not \\(2,\\)",
        ),
        ({"obs": OBS, "action": ACTION + 0.5}, "column `action` of a batch is float64, but Discrete"),
        ({"obs": OBS, "action": ACTION + 7}, "column `action` of a batch goes from 7 to 7, but Discrete.* from 0 to 1"),
        ({"obs": OBS.tolist(), "action": ACTION}, "column `obs` of a batch is a list: give a NumPy array or a tensor"),
        (
            {"obs": OBS, "action": ACTION, "reward": OBS[:, :1]},
            r"`reward` of a batch has rows of shape \(1,\), but .*: give an array \[rows\], such as reward\[:, 0\]",
        ),
        (
            {"obs": OBS, "action": ACTION, "reward": OBS},
            r"`reward` of a batch has rows of shape \(2,\), but .*\[rows\]\.$",
        ),
        (
            {"obs": OBS, "action": ACTION, "terminated": np.ones(8)},
            "column `terminated` of a batch is float64: give booleans, as terminated != 0",
        ),
        (
            {"obs": OBS, "action": ACTION, "truncated": torch.ones(8, dtype=torch.uint8)},
            r"column `truncated` of a batch is torch.uint8: give booleans, as truncated != 0",
        ),
        (
            {"obs": OBS, "action": ACTION, "next_obs": OBS[:, :1]},
            r"column `next_obs` of a batch has rows of shape \(1,\), not \(2,\)",
        ),
    ],
)
def test_batches_that_do_not_fit_are_named(batch: Any, problem: str, tmp_path: Path) -> None:
    algorithm = BC(BCConfig(data=written(tmp_path / "data", shouting()), **SHORT))
    algorithm.learn_from([batch] * 3)
    with pytest.raises(DataError, match=problem):
        algorithm.train()


def test_neither_data_nor_env_is_an_error() -> None:
    with pytest.raises(SettingsError, match="`data` is missing: give the recording to learn from"):
        BCConfig()


# -- memory -----------------------------------------------------------------------------------------------------------


def remembering(num: int = 64, length: int = 6) -> Experience:
    """What is seen first says what to do to the end; later observations say nothing."""
    rng = np.random.default_rng(0)
    first = rng.integers(2, size=num)
    obs = np.zeros((num, length, 2), np.float32)
    obs[:, 0, 0] = 2 * first - 1
    return Experience(
        {"obs": obs.reshape(-1, 2), "action": np.repeat(first, length)},
        np.arange(0, num * length + 1, length),
        Segments.of(num, episode_id=[f"e{i}" for i in range(num)], terminated=np.ones(num, bool)),
        {"obs": np.zeros((num, 2), np.float32)},
    )


@pytest.mark.parametrize(
    ("recurrent", "segment", "burn_in", "learns"),
    [("gru", 6, 0, True), ("gru", 3, 3, True), ("gru", 3, 0, False), (None, 6, 0, False)],
)
def test_recurrent_modules_learn_from_sequences(
    recurrent: Any, segment: int, burn_in: int, learns: bool, tmp_path: Path
) -> None:
    config = BCConfig(
        data=written(tmp_path / "data", remembering()),
        network=NetworkConfig(hidden=(16,), recurrent=recurrent),
        max_segment_length=segment,
        burn_in=burn_in,
        batch_size=48,
        updates_per_iteration=150,
        lr=0.01,
        seed=0,
    )
    loss = BC(config).train().losses["imitation"]
    assert (loss < 0.15) == learns, loss


# -- what is told, and when -------------------------------------------------------------------------------------------


def test_results_say_where_the_time_went(echo: str) -> None:
    algorithm = BC(BCConfig(data=echo, mode="stream", seed=0, batch_size=64, updates_per_iteration=20))
    result = algorithm.train()
    assert result.data.keys() >= {"load", "connectors", "shuffle", "wait", "steps_per_s", "mb_per_s", "queue"}
    assert all(value >= 0 for value in result.data.values())
    assert result.data["load"] > 0
    assert result.data["steps_per_s"] > 0
    assert result.bottleneck in ("update", "load", "connectors", "shuffle")
    assert result.times["wait"] == result.data["wait"]
    held = BC(BCConfig(data=echo, mode="auto", seed=0, batch_size=64, updates_per_iteration=20))
    held.train()
    assert "mb_per_s" not in held.train().data  # all of it is in memory
    json.dumps(result.to_dict())


def test_errors_of_data_and_envs_come_before_training(echo: str) -> None:
    class NeedsMore(BC):
        columns = ("obs", "action", "fuel")

    with pytest.raises(DataError, match="fuel"):
        NeedsMore(BCConfig(data=echo))
    with pytest.raises(SettingsError, match="does not fit the module"):
        BC(BCConfig(data=echo, env="CartPole-v1"))
    BC(BCConfig(data=echo, env="CartPole-v1", evaluation_interval=0)).close()  # it is not needed


class Counted(Echo):
    """Counts how often it is made, and how often it is closed."""

    made = closed = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.made += 1

    def close(self) -> None:
        Counted.closed += 1


def test_evaluations_play_in_the_same_envs_and_as_if_these_were_new(echo: str) -> None:
    same: Any = {"data": echo, "env": Counted, "evaluation_episodes": 4, "seed": 0, "updates_per_iteration": 10}
    same["evaluation_interval"] = 1
    algorithm = BC(BCConfig(**same, connectors=("normalize_obs",)))
    assert Counted.made == 4
    for _ in range(3):
        finished = []
        algorithm.take_finished = finished.append  # type: ignore[method-assign]
        algorithm.train()
        assert Counted.made == 4
        apart = algorithm.new_runner(Echo, 4, algorithm.runner_seed)
        apart.collect(num_episodes=4, explore=False)
        assert finished[0].returns.tolist() == apart.take_finished().returns.tolist()
    assert Counted.closed == 0
    algorithm.close()
    assert Counted.closed == 4


def test_an_evaluation_can_go_beside_training(echo: str) -> None:
    same: Any = {"data": echo, "env": Echo, "evaluation_episodes": 4, "evaluation_interval": 2, "seed": 0}
    same["updates_per_iteration"] = 10
    after, beside = BC(BCConfig(**same)), BC(BCConfig(**same, evaluate_beside=True))
    first = [(r.episodes, r.return_mean) for r in (after.train() for _ in range(6))]
    second = [(r.episodes, r.return_mean) for r in (beside.train() for _ in range(6))]
    assert [episodes for episodes, _ in first] == [0, 4, 4, 8, 8, 12]
    assert [episodes for episodes, _ in second] == [0, 0, 0, 4, 4, 8]
    assert second[3][1] == first[1][1]  # of the weights that the module had then
    beside.close()


def test_an_evaluation_is_recorded_even_if_the_next_one_cannot_begin(echo: str, tmp_path: Path) -> None:
    made = itertools.count()

    def make() -> Echo:
        if next(made) == 3:
            raise RuntimeError("no more envs")
        return Echo()

    given: Any = {"data": echo, "evaluation_episodes": 2, "evaluation_interval": 1, "evaluate_beside": True}
    record = etude.RecordConfig(path=str(tmp_path))
    algorithm = BC(BCConfig(**given, env=make, seed=0, updates_per_iteration=2, record=record))
    with closing(algorithm), pytest.raises(EnvError, match="no more envs"):
        [algorithm.train() for _ in range(6)]
    assert Recording.open(str(tmp_path)).num_episodes == 2


@pytest.mark.parametrize("writes", [False, True])
def test_what_a_budget_ends_waits_for_the_evaluation_beside_it(echo: str, writes: bool, tmp_path: Path) -> None:
    same: Any = {"data": echo, "env": Echo, "evaluation_episodes": 4, "evaluation_interval": 2, "seed": 0}
    same["updates_per_iteration"] = 10
    after, beside = BC(BCConfig(**same)), BC(BCConfig(**same, evaluate_beside=True))
    stop, out = etude.Stop(updates=50), tmp_path / "run" if writes else None
    first, second = after.fit(stop), beside.fit(stop, out=out)
    assert second.evaluating is None
    for name in ("evaluation", "episodes", "return_mean", "returns_counted", "length_mean"):
        assert getattr(second, name) == getattr(first, name)
    assert second.evaluation["updates"] == 50  # of the last weights, though none is due
    if out is not None:
        rows = read_jsonl(out / "metrics.jsonl")
        assert rows[-1]["evaluation"] == second.evaluation
        assert [row["evaluation"].get("updates") for row in rows] == [None, None, None, 20, 20, 40, 50]
    again = beside.fit(stop, out=out)
    assert (again.evaluation, again.episodes) == (second.evaluation, second.episodes)  # nothing is left to evaluate
    beside.close()


def test_without_an_interval_nothing_is_evaluated_at_the_end(echo: str) -> None:
    with closing(BC(BCConfig(data=echo, env=Echo, updates_per_iteration=1, evaluation_interval=0))) as algorithm:
        assert algorithm.fit(etude.Stop(updates=1)).evaluation == {}
    with closing(BC(BCConfig(data=echo, updates_per_iteration=1))) as algorithm:  # nor without an env
        assert algorithm.fit(etude.Stop(updates=1)).evaluation == {}


class Sometimes(Echo):
    works = False

    def reset(self, **options: Any) -> Any:
        if not self.works:
            raise RuntimeError("out of order")
        return super().reset(**options)


def test_an_evaluation_that_failed_at_the_end_is_made_by_the_next_fit(
    echo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = etude.Stop(updates=1)
    with closing(BC(BCConfig(data=echo, env=Sometimes, seed=0, updates_per_iteration=1, **BESIDE))) as algorithm:
        with pytest.raises(Exception, match="out of order"):
            algorithm.fit(stop)
        monkeypatch.setattr(Sometimes, "works", True)
        assert algorithm.fit(stop).evaluation["updates"] == 1


class Lasting(Echo):
    def reset(self, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


@pytest.mark.slow
def test_ctrl_c_in_the_last_evaluation_saves_the_run_and_is_told(echo: str, tmp_path: Path) -> None:
    algorithm = BC(BCConfig(data=echo, env=Lasting, seed=0, updates_per_iteration=1))
    with closing(algorithm), pytest.raises(KeyboardInterrupt, match="the run is saved in"):
        algorithm.fit(etude.Stop(updates=1), out=tmp_path / "run")
    resumed = etude.load(tmp_path / "run", env=Echo)
    with closing(resumed):
        result = resumed.fit(etude.Stop(updates=1), out=tmp_path / "run")
    assert (result.updates, result.evaluation["updates"]) == (1, 1)


def test_a_goal_that_was_met_is_not_taken_back_by_the_evaluation_that_still_runs(echo: str) -> None:
    algorithm = BC(
        BCConfig(data=echo, env=Echo, updates_per_iteration=1, evaluation_interval=1, seed=0, evaluate_beside=True)
    )
    stop = etude.Stop(return_mean=-1e9, updates=2)
    result = algorithm.fit(stop)
    assert stop.goals_met(result)
    assert (result.evaluation["updates"], result.evaluating) == (1, 2)
    algorithm.close()


BESIDE: Any = {"evaluate_beside": True, "evaluation_interval": 1}


class Broken(Echo):
    def reset(self, **options: Any) -> Any:
        raise RuntimeError("out of order")


def test_an_evaluation_that_fails_beside_training_is_told(echo: str) -> None:
    algorithm = BC(BCConfig(data=echo, env=Broken, seed=0, updates_per_iteration=1, **BESIDE))
    algorithm.train()
    with pytest.raises(Exception, match="out of order"):
        algorithm.train()


def test_the_last_evaluation_beside_training_may_fail_once_the_weights_are_saved(echo: str, tmp_path: Path) -> None:
    algorithm = BC(BCConfig(data=echo, env=Broken, seed=0, updates_per_iteration=1, **BESIDE))
    with pytest.raises(Exception, match="out of order"):
        algorithm.fit(etude.Stop(updates=1), out=tmp_path / "run")
    assert etude.load(tmp_path / "run", env=Echo).updates == 1


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "stream", "num_workers": 2, "buffer_size": 100},
        {"mode": "materialize_data", "connectors": ("frame_stack:2", "normalize_obs")},
        {"mode": "stream", "connectors": ("frame_stack:2",), "buffer_size": 50},
        {"network": NetworkConfig(recurrent="gru"), "max_segment_length": 4, "mode": "stream"},
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(echo: str, given: dict[str, Any], tmp_path: Path) -> None:
    algorithm = BC(BCConfig(data=echo, seed=1, batch_size=24, updates_per_iteration=9, **given))
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path / "run")
    expected = [algorithm.train().losses for _ in range(4)]
    resumed = etude.load(tmp_path / "run")
    assert [resumed.train().losses for _ in range(4)] == expected
    algorithm.close()
    resumed.close()


class Hanging(Broken):
    """Hangs in its first step."""

    gate = threading.Event()

    def reset(self, **kwargs: Any) -> Any:
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action: Any) -> Any:
        self.gate.wait()
        raise RuntimeError("too late")


def test_an_evaluation_that_hangs_beside_training_is_left_behind(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.algorithms.play.PATIENCE", 0.1)
    algorithm = BC(BCConfig(data=echo, env=Hanging, seed=0, updates_per_iteration=1, **BESIDE))
    algorithm.train()
    algorithm.close()
    Hanging.gate.set()


class Leaving(etude.Callback):
    def on_episode_start(self, episode: Any) -> None:
        raise SystemExit(0)


def test_an_evaluation_beside_training_ends_no_program(echo: str) -> None:
    algorithm = BC(BCConfig(data=echo, env=Echo, seed=0, updates_per_iteration=1, callbacks=(Leaving,), **BESIDE))
    algorithm.train()
    with pytest.raises(EtudeError, match="ended by SystemExit"):
        algorithm.train()


@pytest.mark.parametrize("on_bad", ["skip", "repair"])
def test_a_file_that_does_not_say_how_many_steps_it_has_is_not_left_out_silently(
    on_bad: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the last file of a recording, which was cut off when the disk was full."""
    written(tmp_path / "r", shouting(), max_rows_per_file=200)
    last = max((tmp_path / "r").iterdir())
    last.write_bytes(last.read_bytes()[:-100])
    algorithm = BC(BCConfig(data=tmp_path / "r", on_bad=on_bad, seed=0, updates_per_iteration=1))
    metrics = algorithm.train().metrics
    assert {name: count for name, count in metrics.items() if "left_out" in name} == {"left_out/unread_parts": 1.0}
    assert [last.name in record.message for record in caplog.records if "left out" in record.message] == [True]
    algorithm.close()
    last.unlink()
    with pytest.raises(SettingsError, match=f"`on_bad` is '{on_bad}', but has no effect on a Recording that was"):
        BC(BCConfig(data=Recording.open(tmp_path / "r", on_bad=None), on_bad=on_bad))
