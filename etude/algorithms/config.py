# SPDX-License-Identifier: Apache-2.0
"""Settings that algorithms share."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from etude.algorithms.nested import (
    AgentsConfig,
    EvaluationConfig,
    MetricsConfig,
    ModuleLike,
    ReadingConfig,
    SegmentConfig,
    SequenceConfig,
    TrajectoryConfig,
)
from etude.algorithms.ray_config import EngineLike
from etude.connectors import PreLearnerLike
from etude.connectors.pipeline import ConnectorLike
from etude.envs import EnvLike, Workers
from etude.errors import SettingsError
from etude.learners import ComputeConfig, OptimizerConfig, Schedule, check_schedule, points_of
from etude.modules import NetworkConfig
from etude.runners import CallbackLike
from etude.settings import (
    Fraction,
    IntFrom0,
    IntFrom1,
    Rule,
    check_rules,
    defaults,
    leaves_of,
    replaced,
    settings,
    typed,
)

_SHARED = (
    "env",
    "engine",
    "seed",
    "agents",
    "num_envs",
    "workers",
    "num_steps",
    "iteration_steps",
    "trajectories",
    "callbacks",
    "record",
    "metrics",
    "evaluation",
    "compute.device",
    "compute.threads",
    "data",
    "filter",
    "reading",
    "updates_per_iteration",
)
"""Settings that can't differ between modules."""


NO_STD = dict.fromkeys(
    ("network.log_std_init", "network.state_dependent_std"), "no standard deviations of actions are learned"
)
ONE_RATE = dict.fromkeys(
    ("optimizer.actor_lr", "optimizer.critic_lr"), "all that is learned has one learning rate, `lr`"
)
NO_VALUE = {"network.separate": "the network has no value function that could share layers with the policy"}
SEQUENCES = dict.fromkeys(("sequences.max_len", "sequences.burn_in", "sequences.start"), "network.recurrent")
SINGLE_STEPS = dict.fromkeys(
    ("sequences.max_len", "sequences.burn_in", "network.recurrent_size"),
    "it learns from single steps, without a memory",
)


@settings
class RecordConfig:
    """Whether and how the steps of training are recorded."""

    everyday: ClassVar[tuple[str, ...]] = ("path",)

    main_setting: ClassVar[str] = "path"

    path: str | None = None
    """The folder of the recording; None records nothing. Modules with different spaces each get a subfolder of their
    name."""

    layout: Literal["episodes", "table"] = "episodes"
    """When steps are written. `episodes`: each episode as a whole when it ends; unfinished ones are held in memory, up
    to 256 MiB. `table`: steps are written as they are made."""

    compression: str | Mapping[str, str] | None = None
    """A codec for all columns, such as `zstd:3`, or codecs by column: `obs/camera=zstd:3,obs=lz4`. None: LZ4 for
    numbers, Zstandard for images."""

    max_rows_per_file: IntFrom1 = 1_048_576
    """Maximum number of steps in a file, at least 1."""

    max_file_size: IntFrom1 = 268_435_456
    """Size in bytes at which a file is closed, at least 1."""

    append: bool = False
    """Add episodes, with new ids, to an existing recording; otherwise an existing one is an error. A resumed run always
    continues its own."""

    def __post_init__(self) -> None:
        if self.compression is not None:
            from etude.recordings.layout import codecs  # needs pyarrow, which acting does not

            codecs(self.compression)


