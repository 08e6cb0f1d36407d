# SPDX-License-Identifier: Apache-2.0
"""Groups of settings that are nested in those of algorithms."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch

from etude.errors import SettingsError
from etude.learners import Schedule
from etude.metrics.stats import Smoothing
from etude.runners import CountBy, Lengths, ModuleOf
from etude.settings import FloatAbove0, FloatFrom0, IntFrom0, IntFrom1, Rate, check_rules, settings

ModuleLike = torch.nn.Module | Callable[[Any, Any], torch.nn.Module]
"""A network, or a function that makes one from the spaces. They are Any, so that it may be annotated with the kinds of
space that it takes."""

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
    """Settings of single modules that differ from the common ones, by module id: `{"red": {"lr": 1e-4, "clip": 0.1}}`;
    as a flag, `--overrides 'red={"lr": 1e-4}'`. They may concern the module and its learning, but not acting and
    collecting."""

    modules_to_train: TrainedLike | None = None
    """The modules that learn: their ids, or a function `(module_id, experience) -> bool`; None: all. The others act but
    stay unchanged. The experience is what was newly collected; None with offline algorithms."""

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
class EvaluationConfig:
    """Evaluations during training: in separate envs, without exploration."""

    everyday: ClassVar[tuple[str, ...]] = ("interval",)
    own_names: ClassVar[Mapping[str, str]] = {
        "interval": "evaluation_interval",
        "episodes": "evaluation_episodes",
        "beside": "evaluate_beside",
    }

    interval: IntFrom0 = 0
    """Iterations between evaluations, at least 0; 0 never evaluates. Training that a budget ends also ends with one.
    Results report their figures beside those of training. Offline algorithms evaluate only if an `env` is given."""

    episodes: IntFrom1 = 20
    """Episodes in an evaluation, at least 1."""

    beside: bool = False
    """Offline algorithms only: evaluate a copy of the module in a thread while training goes on. The returns are in the
    result of the next iteration in which an evaluation is due, or of the last one if a budget ends training, and
    `Checkpoints` scores the evaluated weights with them."""


@settings
class MetricsConfig:
    """How results average the figures of episodes."""

    everyday: ClassVar[tuple[str, ...]] = ()

    window: IntFrom1 = 100
    """Number of latest episodes over which results average returns and lengths, at least 1."""

    smoothing: Smoothing = "window"
    """How results average returns and lengths of episodes, and milliseconds of a turn. `window`: over the last `window`
    episodes; turns, over the iteration. `ema`: exponential moving averages over episodes, in which a new one weighs 2 /
    (window + 1); turns, over iterations in the same way."""


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
    """What happens to an episode at `max_length`: `continue` goes on in another segment; `reset` truncates it and
    resets its env."""

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
    the start of the sequence then comes from its present weights (Kapturowski et al. 2019, "Recurrent experience replay
    in distributed reinforcement learning")."""

    start: Literal["stored", "zeros"] = "stored"
    """State with which a recurrent module begins a sequence (or its burn-in). `stored`: the state it had while acting,
    which a replay then stores. `zeros`: its initial state. SAC's critics, which do not act, always begin with their
    initial state."""


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


@settings
class ReplayConfig:
    """What a replay holds, and how steps are drawn from it."""

    everyday: ClassVar[tuple[str, ...]] = ("capacity", "learning_starts")

    capacity: int = 1_000_000
    """Capacity of each module's replay in steps, at least `batch_size`: when it is full, the oldest are overwritten."""

    learning_starts: IntFrom0 = 1000
    """Env steps collected before the first gradient step, at least 0. Until then SAC and TD3 sample actions uniformly
    from the action space."""

    prioritized: bool = False
    """Draw steps in proportion to their latest errors, with importance weights; otherwise uniformly. Source: Schaul et
    al. 2016, "Prioritized experience replay", the proportional variant."""

    priority_alpha: FloatFrom0 = 0.6
    """Exponent of the errors, at least 0; 0 draws uniformly. Default: Schaul et al. 2016, table 3."""

    priority_beta: Schedule = ((0, 0.4), (100_000, 1.0))
    """Exponent of the importance weights, 0 to 1; 1 corrects in full. Default: from 0.4 to 1, as in Schaul et al.
    2016."""


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
    values need to be invented. `skip`: it is left out. The latter two count and report it."""

    obs_filter: Literal["data", "stored"] = "data"
    """Where connectors that learn from observations, such as `normalize_obs`, get their statistics. `data`: from all of
    the data, in a pass before training. `stored`: from the recording, which has stored them."""


@settings
class VTraceConfig:
    """V-trace's importance weights for steps that were made by older weights."""

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
    """When and how far target networks move."""

    everyday: ClassVar[tuple[str, ...]] = ()
    own_names: ClassVar[Mapping[str, str]] = {"interval": "target_interval"}

    interval: IntFrom1 | None = None
    """Gradient steps between two updates of the target network, at least 1; None: there is no target network."""

    tau: Rate = 1.0
    """How far an update moves the target network towards the trained one, above 0, at most 1. 1 copies it (Mnih et al.
    2015; Luo et al. 2020); less, with an `interval` of 1, is Polyak averaging (Lillicrap et al. 2016)."""
