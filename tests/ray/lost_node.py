# SPDX-License-Identifier: Apache-2.0
"""Trains on two nodes, of which one goes: with its runner and what that has made, then with a learner. Prints counts.

Another node comes in its place. The second goes by SIGKILL.
"""

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import runner_envs
from ray.cluster_utils import Cluster

from etude.algorithms import Ray
from etude.algorithms.ppo import PPO, PPOConfig

STORE = 150 * 2**20


class BackgroundEvaluation(PPO):
    """Its runners go on while it learns."""

    collects_in_background = True


class Waiting(PPO):
    """In its third update, its loss waits until a node has gone."""

    folder = ""

    def loss(self, module: Any, batch: Any) -> Any:
        """Waits only where a folder is named: at learners, not here."""
        if self.folder and self.updates == 2:
            Path(self.folder, f"waits{os.getpid()}").touch()
            while not Path(self.folder, "gone").exists():
                time.sleep(0.005)
        return super().loss(module, batch)


def main() -> None:
    head = {"num_cpus": 4, "resources": {"near": 4}, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = far_node(cluster)
    ray.init(address=cluster.address, log_to_driver=False)
    runner_goes(cluster, other)
    learner_goes(cluster)
    ray.shutdown()
    cluster.shutdown()


def far_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=4, resources={"far": 4}, object_store_memory=STORE)


def runner_goes(cluster: Cluster, other: Any) -> None:
    engine = Ray(num_runners=1, resources_per_runner={"far": 1}, fragment_steps=64, in_flight=2)
    algorithm = BackgroundEvaluation(
        PPOConfig(env=runner_envs.Wide, num_envs=2, num_steps=64, minibatch_size=64, epochs=1, seed=1, engine=engine)
    )
    algorithm.train()
    (member,) = algorithm.runner.members  # type: ignore[attr-defined]
    ray.wait([request.answer for request in member.requests], num_returns=2, fetch_local=False)  # both lie there
    giver: Any = ray.remote(runner_envs.Giver).options(resources={"far": 1}).remote()
    (lost,) = ray.get(giver.give.remote(np.zeros(1_000_000)))  # lies there, too
    cluster.remove_node(other)
    far_node(cluster)
    counts: dict[str, float] = {}
    for _ in range(2):
        for name, value in algorithm.train().metrics.items():
            counts[name] = counts.get(name, 0.0) + value
    counts["env_steps"] = algorithm.env_steps
    print(json.dumps(counts))
    broadcast = algorithm.runner._broadcast  # type: ignore[attr-defined]
    broadcast.refresh(algorithm)
    broadcast.ref, broadcast.version = lost, broadcast.version + 1
    broadcast._is_stored = lambda values: True  # it is lost after this was asked
    (member,) = algorithm.runner.members  # type: ignore[attr-defined]
    ray.wait([request.answer for request in member.requests], num_returns=2)
    then = [algorithm.train().metrics for _ in range(4)]
    names = ("lost_fragments", "runner_restarts")
    total = {name: sum(metrics[name] for metrics in then) for name in names}
    print(json.dumps(total | {"env_steps": algorithm.env_steps - counts["env_steps"]}))
    algorithm.close()


def learner_goes(cluster: Cluster) -> None:
    """Two learners of three CPUs, for which each node has room for one; and a peer here, which learns from the same."""
    far_node(cluster)  # for who comes back
    engine = Ray(
        num_runners=2,
        cpus_per_runner=0.5,
        resources_per_runner={"near": 1},
        num_learners=2,
        cpus_per_learner=3,
        fragment_steps=32,
    )
    same: dict[str, Any] = {"num_envs": 2, "num_steps": 64, "minibatch_size": 64, "epochs": 1, "lr": 1e-2, "seed": 1}
    algorithm = Waiting(PPOConfig(env=runner_envs.Walk, engine=engine, **same))
    peer = Waiting(PPOConfig(**same), saved_spaces=algorithm.spaces)
    its_engine: Any = algorithm.engine
    learners = its_engine.learners
    update = learners.update

    def both(parts: Any, env_steps: int) -> Any:
        peer.learner.set_env_steps(env_steps)
        for name, exp in parts.items():
            peer.learn(name, exp)
        return update(parts, env_steps)

    learners.update = both
    with tempfile.TemporaryDirectory() as folder:
        algorithm.folder = folder

        def watch() -> None:
            while len(list(Path(folder).glob("waits*"))) < 2:
                time.sleep(0.005)
            there = learners._group.nodes
            cluster.remove_node(next(n for n in cluster.worker_nodes if n.node_id in there), allow_graceful=False)
            Path(folder, "gone").touch()

        watcher = threading.Thread(target=watch)
        watcher.start()
        results = [algorithm.train() for _ in range(5)]
        watcher.join()
    here, there = (each.module.state_dict() for each in (peer, algorithm))
    apart = max(float((here[name] - there[name]).abs().max()) for name in here)
    names = ("learner_restarts", "runner_restarts", "lost_fragments")
    counts = {name: [result.metrics[name] for result in results] for name in names}
    print(json.dumps(counts | {"updates": algorithm.updates, "env_steps": algorithm.env_steps, "apart": apart}))
    algorithm.close()


main()
