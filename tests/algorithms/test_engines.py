# SPDX-License-Identifier: Apache-2.0
import dataclasses
from contextlib import closing

import pytest

from etude.algorithms import PPO, PPOConfig, Ray, RayData, load
from etude.algorithms.engine import Engine
from etude.errors import SettingsError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_runners": 0}, r"`num_runners` is 0, but must be at least 1"),
        ({"in_flight": 0}, r"`in_flight` is 0, but must be at least 1"),
        ({"num_learners": -1}, r"`num_learners` is -1, but must be at least 0"),
        ({"gpus_per_learner": -0.5}, r"`gpus_per_learner` is -0.5, but must be at least 0"),
        ({"fragment_steps": 0}, r"`fragment_steps` is 0, but must be at least 1"),
        ({"sample_timeout": 0}, r"`sample_timeout` is 0.0, but must be above 0"),
        ({"step_timeout": -1}, r"`step_timeout` is -1.0, but must be above 0"),
        ({"num_runner": 2}, r"Ray has no setting `num_runner`. Nearest: `num_runners`"),
    ],
)
def test_settings_that_are_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        Ray(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_cpus": 0}, r"`num_cpus` is 0.0, but must be above 0"),
        ({"prefetch_batches": -1}, r"`prefetch_batches` is -1, but must be at least 0"),
    ],
)
def test_settings_of_data_that_are_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        RayData(**given)


@pytest.mark.parametrize("engine", ["spark", None])
def test_what_is_no_engine(engine):
    with pytest.raises(
        SettingsError, match=rf"PPOConfig.engine is {engine!r}, expected Ray \| 'local' \| 'ray'\."
    ) as caught:
        PPOConfig(env="CartPole-v1", engine=engine)
    assert "num_runners=None" not in str(caught.value)


def test_the_local_engine_is_no_cluster():
    with closing(PPO(PPOConfig(env="CartPole-v1"))) as algorithm:
        assert type(algorithm.engine) is Engine


def test_the_engine_comes_from_who_loads_and_no_cluster_is_started_for_it(tmp_path):
    with_it = PPO(PPOConfig(env="CartPole-v1", num_envs=2, num_steps=32, seed=1))
    engine = Ray(num_runners=3, address="10.0.0.1:6379", runtime_env={"env_vars": {"TOKEN": "S3CR3T"}})
    with_it.config = dataclasses.replace(with_it.config, engine=engine)
    with_it.save(tmp_path / "run")
    assert load(tmp_path / "run").config.engine == "local"
    text = (tmp_path / "run" / "checkpoint.json").read_text()
    assert not [word for word in ("10.0.0.1", "S3CR3T") if word in text]
    other = Ray(num_runners=2, data=RayData(prefetch_batches=1))
    loaded = load(tmp_path / "run", engine=other)
    assert loaded.config.engine == other
    assert not loaded.engine.has_envs
    assert load(tmp_path / "run", engine={"num_runners": 5}).config.engine == Ray(num_runners=5)


def test_without_ray_the_error_says_what_to_install(preloaded):
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from etude.algorithms import PPO, PPOConfig\n"
        "from etude.errors import EngineError\n"
        "try:\n    PPO(PPOConfig(engine='ray'))\nexcept EngineError as error:\n    print(error)\n"
    )
    told = preloaded.run(code).stdout
    assert told.startswith("the ray engine needs Ray: pip install '.[ray]' in the clone of Etude, which is on no ")


def test_nothing_but_the_ray_engine_imports_ray(preloaded):
    code = "import sys, etude.algorithms, etude.cli.main; print('ray' in sys.modules)"
    assert preloaded.run(code).stdout.strip() == "False"
