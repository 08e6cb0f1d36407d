# SPDX-License-Identifier: Apache-2.0
"""Settings that algorithms share: those of every algorithm, and the groups that are nested in them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch

from etude.algorithms.ray_config import EngineLike
from etude.connectors import PreLearnerLike
from etude.connectors.pipeline import ConnectorLike
from etude.envs import EnvLike, Workers
from etude.errors import SettingsError
from etude.learners import ComputeConfig, OptimizerConfig, Schedule, check_schedule, points_of
from etude.metrics.stats import Smoothing
from etude.modules import NetworkConfig
from etude.runners import CallbackLike, CountBy, Lengths, ModuleOf
from etude.settings import (
    FloatAbove0,
    FloatFrom0,
    IntFrom0,
    IntFrom1,
    Rate,
    Rule,
    UnitInterval,
    check_rules,
    defaults,
    leaves_of,
    replaced,
    settings,
    typed,
)

ModuleLike = torch.nn.Module | Callable[[Any, Any], torch.nn.Module]
"""A network, or a function ``(obs_space, action_space)`` that makes one. The arguments are Any, so that the function
may annotate narrower types of space."""

ModulesLike = tuple[str, ...] | Mapping[str, ModuleLike | None]
"""Module ids, or a mapping from ids to networks; None for the built-in one."""

TrainedLike = tuple[str, ...] | Callable[[str, Any], bool]
"""Module ids, or a function ``(module_id, experience) -> bool``."""


@settings
class AgentsConfig:
    """Several modules, for agents that share an env."""

    everyday: ClassVar[tuple[str, ...]] = ()

    modules: ModulesLike | None = None
    """Module ids, or a mapping from ids to networks (as in `module`)."""

    module_of: ModuleOf | None = None
    """Function that chooses the module of an agent: called with the agent's name and the `Episode` when the agent
    begins an episode. None: each agent uses the module of its own name, or the only one."""

    overrides: Mapping[str, Mapping[str, Any]] | None = None
    """Settings of individual modules that differ from the common ones, by module id: `{"red": {"lr": 1e-4, "clip":
    0.1}}`; as a flag, `--overrides 'red={"lr": 1e-4}'`. Only settings of the module and its learning can be overridden,
    not those of acting and collecting."""

    modules_to_train: TrainedLike | None = None
    """The modules that learn: their ids, or a function `(module_id, experience) -> bool`; None: all. The others act but
    stay unchanged. `experience` is the newly collected experience, or None in offline algorithms."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "agents",
            modules=(
                self.modules is None or 0 < len(set(self.modules)) == len(self.modules),
                "a list of at least one id, without duplicates",
            ),
            module_of=(self.module_of is None or self.modules is not None, "none without `modules`"),
        )


@settings
class EvaluationConfig:
    """Evaluations during training: in separate envs, without exploration."""

    everyday: ClassVar[tuple[str, ...]] = ("interval",)
    own_names: ClassVar[Mapping[str, str]] = {
        "interval": "evaluation_interval",
        "episodes": "evaluation_episodes",
        "beside": "evaluate_beside",
    }

    interval: IntFrom0 = 0
    """Iterations between evaluations, at least 0; 0 never evaluates. If a budget ends training, the final weights are
    evaluated, too. Results report evaluations separately from training episodes. Offline algorithms evaluate only if an
    `env` is given."""

    episodes: IntFrom1 = 20
    """Episodes in an evaluation, at least 1."""

    beside: bool = False
    """Offline algorithms only: evaluate a copy of the module in a thread during training. The returns are in the result
    of the next iteration in which an evaluation is due, or of the last one if a budget ends training. `Checkpoints`
    uses them as the score of the evaluated weights."""


@settings
class MetricsConfig:
    """How results average the figures of episodes."""

    everyday: ClassVar[tuple[str, ...]] = ()

    window: IntFrom1 = 100
    """Number of latest episodes over which results average returns and lengths, at least 1."""

    smoothing: Smoothing = "window"
    """How results average episode returns and lengths, and the milliseconds per turn (`turn_ms`). `window`: over the
    last `window` episodes; turns over the iteration. `ema`: exponential moving averages over episodes, in which a new
    episode has the weight 2 / (window + 1); turns over iterations in the same way."""


