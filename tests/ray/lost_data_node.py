# SPDX-License-Identifier: Apache-2.0
"""Takes batches that two nodes read, of which one goes in the middle of an epoch; prints how often steps came."""

import json
import sys
from collections import Counter

import numpy as np
import ray
from ray.cluster_utils import Cluster

import etude
from etude.algorithms import Ray, RayData
from etude.ray.data import Shard, feeds_of, open_shards

STORE = 150 * 2**20


@ray.remote(num_cpus=0, resources={"here": 0.1})
class Learner:
    """Takes its share, and says which steps these were."""

    def __init__(self, config: etude.BCConfig, spaces: object, shard: Shard) -> None:
        self.feed = feeds_of(shard, etude.BC(config, saved_spaces=spaces))["main"]  # type: ignore[arg-type]

    def take(self, num: int) -> list[tuple[int, int]]:
        return [(int(a), int(b)) for batch in self.feed.take(num) for a, b in np.asarray(batch["obs"])]


def main(path: str, num_learners: int, steps: int) -> None:
    head = {"num_cpus": 1, "resources": {"here": 1}, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=3, object_store_memory=STORE)
    ray.init(address=cluster.address, log_to_driver=False)
    config = etude.BCConfig(data=path, mode="stream", batch_size=10, buffer_size=20, prefetch=0, seed=0)
    algorithm = etude.BC(config)
    settings = Ray(num_learners=num_learners, data=RayData(prefetch_batches=0))
    each = steps // num_learners // (10 // num_learners)
    found: list[tuple[int, int]] = []
    shards = open_shards(algorithm, settings)
    learners = [Learner.remote(config, algorithm.module_spaces(), shard) for shard in shards]  # type: ignore[attr-defined]
    for num in (2, each - 2):
        found += [step for part in ray.get([one.take.remote(num) for one in learners]) for step in part]
        if num == 2:
            cluster.remove_node(other)
    print(json.dumps({"steps": len(set(found)), "most": max(Counter(found).values())}), flush=True)
    ray.shutdown()
    cluster.shutdown()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
