# SPDX-License-Identifier: Apache-2.0
"""Settings that algorithms share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self, get_type_hints

import torch

from etude.algorithms.ray_config import EngineLike
from etude.connectors import PreLearnerLike
from etude.connectors.pipeline import ConnectorLike
from etude.envs import EnvLike, Workers
from etude.errors import SettingsError
from etude.learners import ClipBy, Precision, Schedule, check_schedule
from etude.metrics.stats import Smoothing
from etude.modules import NetworkConfig
from etude.runners import CallbackLike, CountBy, Lengths, ModuleOf
from etude.settings import defaults, settings, typed
from etude.threads import ThreadsLike

ModuleLike = torch.nn.Module | Callable[[Any, Any], torch.nn.Module]
"""A net, or what makes one of the spaces; Any, so that it may be annotated with the kinds of space that it takes."""

ModulesLike = tuple[str, ...] | Mapping[str, ModuleLike | None]
"""Ids of modules, or a mapping of ids to networks; None for a built-in one."""


_SHARED = {
    "env",
    "engine",
    "seed",
    "modules",
    "module_of",
    "overrides",
    "modules_to_train",
    "num_envs",
    "workers",
    "num_steps",
    "whole_episodes",
    "count_steps_by",
    "callbacks",
    "record",
    "window",
    "device",
    "threads",
    "data",
    "mode",
    "buffer_size",
    "num_workers",
    "worker_kind",
    "prefetch",
    "filter",
    "on_bad",
    "obs_filter",
    "updates_per_iteration",
    "iteration_steps",
    "min_trajectory_length",
    "max_trajectory_length",
    "at_max_length",
    "smoothing",
    "evaluation_interval",
    "evaluation_episodes",
    "evaluate_beside",
}
"""Settings that can't be different for single modules."""

TrainedLike = tuple[str, ...] | Callable[[str, Any], bool]
"""Ids of modules, or a function ``(module_id, experience) -> bool``."""


NO_STD = dict.fromkeys(
    ("network.log_std_init", "network.state_dependent_std"), "no standard deviations of actions are learned"
)
NO_VALUE = {"network.separate": "the network has no value function that could share layers with the policy"}
SINGLE_STEPS = dict.fromkeys(
    ("max_segment_length", "burn_in", "network.recurrent_size"), "it learns from single steps, without a memory"
)


