# SPDX-License-Identifier: Apache-2.0
"""Algorithms that record to a server and learn from there."""

import json

import numpy as np

import etude
from etude.algorithms import BC, PPO, BCConfig, PPOConfig
from etude.checkpoints import load_meta
from etude.recordings import Recording


def test_what_was_recorded_to_a_server_is_learned_from_there(s3, tmp_path):
    ppo = PPO(PPOConfig(env="CartPole-v1", num_envs=2, seed=0))
    ppo.record(f"{s3.url}/runs/a", num_episodes=4, seed=0)
    ppo.record(f"{s3.url}/runs/b", num_episodes=4, seed=1)
    ppo.record(tmp_path / "a", num_episodes=4, seed=0)
    here, there = Recording.open(tmp_path / "a").read(), Recording.open(f"{s3.url}/runs/a").read()
    np.testing.assert_array_equal(here.steps["obs"], there.steps["obs"])
    data = [
        f"{s3.url}/runs/a",
        f"s3://KEY:SECRET@{s3.url.removeprefix('s3://')}/runs/b/*.parquet?endpoint_override={s3.address}&scheme=http",
    ]
    bc = BC(BCConfig(data=data, batch_size=32, updates_per_iteration=2))
    bc.train()
    bc.save(f"{s3.url}/clone")
    kept = load_meta(f"{s3.url}/clone")
    assert "SECRET" not in json.dumps(kept)
    assert kept["config"]["data"][1].startswith(f"{s3.url}/runs/b/*.parquet?endpoint_override=")
    again = etude.load(f"{s3.url}/clone")
    assert again.train().iteration == 2
