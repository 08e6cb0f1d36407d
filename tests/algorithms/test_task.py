# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from over_seeds import median_over_seeds
from signalling import Signalling
from test_saving import facts
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from toy_envs import Echo, Switchboard

import etude
from etude.cli.main import main
from etude.errors import DataError, ModuleError, SettingsError
from etude.learners import Schedule


class Reinforce(etude.Task[etude.TaskConfig]):
    """As in the examples, but returns are computed by the library."""

    def environment(self) -> Any:
        return "CartPole-v1"

    def network(self, obs_space: Any, action_space: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(obs_space.shape[0], 64), nn.Tanh(), nn.Linear(64, int(action_space.n)))

    def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
        logits = module(obs)
        return logits.argmax(-1) if optimal else Categorical(logits=logits).sample()

    def postprocess_trajectory(self, trajectory: Any) -> Any:
        following = trajectory.steps["reward"].copy()
        for t in range(len(following) - 2, -1, -1):
            following[t] += self.config.gamma * following[t + 1]
        return trajectory.with_steps(following=following)

    def postprocess_trajectories(self, trajectories: Any) -> Any:
        x = trajectories.steps["following"]
        return trajectories.with_steps(following=(x - x.mean()) / (x.std() + 1e-8))

    def loss(self, module: Any, batch: Any, output: Any) -> Any:
        mask = batch.mask.float()
        return -(Categorical(logits=output).log_prob(batch.action) * batch.following * mask).sum() / mask.sum()


def test_learners_on_a_cluster_are_refused_before_anything_is_started() -> None:
    with pytest.raises(SettingsError, match=r"num_learners=2, but a task .*`num_runners`"):
        etude.TaskConfig(engine=etude.Ray(num_runners=1, num_learners=2))
    etude.TaskConfig(engine=etude.Ray(num_runners=1))


class Misled(Reinforce):
    """Steps get the credit of others."""

    def postprocess_trajectories(self, trajectories: Any) -> Any:
        right = super().postprocess_trajectories(trajectories)
        return right.with_steps(following=np.random.default_rng(0).permutation(right.steps["following"]))


def config(**given: Any) -> etude.TaskConfig:
    usual = {"whole_episodes": True, "num_steps": 1000, "num_update_steps": 1, "batch_size": None, "lr": 1e-2}
    return etude.TaskConfig(**{**usual, "seed": 1, **given})


def small(**given: Any) -> etude.TaskConfig:
    return config(**{"num_steps": 60, "num_envs": 3, "num_update_steps": 3, "batch_size": 8, "num_samples": 4, **given})


@pytest.mark.learning
def test_reinforce_learns_cartpole_and_with_the_wrong_credit_does_not() -> None:
    stop = etude.Stop(return_mean=200, env_steps=60_000)
    assert median_over_seeds(lambda seed: Reinforce(config(seed=seed)).fit(stop).return_mean) >= 150
    assert median_over_seeds(lambda seed: Misled(config(seed=seed)).fit(stop).return_mean) < 60


class WorldModel(etude.Task[etude.TaskConfig]):
    """Acts at random in Pendulum, and foretells what follows of several actions."""

    needs_next_obs = True

    def environment(self) -> Any:
        return "Pendulum-v1"

    def network(self, obs_space: Any, action_space: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 3))

    def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
        return torch.rand(len(obs), 1) * 4 - 2

    def forward(self, module: nn.Module, batch: Any) -> Any:
        return self.foretell(module, batch["obs"][:, 0], batch["action"])

    def foretell(self, module: nn.Module, obs: Tensor, actions: Tensor) -> Tensor:
        out = [obs]
        for action in actions.unbind(1):
            out.append(out[-1] + module(torch.cat([out[-1], action], -1)))
        return torch.stack(out[1:], 1)

    def loss(self, module: Any, batch: Any, output: Any) -> Any:
        return etude.Loss(error=F.mse_loss(output[batch.mask], batch.next_obs[batch.mask]))

    def error(self, exp: Any) -> float:
        unseen = etude.ReplayDataset(self.config.num_samples, next_obs=True)
        unseen.add(exp)
        batch = {name: torch.from_numpy(c) for name, c in unseen.gather(np.arange(len(unseen))).items()}
        with torch.no_grad():
            out = self.forward(self.module.net, batch)
        return float((out - batch["next_obs"])[batch["mask"]].square().mean())


class Late(WorldModel):
    """Learns from the action after each, as if it had been the one."""

    def postprocess_trajectory(self, trajectory: Any) -> Any:
        return trajectory.with_steps(action=np.roll(trajectory.steps["action"], -1, 0))