@settings
class TrajectoryConfig:
    """How collected steps are cut into segments and counted."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {
        "min_length": "min_trajectory_length",
        "max_length": "max_trajectory_length",
    }

    min_length: int = 1
    """Shortest segment kept, in steps, at least 1: shorter ones are dropped and counted as `dropped_steps`."""

    max_length: int | None = None
    """Longest segment, in steps: longer ones are cut; None never cuts."""

    at_max_length: Literal["continue", "reset"] = "continue"
    """What happens to an episode at `max_length`. `continue`: it continues in another segment; `reset`: it is
    truncated, and its env is reset."""

    whole_episodes: bool = False
    """Learn from whole episodes: an iteration ends as soon as the finished episodes have `num_steps` steps in total."""

    count_steps_by: CountBy = "env_steps"
    """Unit of `num_steps` if several agents share an env: steps of the env (`env_steps`) or of agents
    (`agent_steps`)."""

    def __post_init__(self) -> None:
        self.lengths()
        if self.at_max_length == "reset" and self.max_length is None:
            raise SettingsError(
                "`trajectories.at_max_length` is 'reset', but there is no `trajectories.max_length` to reset at."
            )

    def lengths(self) -> Lengths | None:
        """The limits on the lengths of segments; None if there are none."""
        limits = Lengths(self.min_length, self.max_length)
        return None if self.min_length == 1 and self.max_length is None else limits


@settings
class SequenceConfig:
    """How recurrent modules are trained."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"max_len": "max_seq_len", "start": "sequence_start"}

    max_len: IntFrom1 = 32
    """Longest sequence on which a recurrent module is trained, in steps, at least 1: gradients flow no further back in
    time. Minibatches then hold whole sequences."""

    burn_in: IntFrom0 = 0
    """Steps before each sequence that a recurrent module first processes without gradients, at least 0. Its state at
    the start of the sequence then comes from its current weights (Kapturowski et al. 2019, "Recurrent experience replay
    in distributed reinforcement learning")."""

    start: Literal["stored", "zeros"] = "stored"
    """State with which a recurrent module begins a sequence (or its burn-in). `stored`: the state that it had while
    acting, which the replay buffer then stores. `zeros`: its initial state. Critics with a memory of their own (SAC,
    TD3) do not act, so they always begin with their initial state."""


@settings
class SegmentConfig:
    """How segments of a recording are cut, for losses over sequences and for recurrent modules."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"max_len": "max_segment_length"}

    max_len: IntFrom1 = 128
    """Longest segment, in steps, at least 1, for losses over sequences and for recurrent modules: longer ones are
    cut."""

    burn_in: IntFrom0 = 0
    """Steps before each segment that a recurrent module first processes without gradients, at least 0. It begins them
    with its initial state (Kapturowski et al. 2019)."""


ClipRange = Annotated[Schedule, Rule(lambda clip: any(value > 0 for _, value in points_of(clip)), "above 0")]
"""The clipping range of a probability ratio: above 0, or a schedule with at least one point above 0."""
Share = Annotated[Schedule, Rule(lambda share: all(value <= 1 for _, value in points_of(share)), "between 0 and 1")]
"""A number from 0 to 1, or a schedule of such numbers."""


@settings
class ReplayConfig:
    """Size of the replay buffer, and how steps are sampled from it."""

    everyday: ClassVar[tuple[str, ...]] = ("capacity", "learning_starts")

    capacity: int = 1_000_000
    """Capacity of each module's replay buffer in steps, at least `batch_size`: when it is full, the oldest are
    overwritten."""

    learning_starts: IntFrom0 = 1000
    """Env steps collected before the first gradient step, at least 0. Until then SAC and TD3 sample actions uniformly
    from the action space."""

    prioritized: bool = False
    """Sample steps in proportion to their latest TD errors, with importance weights; otherwise uniformly. Source:
    Schaul et al. 2016, "Prioritized experience replay", the proportional variant."""

    priority_alpha: FloatFrom0 = 0.6
    """Exponent of the TD errors, at least 0; 0 samples uniformly. Default: Schaul et al. 2016, table 3."""

    priority_beta: Share = ((0, 0.4), (100_000, 1.0))
    """Exponent of the importance weights, 0 to 1; 1 corrects the bias fully. Default: from 0.4 to 1, as in Schaul et
    al. 2016."""


@settings
class ReadingConfig:
    """How a recording is read."""

    everyday: ClassVar[tuple[str, ...]] = ()

    mode: Literal["auto", "stream", "materialize_data", "materialize_mapped_data"] = "auto"
    """Where the data is held. `stream` reads it again in each epoch, in bounded memory; `materialize_data` holds the
    recorded data in memory; `materialize_mapped_data` holds the output of the connectors in memory. `auto`: in memory
    up to 1 GiB."""

    buffer_size: IntFrom1 = 65_536
    """Steps that are shuffled together while streaming, at least 1: more mix better and take more memory."""

    num_workers: IntFrom0 = 0
    """Workers that read, decode and apply connectors ahead of time, at least 0. 0: one thread, which also makes
    batches."""

    worker_kind: Literal["threads", "processes"] = "threads"
    """Whether these workers are threads or processes. Processes are worth it for sources and connectors that run much
    Python code; starting them takes a third of a second."""

    prefetch: IntFrom0 = 2
    """Blocks of batches that are prepared in advance, at least 0; 0 makes each on demand."""

    on_bad: Literal["strict", "repair", "skip"] = "strict"
    """What happens to bad data, such as NaN or duplicate steps. `strict`: an error. `repair`: it is fixed where no
    values need to be invented. `skip`: it is left out. `repair` and `skip` count and report it."""

    obs_filter: Literal["data", "stored"] = "data"
    """Where connectors that learn from observations, such as `normalize_obs`, get their statistics. `data`: from all of
    the data, in a pass before training. `stored`: those stored in the recording."""


@settings
class VTraceConfig:
    """Caps of V-trace's importance weights, which correct for steps collected with older weights."""

    everyday: ClassVar[tuple[str, ...]] = ()

    rho_bar: FloatAbove0 = 1.0
    """Cap of the importance weights of rewards and advantages, above 0. Default: Espeholt et al. 2018; Petrenko et al.
    2020."""

    c_bar: FloatAbove0 = 1.0
    """Cap of the importance weights with which later rewards are propagated back, above 0, at most `rho_bar`. Default:
    as for `rho_bar`."""

    def __post_init__(self) -> None:
        check_rules(self, "vtrace", c_bar=(self.c_bar <= self.rho_bar, "at most `rho_bar`"))


