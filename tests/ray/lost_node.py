# SPDX-License-Identifier: Apache-2.0
"""Trains on two nodes, of which one goes with its runner and with what that has made; prints the counts."""

import json
from typing import Any

import numpy as np
import ray
import runner_envs
from ray.cluster_utils import Cluster

from etude.algorithms.engines import Ray
from etude.algorithms.ppo import PPO, PPOConfig

STORE = 150 * 2**20


class Beside(PPO):
    """Its runners go on while it learns."""

    collects_beside = True


def main() -> None:
    head = {"num_cpus": 4, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=4, resources={"far": 4}, object_store_memory=STORE)
    ray.init(address=cluster.address, log_to_driver=False)
    engine = Ray(num_runners=1, resources_per_runner={"far": 1}, fragment_steps=64, in_flight=2)
    algorithm = Beside(
        PPOConfig(env=runner_envs.Wide, num_envs=2, num_steps=64, minibatch_size=64, epochs=1, seed=1, engine=engine)
    )
    algorithm.train()
    (member,) = algorithm.runner._stage.crew.members  # type: ignore[attr-defined]
    first, second = member.asks
    ray.wait([second.parts], fetch_local=False)  # both are made, and lie there
    made = ray.get(first.report).env_steps
    giver: Any = ray.remote(runner_envs.Giver).options(resources={"far": 1}).remote()
    (lost,) = ray.get(giver.give.remote(np.zeros(1_000_000)))  # lies there, too
    cluster.remove_node(other)
    cluster.add_node(num_cpus=4, resources={"far": 4}, object_store_memory=STORE)
    counts: dict[str, float] = {}
    for _ in range(2):
        for name, value in algorithm.train().metrics.items():
            counts[name] = counts.get(name, 0.0) + value
    counts |= {"made": made, "env_steps": algorithm.env_steps}
    print(json.dumps(counts))
    broadcast = algorithm.runner._stage._broadcast  # type: ignore[attr-defined]
    broadcast.refresh(algorithm.students)
    broadcast.ref, broadcast.version = lost, broadcast.version + 1
    (member,) = algorithm.runner._stage.crew.members  # type: ignore[attr-defined]
    ray.wait([ask.report for ask in member.asks], num_returns=2)
    then = [algorithm.train().metrics for _ in range(4)]
    names = ("lost_fragments", "runner_restarts")
    total = {name: sum(metrics[name] for metrics in then) for name in names}
    print(json.dumps(total | {"env_steps": algorithm.env_steps - counts["env_steps"]}))
    algorithm.close()
    ray.shutdown()
    cluster.shutdown()


main()
