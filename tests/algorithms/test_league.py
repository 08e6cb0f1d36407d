# SPDX-License-Identifier: Apache-2.0
"""Modules that come and go while training runs, modules that only act, and modules with a loss of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from signalling import Signalling
from torch import nn

import etude
from etude.algorithms import PPO, PPOConfig
from etude.algorithms.feed import modules_of
from etude.errors import DataError, SettingsError
from etude.learners import Batch, Loss
from etude.modules import Output


class Duel:
    """Two agents with equal spaces; each is paid for saying what it sees."""

    possible_agents = ["left", "right"]  # noqa: RUF012

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._t = 0
        return self._obs(), {}

    def _obs(self) -> Any:
        self._seen = {agent: int(self._rng.integers(2)) for agent in self.possible_agents}
        return {agent: np.eye(2, dtype=np.float32)[seen] for agent, seen in self._seen.items()}

    def step(self, actions: Any) -> Any:
        reward = {agent: float(action == self._seen[agent]) for agent, action in actions.items()}
        self._t += 1
        return self._obs(), reward, {"__all__": self._t == 8}, {}, {}


def first_and_last(agent: Any, episode: Any) -> str:
    return "first" if agent == "left" else "last"


def all_three(agent: Any, episode: Any) -> str:
    return "first" if agent == "left" else ("last", "third")[episode.number % 2]


def config(**given: Any) -> PPOConfig:
    shared: dict[str, Any] = {"num_envs": 4, "num_steps": 128, "minibatch_size": 32, "epochs": 2, "seed": 3}
    shared |= {"env": Duel, "modules": ("first", "last"), "module_of": first_and_last}
    return PPOConfig(**shared | given)


def weights(algorithm: Any, name: str) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in algorithm.policies[name].module.parameters()])


def test_a_module_comes_and_goes() -> None:
    algorithm = PPO(config())
    algorithm.train()
    steps = algorithm.env_steps
    policy = algorithm.add_module("third", like="last", module_of=all_three)
    assert torch.equal(weights(algorithm, "third"), weights(algorithm, "last"))
    assert algorithm.policies["third"] is policy
    result = algorithm.train()
    assert result.env_steps == steps + 128
    assert {name.partition("/")[0] for name in result.losses} == {"first", "last", "third"}
    assert {"third/lr"} <= result.metrics.keys()
    assert algorithm.learner.modules["third"].updates > 0
    assert result.module_returns.keys() == {"first", "last", "third"}
    algorithm.remove_module("third", module_of=first_and_last)
    result = algorithm.train()
    assert {name.partition("/")[0] for name in result.losses} == {"first", "last"}
    assert result.module_returns.keys() == {"first", "last"}
    assert algorithm.evaluate(2).episodes == 2


def test_what_connectors_have_learned_is_copied_to_an_opponent() -> None:
    algorithm = PPO(config(connectors=("normalize_obs",), modules_to_train=("first",)))
    algorithm.train()
    learner, opponent = algorithm.policies["first"], algorithm.policies["last"]
    opponent.module.load_state_dict(learner.module.state_dict())
    assert opponent.connectors.metrics() != learner.connectors.metrics()
    opponent.connectors.load_state_dict(learner.connectors.state_dict())
    obs = np.random.default_rng(0).random((500, 2), np.float32)
    np.testing.assert_array_equal(opponent.act(obs)[0], learner.act(obs)[0])


def test_a_recording_names_the_connectors_of_each_module(tmp_path: Path) -> None:
    algorithm = PPO(config(overrides={"last": {"connectors": ("frame_stack:2",)}}))
    algorithm.record(tmp_path / "data", 2)
    found = etude.Recording.open(tmp_path / "data").meta["connectors"]
    assert [name.split(":")[0] for name in found["first"]] == ["clip_action"]
    assert [name.split(":")[0] for name in found["last"]] == ["clip_action", "frame_stack"]


def test_a_module_that_was_added_is_in_checkpoints(tmp_path: Path) -> None:
    algorithm = PPO(config())
    algorithm.add_module("third", module_of=all_three)
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, env=Duel, module_of=all_three)
    assert list(loaded.policies) == ["first", "last", "third"]
    for _ in range(2):
        one, other = algorithm.train(), loaded.train()
        assert one.losses == other.losses
    for name in algorithm.policies:
        assert torch.equal(weights(algorithm, name), weights(loaded, name))


class Unequal(Duel):
    """The right agent sees and does something else."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (2 if agent == "left" else 3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2 if agent == "left" else 3)

    def _obs(self) -> Any:
        return {agent: np.resize(seen, 2 if agent == "left" else 3) for agent, seen in super()._obs().items()}