@settings
class RecordConfig:
    """Whether and how the steps of training are recorded."""

    everyday: ClassVar[tuple[str, ...]] = ("path",)

    main_setting: ClassVar[str] = "path"

    path: str | None = None
    """The folder of the recording; none records nothing. Where modules have different spaces, each has a folder of its
    name there."""

    layout: Literal["episodes", "table"] = "episodes"
    """`episodes`: written when they end, each as a whole; unfinished ones are held in memory, up to 256 MiB. `table`:
    steps are written as they come."""

    compression: str | Mapping[str, str] | None = None
    """A codec for all columns, such as `zstd:3`, or codecs by column: `obs/camera=zstd:3,obs=lz4`. None: LZ4 for
    numbers, Zstandard for images."""

    max_rows_per_file: int = 1_048_576
    """A file holds at most this many steps."""

    max_file_size: int = 268_435_456
    """A file is closed once it has this many bytes."""

    append: bool = False
    """Add to the recording that is there, with other ids of episodes; else one that is there is an error. A resumed run
    always goes on with its own."""

    def __post_init__(self) -> None:
        for name in ("max_rows_per_file", "max_file_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"`record.{name}` is {getattr(self, name)}, but must be at least 1.")
        if self.compression is not None:
            from etude.recordings.layout import codecs  # needs pyarrow, which acting does not

            codecs(self.compression)


@settings
class AlgorithmConfig:
    """What every algorithm can be told."""

    everyday: ClassVar[tuple[str, ...]] = ("env", "seed", "connectors", "lr", "device")
    """The settings that the command line's short help shows. A class without any has all of its own shown."""

    unused: ClassVar[Mapping[str, str]] = {}
    """Settings that have no effect on this algorithm, beside those of its base classes, and why: they are refused.
    `network.separate` is nested."""

    env: EnvLike | None = None
    """Where to act: a registered id, `module:factory`, a function that makes an env, an Env or a VectorEnv."""

    engine: EngineLike = "local"
    """Where runners and learners live: `local`, this process and its env workers; or a Ray cluster: `ray`, or settings
    of it, a `Ray`."""

    seed: int | None = None
    """Of everything random: weights, envs, actions, the order of minibatches. None draws one from the system."""

    module: ModuleLike | None = None
    """Your own network: an nn.Module, or a class or function called with (obs_space, action_space). None: `network`."""

    modules: ModulesLike | None = None
    """Several modules, where agents share an env: their ids, or a mapping of ids to networks (as `module`)."""

    module_of: ModuleOf | None = None
    """Which of the modules acts for an agent: a function of its name and the `Episode`, asked when the agent begins an
    episode. None: each agent has the module of its own name, or the only one."""

    network: NetworkConfig = NetworkConfig()
    """The shape of the built-in network."""

    squash: bool = False
    """Hold Box actions inside their bounds by tanh (Haarnoja et al. 2018, appendix C); else a plain Gaussian draws
    them, and the env gets them clipped."""

    connectors: tuple[ConnectorLike, ...] = ()
    """Between env and module, in order from the env: names such as `normalize_obs` or `frame_stack:4`, connectors,
    or functions of the observation."""

    lr: Schedule = 3e-4
    """Learning rate of Adam; or a schedule of it: points of (env_steps, rate) with straight lines between."""

    adam_eps: float = 1e-8
    """What Adam adds to the root of the second moment, at least 0. Default: Kingma & Ba 2015."""

    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moments, each at least 0 and below 1. Default: Kingma & Ba 2015."""

    grad_clip: float | None = 0.5
    """Limit that gradients are clipped to, see `grad_clip_by`; None leaves them as they are. Default: Huang et al.
    2022, detail 11."""

    grad_clip_by: ClipBy = "loss_norm"
    """What `grad_clip` limits. `loss_norm`: the norm of the gradient of the policy's loss, and that of the value's,
    each by itself; else the larger one, the value's where returns are large, would leave the other next to nothing. Of
    algorithms with several optimizers, the norm of each. `global_norm`: that of all gradients of an optimizer together.
    `norm`: that of each tensor. `value`: each element."""

    log_grad_norms: bool = False
    """Log the norm of the gradients, `grad_norm`, also where nothing is clipped."""

    accumulate: int = 1
    """Minibatches whose mean gradient makes a gradient step, at least 1: for batches that memory has no room for. Where
    settings say how many gradient steps are made, each takes so many batches."""

    precision: Precision = "float32"
    """What the forward pass is computed in: `bfloat16` halves the memory of activations and is faster for wide networks
    where the hardware has it, slower for small ones. Weights and optimizers stay float32."""

    max_skipped: int = 10
    """A gradient step whose loss or gradients are not finite is skipped, and counted as `skipped_steps`; so many in a
    row are an error. At least 1."""

    overrides: Mapping[str, Mapping[str, Any]] | None = None
    """Settings of single modules that differ from the others': `{"red": {"lr": 1e-4, "clip": 0.1}}`, by module id. They
    hold for what makes a module and what it learns by, not for acting and collecting."""

    modules_to_train: TrainedLike | None = None
    """Which of the modules learn: their ids, or a function `(module_id, experience) -> bool`; none is all. The others
    act, and stay as they are."""

    compile: bool = False
    """Compile the whole gradient step with torch.compile: takes up to half a minute at the start, then about twice as
    fast on a CPU. Needs a C++ compiler, and a folder for temporary files (`TMPDIR`) whose path has no space."""

    device: str = "cpu"
    """Where the module is and learns, as torch names it: cpu, cuda, cuda:1. Others are refused: Apple's `mps` has no
    float64, which some figures are computed in."""

    threads: ThreadsLike = "auto"
    """CPU threads of torch while it trains, at least 1; then the process has its own setting back. `auto`: gradient
    steps get as many as the first of them show to be fastest, one for small networks, and never more than there are
    free cores; all else gets one. Sums that threads share may differ in their last bits: for numbers that repeat
    exactly with large networks, give a number."""

    evaluation_episodes: int = 20
    """Episodes of an evaluation during training."""

    callbacks: tuple[CallbackLike, ...] = ()
    """Code of your own that is called while episodes run in training (offline: in its evaluations), one after the
    other: objects or classes that inherit from `Callback`, or `module:Class`."""

    record: RecordConfig = RecordConfig()
    """Keep what is lived through in training (offline: in its evaluations) as a recording."""

    smoothing: Smoothing = "window"
    """What results say of episodes: `window`, over the last so many of them; or `ema`, their exponential moving
    average, in which a new one weighs 2 / (window + 1). Times of a turn are means over the iteration, or such averages
    of these."""

    def __post_init__(self) -> None:
        self._refuse_unused()
        for name, schedule in schedules_in(self).items():
            check_schedule(name, schedule)
        self.check(
            adam_eps=(self.adam_eps >= 0, "at least 0"),
            adam_betas=(all(0 <= beta < 1 for beta in self.adam_betas), "two numbers, each at least 0 and below 1"),
            seed=(self.seed is None or self.seed >= 0, "at least 0"),
            threads=(self.threads == "auto" or self.threads >= 1, "at least 1, or auto"),
            accumulate=(self.accumulate >= 1, "at least 1"),
            max_skipped=(self.max_skipped >= 1, "at least 1"),
            grad_clip=(self.grad_clip is None or self.grad_clip > 0, "greater than 0, or none"),
            evaluation_episodes=(self.evaluation_episodes >= 1, "at least 1"),
            modules=(
                self.modules is None or 0 < len(set(self.modules)) == len(self.modules),
                "one id or more, each once",
            ),
            module=(
                self.module is None or self.modules is None,
                "none where there are `modules`: give it to one of them",
            ),
            module_of=(self.module_of is None or self.modules is not None, "none where there are no `modules`"),
        )
        there = tuple(self.modules or ("main",))
        for module_id, given in (self.overrides or {}).items():
            if module_id not in there:
                raise SettingsError(f"`overrides` are of {module_id!r}, but the `modules` are {there}.")
            self.with_overrides(module_id, given)
        if isinstance(self.modules_to_train, tuple) and not set(self.modules_to_train) <= set(there):
            raise SettingsError(f"`modules_to_train` is {self.modules_to_train!r}, but the `modules` are {there}.")

    def _refuse_unused(self) -> None:
        known = defaults(type(self))
        unused: dict[str, str] = {}
        for base in type(self).__mro__:
            unused |= base.__dict__.get("unused", {})
        for path, why in unused.items():
            outer, _, inner = path.partition(".")
            value, usual = getattr(self, outer), [known[outer]]
            if inner:
                usual = [getattr(known[outer], inner), defaults(type(value))[inner]]
                value = getattr(value, inner)
            if value not in usual:
                raise SettingsError(f"`{path}` is {value!r}, but has no effect here: {why}. Leave it out.")

    def with_overrides(self, module_id: str, given: Mapping[str, Any]) -> Self:
        """These settings with some of a module's own.

        Raises:
            SettingsError: they are not settings, or such as concern all modules together.
        """
        shared = sorted(given.keys() & _SHARED)
        if shared:
            raise SettingsError(f"`overrides` of {module_id!r} hold `{shared[0]}`, which is of all modules together.")
        owner = f"overrides.{module_id}"
        own = typed(type(self), given, owner=owner)
        for name, value in own.items():
            whole = getattr(self, name)
            if isinstance(value, Mapping) and dataclasses.is_dataclass(whole):  # of settings inside others, some
                own[name] = dataclasses.replace(whole, **value)  # type: ignore[type-var]
        return dataclasses.replace(self, overrides=None, **own)

    def check(self, **rules: tuple[bool, str]) -> None:
        """Raise a SettingsError for the first setting that breaks its rule: ``name=(is_fine, what_it_must_be)``."""
        for name, (fine, rule) in rules.items():
            if not fine:
                raise SettingsError(f"`{name}` is {getattr(self, name)!r}, but must be {rule}.")


def schedules_in(config: AlgorithmConfig) -> dict[str, Schedule]:
    """The settings that may be schedules, by name; without those that are None."""
    hints = get_type_hints(type(config))
    found = {name: getattr(config, name) for name, hint in hints.items() if hint in (Schedule, Schedule | None)}
    return {name: value for name, value in found.items() if value is not None}


@settings
class ActorCriticRates:
    """Learning rates of policy and values of their own."""

    everyday: ClassVar[tuple[str, ...]] = ()

    actor_lr: Schedule | None = None
    """Learning rate of the parameters that only the policy's loss reaches, or a schedule of it; None: `lr`."""

    critic_lr: Schedule | None = None
    """Learning rate of the parameters that only the loss of values reaches, or a schedule of it; None: `lr`."""


@settings
class ActingConfig(AlgorithmConfig):
    """What algorithms that act in envs while they learn can be told."""

    everyday: ClassVar[tuple[str, ...]] = ("num_envs", "num_steps", "gamma")

    num_envs: int = 16
    """Copies of the env that step together, at least 1."""

    workers: Workers = Workers()
    """Where the envs live: here, or in processes or threads of their own."""

    num_steps: int = 4096
    """Steps collected for each iteration, over all envs, at least 1."""

    min_trajectory_length: int = 1
    """Segments of fewer steps are dropped, and counted as `dropped_steps`; at least 1."""

    max_trajectory_length: int | None = None
    """Segments of more steps are cut; none: never."""

    at_max_length: Literal["continue", "reset"] = "continue"
    """An episode that is as long as `max_trajectory_length` goes on in a further segment; or it is truncated there, and
    its env is reset."""

    count_steps_by: CountBy = "env_steps"
    """What a step is where several agents share an env: `env_steps`, one of the env's; or `agent_steps`."""

    gamma: float = 0.99
    """Discount of future rewards, 0 to 1. Default: Schulman et al. 2017; Mnih et al. 2015."""

    window: int = 100
    """Return and length in results are over the last so many episodes."""

    evaluation_interval: int = 0
    """Iterations between evaluations, in envs of their own, without exploring, whose figures are in results beside
    those of training; 0 evaluates never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            evaluation_interval=(self.evaluation_interval >= 0, "at least 0"),
            num_envs=(self.num_envs >= 1, "at least 1"),
            num_steps=(self.num_steps >= 1, "at least 1"),
            gamma=(0 <= self.gamma <= 1, "between 0 and 1"),
            window=(self.window >= 1, "at least 1"),
        )
        Lengths(self.min_trajectory_length, self.max_trajectory_length)
        if self.at_max_length == "reset" and self.max_trajectory_length is None:
            raise SettingsError("`at_max_length` is 'reset', but there is no `max_trajectory_length` to reset at.")


@settings
class OnPolicyConfig(ActingConfig, ActorCriticRates):
    """What algorithms that learn from their own latest steps can be told."""

    everyday: ClassVar[tuple[str, ...]] = ("epochs", "minibatch_size", "lambda_")

    lr: Schedule = 1e-3
    """Learning rate of Adam; or a schedule of it: points of (env_steps, rate) with straight lines between. Default: the
    best of 3e-4 to 1e-3 on CartPole, Acrobot and Pendulum; larger networks want less."""

    whole_episodes: bool = False
    """Learn from whole episodes: from those that have ended, as soon as they have `num_steps` steps together."""

    num_steps: int = 4096
    """Steps collected for each iteration, over all envs. Default: measured as for `lr`; sampling is cheap, and large
    batches let minibatches be large."""

    epochs: int = 8
    """How often an iteration goes over its steps. Default: measured as for `lr`."""

    minibatch_size: int = 256
    """Steps in a gradient step. Default: measured as for `lr`."""

    num_minibatches: int | None = None
    """Minibatches of each module in an epoch, whatever number of steps it has: where several modules have unequal
    data, all make as many. None: as many as `minibatch_size` gives."""

    max_seq_len: int = 32
    """Steps that a recurrent module is trained through at once, at least 1: gradients flow no further back in time.
    Minibatches then hold whole sequences."""

    burn_in: int = 0
    """Steps before each of these sequences that a recurrent module walks through first, without gradients, so that the
    state that the sequence starts from is that of its present weights (Kapturowski et al. 2019)."""

    sequence_start: Literal["stored", "zeros"] = "stored"
    """The state that a recurrent module begins a sequence (or its burn-in) with: the one it had while acting, or its
    initial one."""

    lambda_: float = 0.95
    """Decay of generalised advantage estimation, 0 to 1. Default: Schulman et al. 2017."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            epochs=(self.epochs >= 1, "at least 1"),
            minibatch_size=(self.minibatch_size >= 1, "at least 1"),
            num_minibatches=(self.num_minibatches is None or self.num_minibatches >= 1, "at least 1, or none"),
            max_seq_len=(self.max_seq_len >= 1, "at least 1"),
            burn_in=(self.burn_in >= 0, "at least 0"),
            lambda_=(0 <= self.lambda_ <= 1, "between 0 and 1"),
        )


