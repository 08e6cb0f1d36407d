# SPDX-License-Identifier: Apache-2.0
"""Learners of a cluster against one that has everything, and what becomes of them when they die."""

import dataclasses
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from etude import BC, DQN, PPO, TD3BC, BCConfig, DQNConfig, PPOConfig, TD3BCConfig
from etude.algorithms import Ray
from etude.connectors import Connector
from etude.errors import DataError, EngineError, EtudeError, SettingsError
from etude.experience import Experience, Segments
from etude.learners import Batch, Loss, Update
from etude.modules import Module, NetworkConfig
from etude.recordings import Recording, RecordingWriter

ray = pytest.importorskip("ray", reason="the ray engine needs Ray: pip install 'etude[ray]'")

from etude.ray.learners import (  # noqa: E402
    LearnerGroup,
    Learners,
    shares_of,
    shares_of_batch,
)

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("cluster")

OBS = spaces.Box(-1, 1, (4,), np.float32)
ACT = spaces.Discrete(3)
SMALL = NetworkConfig(hidden=(8,))


class UserError(Exception):
    pass


class Touchy(PPO):
    """Fails where a row says so, hangs where another does, or ends its process, once; logs a number of its own."""

    weight = 1.0
    died = ""

    def loss(self, module: Module, batch: Batch) -> Loss:
        if bool((batch["bad"] > 0).any()):
            raise UserError("a row that must not be")
        if bool((batch["bad"] < -1).any()):
            time.sleep(600)
        if bool((batch["bad"] < 0).any()) and self.updates == 3 and self.died and not os.path.exists(self.died):
            open(self.died, "x", encoding="utf-8").close()
            os.kill(os.getpid(), signal.SIGKILL)
        of = super().loss(module, batch)
        return Loss(**of.parts).log(weight=torch.tensor(float(self.weight)), rows=batch.reward.mean())


def made(kind: type = Touchy, config: Any = None, modules: tuple[str, ...] = ("main",)) -> Any:
    config = config or PPOConfig(seed=3, network=SMALL, lr=1e-2, epochs=2, minibatch_size=1000)
    if modules != ("main",):
        config = dataclasses.replace(config, modules=modules)
    return kind(config, saved_spaces=dict.fromkeys(modules, (OBS, ACT)))


def experience(num_steps: int, *, seed: int = 0, module: Module | None = None) -> Experience:
    """As prepared for PPO."""
    rng = np.random.default_rng(seed)
    offsets = np.unique(np.append(np.arange(0, num_steps, 9), num_steps))
    num = len(offsets) - 1
    steps = {
        "obs": rng.normal(size=(num_steps, 4)).astype(np.float32),
        "action": rng.integers(0, 3, num_steps),
        "logp": np.full(num_steps, -1.1, np.float32),
        "bad": np.zeros(num_steps, np.float32),
    }
    for name in ("reward", "value", "advantage", "value_target"):
        steps[name] = rng.normal(size=num_steps).astype(np.float32)
    for name, part in {} if module is None else module.initial_state().items():
        steps[f"state_in/{name}"] = rng.normal(size=(num_steps, *part.shape)).astype(np.float32)
    segments = Segments.of(num, episode_id=[str(i) for i in range(num)])
    return Experience(steps, offsets, segments, {"obs": rng.normal(size=(num, 4)).astype(np.float32)})


def learned(algorithm: Any, exp: Experience, name: str = "main") -> Update:
    algorithm.learner.set_env_steps(5)
    return algorithm.learn(name, exp)  # type: ignore[no-any-return]


def check_alike(one: Any, other: Any, name: str = "main") -> None:
    """The same weights, optimizers and counts."""
    own, others = one.learner.modules[name], other.learner.modules[name]
    assert (own.updates, own.skipped, own.steps_trained) == (others.updates, others.skipped, others.steps_trained)
    for key, value in own.module.state_dict().items():
        torch.testing.assert_close(value, others.module.state_dict()[key], atol=2e-6, rtol=1e-4)
    for key, value in own.optimizers["all"].state_dict().items():
        torch.testing.assert_close(value, others.optimizers["all"].state_dict()[key], atol=2e-6, rtol=1e-3)


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[tuple[Any, Learners]]:
    """An algorithm with two learners; each test begins with new weights."""
    algorithm = made()
    learners = Learners(algorithm, Ray(num_learners=2))
    yield algorithm, learners
    learners.close()


