# SPDX-License-Identifier: Apache-2.0
"""The settings of the ray engine."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from etude.settings import check_range, settings


@settings
class RayData:
    """How recordings flow to the learners on a cluster, through Ray Data."""

    everyday: ClassVar[tuple[str, ...]] = ()

    num_cpus: float = 1.0
    """CPUs of each task that reads and prepares, above 0."""

    prefetch_batches: int = 2
    """Blocks that each learner fetches ahead, at least 0."""

    def __post_init__(self) -> None:
        check_range(
            "ray.data",
            num_cpus=(self.num_cpus > 0, f"greater than 0, not {self.num_cpus}"),
            prefetch_batches=(self.prefetch_batches >= 0, f"at least 0, not {self.prefetch_batches}"),
        )


@settings
class Ray:
    """The ray engine: runners and learners as actors of a Ray cluster. Needs ``pip install ".[ray]"`` in the clone."""

    main_setting: ClassVar[str] = "num_runners"
    everyday: ClassVar[tuple[str, ...]] = ("num_runners",)

    num_runners: int = 2
    """Runners that act at the same time, each with `num_envs` envs of its own, at least 1."""

    cpus_per_runner: float = 1.0
    """CPUs that each of them is given, at least 0."""

    gpus_per_runner: float = 0.0
    """GPUs that each of them is given, at least 0; fractions are allowed."""

    resources_per_runner: Mapping[str, float] | None = None
    """Other resources that each of them is given, by name, such as `{"simulator": 1}`."""

    fragment_steps: int | None = None
    """Steps that a runner gives at once, at least 1. None: where the learner waits for all of an iteration's steps, a
    part of each runner's share, so that fast runners take over from slow ones; else `num_steps`."""

    in_flight: int = 2
    """Fragments that are asked of a runner at once where the learner does not wait for them, at least 1: more keep
    runners busy while it learns, and make what it learns from older."""

    sample_timeout: float = 60.0
    """Seconds after which a collection goes on with what has come, at least one fragment; above 0. Runners also have
    these to write what they record, and processes wait so long for room before that is told."""

    step_timeout: float | None = 300.0
    """Seconds without a single turn, above 0, after which a runner's envs count as hanging, also those that are being
    made: it is ended and made anew. None: never."""

    restart_failed_runners: bool = True
    """Make runners anew that have died; else training goes on with the others."""

    max_restarts: int = 100
    """Restarts until a run is resumed, at least 0: so many of runners, of evaluation runners and of learners, all of a
    kind together; one more is an error."""

    num_evaluation_runners: int = 0
    """Runners apart from these, which play the episodes of evaluations while training goes on; 0: the process that
    trains plays them."""

    num_learners: int = 0
    """Learners that share each update, each with a part of the batch. 0: the process that trains learns itself."""

    cpus_per_learner: float = 1.0
    """CPUs that each of them is given, at least 0."""

    gpus_per_learner: float = 0.0
    """GPUs that each of them is given, at least 0; fractions are allowed. Above 0, learners learn on `cuda`."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How gradients are averaged: `nccl` where each learner has a GPU to itself, `gloo` else."""

    learner_timeout: float = 600.0
    """Seconds that an update may take, or the start of learners that have found room, before one of them counts as
    lost, above 0."""

    address: str | None = None
    """The cluster: `auto`, `host:port`, `ray://host:port`. None: the one that `RAY_ADDRESS` names or that this process
    is connected to already, else one of this machine alone, which ends with the run."""

    runtime_env: Mapping[str, Any] | None = None
    """What actors find: see Ray's runtime environments."""

    data: RayData = RayData()
    """How recordings flow to the learners."""

    def __post_init__(self) -> None:
        least = dict.fromkeys(("num_runners", "in_flight"), 1) | dict.fromkeys(_FROM_ZERO, 0)
        rules = {
            name: (getattr(self, name) >= n, f"at least {n}, not {getattr(self, name)}") for name, n in least.items()
        }
        for name in ("sample_timeout", "step_timeout", "learner_timeout"):
            value = getattr(self, name)
            rules[name] = (value is None or value > 0, f"greater than 0, not {value}")
        fragment = self.fragment_steps
        rules["fragment_steps"] = (fragment is None or fragment >= 1, f"at least 1, not {fragment}")
        is_whole = self.backend != "nccl" or self.gpus_per_learner >= 1
        rules["backend"] = (is_whole, "auto or gloo where learners have no whole GPU each")
        check_range("ray", **rules)


_FROM_ZERO = (
    "cpus_per_runner",
    "gpus_per_runner",
    "max_restarts",
    "num_evaluation_runners",
    "num_learners",
    "cpus_per_learner",
    "gpus_per_learner",
)

EngineLike: TypeAlias = Ray | Literal["local", "ray"]
"""``local``: this process and its env workers; or a Ray cluster, with settings of its own or without."""
