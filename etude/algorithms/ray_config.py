# SPDX-License-Identifier: Apache-2.0
"""Settings of the ray engine."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from etude.settings import FloatAbove0, FloatFrom0, IntFrom0, IntFrom1, check_rules, settings


@settings
class RayData:
    """How recordings reach remote learners, through Ray Data."""

    everyday: ClassVar[tuple[str, ...]] = ()

    num_cpus: FloatAbove0 = 1.0
    """CPUs of each task that reads and prepares data, above 0."""

    prefetch_batches: IntFrom0 = 2
    """Blocks that each learner fetches ahead, at least 0."""


@settings
class Ray:
    """The ray engine: runners and learners as actors of a Ray cluster. Needs ``pip install ".[ray]"`` in the clone."""

    main_setting: ClassVar[str] = "num_runners"
    everyday: ClassVar[tuple[str, ...]] = ("num_runners",)

    num_runners: IntFrom1 = 2
    """Number of runners that act at the same time, at least 1, each with `num_envs` envs."""

    cpus_per_runner: FloatFrom0 = 1.0
    """CPUs reserved for each runner, at least 0."""

    gpus_per_runner: FloatFrom0 = 0.0
    """GPUs reserved for each runner, at least 0; fractions are allowed."""

    resources_per_runner: Mapping[str, float] | None = None
    """Other resources reserved for each runner, by name, such as `{"simulator": 1}`."""

    fragment_steps: IntFrom1 | None = None
    """Steps that a runner returns at once, at least 1. None: `num_steps`; but if the learner waits for all of an
    iteration's steps, a part of each runner's share, so that fast runners take over from slow ones."""

    in_flight: IntFrom1 = 2
    """Fragments requested from a runner at once if the learner does not wait for them, at least 1. More keep runners
    busy while it learns, and make the steps that it learns from older."""

    sample_timeout: FloatAbove0 = 60.0
    """Seconds after which a collection continues with the fragments that have arrived, at least one; above 0. It is
    also how long processes wait for free resources of the cluster before they report it."""

    step_timeout: FloatAbove0 | None = 300.0
    """Seconds without a completed env step after which a runner's envs count as hanging, above 0; also the limit for
    making the envs. The runner is then restarted. None: no limit."""

    restart_failed_runners: bool = True
    """Restart runners that have died; otherwise training continues with the others."""

    max_restarts: IntFrom0 = 100
    """Maximum number of restarts, at least 0; one more is an error. Counting starts again when a run is resumed.
    Runners, evaluation runners and learners are counted separately."""

    num_evaluation_runners: IntFrom0 = 0
    """Extra runners that play evaluation episodes during training, at least 0; 0: the training process plays them."""

    num_learners: IntFrom0 = 0
    """Number of learners, each with a part of every batch, at least 0. 0: the training process learns."""

    cpus_per_learner: FloatFrom0 = 1.0
    """CPUs reserved for each learner, at least 0."""

    gpus_per_learner: FloatFrom0 = 0.0
    """GPUs reserved for each learner, at least 0; fractions are allowed. Above 0, learners use `cuda`."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend that averages gradients. `auto`: `nccl` if each learner has a GPU to itself, else `gloo`."""

    learner_timeout: FloatAbove0 = 600.0
    """Seconds that an update, or the start of learners with reserved resources, may take before one of them counts as
    lost, above 0."""

    address: str | None = None
    """Address of the cluster: `auto`, `host:port`, `ray://host:port`. None: the one that `RAY_ADDRESS` names or that
    this process is connected to, else a new one on this machine, which ends with the run."""

    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment of the actors; see Ray's documentation."""

    data: RayData = RayData()
    """How recordings reach the learners."""

    def __post_init__(self) -> None:
        is_whole = self.backend != "nccl" or self.gpus_per_learner >= 1
        check_rules(self, "ray", backend=(is_whole, "auto or gloo where learners have no whole GPU each"))


EngineLike: TypeAlias = Ray | Literal["local", "ray"]
"""``local``, this process and its env workers; ``ray``, a Ray cluster with default settings; or a `Ray` with
settings."""
