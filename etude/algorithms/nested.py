# SPDX-License-Identifier: Apache-2.0
"""Settings that are nested in those of algorithms."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch

from etude.errors import SettingsError
from etude.learners import ClipBy, Precision, Schedule
from etude.metrics.stats import Smoothing
from etude.runners import CountBy, Lengths, ModuleOf
from etude.settings import check_rules, settings
from etude.threads import ThreadsLike

ModuleLike = torch.nn.Module | Callable[[Any, Any], torch.nn.Module]
"""A net, or what makes one of the spaces; Any, so that it may be annotated with the kinds of space that it takes."""

ModulesLike = tuple[str, ...] | Mapping[str, ModuleLike | None]
"""Ids of modules, or a mapping of ids to networks; None for a built-in one."""

TrainedLike = tuple[str, ...] | Callable[[str, Any], bool]
"""Ids of modules, or a function ``(module_id, experience) -> bool``."""


@settings
class AgentsConfig:
    """Several modules, where agents share an env."""

    everyday: ClassVar[tuple[str, ...]] = ()

    modules: ModulesLike | None = None
    """Their ids, or a mapping of ids to networks (as `module`)."""

    module_of: ModuleOf | None = None
    """Which of the modules acts for an agent: a function of its name and the `Episode`, asked when the agent begins an
    episode. None: each agent has the module of its own name, or the only one."""

    overrides: Mapping[str, Mapping[str, Any]] | None = None
    """Settings of single modules that differ from the others': `{"red": {"lr": 1e-4, "clip": 0.1}}`, by module id. They
    hold for what makes a module and what it learns by, not for acting and collecting."""

    modules_to_train: TrainedLike | None = None
    """Which of the modules learn: their ids, or a function `(module_id, experience) -> bool`; none is all. The others
    act, and stay as they are."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "agents",
            modules=(
                self.modules is None or 0 < len(set(self.modules)) == len(self.modules),
                "one id or more, each once",
            ),
            module_of=(self.module_of is None or self.modules is not None, "none where there are no `modules`"),
        )


@settings
class OptimizerConfig:
    """How gradients become steps, besides `lr`."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"eps": "adam_eps", "betas": "adam_betas"}

    actor_lr: Schedule | None = None
    """Learning rate of the parameters that only the policy's loss reaches, or a schedule of it; None: `lr`."""

    critic_lr: Schedule | None = None
    """Learning rate of the parameters that only the loss of values reaches, or a schedule of it; None: `lr`."""

    eps: float = 1e-8
    """What Adam adds to the root of the second moment, at least 0. Default: Kingma & Ba 2015."""

    betas: tuple[float, float] = (0.9, 0.999)
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

    max_skipped: int = 10
    """A gradient step whose loss or gradients are not finite is skipped, and counted as `skipped_steps`; so many in a
    row are an error. At least 1."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "optimizer",
            eps=(self.eps >= 0, "at least 0"),
            betas=(all(0 <= beta < 1 for beta in self.betas), "two numbers, each at least 0 and below 1"),
            grad_clip=(self.grad_clip is None or self.grad_clip > 0, "greater than 0, or none"),
            accumulate=(self.accumulate >= 1, "at least 1"),
            max_skipped=(self.max_skipped >= 1, "at least 1"),
        )


@settings
class ComputeConfig:
    """What is computed where, and how."""

    everyday: ClassVar[tuple[str, ...]] = ("device",)

    device: str = "cpu"
    """Where the module is and learns, as torch names it: cpu, cuda, cuda:1. Others are refused: Apple's `mps` has no
    float64, which some figures are computed in."""

    threads: ThreadsLike = "auto"
    """CPU threads of torch while it trains, at least 1; then the process has its own setting back. `auto`: gradient
    steps get as many as the first of them show to be fastest, one for small networks, and never more than there are
    free cores; all else gets one. Sums that threads share may differ in their last bits: for numbers that repeat
    exactly with large networks, give a number."""

    precision: Precision = "float32"
    """What the forward pass is computed in: `bfloat16` halves the memory of activations and is faster for wide networks
    where the hardware has it, slower for small ones. Weights and optimizers stay float32."""

    compile: bool = False
    """Compile the whole gradient step with torch.compile: takes up to half a minute at the start, then about twice as
    fast on a CPU. Needs a C++ compiler, and a folder for temporary files (`TMPDIR`) whose path has no space."""

    def __post_init__(self) -> None:
        check_rules(self, "compute", threads=(self.threads == "auto" or self.threads >= 1, "at least 1, or auto"))


@settings
class EvaluationConfig:
    """Evaluations during training: in envs of their own, without exploring."""

    everyday: ClassVar[tuple[str, ...]] = ("interval",)
    own_names: ClassVar[Mapping[str, str]] = {
        "interval": "evaluation_interval",
        "episodes": "evaluation_episodes",
        "beside": "evaluate_beside",
    }

    interval: int = 0
    """Iterations between evaluations, whose figures are in results beside those of training; 0 evaluates never. Of
    algorithms that learn from recordings, where an `env` is given."""

    episodes: int = 20
    """Episodes of an evaluation, at least 1."""

    beside: bool = False
    """Of algorithms that learn from recordings: evaluate a copy of the module in a thread while training goes on; the
    returns are in the result of the next iteration in which an evaluation is due."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "evaluation",
            interval=(self.interval >= 0, "at least 0"),
            episodes=(self.episodes >= 1, "at least 1"),
        )