def third_at_first(agent: Any, episode: Any) -> str:
    return "last" if agent == "right" else ("third", "first")[episode.number % 2]


def test_a_module_that_acts_for_no_agent_at_first_keeps_its_spaces(tmp_path: Path) -> None:
    algorithm = PPO(config(env=Unequal))
    algorithm.train()
    algorithm.add_module("third", like="first", module_of=third_at_first)
    algorithm.train()
    algorithm.save(tmp_path / "run")
    loaded = etude.load(tmp_path / "run", env=Unequal, module_of=third_at_first)
    assert loaded.train().losses == algorithm.train().losses
    for one in (algorithm, loaded):
        assert one.evaluate(2).episodes == 2
    assert loaded.record(tmp_path / "data", 2).episodes == 2


def in_turn(agent: Any, episode: Any) -> str:
    return ("first", "last")[(episode.number + episode.env + (agent == "left")) % 2]


def test_offline_the_same_module_of_splits_agents_as_it_did_in_the_env(tmp_path: Path) -> None:
    acted = PPO(config(module_of=in_turn))
    acted.record(tmp_path / "data", 20, explore=True)
    data = etude.Recording.open(tmp_path / "data")
    given = {"data": str(tmp_path / "data"), "modules": ("first", "last"), "module_of": in_turn}
    offline = etude.BC(etude.BCConfig(**given, mode="materialize_data"))
    segments = data.read().segments
    assert {(agent, name) for agent, name in zip(segments.agent_id, segments.module_id, strict=True)} == {
        (agent, name) for agent in ("left", "right") for name in ("first", "last")
    }
    np.testing.assert_array_equal(modules_of(segments, in_turn), segments.module_id)
    assert offline.train().updates > 0


def test_gradient_steps_of_a_removed_module_still_count(tmp_path: Path) -> None:
    algorithm = PPO(config())
    before = algorithm.train().updates
    alone = algorithm.learner.modules["first"].updates
    algorithm.remove_module("last", module_of=lambda agent, episode: "first")
    assert algorithm.updates == before > alone
    after = algorithm.train().updates
    assert after > before
    algorithm.save(tmp_path)
    assert etude.load(tmp_path, env=Duel, module_of=lambda agent, episode: "first").updates == after


def test_merged_episodes_keep_their_numbers() -> None:
    own = "0" * 16 + "-3-7"
    for given in (own, f"{own}~2", f"1-{own}", f"0-12-{own}@320~3", f"{own}~2~~2~3"):
        assert etude.Episode.recorded(given) == (given, 3, 7)
    for given in ("2024-01-15", f"{own}-8", f"x-{own}"):
        assert etude.Episode.recorded(given) == (given, None, None)


def test_served_episodes_belong_to_the_module_that_acted() -> None:
    def of_agents(agent: str, episode: Any) -> str:
        return "first" if agent == "left" else "last"

    served = etude.Segments.of(3, episode_id=["x", "y", "z"], module_id=["first", "last", "first"])
    assert modules_of(served, of_agents, ("first", "last")).tolist() == ["first", "last", "first"]
    assert modules_of(served, of_agents).tolist() == ["last"] * 3  # there are no such modules
    own = etude.Segments.of(2, episode_id=["0" * 16 + "-0-1", "0" * 16 + "-0-2"], module_id=["first", "last"])
    assert modules_of(own, lambda agent, episode: "last", ("first", "last")).tolist() == ["last", "last"]
    named = etude.Segments.of(2, episode_id=["x", "y"], agent_id="left", module_id=["first", "last"])
    assert modules_of(named, of_agents, ("first", "last")).tolist() == ["first", "first"]
    assert modules_of(named, in_turn, ("first", "last")).tolist() == ["first", "last"]  # it needs a number