@pytest.fixture
def two(pair: tuple[Any, Learners]) -> tuple[Any, Learners]:
    algorithm, learners = pair
    new = made().learner.modules["main"]
    algorithm.learner.modules["main"].load_state_dict(new.state_dict())
    algorithm.learner.modules["main"].lr.update(new.lr)
    algorithm.learner.set_env_steps(0)
    algorithm.weight, algorithm.died = 1.0, ""
    learners.stats()
    return algorithm, learners


# -- updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [60, 61, 1])
def test_two_learn_as_one_from_the_joined_batch(two: tuple[Any, Learners], size: int) -> None:
    algorithm, learners = two
    one = made()
    for seed in range(2):
        exp = experience(size, seed=seed)
        own = learned(one, exp)
        algorithm.learner.set_env_steps(5)
        update = learners.update({"main": exp}, 5)["main"]
        assert update.losses == pytest.approx(own.losses, rel=1e-3, abs=1e-5)
        assert {n: v for n, v in update.metrics.items() if n != "clip_fraction"} == pytest.approx(
            {n: v for n, v in own.metrics.items() if n != "clip_fraction"}, rel=1e-3, abs=1e-5
        )
        check_alike(algorithm, one)
    assert learners.stats() == {"learner_restarts": 0.0}


def test_what_changes_here_goes_to_the_learners(two: tuple[Any, Learners]) -> None:
    algorithm, learners = two
    learners.update({"main": experience(30)}, 0)
    with torch.no_grad():
        for parameter in algorithm.module.parameters():
            parameter.mul_(0.5)
    algorithm.weight = 7.0
    algorithm.learner.only.lr["all"] = 0.5
    one = made()
    one.learner.modules["main"].load_state_dict(algorithm.learner.modules["main"].state_dict())
    one.learner.modules["main"].lr["all"] = 0.5
    assert learners.update({"main": experience(30)}, 0)["main"].metrics["weight"] == 7.0
    one.learn("main", experience(30))
    check_alike(algorithm, one)


def test_a_recurrent_module_and_several_with_unequal_data(cluster: None) -> None:
    """One module stops early, another has a single row, another none; a function says which are trained."""
    network = NetworkConfig(hidden=(8,), recurrent="lstm", recurrent_size=4)
    config = PPOConfig(
        seed=3,
        epochs=2,
        minibatch_size=1000,
        max_seq_len=4,
        burn_in=2,
        network=SMALL,
        modules=("long", "single", "stopping", "empty", "resting"),
        overrides={"long": {"network": network}, "stopping": {"lr": 3e-2, "epochs": 20, "kl_target": 0.02}},
        modules_to_train=lambda name, exp: name != "resting",
    )
    names = tuple(config.agents.modules or ())
    algorithm, one = made(config=config, modules=names), made(config=config, modules=names)
    parts = {
        "long": experience(70, module=algorithm.policies["long"].module),
        "single": experience(1),
        "stopping": experience(45),
        "empty": experience(9)[:0],
        "resting": experience(20),
    }
    learners = Learners(algorithm, Ray(num_learners=2))
    try:
        updates = learners.update(algorithm.learner.chosen(parts), 0)
    finally:
        learners.close()
    assert list(updates) == ["long", "single", "stopping", "empty"]
    assert updates["empty"] == Update({}, {})
    for name in names:
        if name in ("long", "single", "stopping"):
            learned(one, parts[name], name)
        check_alike(algorithm, one, name)
    assert 1 < one.learner.modules["stopping"].updates < 20