@settings
class MetricsConfig:
    """What results say of episodes."""

    everyday: ClassVar[tuple[str, ...]] = ()

    window: int = 100
    """Return and length in results are over the last so many episodes, at least 1."""

    smoothing: Smoothing = "window"
    """How returns and lengths of episodes are averaged: `window`, over the last `window` episodes; or `ema`, an
    exponential moving average in which a new episode weighs 2 / (window + 1). Times of a turn are averaged over the
    iteration, and with `ema` over iterations in the same way."""

    def __post_init__(self) -> None:
        check_rules(self, "metrics", window=(self.window >= 1, "at least 1"))


@settings
class TrajectoryConfig:
    """How collected steps are cut into segments, and counted."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {
        "min_length": "min_trajectory_length",
        "max_length": "max_trajectory_length",
    }

    min_length: int = 1
    """Segments of fewer steps are dropped, and counted as `dropped_steps`; at least 1."""

    max_length: int | None = None
    """Segments of more steps are cut; none: never."""

    at_max_length: Literal["continue", "reset"] = "continue"
    """An episode that is as long as `max_length` goes on in a further segment; or it is truncated there, and its env is
    reset."""

    whole_episodes: bool = False
    """Learn from whole episodes: from those that have ended, as soon as they have `num_steps` steps together."""

    count_steps_by: CountBy = "env_steps"
    """What a step is where several agents share an env: `env_steps`, one of the env's; or `agent_steps`."""

    def __post_init__(self) -> None:
        Lengths(self.min_length, self.max_length)
        if self.at_max_length == "reset" and self.max_length is None:
            raise SettingsError(
                "`trajectories.at_max_length` is 'reset', but there is no `trajectories.max_length` to reset at."
            )


