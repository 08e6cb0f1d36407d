# SPDX-License-Identifier: Apache-2.0
"""Policies of all kinds: behind connectors, with memory, over all spaces, several at once."""

from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from many_agent_envs import CartPoles
from signalling import Signalling
from tabular import PLAYS, WANTS, exact, played, policy
from toy_envs import Echo, Switchboard

from etude.algorithms import DQN, PPO, SAC, DQNConfig, PPOConfig, SACConfig, Task, TaskConfig
from etude.errors import DataError, ModuleError, SettingsError
from etude.evaluation import FQEConfig, OffPolicyEvaluationConfig, evaluate, evaluate_each_on, evaluate_on, fqe
from etude.modules import NetworkConfig
from etude.recordings import Recording, RecordingWriter

NEED_WEIGHTS = ("is", "wis", "pdis", "wpdis")
SMALL = FQEConfig(members=3, steps=40, batch_size=64)


class Reach(gym.Env[Any, Any]):
    """Reward for an action near what is shown; 5 steps, then terminated or truncated."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-2, 2, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def _look(self) -> Any:
        self.shown = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.shown

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = -float(np.square(action - self.shown).sum())
        over = self.t == 5
        return self._look(), reward, over and self.shown[0] > 0, over and self.shown[0] <= 0, {}


def own_recording(tmp_path, algorithm, episodes=40):
    algorithm.record(tmp_path / "own", episodes, seed=1, explore=True)
    return tmp_path / "own"


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(env=Echo, seed=0),
        PPOConfig(env=Echo, seed=0, connectors=("frame_stack:3", "prev_action_reward", "clip_reward:-0.1,0.1")),
        PPOConfig(env=Echo, seed=0, network=NetworkConfig(recurrent="lstm", recurrent_size=8)),
        PPOConfig(env=Switchboard, seed=0),
        PPOConfig(env=Reach, seed=0),
        PPOConfig(env=Reach, seed=0, squash=True),
        PPOConfig(env=Reach, seed=0, connectors=("rescale_action",)),
    ],
    ids=["discrete", "connectors", "lstm", "multidiscrete", "gaussian", "squashed", "rescaled"],
)
def test_the_policy_that_played_has_weights_of_1(tmp_path, config):
    algorithm = PPO(config)
    path = own_recording(tmp_path, algorithm)
    algorithm.module.train()
    found = evaluate_on(algorithm, path, methods=NEED_WEIGHTS)
    assert algorithm.module.training
    assert found.mean_weight == pytest.approx(1, abs=1e-3)
    for estimate in found.estimates.values():
        assert estimate.mean == pytest.approx(found.behaviour.mean, rel=1e-3)
        assert estimate.effective_sample_size == pytest.approx(40, rel=1e-3)
    discounted = [np.sum(one.steps["reward"] * 0.99 ** np.arange(one.num_steps)) for one in Recording.open(path).read()]
    assert found.behaviour.mean == pytest.approx(np.mean(discounted))
    if not algorithm.module.recurrent:
        fitted = evaluate_on(algorithm, path, methods=["dm", "dr", "fqe"], fqe=SMALL)
        assert all(np.isfinite(estimate.mean) for estimate in fitted.estimates.values())


def test_memory_makes_a_difference(tmp_path):
    net = NetworkConfig(recurrent="gru", recurrent_size=8)
    played_by, other = (PPO(PPOConfig(env=Echo, seed=seed, network=net)) for seed in (0, 1))
    with torch.no_grad():
        other.module.net.policy_head.weight.mul_(300.0)
    path = own_recording(tmp_path, played_by)
    found = evaluate_on(other, path, methods=["wis"])
    exp = Recording.open(path).read()
    naive = []
    for one in exp:  # a step at a time, with the state carried along
        state, total = None, 0.0
        for t in range(one.num_steps):
            out = other.module(torch.from_numpy(one.steps["obs"][t : t + 1].copy())[:, None], state)
            state = out.state
            logp = torch.log_softmax(out.dist_inputs[0, 0], -1)[int(one.steps["action"][t])]
            total += logp.item() - float(one.steps["logp"][t])
        naive.append(np.exp(total))
    assert found.mean_weight == pytest.approx(np.mean(naive), rel=1e-3)
    assert found.estimates["wis"].effective_sample_size < 30
    with pytest.raises(SettingsError, match="module 'main' is recurrent, but dm, dr, wdr and fqe fit values of single"):
        evaluate_on(other, path)


def test_box_actions_are_valued_by_draws(tmp_path):
    algorithm = PPO(PPOConfig(env=Reach, seed=0))
    path = own_recording(tmp_path, algorithm, 400)
    with torch.no_grad():
        algorithm.module.net.log_std.fill_(-1.0)  # calmer than what played: closer to what is shown
    truth = -5 * (2 / 3 + 2 * np.exp(-2.0))  # each coordinate: variance of the shown one and of the action
    found = evaluate_on(
        algorithm, path, methods=["dm", "dr", "wdr", "fqe"], gamma=1 - 1e-9, fqe=FQEConfig(members=3, steps=500)
    )
    # truncated episodes are valued beyond their end, so that only the order is told: better than what was played
    assert found.behaviour.mean == pytest.approx(-5 * (2 / 3 + 2), rel=0.25)
    assert truth > found.behaviour.mean + 5
    assert all(estimate.mean > found.behaviour.mean + 2 for estimate in found.estimates.values())
    assert "episodes were truncated: dm, dr, wdr and fqe include the value of what would have followed" in " ".join(
        found.notes
    )
    with pytest.raises(SettingsError, match="`gamma` is 1, and episodes were truncated"):
        evaluate_on(algorithm, path, methods=["fqe"], gamma=1.0)
    assert evaluate_on(algorithm, path, methods=["wis"], gamma=1.0).gamma == 1.0


def test_most_likely_actions_of_discrete_spaces():
    exp, greedy = played(3_000, seed=1), policy(np.array([[9.0, 0], [0, 9.0], [0, 9.0]]) * 5)
    wanted = exact(np.array([[9.0, 0], [0, 9.0], [0, 9.0]]) * 5)[0]
    algorithm = policy(WANTS)  # which has the same most likely actions
    config = FQEConfig(members=3, steps=500)
    found = evaluate_on(algorithm, exp, explore=False, gamma=0.9, fqe=config)
    drawn = evaluate_on(greedy, exp, methods=["pdis", "wpdis"], gamma=0.9)
    for name in ("pdis", "wpdis"):
        assert found.estimates[name].mean == pytest.approx(drawn.estimates[name].mean, rel=1e-4)
    for name in ("wpdis", "dr", "wdr", "fqe", "dm"):
        assert found.estimates[name].mean == pytest.approx(wanted, abs=0.35), name
    assert "taking its most likely actions" in str(found)


def test_where_no_episode_could_be_the_policys_there_is_no_estimate():
    exp = played(6, seed=2)
    flipped = exp.with_steps(action=1 - policy(WANTS).module.dist.act(exp.steps["obs"] @ WANTS, None)["action"])
    found = evaluate_on(policy(WANTS), flipped, explore=False, methods=NEED_WEIGHTS, gamma=0.9)
    assert found.estimates["is"].mean == found.estimates["pdis"].mean == found.mean_weight == 0
    assert np.isnan(found.estimates["wis"].mean)
    assert np.isnan(found.estimates["wpdis"].low)
    assert found.estimates["wis"].effective_sample_size == 0
    assert '"mean": null' in found.to_json()
    assert found.trusted is False
    assert any("the mean weight of whole episodes is 0 rather than 1" in note for note in found.notes)


def test_epsilon_greedy_and_deterministic_policies(tmp_path):
    behaviour = PPO(PPOConfig(env=Echo, seed=0))
    path = own_recording(tmp_path, behaviour, 100)
    dqn = DQN(DQNConfig(env=Echo, seed=0))
    dqn.module.dist.epsilon = 0.5
    found = evaluate_on(dqn, path, methods=["pdis", "wpdis", "dr", "fqe"], fqe=SMALL)
    assert found.estimates["wpdis"].low < found.estimates["wpdis"].mean < found.estimates["wpdis"].high
    boxes = PPO(PPOConfig(env=Reach, seed=0))
    data = tmp_path / "boxes"
    boxes.record(data, 20, seed=1, explore=True)
    sac = SAC(SACConfig(env=Reach, seed=0, network=NetworkConfig(hidden=(16,))))
    assert np.isfinite(evaluate_on(sac, data, methods=["wis", "fqe"], fqe=SMALL).estimates["fqe"].mean)
    assert evaluate_on(sac, data, explore=False, methods=["dm", "fqe"], fqe=SMALL).behaviour_policy is None
    with pytest.raises(SettingsError, match=r"most likely `action` has no density, which importance weights need"):
        evaluate_on(sac, data, explore=False)


class EchoTask(Task):
    """Does what is shown."""

    def forward(self, net: Any, batch: Any) -> Any:
        return net(batch.obs)

    def loss(self, out: Any, batch: Any) -> Any:
        raise NotImplementedError

    def act(self, net: Any, obs: Any, optimal: bool) -> Any:
        return obs.argmax(-1)


@pytest.mark.parametrize("evaluate", [evaluate_on, evaluate_each_on])
def test_a_policy_alone_is_no_algorithm(evaluate):
    given: Any = policy(WANTS).policy
    with pytest.raises(SettingsError, match=r"the first argument is an algorithm, .* not Policy\(.*etude\.load"):
        evaluate(given, played(3, seed=0))


def test_a_task_has_no_probabilities(tmp_path):
    path = own_recording(tmp_path, PPO(PPOConfig(env=Echo, seed=0)), 200)
    task = EchoTask(TaskConfig(env=Echo, seed=0, module=lambda obs, action: torch.nn.Linear(2, 2)))
    with pytest.raises(SettingsError, match="a Task's own `act` gives no probabilities"):
        evaluate_on(task, path)
    found = evaluate_on(task, path, methods=["fqe"], gamma=0.9, fqe=FQEConfig(members=3, steps=500))
    # 1 at each step; the time is not seen, so that any step may be the last of ten
    assert found.estimates["fqe"].mean == pytest.approx(1 / (1 - 0.9 * 0.9), abs=0.4)


def test_the_policy_that_played_can_be_fitted():
    exp = played(1_500, seed=3)
    unknown = exp.with_steps()
    del unknown.steps["logp"]
    algorithm = policy(WANTS)
    found = evaluate_on(algorithm, unknown, methods=NEED_WEIGHTS, gamma=0.9, behaviour="fit")
    known = evaluate_on(algorithm, exp, methods=NEED_WEIGHTS, gamma=0.9)
    assert found.behaviour_policy == "fitted"
    assert "probabilities of the policy that played: fitted" in str(found)
    for name in ("wis", "wpdis", "pdis"):
        assert found.estimates[name].mean == pytest.approx(known.estimates[name].mean, abs=0.2), name
    assert found.estimates["wpdis"].mean == pytest.approx(exact(WANTS)[0], abs=0.25)
    with pytest.raises(DataError, match=r"no column `logp`.*behaviour='fit'.*by dm and fqe only"):
        evaluate_on(algorithm, unknown, methods=["wis"])
    assert evaluate_on(algorithm, unknown, methods=["dm"], fqe=SMALL).behaviour_policy is None


def test_each_module_from_what_its_agents_did(tmp_path, monkeypatch, capsys):
    algorithm = PPO(PPOConfig(env=CartPoles, modules=("red", "blue"), module_of=by_number, seed=0, num_envs=1))
    path = own_recording(tmp_path, algorithm, 10)
    found = evaluate_each_on(algorithm, path, methods=["wis", "wpdis", "fqe"], fqe=SMALL)
    exp = Recording.open(path).read()
    for name, agents in (("red", 3), ("blue", 1)):
        own, result = exp.select(module_id=name), found[name]
        assert (result.module, result.episodes, result.steps) == (name, 10 * agents, own.num_steps)
        assert result.mean_weight == pytest.approx(1, abs=1e-3)
        returns = [np.sum(one.steps["reward"] * 0.99 ** np.arange(one.num_steps)) for one in own]
        assert result.behaviour.mean == pytest.approx(np.mean(returns))
    assert capsys.readouterr().err == ""
    shares = {}

    @contextmanager
    def gauge(title, *, quiet):
        yield shares.setdefault(title, []).append

    for module in (evaluate, fqe):
        monkeypatch.setattr(module, "gauge", gauge)
    evaluate_each_on(algorithm, path, methods=["fqe"], fqe=SMALL, progress=True)
    assert [*shares] == ["fitting action values", "valuing the episodes"]
    assert all(each.count(1.0) == 2 and max(each) == 1.0 for each in shares.values()), "once for each module"
    with pytest.raises(SettingsError, match=r"there are the modules \['red', 'blue'\]: evaluate_each_on gives"):
        evaluate_on(algorithm, path)
    again = evaluate_each_on(algorithm, renamed(exp, module_id=None), methods=["wis"])  # asked of module_of
    assert {name: result.episodes for name, result in again.items()} == {"red": 30, "blue": 10}


def by_number(agent: Any, episode: Any) -> str:
    return "blue" if agent == "cart_3" else "red"


def renamed(exp, **columns):
    segments = exp.segments.replace(**{n: np.full(len(exp.segments), v, object) for n, v in columns.items()})
    return type(exp)(exp.steps, exp.offsets, segments, exp.final_obs)


def test_agents_of_nobody_are_counted_and_absent_modules_named():
    config = PPOConfig(env=lambda: CartPoles(2), modules=("cart_0", "cart_1"), seed=0, num_envs=1)
    algorithm = PPO(config)
    exp = algorithm.runner.collect_each(num_episodes=6)["cart_0"]
    nameless = renamed(exp, module_id=None)  # by the agent's name
    both = type(exp).concat([nameless, renamed(exp, module_id="green", agent_id="stranger")])
    found = evaluate_each_on(algorithm, both, methods=["wis"])
    assert list(found) == ["cart_0"]
    assert found["cart_0"].left_out == {"of agents that no module acts for": 6}
    assert "there is no whole episode of the modules ['cart_1']" in found["cart_0"].notes
    with pytest.raises(DataError, match="the experience: there is no whole episode"):
        evaluate_each_on(algorithm, renamed(exp, module_id="green", agent_id="stranger"), methods=["wis"])


def test_agents_of_an_episode_are_drawn_together():
    exp = played(40, seed=4)
    twins = type(exp).concat([renamed(exp, agent_id="a"), renamed(exp, agent_id="b")])
    one, two = (evaluate_on(policy(PLAYS), data, methods=["wis"], gamma=0.9) for data in (exp, twins))
    assert two.episodes == 80
    assert [note for note in two.notes if "the policy acts for several agents in an episode" in note]
    assert not [note for note in one.notes if "several agents" in note]
    assert two.behaviour.mean == pytest.approx(one.behaviour.mean)
    assert (two.behaviour.low, two.behaviour.high) == pytest.approx((one.behaviour.low, one.behaviour.high))


def test_episodes_of_one_id_and_agent_are_named():
    exp = played(20, seed=4)
    found = evaluate_on(policy(PLAYS), type(exp).concat([exp, exp]), methods=["wis"])
    assert found.episodes == 40
    assert [note for note in found.notes if note.startswith("several episodes have the same id and agent")]
    assert not [note for note in found.notes if "several agents" in note]


def test_data_of_another_kind(tmp_path):
    echo = PPO(PPOConfig(env=Echo, seed=0))
    path = own_recording(tmp_path, echo)
    with pytest.raises(DataError, match=r"own: the observations are .* but module 'main' was made for"):
        evaluate_on(PPO(PPOConfig(env=Switchboard, seed=0)), path)
    with pytest.raises(DataError, match=r"own: the actions are Discrete\(2\), but module 'main' was made for Box"):
        evaluate_on(PPO(PPOConfig(env=Reach, seed=0)), path)
    with pytest.raises(DataError, match="the experience: the observations are"):
        evaluate_on(policy(WANTS), Recording.open(path).read())
    boxes = PPO(PPOConfig(env=Reach, seed=0))
    boxes.record(tmp_path / "boxes", 3, seed=1, explore=True)
    rescaled = PPO(PPOConfig(env=Reach, seed=0, connectors=("rescale_action",)))
    exp = Recording.open(tmp_path / "boxes").read()
    for high in (3, np.inf):  # other bounds than the env's, or none, so that units are not known
        where, space = tmp_path / str(high), spaces.Box(-high, high, (2,), np.float32)
        with RecordingWriter(where, obs_space=Reach.observation_space, action_space=space) as writer:
            writer.write(exp)
        with pytest.raises(DataError, match="with actions in the units of the env or of the module, as the bounds"):
            evaluate_on(rescaled, where)


@pytest.mark.parametrize("methods", [["is"], ["wis", "pdis"], ["dm"]])
def test_actions_in_the_units_of_the_env_or_of_the_module(methods, tmp_path):
    """`rescale_action` halves actions of this env, so that two of them are four times as dense."""
    boxes = PPO(PPOConfig(env=Reach, seed=0))
    path = own_recording(tmp_path, boxes)
    rescaled = PPO(PPOConfig(env=Reach, seed=1, connectors=("rescale_action",)))
    found = evaluate_on(rescaled, path, methods=methods, fqe=SMALL, seed=0)
    exp = Recording.open(path).read()
    halved = exp.with_steps(action=exp.steps["action"] / 2, logp=exp.steps["logp"].astype(np.float64) + np.log(4))
    in_memory = evaluate_on(rescaled, halved, methods=methods, fqe=SMALL, seed=0)
    for method in methods:
        assert found.estimates[method].mean == pytest.approx(in_memory.estimates[method].mean, rel=1e-5)
    with torch.no_grad():
        out = rescaled.module(torch.from_numpy(exp.steps["obs"]))
        density = out.logp(torch.from_numpy(exp.steps["action"] / 2)).double().numpy() - np.log(4)
    ratio = np.add.reduceat(density - exp.steps["logp"], exp.offsets[:-1])
    assert found.mean_weight == pytest.approx(np.exp(ratio).mean(), rel=1e-4)


def test_actions_that_were_not_drawn(tmp_path):
    echo = PPO(PPOConfig(env=Echo, seed=0))
    echo.record(tmp_path / "greedy", 5, seed=1)
    with pytest.raises(DataError, match=r"greedy: `logp` is 0 throughout: the actions were not sampled"):
        evaluate_on(echo, tmp_path / "greedy")
    exp = played(5, seed=5)
    logp = exp.steps["logp"].copy()
    logp[exp.offsets[3]] = np.nan
    with pytest.raises(DataError, match=r"the experience: `logp` is nan at t 0 of episode '5-3'"):
        evaluate_on(policy(WANTS), exp.with_steps(logp=logp))
    probabilities = np.exp(exp.steps["logp"])
    with pytest.raises(DataError, match=r"`logp` is 0\.\d+ at t 0 of episode '5-0': .*mapped as `propensity`"):
        evaluate_on(policy(WANTS), exp.with_steps(logp=probabilities))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ["wiss"]}, "there is no method `wiss`; there are is, wis, .* Nearest: `wis`"),
        ({"methods": []}, "`methods` is .*, but must be some of is, wis"),
        ({"gamma": 1.1}, "`gamma` is 1.1, but must be between 0 and 1"),
        ({"confidence": 1.0}, "`confidence` is 1.0, but must be between 0 and 1, both left out"),
        ({"seed": -1}, "`seed` is -1, but must be at least 0"),
        ({"behaviour": "guess"}, "OffPolicyEvaluationConfig.behaviour is 'guess', expected 'recorded' | 'fit'"),
        ({"resamples": 0}, "`resamples` is 0, but must be at least 1"),
        ({"resample": 10}, "OffPolicyEvaluationConfig has no setting `resample`. Nearest: `resamples`"),
    ],
)
def test_arguments_out_of_range(given, message):
    with pytest.raises(SettingsError, match=message):
        evaluate_on(policy(WANTS), played(3, seed=6), **given)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("members", 1, "at least 2"),
        ("steps", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("lr", 0.0, "above 0"),
        ("tau", 1.5, "above 0 and at most 1"),
        ("draws", 0, "at least 1"),
    ],
)
def test_settings_of_fits_out_of_range(name, value, words):
    with pytest.raises(SettingsError, match=f"`{name}` is {value}, but must be {words}"):
        FQEConfig(**{name: value})


def test_settings_come_as_one_object_or_by_name():
    exp, algorithm = played(30, seed=6), policy(WANTS)
    config = OffPolicyEvaluationConfig(methods=("wis",), gamma=0.9, seed=4)
    found = evaluate_on(algorithm, exp, config)
    assert found == evaluate_on(algorithm, exp, methods=["wis"], gamma=0.9, seed=4)
    other = evaluate_on(algorithm, exp, config, gamma=0.5)
    assert (other.gamma, other.seed, list(other.estimates)) == (0.5, 4, ["wis"])
    assert evaluate_each_on(algorithm, exp, config) == {"main": found}


def test_one_episode_has_an_estimate_and_no_interval():
    found = evaluate_on(policy(WANTS), played(1, seed=7), methods=["wis", "fqe"], fqe=SMALL)
    assert np.isfinite(found.estimates["wis"].mean)
    assert np.isnan(found.estimates["wis"].low)
    assert np.isnan(found.estimates["fqe"].high)
    assert "one episode has no interval" in found.notes


@pytest.mark.parametrize(("method", "recurrent"), [("wis", None), ("wis", "lstm"), ("dm", None)])
def test_a_network_that_gives_nan_is_named(tmp_path, method, recurrent):
    algorithm = PPO(PPOConfig(env=Echo, seed=0, network=NetworkConfig(recurrent=recurrent, recurrent_size=8)))
    data = own_recording(tmp_path, algorithm, episodes=5)
    with torch.no_grad():
        next(algorithm.module.parameters()).fill_(float("nan"))
    config = OffPolicyEvaluationConfig(methods=(method,), fqe=SMALL)
    with pytest.raises(ModuleError, match="gives NaN for recorded observations, so its actions have no probabilities"):
        evaluate_on(algorithm, data, config)


def test_a_recording_of_one_of_modules_with_different_spaces(tmp_path):
    algorithm = PPO(PPOConfig(env=Signalling, modules=("speaker", "listener"), num_envs=1, seed=0))
    algorithm.record(tmp_path / "data", 20, explore=True)
    for name, other in (("speaker", "listener"), ("listener", "speaker")):
        found = evaluate_each_on(algorithm, tmp_path / "data" / name, methods=["is"])
        assert list(found) == [name]
        assert found[name].episodes == 20
        assert f"the spaces of the modules ['{other}'] are not those of the recording" in found[name].notes
    with pytest.raises(DataError, match="the observations are .* but module 'speaker' was made for"):
        evaluate_each_on(algorithm, played(3, seed=0), methods=["is"])
    algorithm.close()