def test_episodes_of_other_tools_have_no_number() -> None:
    segments = etude.Segments.of(1, episode_id="2024-01-15", agent_id="left")
    with pytest.raises(DataError, match="Only ids of Etude's own episodes say which `env` and `number` they had"):
        modules_of(segments, in_turn)


def test_what_can_not_come_or_go() -> None:
    algorithm = PPO(config())
    with pytest.raises(SettingsError, match=r"there is already a module 'last': there are \['first', 'last'\]"):
        algorithm.add_module("last")
    with pytest.raises(SettingsError, match=r"there is no module 'ghost': there are"):
        algorithm.remove_module("ghost")
    with pytest.raises(SettingsError, match="there is no module 'ghost'"):
        algorithm.add_module("new", like="ghost")
    with pytest.raises(SettingsError, match="set `modules`"):
        PPO(PPOConfig(env="CartPole-v1", num_envs=1)).add_module("b")
    one = PPO(config(modules=("first",), module_of=lambda agent, episode: "first"))
    with pytest.raises(SettingsError, match="'first' is the only module"):
        one.remove_module("first")


@pytest.mark.parametrize("which", [("first",), lambda name, exp: name == "first"])
def test_the_others_act_and_stay_as_they_are(which: Any) -> None:
    algorithm = PPO(config(modules_to_train=which, connectors=("normalize_obs",)))
    before = weights(algorithm, "last")
    result = algorithm.train()
    assert {name.partition("/")[0] for name in result.losses} == {"first"}
    assert result.agent_returns.keys() == {"left", "right"}
    assert torch.equal(weights(algorithm, "last"), before)
    assert not torch.equal(weights(algorithm, "first"), before)


def test_modules_to_train_are_modules() -> None:
    with pytest.raises(
        SettingsError, match=r"`agents.modules_to_train` is \('ghost',\), but the `modules` are \('first', 'l"
    ):
        config(modules_to_train=("ghost",))


def test_as_many_gradient_steps_for_modules_with_unequal_data() -> None:
    def lopsided(agent: Any, episode: Any) -> str:
        return "last" if agent == "right" and episode.number % 4 == 0 else "first"

    algorithm = PPO(config(module_of=lopsided, minibatch_size=64, num_minibatches=3))
    algorithm.train()
    assert {name: own.updates for name, own in algorithm.learner.modules.items()} == {"first": 6, "last": 6}