@pytest.mark.learning
def test_a_world_model_foretells_unseen_steps_and_from_the_wrong_actions_does_not() -> None:
    settings = etude.TaskConfig(
        num_samples=4, replay_epochs=5, num_steps=2000, num_update_steps=150, lr=((0, 5e-3), (10_000, 2e-4))
    )

    def error(kind: type[WorldModel], seed: int) -> float:
        model = kind(dataclasses.replace(settings, seed=seed))
        model.fit(etude.Stop(env_steps=12_000))
        return model.error(kind(dataclasses.replace(settings, seed=seed + 1)).collect(num_steps=2000)["main"])

    right = float(median_over_seeds(lambda seed: error(WorldModel, seed)))
    assert right < 0.002  # that nothing changes is wrong by 0.79
    assert median_over_seeds(lambda seed: error(Late, seed)) > max(0.004, 3 * right)


@pytest.mark.learning
def test_nested_observations_and_actions() -> None:
    class Repeat(Reinforce):
        def environment(self) -> Any:
            return Switchboard

        def network(self, obs_space: Any, action_space: Any) -> nn.Module:
            return nn.Linear(3 + 2 + 4, 5)

        def logits(self, module: nn.Module, obs: Any) -> list[Categorical]:
            lamp = F.one_hot(obs["panel"]["lamp"], 3)
            picture = obs["picture"].flatten(-2) / 255
            assert obs["panel"]["noise"].dtype == torch.float32  # float64 in the env
            logits = module(torch.cat([lamp, obs["panel"]["noise"], picture], -1))
            return [Categorical(logits=part) for part in logits.split([3, 2], -1)]

        def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
            return torch.stack([dist.sample() for dist in self.logits(module, obs)], -1)

        def forward(self, module: nn.Module, batch: Any) -> Any:
            return self.logits(module, batch.obs)

        def loss(self, module: Any, batch: Any, output: Any) -> Any:
            logp = sum(dist.log_prob(a) for dist, a in zip(output, batch.action.unbind(-1), strict=True))
            return -(logp * batch.following).mean()

    def score(seed: int) -> float:
        task = Repeat(config(gamma=0.0, num_steps=500, lr=3e-2, window=30, seed=seed))
        return task.fit(etude.Stop(return_mean=8, env_steps=40_000)).return_mean  # at random: 4.2 of 10

    assert median_over_seeds(score) >= 7.5


def test_batches_are_samples_of_the_last_collections() -> None:
    seen = []

    class Looks(Reinforce):
        needs_next_obs = True

        def loss(self, module: Any, batch: Any, output: Any) -> Any:
            seen.append({name: batch[name] for name in ("obs", "reward", "following", "mask", "terminated")})
            assert output.shape == (8, 4, 2)
            inside = batch.mask[:, :-1] & batch.mask[:, 1:]
            assert torch.equal(batch.next_obs[:, :-1][inside], batch.obs[:, 1:][inside])
            return super().loss(module, batch, output)

    task = Looks(small(replay_epochs=2))
    kept = []
    for i in range(3):
        result = task.train()
        kept.append(result.env_steps - sum(kept))
        assert result.updates == 3 * (i + 1)
        assert task.dataset.num_steps == sum(kept[-2:])
        assert result.metrics["samples"] == len(task.dataset)
    assert all(len(batch["obs"]) == 8 and batch["following"].dtype == torch.float32 for batch in seen)
    assert any(batch["terminated"].any() for batch in seen)
    assert any(not batch["mask"].all() for batch in seen)


def test_samples_of_earlier_collections_are_not_kept_where_connectors_change() -> None:
    with pytest.raises(SettingsError, match="`replay_epochs` is 2, but normalize_obs changes after each collection"):
        Reinforce(small(replay_epochs=2, connectors=("normalize_obs",)))
    Reinforce(small(connectors=("normalize_obs",))).train()