@settings
class AlgorithmConfig:
    """Settings of every algorithm."""

    everyday: ClassVar[tuple[str, ...]] = ("env", "seed", "connectors", "lr")
    """The settings that the command line's short help shows. For a class that doesn't define this, it shows all of the
    class's own settings."""

    unused: ClassVar[Mapping[str, str]] = {}
    """Settings without effect on this algorithm, by dotted path (such as `network.separate`), and the reason: they are
    refused. Those of base classes are added."""

    of_weights: ClassVar[tuple[str, ...]] = ("network",)
    """Settings that decide what weights mean: a run or a policy can't be loaded with others, even if the weights would
    fit."""

    needs: ClassVar[Mapping[str, str]] = {
        "network.recurrent_size": "network.recurrent",
        "optimizer.grad_clip_by": "optimizer.grad_clip",
    }
    """Settings that have an effect only with another one, by dotted path: an algorithm warns where that one is not
    set. Those of base classes are added."""

    env: EnvLike | None = None
    """The env to act in: a registered id, `module:factory`, a function that makes an env; an Env, VectorEnv or
    Arena."""

    engine: EngineLike = "local"
    """Where runners and learners live. `local`: in this process and its env workers. A Ray cluster: `ray`, or a `Ray`
    object with its settings."""

    seed: IntFrom0 | None = None
    """Seed of all randomness: weights, envs, actions, the order of minibatches; at least 0. None draws one from the
    system."""

    module: ModuleLike | None = None
    """Your own network: an nn.Module, or a class or function called with (obs_space, action_space). None: `network`."""

    agents: AgentsConfig = AgentsConfig()
    """Several modules, for agents that share an env."""

    network: NetworkConfig = NetworkConfig()
    """The shape of the built-in network."""

    connectors: tuple[ConnectorLike, ...] = ()
    """Connectors between env and module, in order from the env. Each is a name such as `normalize_obs` or
    `frame_stack:4`, a connector object, or a function of the observation."""

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule: points of (env_steps, rate) with straight lines between."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of the optimizer, besides `lr`."""

    compute: ComputeConfig = ComputeConfig()
    """Device, threads and precision."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluations during training."""

    callbacks: tuple[CallbackLike, ...] = ()
    """Your own code, called in this order while episodes run in training; offline, in its evaluations. Each is an
    object or class that inherits from `Callback`, or `module:Class`."""

    record: RecordConfig = RecordConfig()
    """Record the steps of training; offline, those of its evaluations."""

    metrics: MetricsConfig = MetricsConfig()
    """How results average the figures of episodes."""

    def __post_init__(self) -> None:
        self._refuse_unused()
        for name, schedule in schedules_in(self).items():
            check_schedule(name, schedule)
        check_rules(
            self,
            module=(
                self.module is None or self.agents.modules is None,
                "none where there are `agents.modules`: give it to one of them",
            ),
        )
        there = tuple(self.agents.modules or ("main",))
        for module_id, given in (self.agents.overrides or {}).items():
            if module_id not in there:
                raise SettingsError(f"`agents.overrides` are of {module_id!r}, but the `modules` are {there}.")
            self.with_overrides(module_id, given)
        trained = self.agents.modules_to_train
        if isinstance(trained, tuple) and not set(trained) <= set(there):
            raise SettingsError(f"`agents.modules_to_train` is {trained!r}, but the `modules` are {there}.")

    def _refuse_unused(self) -> None:
        for path, why in self.all_unused().items():
            if self._is_changed(path):
                raise SettingsError(f"`{path}` is {self.at(path)!r}, but has no effect here: {why}. Leave it out.")

    def without_effect(self) -> list[str]:
        """What to warn of: settings without effect, as the one that they need is not set.

        Where you give networks of your own, or several modules, nothing is known about what they use: [].
        """
        if self.module is not None or self.agents.modules is not None:
            return []
        return [
            f"`{path}` is {self.at(path)!r}, but has no effect, as `{needed}` is {self.at(needed)!r}."
            for path, needed in self._of_classes("needs").items()
            if not self.at(needed) and self._is_changed(path)
        ]

    def at(self, path: str) -> Any:
        """The setting at a dotted path, such as `network.hidden`."""
        return functools.reduce(getattr, path.split("."), cast("Any", self))

    @classmethod
    def all_unused(cls) -> dict[str, str]:
        """`unused` of this class and of those that it inherits from."""
        return cls._of_classes("unused")

    @classmethod
    def _of_classes(cls, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for base in cls.__mro__:
            found |= base.__dict__.get(name, {})
        return found

    def _is_changed(self, path: str) -> bool:
        """Whether a setting differs from its default here, and, if it is nested, from that of its own class."""
        known = defaults(type(self))
        outer, _, inner = path.partition(".")
        if not inner:
            return bool(self.at(path) != known[outer])
        return self.at(path) not in [getattr(known[outer], inner), defaults(type(self.at(outer)))[inner]]

    def with_overrides(self, module_id: str, given: Mapping[str, Any]) -> Self:
        """These settings, with one module's overrides applied.

        Raises:
            SettingsError: `given` names unknown settings, or settings that apply to all modules together.
        """
        owner = f"{type(self).__name__}.overrides.{module_id}"
        own = typed(type(self), given, owner=owner)
        for path in _SHARED:
            if _has(own, path):
                raise SettingsError(f"`overrides` of {module_id!r} hold `{path}`, which is of all modules together.")
        alone = dataclasses.replace(self, agents=dataclasses.replace(self.agents, overrides=None))
        return replaced(alone, own, owner)


def schedules_in(config: AlgorithmConfig) -> dict[str, Schedule]:
    """The settings that may be schedules and are not None, by dotted path."""
    leaves = [leaf for leaf in leaves_of(type(config)) if leaf.hint in (Schedule, Schedule | None)]
    found: dict[str, Schedule | None] = {path: config.at(path) for path in (".".join(leaf.path) for leaf in leaves)}
    return {path: value for path, value in found.items() if value is not None}


def _has(given: Mapping[str, Any], path: str) -> bool:
    outer, _, inner = path.partition(".")
    return outer in given and (not inner or (isinstance(given[outer], Mapping) and inner in given[outer]))


@settings
class ActingConfig(AlgorithmConfig):
    """Settings of algorithms that act in envs while they learn."""

    unused: ClassVar[Mapping[str, str]] = {
        "evaluation.beside": "on a cluster, `ray.num_evaluation_runners` play beside training"
    }
    everyday: ClassVar[tuple[str, ...]] = ("num_envs", "num_steps", "gamma")

    num_envs: IntFrom1 = 16
    """Copies of the env that step together, at least 1."""

    workers: Workers = Workers()
    """Where the envs live: in this process, or in worker processes or threads."""

    num_steps: IntFrom1 = 4096
    """Steps collected for each iteration, over all envs, at least 1."""

    trajectories: TrajectoryConfig = TrajectoryConfig()
    """How collected steps are cut into segments and counted."""

    gamma: Fraction = 0.99
    """Discount factor, 0 to 1. Default: Schulman et al. 2017; Mnih et al. 2015."""


ClipRange = Annotated[Schedule, Rule(lambda clip: any(value > 0 for _, value in points_of(clip)), "above 0")]
"""The clipping range of a probability ratio: above 0, or a schedule with a point that is."""


@settings
class OnPolicyConfig(ActingConfig):
    """Settings of algorithms that learn from their own latest steps."""

    everyday: ClassVar[tuple[str, ...]] = ("epochs", "minibatch_size", "lambda_")

    needs: ClassVar[Mapping[str, str]] = SEQUENCES

    lr: Schedule = 1e-3
    """Learning rate of Adam, or a schedule: points of (env_steps, rate) with straight lines between. Default: the best
    of 3e-4 to 1e-3 on CartPole, Acrobot and Pendulum; larger networks want less."""

    num_steps: int = 4096
    """Steps collected for each iteration, over all envs, at least 1. Default: measured as for `lr`; sampling is cheap,
    and large batches allow large minibatches."""

    epochs: IntFrom1 = 8
    """Passes over each iteration's steps, at least 1. Default: measured as for `lr`."""

    minibatch_size: IntFrom1 = 256
    """Steps in a minibatch, at least 1; each makes one gradient step. Default: measured as for `lr`."""

    num_minibatches: IntFrom1 | None = None
    """Minibatches in an epoch, the same number for each module however many steps it has, at least 1. None: as many as
    `minibatch_size` gives."""

    sequences: SequenceConfig = SequenceConfig()
    """How recurrent modules are trained."""

    lambda_: Fraction = 0.95
    """Lambda of generalised advantage estimation, 0 to 1. Default: Schulman et al. 2017."""


DataLike = str | tuple[Any, ...] | Any
"""A path, glob or URL; a tuple of them; anything else that `Recording.open` takes; or a `Recording`."""


@settings
class OfflineConfig(AlgorithmConfig):
    """Settings of algorithms that learn from a recording. ``env`` is only used for evaluation.

    Schedules count gradient steps.
    """

    everyday: ClassVar[tuple[str, ...]] = ("data", "batch_size", "updates_per_iteration")

    unused: ClassVar[Mapping[str, str]] = {
        "record.layout": "evaluations record whole episodes",
        "metrics.window": "results are over the episodes of the latest evaluation",
    }

    needs: ClassVar[Mapping[str, str]] = {"sequences.burn_in": "network.recurrent"}

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule: points of (gradient steps, rate) with straight lines between, or half a
    cosine if `cosine` precedes them."""

    data: DataLike | None = None
    """The recording to learn from: a folder, a file, a glob or a URL, several of them, a `Source`, or a `Recording`. A
    `Recording` keeps the `on_bad` that it was opened with, whatever `reading.on_bad` says. None: you pass batches to
    `learn_from`, and `env` defines the spaces."""

    batch_size: IntFrom1 = 1024
    """Steps in a gradient step, at least 1. Recurrent modules take whole sequences with about this many steps in
    all."""

    updates_per_iteration: IntFrom1 = 100
    """Gradient steps of each module between two results, at least 1."""

    reading: ReadingConfig = ReadingConfig()
    """How the recording is read."""

    prelearner: PreLearnerLike | None = None
    """Your own step between the recording and the learner. A function `(exp, connect) -> Experience`, or a `PreLearner`
    object with its own settings (on the command line, `module:name` of either). `connect(exp)` applies the connectors
    as usual."""

    filter: str | None = None
    """Learn only from steps that meet this condition, such as `reward > 0 and t < 100`. It may use columns of scalars
    and of strings; readers use it to read less. Segments are cut where steps are left out."""

    sequences: SegmentConfig = SegmentConfig()
    """How segments are cut, for losses over sequences and for recurrent modules."""

    evaluation: EvaluationConfig = EvaluationConfig(interval=10)
    """Evaluations during training, if an `env` is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(
            self, prelearner=(not isinstance(self.prelearner, type), "an object of this class, made with its settings")
        )
        if self.data is None and self.env is None:
            raise SettingsError(
                "`data` is missing: give the recording to learn from, such as data='data/expert'; or, where batches "
                "are given to learn_from, an `env` that has the spaces."
            )


def learners_of(config: AlgorithmConfig) -> int:
    """The number of remote learners that the settings ask for."""
    return 0 if isinstance(config.engine, str) else config.engine.num_learners