def test_dqn_learns_from_batches_and_says_errors_by_row(cluster: None) -> None:
    config = DQNConfig(seed=3, network=SMALL, prioritized=True, n_step=1, target_interval=2, accumulate=2)
    algorithm, one = made(DQN, config), made(DQN, config)
    rng = np.random.default_rng(0)
    batches = [
        {
            "obs": rng.normal(size=(9, 4)).astype(np.float32),
            "next_obs": rng.normal(size=(9, 4)).astype(np.float32),
            "action": rng.integers(0, 3, 9),
            "reward": rng.normal(size=9).astype(np.float32),
            "discount": np.full(9, 0.9, np.float32),
            "weight": rng.uniform(0.5, 1.0, 9).astype(np.float32),
            "index": np.arange(9),
        }
        for _ in range(5)
    ]
    learner, errors = one.learner.modules["main"], []

    def given() -> Iterator[Any]:
        for batch in batches:
            yield batch
            errors.append(learner.kept["td_error"])

    own = learner.update_from(given())
    learners = Learners(algorithm, Ray(num_learners=2))
    try:
        update, kept = learners.update_from("main", iter(batches), 0)
    finally:
        learners.close()
    check_alike(algorithm, one)
    assert update.losses == pytest.approx(own.losses, rel=1e-4)
    assert len(kept) == 5
    for rows, error in zip(kept, errors, strict=True):
        torch.testing.assert_close(rows["td_error"], error, atol=1e-5, rtol=1e-4)


def test_td3_bc_divides_by_the_mean_of_all_learners(cluster: None) -> None:
    config = TD3BCConfig(data="none", seed=3, network=SMALL, lr=1e-2, policy_delay=1, target_noise=0.0)
    box = {"main": (OBS, spaces.Box(-1, 1, (2,), np.float32))}
    algorithm, one = TD3BC(config, saved_spaces=box), TD3BC(config, saved_spaces=box)
    rng, scales = np.random.default_rng(0), np.linspace(0.1, 3.0, 9, dtype=np.float32)[:, None]  # shares differ
    batches = [
        {
            "obs": scales * rng.normal(size=(9, 4)).astype(np.float32),
            "next_obs": scales * rng.normal(size=(9, 4)).astype(np.float32),
            "action": rng.uniform(-1, 1, (9, 2)).astype(np.float32),
            "reward": rng.normal(size=9).astype(np.float32),
            "terminated": np.zeros(9, bool),
        }
        for _ in range(5)
    ]
    own = one.learner.modules["main"].update_from(iter(batches))
    with closing(Learners(algorithm, Ray(num_learners=2))) as learners:
        update, _ = learners.update_from("main", iter(batches), 0)
        with pytest.raises(DataError, match="a batch has fewer rows than there are learners, 2: give larger"):
            learners.update_from("main", [{name: column[:1] for name, column in batches[0].items()}], 0)
    assert update.losses == pytest.approx(own.losses, rel=1e-5)
    for key, value in one.module.state_dict().items():
        torch.testing.assert_close(algorithm.module.state_dict()[key], value, atol=1e-5, rtol=1e-4)


# -- faults -------------------------------------------------------------------------------------------------------


