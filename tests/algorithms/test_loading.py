# SPDX-License-Identifier: Apache-2.0
"""A loaded algorithm may only play: training's envs are made once it trains. And settings in checkpoints."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from checkpoint_documents import at, read, removed, replaced, write
from gymnasium import spaces
from many_agent_envs import CartPoles, TwoJobs
from toy_envs import Echo, OwnNet

import etude
from etude.algorithms import PPO, PPOConfig
from etude.algorithms.saving import load_config, to_plain
from etude.checkpoints import load_tree, save_tree
from etude.envs import Workers
from etude.errors import CheckpointError, EnvError, SettingsError
from etude.runners import Episode

MADE: list[gym.Env[Any, Any]] = []


def counted() -> gym.Env[Any, Any]:
    MADE.append(Echo())
    return MADE[-1]


@pytest.fixture(autouse=True)
def none_made() -> None:
    MADE.clear()


def ppo(**given: Any) -> PPO:
    small = {"env": counted, "seed": 1, "num_envs": 3, "num_steps": 60, "minibatch_size": 30, "epochs": 1}
    return PPO(PPOConfig(**{**small, **given}))


def facts(result: Any) -> Any:
    row = result.to_dict()
    return repr([row[name] for name in ("env_steps", "episodes", "return_mean", "losses", "updates")])


def test_only_training_makes_training_s_envs(tmp_path: Path) -> None:
    algorithm = ppo(connectors=("normalize_obs",))
    assert len(MADE) == 3
    algorithm.train()
    algorithm.save(tmp_path / "a")
    loaded = etude.load(tmp_path / "a", env=counted)
    played = loaded.evaluate(5, env=Echo, seed=4)
    loaded.save(tmp_path / "b")
    loaded.close()
    assert len(MADE) == 3
    assert played.return_mean == algorithm.evaluate(5, env=Echo, seed=4).return_mean  # as the connectors had learned
    loaded.evaluate(2, seed=4)
    assert len(MADE) == 3 + 2
    again = etude.load(tmp_path / "b", env=counted)
    again.prepare()
    again.prepare()
    assert len(MADE) == 5 + 3
    expected = [facts(algorithm.train()) for _ in range(3)]
    assert [facts(again.train()) for _ in range(3)] == expected
    assert [facts(etude.load(tmp_path / "a", env=counted).train())] == expected[:1]
    assert len(MADE) == 8 + 3


def test_what_was_learned_by_connectors_is_there_to_play(tmp_path: Path) -> None:
    algorithm = ppo(connectors=("normalize_obs",))
    algorithm.train()
    algorithm.save(tmp_path)
    states = [
        a.connectors.state_dict()["connectors"][1]["state"] for a in (algorithm, etude.load(tmp_path, env=counted))
    ]
    assert repr(states[0]) == repr(states[1])
    fresh = ppo(connectors=("normalize_obs",)).connectors.state_dict()["connectors"][1]["state"]
    assert repr(fresh) != repr(states[0])


FAILS: list[bool] = []


def failing() -> gym.Env[Any, Any]:
    if FAILS:
        raise RuntimeError("no simulator")
    return counted()


def test_envs_that_can_not_be_made_are_an_error_of_training_only(tmp_path: Path) -> None:
    algorithm = ppo(env=failing)
    algorithm.train()
    algorithm.save(tmp_path)
    FAILS.append(True)
    try:
        loaded = etude.load(tmp_path, env=failing)
        assert loaded.evaluate(3, env=Echo, seed=1).episodes == 3
        with pytest.raises(EnvError, match="no simulator"):
            loaded.train()
    finally:
        FAILS.clear()
    assert facts(loaded.train()) == facts(algorithm.train())


class Reach(gym.Env[Any, Any]):
    """Actions up to ``high``, all of which are kept."""

    def __init__(self, high: float = 1.0, size: int = 2) -> None:
        self.observation_space = spaces.Box(0, 1, (size,), np.float32)
        self.action_space = spaces.Box(-high, high, (1,), np.float32)
        self.high, self.most, self.size = high, 0.0, size

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(self.size, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.most = max(self.most, float(abs(action[0])))
        return np.zeros(self.size, np.float32), 0.0, self.t == 5, False, {}


def wide() -> gym.Env[Any, Any]:
    MADE.append(Reach(100.0))
    return MADE[-1]


def longer() -> gym.Env[Any, Any]:
    return Reach(size=3)


def test_connectors_of_a_loaded_run_fit_another_env(tmp_path: Path) -> None:
    algorithm = ppo(env=Reach, connectors=("rescale_action",))
    algorithm.train()
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, env=wide)
    assert loaded.train().resumed == "new episodes: another env was given"
    assert max(env.most for env in MADE) > 1.0  # type: ignore[attr-defined]
    assert loaded.spaces["main"][1] == spaces.Box(-100.0, 100.0, (1,), np.float32)
    mismatch = etude.load(tmp_path, env=longer)
    with pytest.raises(SettingsError, match=r"the env test_loading:longer does not fit the module"):
        mismatch.train()


def test_a_checkpoint_that_lacks_something_is_named_at_once_or_when_training_begins(tmp_path: Path) -> None:
    ppo().save(tmp_path / "a")
    tree, meta = load_tree(tmp_path / "a")
    save_tree(tmp_path / "b", {**tree, "connectors/main": {}}, meta=meta)
    with pytest.raises(CheckpointError, match="the component `connectors/main` of the state holds no 'env': it is"):
        etude.load(tmp_path / "b", env=counted)
    runner = {name: value for name, value in tree["runner"].items() if name != "tracker"}
    save_tree(tmp_path / "c", {**tree, "runner": runner}, meta=meta)
    with pytest.raises(
        CheckpointError, match="`runner` of the checkpoint holds no 'tracker': .* not_components='runner'"
    ):
        etude.load(tmp_path / "c", env=counted).train()


def test_a_class_of_etudes_is_found_when_it_has_moved_to_another_file(tmp_path: Path) -> None:
    ppo(connectors=(etude.NormalizeObs(clip=5.0),)).save(tmp_path)
    document = read(tmp_path)
    place = ("meta", "config", "connectors", 0, "$made")
    assert at(document, place) == "etude.connectors.observations:NormalizeObs"
    write(tmp_path, replaced(document, place, "etude.connectors.normalize:NormalizeObs"))
    (normalize,) = etude.load(tmp_path, env=counted).config.connectors
    assert (type(normalize), normalize.clip) == (etude.NormalizeObs, 5.0)


# -- settings -------------------------------------------------------------------------------------------------------


def by_job(agent: Any, episode: Episode) -> str:
    return "red" if agent == "echo" else "blue"


def test_modules_and_who_they_act_for_come_back(tmp_path: Path) -> None:
    algorithm = ppo(env=TwoJobs, modules={"red": OwnNet, "blue": None}, module_of=by_job)
    algorithm.train()
    algorithm.save(tmp_path)
    own: dict[str, Any] = {"env": TwoJobs, "module_of": by_job}
    loaded = etude.load(tmp_path, modules={"red": OwnNet, "blue": None}, **own)
    assert loaded.config.agents.modules == {"red": OwnNet, "blue": None}
    assert loaded.config.agents.module_of is by_job
    assert facts(loaded.train()) == facts(algorithm.train())
    assert loaded.evaluate(3, seed=1).module_returns.keys() == {"red", "blue"}
    for others in (("red",), ("red", "green"), {"red": OwnNet, "blue": None, "green": None}):
        with pytest.raises(CheckpointError, match=r"`modules` can't be others than were saved: .* \['red', 'blue'\]"):
            etude.load(tmp_path, modules=others, **own)


def test_ids_of_modules_come_back_as_such(tmp_path: Path) -> None:
    algorithm = ppo(env=CartPoles, modules=("cart_0", "cart_1", "cart_2", "cart_3"))
    algorithm.save(tmp_path)
    assert etude.load(tmp_path, env=CartPoles).config.agents.modules == algorithm.config.agents.modules


def test_modules_without_a_name_must_be_given_again(tmp_path: Path) -> None:
    modules = {"red": lambda obs, action: OwnNet(obs, action), "blue": None}
    ppo(env=TwoJobs, modules=modules, module_of=by_job).save(tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"`modules` was <function .* give it when loading, as .*, modules=\.\.\.\)"
    ):
        etude.load(tmp_path / "a", env=TwoJobs, module_of=by_job)
    given: dict[str, Any] = {"env": TwoJobs, "module_of": by_job, "modules": modules}
    assert etude.load(tmp_path / "a", **given).config.agents.modules == modules
    ppo(env=TwoJobs, modules=("red", "blue"), module_of=lambda *asked: by_job(*asked)).save(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"`module_of` was <function .* give it when loading, as .*, module_of="):
        etude.load(tmp_path / "b", env=TwoJobs)
    assert etude.load(tmp_path / "b", env=TwoJobs, module_of=by_job).config.agents.module_of is by_job


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modules": ()}, r"`agents.modules` is \(\), but must be a list of at least one id, without duplicates"),
        ({"modules": ("a", "a")}, "`agents.modules` is .* must be a list of at least one id, without duplicates"),
        ({"modules": ("a",), "module": OwnNet}, "`module` is .* but must be none where there are `agents.modules`"),
        ({"module_of": by_job}, "`agents.module_of` is .* but must be none without `modules`"),
    ],
)
def test_modules_that_can_not_be(given: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PPOConfig(**given)


def test_workers_come_back_and_some_of_their_settings_may_be_others(tmp_path: Path) -> None:
    workers = Workers(num_workers=1, envs_per_worker=4, mode="thread", min_batch=4, max_wait=0.5)
    algorithm = ppo(workers=workers)
    algorithm.close()
    algorithm.save(tmp_path)
    made = len(MADE)
    assert etude.load(tmp_path, env=counted).config.workers == workers
    for override in ({"min_batch": 2}, {"min_batch": "2"}):
        config = etude.load(tmp_path, env=counted, workers=override).config
        assert config.workers == Workers(num_workers=1, envs_per_worker=4, mode="thread", min_batch=2, max_wait=0.5)
    assert etude.load(tmp_path, env=counted, workers=2).config.workers.num_workers == 2
    assert etude.load(tmp_path, env=counted, workers=Workers()).config.workers == Workers()
    assert len(MADE) == made
    with pytest.raises(SettingsError, match=r"PPOConfig\.workers has no setting `min_bach`. Nearest: `min_batch`"):
        etude.load(tmp_path, env=counted, workers={"min_bach": 2})


def test_plain_data_of_every_kind_of_setting() -> None:
    config = PPOConfig(
        modules={"red": OwnNet, "blue": None},
        module_of=by_job,
        workers=Workers(check="always"),
        lr=((0, 0.1), (9, 0.0)),
    )
    plain = {name: to_plain(getattr(config, name)) for name in ("agents", "workers", "lr")}
    assert plain["agents"]["modules"] == {"red": {"$ref": "toy_envs:OwnNet"}, "blue": None}
    own = {"modules": config.agents.modules, "module_of": by_job}
    assert load_config(PPOConfig, plain, own) == load_config(PPOConfig, plain, {}, trust=True) == config
    assert load_config(PPOConfig, {}, {}) == PPOConfig()
    with pytest.raises(CheckpointError, match="PPOConfig has no setting `wokers`. Nearest: `workers`"):
        load_config(PPOConfig, {"wokers": {}}, {})
    with pytest.raises(SettingsError, match="PPOConfig has no setting `wokers`. Nearest: `workers`"):
        load_config(PPOConfig, {}, {"wokers": {}})


def test_a_setting_that_an_older_checkpoint_lacks_is_new_if_it_is_not_the_default(tmp_path: Path) -> None:
    ppo().save(tmp_path)
    write(tmp_path, removed(read(tmp_path), ("meta", "config", "optimizer", "betas")))
    as_saved = etude.load(tmp_path, env=counted)
    assert not as_saved.recorder.has_new_settings
    other = etude.load(tmp_path, env=counted, optimizer={"betas": (0.5, 0.9)})
    assert other.recorder.has_new_settings
