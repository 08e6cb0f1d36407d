# SPDX-License-Identifier: Apache-2.0
"""What an algorithm asks of a cluster, process by process."""

from etude.algorithms import ActingConfig, AlgorithmConfig, OfflineConfig
from etude.algorithms.ray_config import Ray
from etude.threads import for_acting


def actors_of(config: AlgorithmConfig) -> list[dict[str, float]]:
    """The resources by name of each process that an algorithm with these settings starts; none on the local engine.

    Of the tasks that read recordings for learners, one: there may be more, as far as there is room.
    """
    if config.engine == "local":
        return []
    engine = Ray() if config.engine == "ray" else config.engine
    runner = {"CPU": engine.cpus_per_runner, "GPU": engine.gpus_per_runner, **(engine.resources_per_runner or {})}
    learner = {"CPU": engine.cpus_per_learner, "GPU": engine.gpus_per_learner}
    evaluates = (
        config.env is not None and isinstance(config, ActingConfig | OfflineConfig) and config.evaluation.interval
    )
    wanted = [runner] * (engine.num_runners if isinstance(config, ActingConfig) else 0)
    wanted += [{**runner, "GPU": 0.0}] * (engine.num_evaluation_runners if evaluates else 0)
    wanted += [learner] * engine.num_learners
    if isinstance(config, OfflineConfig) and config.data is not None and engine.num_learners:
        wanted += [{"CPU": engine.data.num_cpus}]
    return [bundle for each in wanted if (bundle := {name: amount for name, amount in each.items() if amount > 0})]


def driver_of(config: AlgorithmConfig) -> dict[str, float]:
    """The resources of the process that trains, where a cluster runs it, too: its threads, workers and GPU."""
    workers = 0
    if isinstance(config, OfflineConfig):
        workers = config.reading.num_workers
    elif isinstance(config, ActingConfig) and config.engine == "local":
        workers = config.workers.num_workers
    gpu = {"GPU": 1.0} if config.compute.device.startswith("cuda") else {}
    return {"CPU": float(for_acting(config.compute.threads) + workers), **gpu}