def test_a_learner_that_is_killed_changes_nothing(
    two: tuple[Any, Learners], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In the middle of an update, while the other waits for it: after the first of its two steps."""
    algorithm, learners = two
    one = made()
    exp = experience(60)
    exp.steps["bad"][-1] = -1
    algorithm.died = str(tmp_path / "died")
    for _ in range(2):
        learned(one, exp)
    learners.update({"main": exp}, 0)
    with caplog.at_level(logging.WARNING, "etude.ray"):
        learners.update({"main": exp}, 0)
    assert os.path.exists(algorithm.died)
    check_alike(algorithm, one)
    assert learners.stats() == {"learner_restarts": 1.0}
    assert learners.stats() == {"learner_restarts": 0.0}
    assert (
        "a learner was lost, and all are made again with their state before this update: The actor died" in caplog.text
    )


def test_a_learner_that_hangs_is_lost_and_losses_are_counted_out(cluster: None) -> None:
    algorithm = made()
    learners = Learners(algorithm, Ray(num_learners=1, max_restarts=0))
    try:
        learners.update({"main": experience(10)}, 0)
        before = {name: value.clone() for name, value in algorithm.module.state_dict().items()}
        learners._settings = dataclasses.replace(learners._settings, learner_timeout=1.0)
        exp = experience(10)
        exp.steps["bad"][3] = -2
        lost = r"a learner was lost, and `ray.max_restarts` \(0\) is used up: no answer within 1 s"
        with pytest.raises(EngineError, match=lost):
            learners.update({"main": exp}, 0)
        for name, value in algorithm.module.state_dict().items():
            assert torch.equal(value, before[name])
    finally:
        learners.close()


class Holder:
    """Takes CPUs, until it is told that others wait."""

    def hold(self) -> None:
        pass


def test_learners_that_find_no_room_are_told(cluster: None) -> None:
    lines: list[str] = []
    while not lines:  # earlier tests may give CPUs back only after the free ones were taken
        holder = ray.remote(Holder).options(num_cpus=int(ray.available_resources().get("CPU", 0))).remote()
        ray.get(holder.hold.remote())

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())
                ray.kill(holder)  # noqa: B023 - the holder of this round

        handler, log = Handler(), logging.getLogger("etude.ray")
        log.addHandler(handler)
        algorithm = made()
        try:
            with closing(Learners(algorithm, Ray(num_learners=1, sample_timeout=0.2))) as learners:
                learners.update({"main": experience(10)}, 0)
        finally:
            log.removeHandler(handler)
            ray.kill(holder)
    wanted = (
        r"no learners yet after 0.2 s. The cluster has free: [\d.]+ of 8 CPU, 1 of 1 GPU. Processes that find no room"
    )
    assert re.match(wanted, lines[0])
    assert algorithm.updates == 2


def test_one_that_waited_in_vain_for_another_at_the_start_is_not_to_blame() -> None:
    waited = ray.exceptions.RayTaskError("join", "", torch.distributed.DistStoreError("wait timeout after 600000ms"))
    group = object.__new__(LearnerGroup)
    assert isinstance(group._reason(waited, 0, None), torch.distributed.DistStoreError)
    died = ray.exceptions.ActorDiedError()
    assert group._reason(died, 1, None) is died
    assert group._reason(waited, 0, died) is died


def test_what_can_not_be_sent_to_learners_is_told(cluster: None) -> None:
    lock = threading.Lock()
    config = PPOConfig(seed=3, network=SMALL, env=lambda: lock)
    learners = Learners(made(config=config), Ray(num_learners=1))
    with (
        closing(learners),
        pytest.raises(SettingsError, match=r"can't be sent to other processes: .{0,20}_thread.lock"),
    ):
        learners.update({"main": experience(20)}, 0)


def test_what_a_loss_raises_is_raised_as_itself(two: tuple[Any, Learners]) -> None:
    """Where one of two has the bad row, the other does not wait for it; later updates begin where this one did."""
    algorithm, learners = two
    exp = experience(60)
    exp.steps["bad"][-1] = 1
    with pytest.raises(UserError, match="a row that must not be") as caught:
        learners.update({"main": exp}, 0)
    assert type(caught.value) is UserError
    (note,) = caught.value.__notes__
    assert "in learner 1" in note
    assert "in loss" in note  # the traceback there
    one = made()
    learned(one, experience(60))
    learners.update({"main": experience(60)}, 0)
    check_alike(algorithm, one)
    assert learners.stats() == {"learner_restarts": 0.0}


def test_losses_that_are_not_finite_are_one_error(two: tuple[Any, Learners]) -> None:
    _, learners = two
    exp = experience(60)
    exp.steps["advantage"][:] = np.nan
    for _ in range(4):
        update = learners.update({"main": exp}, 0)["main"]
        assert update.metrics["skipped_steps"] == 2
        assert np.isnan(update.losses["policy"])
    with pytest.raises(EtudeError, match="module 'main'") as caught:
        learners.update({"main": exp}, 0)
    assert "`advantage` holds 30 numbers of 30" in str(caught.value)


def test_learners_read_a_recording_and_outlive_one_another(cluster: None, tmp_path: Path) -> None:
    """Each half of each batch; where one is killed, they begin again where they stood. What is bad is counted, too."""
    with closing(PPO(PPOConfig(env="CartPole-v1", num_envs=2, seed=1, network=SMALL))) as expert:
        expert.record(tmp_path / "data", 20, explore=True, seed=1)
    read = Recording.open(tmp_path / "data").read()
    some = read.select([0, 1])
    some = Experience(
        some.steps, some.offsets, some.segments.replace(episode_id=np.array(["x", "y"], object)), some.final_obs
    )
    some.steps["obs"][:] = np.nan  # no learner ever gets a block of this file
    header = Recording.open(tmp_path / "data").header
    with RecordingWriter(
        tmp_path / "data", obs_space=header.obs_space, action_space=header.action_space, append=True
    ) as writer:
        writer.write(some)
    config = BCConfig(
        on_bad="skip",
        data=str(tmp_path / "data"),
        seed=0,
        network=SMALL,
        batch_size=64,
        updates_per_iteration=15,
        engine=Ray(num_learners=2),
    )
    with closing(BC(config)) as algorithm:
        first = algorithm.train()
        assert algorithm.learner.only.steps_trained == 15 * 64
        its_engine: Any = algorithm.engine
        os.kill(its_engine.learners.pids[0], signal.SIGKILL)
        results = [algorithm.train() for _ in range(3)]
        assert algorithm.updates == 60
        assert algorithm.learner.only.steps_trained == 60 * 64
    assert [result.metrics["learner_restarts"] for result in results] == [1.0, 0.0, 0.0]
    assert results[-1].losses["imitation"] < first.losses["imitation"]
    assert results[-1].bottleneck
    assert results[-1].times["wait"] == results[-1].data["wait"] > 0
    left_out = {name: count for name, count in results[-1].metrics.items() if name.startswith("left_out/")}
    unshared = {"left_out/unshared": 1.0} if read.num_steps % 2 else {}
    assert left_out == {"left_out/nan": float(some.num_steps)} | unshared


class Torque(Connector):
    """Five choices of a torque."""

    def spaces(self, obs_space: Any, action_space: Any) -> Any:
        self.highest = action_space.high
        return obs_space, spaces.Discrete(5)

    def act(self, action: Any) -> Any:
        return {"action": ((action["action"][:, None] / 2 - 1) * self.highest).astype(np.float32)}


def test_learners_read_actions_as_chosen_before_connectors_mapped_them(cluster: None, tmp_path: Path) -> None:
    with closing(PPO(PPOConfig(env="Pendulum-v1", connectors=(Torque(),), num_envs=1, seed=1))) as expert:
        expert.record(tmp_path / "data", 1, seed=1)
    config = BCConfig(
        data=str(tmp_path / "data"), connectors=(Torque(),), seed=0, updates_per_iteration=2, engine=Ray(num_learners=2)
    )
    with closing(BC(config)) as algorithm:
        assert algorithm.train().updates == 2
        assert algorithm.spaces["main"][1] == spaces.Box(-2, 2, (1,))


# -- shares -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookback", [0, 3])
@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_shares_are_equal_and_all_there_is(num: int, lookback: int) -> None:
    exp = experience(61)
    exp.segments.lookback[:] = np.minimum(lookback, exp.lengths - 1)
    shares = shares_of(exp, num)
    sizes = [int(share.trained().sum()) for share in shares]
    assert len(shares) == num
    assert sum(sizes) == exp.trained().sum()
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(
        np.concatenate([share.steps["obs"][share.trained()] for share in shares]), exp.steps["obs"][exp.trained()]
    )
    for share in shares:
        share.validate()


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize("num", [2, 3, 5])
def test_shares_for_a_recurrent_module_keep_its_sequences(num: int, context: int) -> None:
    from etude.learners.batch import Sequences

    exp = experience(61)
    exp.segments.lookback[1:4] = (2, 1, 8)
    exp = exp.with_segments(
        t_start=np.where(exp.segments.lookback >= 2, 5, 0)
    )  # these go on: all of `context` is there

    def sequences(of: Experience) -> list[tuple[bytes, bytes]]:
        rows = Sequences.cut(of, 4, 3, context)
        obs = of.steps["obs"]
        return [
            (obs[first - before : first].tobytes(), obs[first : first + length].tobytes())
            for first, length, before in zip(*rows, strict=True)
        ]

    shares = shares_of(exp, num, max_seq_len=4, burn_in=3 + context)
    assert [one for share in shares for one in sequences(share)] == sequences(exp)
    sizes = [int(share.trained().sum()) for share in shares]
    assert np.abs(np.cumsum(sizes) - exp.trained().sum() * np.arange(1, num + 1) / num).max() <= 3


def test_shares_of_batches() -> None:
    exp = experience(60)
    plain = shares_of_batch({"x": np.arange(7)}, 3, recurrent=False)
    assert [share["x"].tolist() for share in plain] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(share["obs"]) for share in shares_of_batch(exp, 4, recurrent=False)] == [15] * 4
    whole = shares_of_batch(exp, 4, recurrent=True)
    assert [share.num_segments for share in whole] == [1, 2, 2, 2]
    assert sum(share.num_steps for share in whole) == 60