@settings
class SequenceConfig:
    """How recurrent modules are trained."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"max_len": "max_seq_len", "start": "sequence_start"}

    max_len: int = 32
    """Steps that a recurrent module is trained through at once, at least 1: gradients flow no further back in time.
    Minibatches then hold whole sequences."""

    burn_in: int = 0
    """Steps before each of these sequences that a recurrent module walks through first, without gradients, so that the
    state that the sequence starts from is that of its present weights (Kapturowski et al. 2019, "Recurrent experience
    replay in distributed reinforcement learning")."""

    start: Literal["stored", "zeros"] = "stored"
    """The state that a recurrent module begins a sequence (or its burn-in) with: the one it had while acting, which a
    replay then holds, or its initial one. SAC's critics, which do not act, always begin with theirs."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "sequences",
            max_len=(self.max_len >= 1, "at least 1"),
            burn_in=(self.burn_in >= 0, "at least 0"),
        )


@settings
class SegmentConfig:
    """How segments of a recording are cut, for losses that look along time and for recurrent modules."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"max_len": "max_segment_length"}

    max_len: int = 128
    """Where a loss looks along time, and for recurrent modules: longer segments are cut to so many steps, at least
    1."""

    burn_in: int = 0
    """Steps before each of these that a recurrent module walks through first, from its initial state, without gradients
    (Kapturowski et al. 2019)."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "sequences",
            max_len=(self.max_len >= 1, "at least 1"),
            burn_in=(self.burn_in >= 0, "at least 0"),
        )


@settings
class ReplayConfig:
    """What a replay holds, and how steps are drawn from it."""

    everyday: ClassVar[tuple[str, ...]] = ("capacity", "learning_starts")

    capacity: int = 1_000_000
    """Steps that the replay of each module holds, at least `batch_size`: when it is full, the oldest make room."""

    learning_starts: int = 1000
    """Env steps that are collected before the first gradient step; SAC and TD3 draw their actions from the whole space
    until then."""

    prioritized: bool = False
    """Draw steps in proportion to their latest errors, and weight them to make up for it (Schaul et al. 2016,
    "Prioritized experience replay", proportional); else uniformly."""

    priority_alpha: float = 0.6
    """Exponent of the errors, from 0 on; 0 is uniform. Default: Schaul et al. 2016, table 3."""

    priority_beta: Schedule = ((0, 0.4), (100_000, 1.0))
    """Exponent of the weights, 0 to 1: 1 makes up for it in full. Default: from 0.4 to 1 as in Schaul et al. 2016."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "replay",
            learning_starts=(self.learning_starts >= 0, "at least 0"),
            priority_alpha=(self.priority_alpha >= 0, "at least 0"),
        )


@settings
class ReadingConfig:
    """How a recording is read."""

    everyday: ClassVar[tuple[str, ...]] = ()

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

    on_bad: Literal["strict", "repair", "skip"] = "strict"
    """What happens to bad data, such as NaN or steps that are there twice: an error, or it is mended where that needs
    no invention, or left out; the latter two are counted and reported."""

    obs_filter: Literal["data", "stored"] = "data"
    """Where connectors that learn from observations, such as `normalize_obs`, have it from: all of the data, read once
    before; or what was stored with the recording."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "reading",
            buffer_size=(self.buffer_size >= 1, "at least 1"),
            num_workers=(self.num_workers >= 0, "at least 0"),
            prefetch=(self.prefetch >= 0, "at least 0"),
        )


@settings
class VTraceConfig:
    """How V-trace weights steps that were made by older weights."""

    everyday: ClassVar[tuple[str, ...]] = ()

    rho_bar: float = 1.0
    """Cap of the importance weights of rewards and advantages, above 0. Default: Espeholt et al. 2018, and Petrenko et
    al. 2020."""

    c_bar: float = 1.0
    """Cap of the weights by which later rewards come back, above 0, at most `rho_bar`. Default: as for `rho_bar`."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "vtrace",
            rho_bar=(self.rho_bar > 0, "greater than 0"),
            c_bar=(0 < self.c_bar <= self.rho_bar, "greater than 0 and at most `rho_bar`"),
        )


@settings
class TargetConfig:
    """When target networks move, and how far."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"interval": "target_interval"}

    interval: int | None = None
    """Gradient steps between two updates of the target network, at least 1; None: there is no such network."""

    tau: float = 1.0
    """How far the target network then moves towards the one that is trained, above 0, at most 1: 1 makes them equal
    (Mnih et al. 2015; Luo et al. 2020); less, with an `interval` of 1, averages (Lillicrap et al. 2016)."""

    def __post_init__(self) -> None:
        check_rules(
            self,
            "target",
            interval=(self.interval is None or self.interval >= 1, "at least 1, or none"),
            tau=(0 < self.tau <= 1, "above 0 and at most 1"),
        )