@settings
class TargetConfig:
    """How target networks are updated."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"interval": "target_interval"}

    interval: IntFrom1 | None = None
    """Gradient steps between two updates of the target network, at least 1; None: there is no target network."""

    tau: Rate = 1.0
    """How far an update moves the target network towards the trained one, above 0, at most 1. 1 copies the trained
    network (Mnih et al. 2015; Luo et al. 2020). A smaller value with an `interval` of 1 is Polyak averaging (Lillicrap
    et al. 2016)."""


# -- settings of algorithms ------------------------------------------------------------------------------------------

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
    """The folder of the recording; None records nothing. Modules with different spaces each get a subfolder named after
    the module."""

    layout: Literal["episodes", "table"] = "episodes"
    """When steps are written. `episodes`: each episode as a whole when it ends; unfinished ones are held in memory, up
    to 256 MiB. `table`: steps are written as they are collected."""

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

    architecture_settings: ClassVar[tuple[str, ...]] = ("network",)
    """Settings that determine what the weights mean: a run or a policy can't be loaded with other values of these, even
    if the weights would fit."""

    needs: ClassVar[Mapping[str, str]] = {
        "network.recurrent_size": "network.recurrent",
        "optimizer.grad_clip_by": "optimizer.grad_clip",
    }
    """Settings that have an effect only if another one is set, by dotted path; otherwise an algorithm warns. Those of
    base classes are added."""

    env: EnvLike | None = None
    """The env to act in: a registered id, `module:factory`, a function that makes an env, or an Env, VectorEnv or
    Arena."""

    engine: EngineLike = "local"
    """Where runners and learners live. `local`: in this process and its env workers. A Ray cluster: `ray`, or a `Ray`
    object with its settings."""

    seed: IntFrom0 | None = None
    """Seed of all randomness: weights, envs, actions, the order of minibatches; at least 0. None: a random one from the
    operating system."""

    module: ModuleLike | None = None
    """Your own network: an nn.Module, or a class or function called with (obs_space, action_space). None: the built-in
    network, see `network`."""

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
    """Your own code, called in this order during training episodes; in offline algorithms, during evaluations. Each is
    an object or class that inherits from `Callback`, or `module:Class`."""

    record: RecordConfig = RecordConfig()
    """Record the steps of training; in offline algorithms, those of evaluations."""

    metrics: MetricsConfig = MetricsConfig()
    """How results average the figures of episodes."""

    def __post_init__(self) -> None:
        for path, why in self.all_unused().items():
            if self.is_changed(path):
                raise SettingsError(f"`{path}` is {self.at(path)!r}, but has no effect here: {why}. Leave it out.")
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

    def without_effect(self) -> list[str]:
        """Warnings about settings that have no effect because the setting that they need is not set.

        Returns [] for your own networks and for several modules, as it is not known which settings they use.
        """
        if self.module is not None or self.agents.modules is not None:
            return []
        return [
            f"`{path}` is {self.at(path)!r}, but has no effect, as `{needed}` is {self.at(needed)!r}."
            for path, needed in self._of_classes("needs").items()
            if not self.at(needed) and self.is_changed(path)
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

    def is_changed(self, path: str) -> bool:
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
            outer, _, inner = path.partition(".")
            if outer in own and (not inner or (isinstance(own[outer], Mapping) and inner in own[outer])):
                raise SettingsError(f"`overrides` of {module_id!r} hold `{path}`, which is of all modules together.")
        alone = dataclasses.replace(self, agents=dataclasses.replace(self.agents, overrides=None))
        return replaced(alone, own, owner)


def schedules_in(config: AlgorithmConfig) -> dict[str, Schedule]:
    """The settings that may be schedules and are not None, by dotted path."""
    leaves = [leaf for leaf in leaves_of(type(config)) if leaf.hint in (Schedule, Schedule | None)]
    found: dict[str, Schedule | None] = {path: config.at(path) for path in (".".join(leaf.path) for leaf in leaves)}
    return {path: value for path, value in found.items() if value is not None}


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

    gamma: UnitInterval = 0.99
    """Discount factor, 0 to 1. Default: Schulman et al. 2017; Mnih et al. 2015."""


@settings
class OnPolicyConfig(ActingConfig):
    """Settings of algorithms that learn from their own latest steps."""

    everyday: ClassVar[tuple[str, ...]] = ("epochs", "minibatch_size", "lambda_")

    needs: ClassVar[Mapping[str, str]] = SEQUENCES

    lr: Schedule = 1e-3
    """Learning rate of Adam, or a schedule: points of (env_steps, rate) with straight lines between. Default: the best
    of 3e-4 to 1e-3 on CartPole, Acrobot and Pendulum; larger networks need less."""

    num_steps: int = 4096
    """Steps collected for each iteration, over all envs, at least 1. Default: measured as for `lr`; sampling is cheap,
    and large batches allow large minibatches."""

    epochs: IntFrom1 = 8
    """Passes over each iteration's steps, at least 1. Default: measured as for `lr`."""

    minibatch_size: IntFrom1 = 256
    """Steps in a minibatch, at least 1; each makes one gradient step. Leave it out where `num_minibatches` is given.
    Default: measured as for `lr`."""

    num_minibatches: IntFrom1 | None = None
    """Minibatches in an epoch, the same number for each module however many steps it has, at least 1. None: as many as
    `minibatch_size` gives."""

    sequences: SequenceConfig = SequenceConfig()
    """How recurrent modules are trained."""

    lambda_: UnitInterval = 0.95
    """Lambda of generalised advantage estimation, 0 to 1. Default: Schulman et al. 2017."""

    def __post_init__(self) -> None:
        super().__post_init__()
        alone = self.num_minibatches is None or self.minibatch_size == type(self).minibatch_size
        check_rules(self, minibatch_size=(alone, "left out, or `num_minibatches` be none"))


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
    `Recording` keeps the `on_bad` that it was opened with; another `reading.on_bad` is refused. None: you pass batches
    to `learn_from`, and `env` defines the spaces."""

    batch_size: IntFrom1 = 1024
    """Steps in each batch, at least 1. Batches of recurrent modules are whole sequences with about this many steps in
    total."""

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
    and of strings. Readers use it to skip data. Segments are cut where steps are left out."""

    sequences: SegmentConfig = SegmentConfig()
    """How segments are cut, for losses over sequences and for recurrent modules."""

    evaluation: EvaluationConfig = EvaluationConfig(interval=10)
    """Evaluations during training, if an `env` is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(
            self,
            prelearner=(not isinstance(self.prelearner, type), "an object, not the class: write MyPreLearner(...)"),
        )
        if self.data is None and self.env is None:
            raise SettingsError(
                "`data` is missing: give the recording to learn from, such as data='data/expert'; or, where batches "
                "are given to learn_from, an `env` that has the spaces."
            )


def learners_of(config: AlgorithmConfig) -> int:
    """The number of remote learners that the settings ask for."""
    return 0 if isinstance(config.engine, str) else config.engine.num_learners