DataLike = str | tuple[Any, ...] | Any
"""A path, a glob or a URL; several of them; whatever else `Recording.open` takes; or a `Recording`."""


@settings
class OfflineConfig(AlgorithmConfig):
    """What algorithms that learn from a recording can be told. ``env`` is only for evaluation.

    Schedules count gradient steps.
    """

    everyday: ClassVar[tuple[str, ...]] = ("data", "batch_size", "updates_per_iteration")

    unused: ClassVar[Mapping[str, str]] = {"record.layout": "evaluations record whole episodes"}

    lr: Schedule = 3e-4
    """Learning rate of Adam; or a schedule of it: points of (gradient steps, rate) with straight lines between, or half
    a cosine where `cosine` is in front of them."""

    data: DataLike | None = None
    """The recording to learn from: a folder, a file, a glob or a URL, several of them, a `Source`, or a `Recording` (as
    it was opened, whatever `on_bad` says). None: batches are given to `learn_from`, and `env` has the spaces."""

    batch_size: int = 1024
    """Steps in a gradient step. Of a recurrent module, about so many, in whole sequences."""

    updates_per_iteration: int = 100
    """Gradient steps between two results."""

    mode: Literal["auto", "stream", "materialize_data", "materialize_mapped_data"] = "auto"
    """Where the data is: `stream` reads it again in each epoch, in bounded memory; `materialize_data` holds in memory
    what was recorded, `materialize_mapped_data` what connectors have made of it. auto: in memory up to 1 GiB."""

    buffer_size: int = 65_536
    """Steps that are shuffled together while streaming, at least 1: more mix better, and take more memory."""

    num_workers: int = 0
    """Workers that read, decode and let connectors work ahead, at least 0; 0: one thread that also makes batches."""

    worker_kind: Literal["threads", "processes"] = "threads"
    """What these are. Processes pay for sources and connectors that are much Python; they take a third of a second to
    start."""

    prefetch: int = 2
    """Blocks of batches that are ready before they are asked for, at least 0: 0 makes them when they are."""

    prelearner: PreLearnerLike | None = None
    """Your own step between the recording and the learner: a function `(exp, connect) -> Experience`, or a `PreLearner`
    with settings of its own (on the command line, `module:name` of either); `connect(exp)` lets the connectors work as
    usual."""

    filter: str | None = None
    """Learn only from steps for which this holds, such as `reward > 0 and t < 100`: a condition on columns of single
    numbers and texts, which readers use to read less. Steps left out cut segments."""

    on_bad: Literal["strict", "repair", "skip"] = "strict"
    """What happens to bad data, such as NaN or steps that are there twice: an error, or it is mended where that needs
    no invention, or left out; the latter two are counted and reported."""

    obs_filter: Literal["data", "stored"] = "data"
    """Where connectors that learn from observations, such as `normalize_obs`, have it from: all of the data, read once
    before; or what was stored with the recording."""

    max_segment_length: int = 128
    """Where a loss looks along time, and for recurrent modules: longer segments are cut to so many steps, at least
    1."""

    burn_in: int = 0
    """Steps before each of these that a recurrent module walks through first, from its initial state, without gradients
    (Kapturowski et al. 2019)."""

    evaluation_interval: int = 1
    """Iterations between evaluations, where an env is given; 0 evaluates never."""

    evaluate_beside: bool = False
    """Evaluate a copy of the module in a thread while training goes on; the returns are in the result of the next
    iteration in which an evaluation is due."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            batch_size=(self.batch_size >= 1, "at least 1"),
            updates_per_iteration=(self.updates_per_iteration >= 1, "at least 1"),
            buffer_size=(self.buffer_size >= 1, "at least 1"),
            num_workers=(self.num_workers >= 0, "at least 0"),
            prefetch=(self.prefetch >= 0, "at least 0"),
            max_segment_length=(self.max_segment_length >= 1, "at least 1"),
            burn_in=(self.burn_in >= 0, "at least 0"),
            evaluation_interval=(self.evaluation_interval >= 0, "at least 0"),
            prelearner=(not isinstance(self.prelearner, type), "an object of this class, made with its settings"),
        )
        if self.data is None and self.env is None:
            raise SettingsError(
                "`data` is missing: give the recording to learn from, such as data='data/expert'; or, where batches "
                "are given to learn_from, an `env` that has the spaces."
            )


def learners_of(config: AlgorithmConfig) -> int:
    """The learners on a cluster that settings ask for."""
    return 0 if isinstance(config.engine, str) else config.engine.num_learners