def test_a_saved_run_goes_on_exactly_with_what_it_had_kept(tmp_path: Path) -> None:
    straight, first = (Reinforce(small(replay_epochs=3, whole_episodes=False, num_steps=50)) for _ in range(2))
    for _ in range(2):
        straight.train()
        first.train()
    first.save(tmp_path / "run")
    second = etude.load(tmp_path / "run")
    assert isinstance(second, Reinforce)
    assert len(second.dataset) == len(straight.dataset)
    for _ in range(3):
        assert facts(straight.train()) == facts(second.train())
    for a, b in zip(straight.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_seed_alone_decides_and_nobody_else_is_disturbed() -> None:
    def run(other: int) -> list[str]:
        torch.manual_seed(other)
        before = torch.get_rng_state()
        task = Reinforce(small())
        rows = [facts(task.train()) for _ in range(2)]
        rows.append(json.dumps(task.evaluate(3, seed=4, explore=True).return_mean))
        assert torch.equal(torch.get_rng_state(), before)
        return rows

    assert run(1) == run(2)
    assert facts(Reinforce(small(seed=2)).train()) != facts(Reinforce(small(seed=3)).train())


def test_it_explores_in_training_and_does_what_is_best_in_evaluations() -> None:
    asked = []

    class Asks(Reinforce):
        def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
            asked.append((optimal, module.training, torch.is_grad_enabled()))
            return super().act(module, obs, optimal)

    task = Asks(small())
    task.train()
    assert set(asked) == {(False, False, False)}
    asked.clear()
    task.evaluate(2, seed=0)
    assert set(asked) == {(True, False, False)}


def test_it_learns_from_what_it_saw_behind_the_connectors() -> None:
    saw = []

    class Sees(Reinforce):
        def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
            saw.append(obs.clone())
            return super().act(module, obs, optimal)

    task = Sees(small(connectors=("frame_stack:3",), num_envs=1, num_samples=1, num_steps=40, whole_episodes=False))
    for _ in range(2):  # the second time, segments go on with lookback
        task.train()
        own = torch.stack([sample["obs"][0] for sample in task.dataset])
        shown = torch.cat(saw)
        assert own.shape == (40, 12)
        assert all((shown == row).all(1).any() for row in own)


def test_a_recording_of_it(tmp_path: Path) -> None:
    Reinforce(small()).record(tmp_path / "data", 3, seed=1)
    exp = etude.Recording.open(tmp_path / "data").read()
    assert exp.num_segments == 3
    assert set(exp.steps) == {"obs", "action", "reward"}


def test_the_settings_env_and_module_come_before_its_own() -> None:
    task = Reinforce(small(env=Echo, module=nn.Linear(2, 2)))
    task.train()
    assert task.module.obs_space.shape == (2,)
    assert isinstance(task.module.net, nn.Linear)


def test_each_of_several_modules_learns_from_its_own() -> None:
    class Talk(Reinforce):
        def environment(self) -> Any:
            return Signalling

        def network(self, obs_space: Any, action_space: Any) -> nn.Module:
            if isinstance(obs_space, gym.spaces.Discrete):
                return nn.Embedding(int(obs_space.n), int(action_space.n))
            return nn.Linear(obs_space.shape[0], int(action_space.n))

    own = {"listener": {"num_samples": 3}}
    task = Talk(small(modules=("speaker", "listener"), num_samples=2, overrides=own))
    before = [p.clone() for s in task.policies.values() for p in s.module.parameters()]
    result = task.train()
    assert set(result.losses) == {"speaker/loss", "listener/loss"}
    assert task.datasets["speaker"][0]["obs"].shape == (2, 4)
    assert task.datasets["listener"][0]["obs"].shape == (3,)
    after = [p for s in task.policies.values() for p in s.module.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    held = task.datasets["listener"]
    task.add_module("third", like="speaker", module_of=lambda agent, episode: {"speaker": "third"}.get(agent, agent))
    task.remove_module("speaker")
    task.train()
    assert task.datasets.keys() == {"listener", "third"}
    assert task.datasets["listener"] is held
    assert task.datasets["third"].num_steps > 0


def test_it_is_trained_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-steps", "60", "--stop.env-steps", "100", "--seed", "1", "--json", "--quiet"]
    assert main(["train", "test_task:Reinforce", *flags, "--out", str(tmp_path / "run")]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] > 0
    assert isinstance(etude.load(tmp_path / "run"), Reinforce)


# -- errors -----------------------------------------------------------------------------------------------------


def with_action(action: Any, **given: Any) -> None:
    class Wrong(Reinforce):
        def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
            return action

    Wrong(small(**given)).train()


@pytest.mark.parametrize(
    ("action", "given", "match"),
    [
        (
            torch.zeros(3, 2, dtype=torch.int64),
            {},
            r"Wrong.act returned a Tensor .*`action` has shape \(2,\), but its space",
        ),
        (torch.zeros(3), {}, r"`action` has dtype float32, but .* dtype int64.* The action space is Discrete\(2\)"),
        ([0, 0, 0], {}, "returned a list that is no action .*: return tensors"),
    ],
)
def test_actions_that_do_not_fit_the_space(action: Any, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ModuleError, match=match):
        with_action(action, **given)


class TwoHands(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Dict({"left": gym.spaces.Discrete(2), "right": gym.spaces.Box(0, 1, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), float(action["left"]), True, False, {}


def test_a_nested_action_without_a_part() -> None:
    given: dict[str, Any] = {"env": TwoHands, "module": lambda obs_space, action_space: nn.Linear(2, 2)}
    with pytest.raises(ModuleError, match=r"returned a dict .*KeyError: 'right'\)\. The action space is Dict"):
        with_action({"left": torch.zeros(3, dtype=torch.int64)}, **given)
    with pytest.raises(ModuleError, match=r"`action/right` has shape \(\), but its space .* has shape \(2,\)"):
        with_action({"left": torch.zeros(3, dtype=torch.int64), "right": torch.zeros(3)}, **given)


def with_loss(loss: Any, **given: Any) -> None:
    class Wrong(Reinforce):
        def loss(self, module: Any, batch: Any, output: Any) -> Any:
            return loss(output)

    Wrong(small(**given)).train()


def test_losses_that_are_none() -> None:
    with pytest.raises(ModuleError, match="Wrong.loss returned a float: it must return a scalar tensor or a Loss"):
        with_loss(lambda output: 1.0)
    with pytest.raises(ModuleError, match=r"gave `loss` of shape \(8, 4\): take its mean, over `mask`"):
        with_loss(lambda output: output.sum(-1))
    with pytest.raises(DataError, match=r"`num_samples` \(7\), but neither Wrong.loss nor forward looked at"):
        with_loss(lambda output: output.sum(), num_samples=7)
    with_loss(lambda output: output.sum(), num_samples=1)  # nothing is masked


@etude.settings
class ScheduledConfig(etude.TaskConfig):
    entropy_weight: Schedule = ((0, 0.5), (64, 0.1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loss_follows_a_schedule(compiled: bool) -> None:
    class Scheduled(Reinforce, etude.Task[ScheduledConfig]):
        def loss(self, module: Any, batch: Any, output: Any) -> Any:
            return super().loss(module, batch, output) * self.scheduled("entropy_weight", module)

    task = Scheduled(ScheduledConfig(num_steps=32, num_update_steps=1, compile=compiled))
    losses = [task.train().losses["loss"] for _ in range(2)]
    assert all(np.isfinite(losses))
    assert [float(task.scheduled("entropy_weight", net)) for net in (task.module, task.module.net)] == [
        pytest.approx(0.3),
        pytest.approx(0.3),
    ]
    assert task.scheduled("gamma", nn.Identity()) == task.config.gamma  # no schedule


def with_trajectory(change: Any, each: bool) -> None:
    class Wrong(Reinforce):
        pass

    setattr(Wrong, "postprocess_trajectory" if each else "postprocess_trajectories", lambda self, exp: change(exp))
    Wrong(small()).train()


def test_postprocessing_that_does_not_fit() -> None:
    with pytest.raises(DataError, match="Wrong.postprocess_trajectory returned a NoneType: it must return an Exp"):
        with_trajectory(lambda exp: None, True)
    with pytest.raises(DataError, match="Wrong.postprocess_trajectories returned a tuple: it must return an Exp"):
        with_trajectory(lambda exp: (exp,), False)
    with pytest.raises(DataError, match="what Wrong.postprocess_trajectory returned is invalid: column `following`"):
        with_trajectory(lambda exp: exp.with_steps(following=np.zeros(1, np.float32)), True)
    with pytest.raises(DataError, match="what Wrong.postprocess_trajectories returned is invalid: column `x` has"):
        with_trajectory(lambda exp: exp.with_steps(x=np.zeros(1)), False)
    with pytest.raises(DataError, match="no steps to learn from"):
        with_trajectory(lambda exp: exp[0:0], False)


@pytest.mark.parametrize("name", ["num_samples", "stride", "replay_epochs", "num_update_steps", "batch_size"])
def test_settings_out_of_range(name: str) -> None:
    with pytest.raises(SettingsError, match=f"`{name}` is 0, but must be at least 1"):
        etude.TaskConfig(**{name: 0})


def test_what_must_be_defined() -> None:
    class Nothing(etude.Task[etude.TaskConfig]):
        pass

    with pytest.raises(SettingsError, match="Nothing has no env: define environment.., or set `env`"):
        Nothing(etude.TaskConfig())
    with pytest.raises(ModuleError, match="Nothing has no net: define network.obs_space, action_space."):
        Nothing(etude.TaskConfig(env=Echo))
    with pytest.raises(NotImplementedError, match="Nothing must define act"):
        Nothing(etude.TaskConfig(env=Echo, module=nn.Linear(2, 2))).train()


def test_hooks_are_called_as_in_other_algorithms_and_an_iteration_gives_an_update() -> None:
    calls = []

    class Hooked(Reinforce):
        def before_collect(self, env_steps: int) -> None:
            calls.append(("collect", env_steps))

        def before_update(self, env_steps: int) -> None:
            calls.append(("update", env_steps))

    with contextlib.closing(Hooked(etude.TaskConfig(seed=1, num_steps=64))) as task:
        task.train()
        first = task.env_steps
        task.train()
        assert calls == [("collect", 0), ("update", first), ("collect", first), ("update", task.env_steps)]
        task.training_step = lambda: None  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(
            SettingsError, match=r"training_step\(\) of Hooked returned None, but must return an Update"
        ):
            task.train()