class Own(nn.Module):
    """Learns to foretell the reward, and acts as it likes."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, obs: torch.Tensor) -> etude.Output:
        return etude.Output(dist_inputs=self.layer(obs)[..., :2])

    def learner_connectors(self) -> list[Any]:
        return [etude.NextObs()]

    def own_loss(self, batch: Batch) -> Loss:
        assert batch.next_obs.shape == batch.obs.shape
        return Loss(foretold=(self.layer(batch.obs)[..., 2] - batch.reward).square().mean())


def test_a_loss_of_its_own_in_place_of_the_algorithms() -> None:
    algorithm = PPO(config(modules={"first": None, "last": Own}, lr=1e-2))
    losses = [algorithm.train().losses for _ in range(20)]
    assert losses[0].keys() == {"first/policy", "first/value", "last/foretold"}
    assert losses[-1]["last/foretold"] < 0.5 * losses[0]["last/foretold"]


def test_hooks_are_told_of_the_steps() -> None:
    calls: list[Any] = []

    class Hooked(PPO):
        def before_update(self, env_steps: int) -> None:
            calls.append(("before", env_steps))

        def after_step(self, module: Any) -> None:
            calls.append("step")

        def after_update(self, env_steps: int) -> None:
            calls.append(("after", env_steps))

    algorithm = Hooked(PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, minibatch_size=32, epochs=1, seed=0))
    algorithm.train()
    algorithm.train()
    assert calls == [("before", 64), "step", "step", ("after", 64), ("before", 128), "step", "step", ("after", 128)]


def test_gradients_can_be_changed_by_an_algorithm() -> None:
    class Frozen(PPO):
        def on_gradients(self, module: Any) -> None:
            for name, parameter in module.named_parameters():
                if "policy" in name:
                    parameter.grad.zero_()

    algorithm = Frozen(PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, minibatch_size=32, epochs=1, seed=0))
    before = {name: p.detach().clone() for name, p in algorithm.module.named_parameters()}
    algorithm.train()
    for name, parameter in algorithm.module.named_parameters():
        assert torch.equal(parameter, before[name]) == ("policy" in name)


def test_agents_with_different_spaces_in_a_league() -> None:
    def swapping(agent: Any, episode: Any) -> str:
        return "other" if agent == "listener" and episode.number % 2 else agent

    algorithm = PPO(PPOConfig(env=Signalling, modules=("speaker", "listener"), num_envs=2, num_steps=64, seed=0))
    with pytest.raises(SettingsError, match="module 'other' acts for no agent in the first episodes"):
        algorithm.add_module("other", module_of=swapping)
    policy = algorithm.add_module("other", like="listener", module_of=swapping)
    assert policy.module.action_space == algorithm.policies["listener"].module.action_space
    assert algorithm.train().losses.keys() >= {"other/policy"}


def test_settings_of_single_modules() -> None:
    own = {"first": {"lr": 0.0, "epochs": 1, "network": {"hidden": (8,)}}, "last": {"gamma": 0.0, "lambda_": 0.0}}
    seen: dict[str, Any] = {}

    class Looking(PPO):
        def update(self, learner: Any, exp: Any) -> Any:
            seen[learner.name] = (self.config.gamma, exp)
            return super().update(learner, exp)

    algorithm = Looking(config(overrides=own))
    before = weights(algorithm, "first")
    algorithm.train()
    assert algorithm.config.gamma == 0.99
    assert {name: own.updates for name, own in algorithm.learner.modules.items()} == {"first": 4, "last": 8}
    assert torch.equal(weights(algorithm, "first"), before)
    assert next(algorithm.policies["first"].module.parameters()).shape[0] == 8
    assert (seen["first"][0], seen["last"][0]) == (0.99, 0.0)
    exp = seen["last"][1]  # without discount and trace, a step is worth what it brings
    np.testing.assert_allclose(exp.steps["value_target"], exp.steps["reward"], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ghost": {"lr": 0.1}}, r"`agents.overrides` are of 'ghost', but the `modules` are \('first', 'last'\)"),
        ({"first": {"num_envs": 2}}, "`overrides` of 'first' hold `num_envs`, which is of all modules together"),
        ({"first": {"lrr": 0.1}}, "overrides.first has no setting `lrr`"),
        ({"first": {"clip": -1.0}}, "`overrides.first.clip` is -1.0, but must be above 0"),
    ],
)
def test_overrides_that_can_not_be(given: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config(overrides=given)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (etude.PPO, {"num_steps": 200}),
        (etude.DQN, {"iteration_steps": 200, "learning_starts": 100, "num_envs": 2}),
    ],
)
def test_what_is_not_trained_acts_as_before(kind: Any, settings: dict[str, Any]) -> None:
    shared = {"env": Duel, "modules": ("first", "last"), "module_of": first_and_last, "modules_to_train": ("first",)}
    algorithm = kind(kind.Config(**shared, **settings, connectors=("normalize_obs",), seed=1))
    algorithm.train()
    fixed, moving = (algorithm.policies[name].connectors.state_dict() for name in ("last", "first"))
    algorithm.train()
    assert_equal_states(algorithm.policies["last"].connectors.state_dict(), fixed)
    with pytest.raises(AssertionError):
        assert_equal_states(algorithm.policies["first"].connectors.state_dict(), moving)


def assert_equal_states(state: Any, other: Any) -> None:
    own = [part["state"] for part in state["connectors"] if part["name"] == "normalize_obs"]
    others = [part["state"] for part in other["connectors"] if part["name"] == "normalize_obs"]
    np.testing.assert_equal(own, others)


class OwnNet(nn.Module):
    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.own = nn.Linear(obs_space.shape[0], int(action_space.n) + 1)

    def forward(self, obs: Any) -> Any:
        out = self.own(obs)
        return etude.Output(dist_inputs=out[..., 1:], value=out[..., 0])


class OtherNet(OwnNet):
    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__(obs_space, action_space)
        self.more = nn.Linear(1, 1)


def test_a_copy_has_the_network_of_what_it_copies_and_a_failed_one_leaves_nothing() -> None:
    algorithm = PPO(config(modules={"first": OwnNet, "last": OwnNet}))
    algorithm.train()
    with pytest.raises(etude.EtudeError):
        algorithm.add_module("third", OtherNet, like="last", module_of=all_three)
    assert (
        [*algorithm.policies] == [*algorithm.learner.modules] == [*algorithm.config.agents.modules] == ["first", "last"]
    )
    algorithm.train()
    added = algorithm.add_module("third", like="last", module_of=all_three)
    assert isinstance(added.module.net, OwnNet)
    for own, other in zip(added.module.parameters(), algorithm.policies["last"].module.parameters(), strict=True):
        assert torch.equal(own, other)
        assert own is not other
    assert algorithm.train().module_returns.keys() == {"first", "last", "third"}


def test_what_is_trained_stays_as_it_was_set_when_modules_come_and_go() -> None:
    algorithm = PPO(config())
    algorithm.learner.modules_to_train = ("first",)
    algorithm.train()
    algorithm.add_module("third", like="last", module_of=all_three)
    algorithm.train()
    assert {name: learner.updates > 0 for name, learner in algorithm.learner.modules.items()} == {
        "first": True,
        "last": False,
        "third": False,
    }
    algorithm.learner.modules_to_train = ("first", "third")
    algorithm.remove_module("third", module_of=first_and_last)
    assert algorithm.learner.modules_to_train == ("first",)


def test_evaluations_of_offline_training_number_their_episodes_from_0(tmp_path: Path) -> None:
    def by_number(agent: Any, episode: Any) -> str:
        numbers.append(episode.number)
        return "first" if (agent == "left") == (episode.number % 2 == 0) else "last"

    numbers: list[int] = []
    PPO(config()).record(tmp_path, 4, seed=1)
    given: Any = {"env": Duel, "modules": ("first", "last"), "module_of": by_number, "evaluation_episodes": 3}
    given["evaluation_interval"] = 1
    algorithm = etude.BC(etude.BCConfig(data=str(tmp_path), updates_per_iteration=2, batch_size=16, seed=0, **given))
    found = []
    for _ in range(3):
        numbers.clear()
        algorithm.train()
        found.append(sorted(set(numbers)))
    assert found[0][0] == 0
    assert found[0] == found[1] == found[2]


class Trunked(nn.Module):
    def __init__(self, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 8) if trunk is None else trunk
        self.heads = nn.Linear(8, 3)

    def forward(self, obs: torch.Tensor) -> Output:
        x = self.heads(torch.tanh(self.trunk(obs)))
        return Output(x[:, :2], x[:, 2])


def test_one_network_object_is_not_for_two_modules() -> None:
    net = Trunked()
    for given in (net, lambda obs_space, action_space: net):
        with pytest.raises(
            SettingsError, match=r"modules 'first' and 'last' have the same network, a Trunked object: .*"
        ):
            PPO(config(modules={"first": given, "last": given}))
    algorithm = PPO(config(modules={"first": net, "last": None}))  # what failed has not taken it
    with pytest.raises(SettingsError, match="'first' and 'third' have the same network"):
        algorithm.add_module("third", net, module_of=all_three)
    algorithm.train()
    assert [*algorithm.policies] == ["first", "last"]
    algorithm.remove_module("first", module_of=lambda agent, episode: "last")
    algorithm.add_module("first", net, module_of=first_and_last)  # its own, again
    algorithm.train()


def test_layers_are_shared_by_modules_that_are_trained_together() -> None:
    trunk = nn.Linear(2, 8)
    before = trunk.weight.detach().clone()
    for which in (("first",), lambda module_id, exp: True):
        with pytest.raises(
            SettingsError, match=r"'first' and 'last' share layers, but are not always trained .* freez"
        ):
            PPO(config(modules={"first": Trunked(trunk), "last": Trunked(trunk)}, modules_to_train=which))
    PPO(config(modules={"first": Trunked(trunk), "last": Trunked(trunk)})).train()
    assert not torch.equal(trunk.weight, before)
    trunk.requires_grad_(False)
    PPO(config(modules={"first": Trunked(trunk), "last": Trunked(trunk)}, modules_to_train=("first",))).train()
