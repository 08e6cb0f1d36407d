# SPDX-License-Identifier: Apache-2.0
"""Results: what training and evaluation report, the running figures they are made of, and when to stop."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from etude.display import short, table
from etude.errors import SettingsError
from etude.learners import Update
from etude.metrics import Ema, Metrics, Window
from etude.metrics.stats import Smoothing
from etude.modules import Module
from etude.runners import Finished
from etude.settings import settings

MIN_EPISODES = 20
"""A mean return is taken for a goal only over as many episodes."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What one iteration of training brought."""

    iteration: int
    """Counted from 1 over the lifetime of the run."""
    env_steps: int
    """Environment steps sampled over the lifetime; 0 offline."""
    updates: int
    """Gradient steps over the lifetime."""
    seconds: float
    """Training time over the lifetime: sampling and learning, without evaluations and what else is played apart."""
    episodes: int
    """Episodes finished over the lifetime."""
    return_mean: float
    """Mean return of the latest episodes: of training, or of the latest evaluation offline. NaN before there is any."""
    return_min: float
    """The least of these returns."""
    return_max: float
    """The greatest of these returns."""
    length_mean: float
    """The mean length of these episodes, in steps."""
    returns_counted: int
    """How many episodes these figures are over."""
    losses: dict[str, float]
    """The mean of each part of the loss."""
    metrics: dict[str, float]
    """Other figures: learning rates, gradient norm, what the loss logs."""
    times: dict[str, float]
    """Seconds that each phase of this iteration took."""
    sample_steps_per_s: float
    """Environment steps a second while sampling in this iteration; 0 offline."""
    length_min: float = math.nan
    """The length of the shortest of these episodes."""
    length_max: float = math.nan
    """The length of the longest of them."""
    duration_mean: float = math.nan
    """The mean duration of these episodes: seconds from the first observation to the last, those left out in which
    nothing was sampled."""
    duration_min: float = math.nan
    """The least of these durations."""
    duration_max: float = math.nan
    """The greatest of them."""
    turn_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    """Milliseconds of each phase of a turn, in which all envs that are ready make a step: ``env`` (waiting for them),
    ``observe`` (connectors towards the module), ``infer`` (the module), ``act`` (connectors back), ``note`` (keeping
    what was lived through); ``callbacks`` where there are any, and ``render`` where one of them draws. Over this
    iteration, or smoothed as set. {} offline."""
    custom: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """What callbacks logged, by name: ``mean``, ``min`` and ``max`` over the latest episodes in which they did."""
    agent_steps: int = 0
    """Steps of single agents over the lifetime; as many as `env_steps` where agents have no names."""
    agent_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean return of each agent over the latest episodes that it was in, by its name."""
    agent_returns_min: dict[str, float] = dataclasses.field(default_factory=dict)
    """The least of these returns."""
    agent_returns_max: dict[str, float] = dataclasses.field(default_factory=dict)
    """The greatest of them."""
    module_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Likewise by module: the mean over its agents in each episode."""
    module_returns_min: dict[str, float] = dataclasses.field(default_factory=dict)
    """The least of these returns."""
    module_returns_max: dict[str, float] = dataclasses.field(default_factory=dict)
    """The greatest of them."""
    faulty_episodes: int = 0
    """Episodes that were cut because their env failed, over the lifetime."""
    resumed: str | None = None
    """After a checkpoint was loaded, in the first result: how the running episodes went on: ``get_state`` (through
    the env's own methods), ``snapshot``, ``new episodes: why``, or ``no episode was running``."""
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    """The latest evaluation during training: ``return_mean``, ``return_min``, ``return_max``, ``length_mean``,
    ``episodes``, and ``updates``, the gradient steps that its modules had had. {} before there is one; offline, where
    all returns are of evaluations, always."""
    data: dict[str, float] = dataclasses.field(default_factory=dict)
    """Offline, how the data flowed in this iteration: seconds of ``read``, ``decode``, ``connectors`` (prelearner
    included) and ``shuffle``, of all workers together, and of ``wait``, in which the learner had none;
    ``steps_per_s`` that came out of the connectors, ``mb_per_s`` read from files as far as they tell, and ``queue``,
    the blocks that were ready when one was taken, in the mean. {} otherwise."""
    bottleneck: str = ""
    """Offline, what this iteration took longest for: ``update``, where data was waited for less than a tenth of the
    time; else the slowest of ``read``, ``decode``, ``connectors`` and ``shuffle``."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        named = ("iteration", "env_steps", "updates", "episodes", "return_mean", "seconds")
        return short(self, **{name: getattr(self, name) for name in named})

    def _repr_html_(self) -> str:
        rows = {name: f"{getattr(self, name):,}" for name in ("iteration", "env_steps", "updates", "episodes")}
        if self.returns_counted:
            rows["return_mean"] = f"{self.return_mean:,.1f} ({self.return_min:,.5g} to {self.return_max:,.5g})"
            rows["length_mean"] = f"{self.length_mean:,.1f}"
        rows |= {f"losses/{name}": f"{value:.4g}" for name, value in self.losses.items()}
        return table("Result", {**rows, "seconds": f"{self.seconds:,.1f}"})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """What an evaluation brought."""

    episodes: int
    """Whole episodes played; fewer than were asked for where the env fails again and again."""
    return_mean: float
    """Mean of their returns; NaN where there are none."""
    return_min: float
    """The least of their returns."""
    return_max: float
    """The greatest of their returns."""
    return_std: float
    """Standard deviation of their returns."""
    length_mean: float
    """Mean of their lengths, in steps."""
    env_steps: int
    """Steps of these episodes."""
    updates: int
    """Gradient steps that the policy has had."""
    seconds: float
    """How long it took."""
    sample_steps_per_s: float
    """Steps a second."""
    agent_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean return of each agent, by its name."""
    module_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Likewise by module: the mean over its agents in each episode."""
    faulty_episodes: int = 0
    """Episodes that were cut because their env failed; not among `episodes`."""
    custom: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """What callbacks logged, by name: ``mean``, ``min`` and ``max`` over the episodes in which they did."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        named = ("episodes", "return_mean", "return_std", "return_min", "return_max", "length_mean", "seconds")
        return short(self, **{name: getattr(self, name) for name in named})


@settings
class Stop:
    """When to stop: at a goal, or when a budget is used up, whichever comes first. Nothing set: never."""

    return_mean: float | None = None
    """Stop at a mean return of at least this, over 20 episodes or more."""

    env_steps: int | None = None
    """Stop after so many environment steps over the lifetime of the run."""

    updates: int | None = None
    """Stop after so many gradient steps over the lifetime of the run, at the end of the iteration that makes the last
    of them: offline, one of `updates_per_iteration`."""

    seconds: float | None = None
    """Stop after so many seconds of training over the lifetime of the run, evaluations left out."""

    def __post_init__(self) -> None:
        for name in ("env_steps", "updates", "seconds"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise SettingsError(f"`stop.{name}` is {limit}, but must be at least 0.")

    def goals_met(self, result: Result) -> bool:
        """Whether every goal set is met; True where none is set."""
        if self.return_mean is None:
            return True
        enough = result.returns_counted >= MIN_EPISODES
        return enough and not math.isnan(result.return_mean) and result.return_mean >= self.return_mean

    def budget_used(self, result: Result) -> bool:
        """Whether any budget is used up."""
        budgets = (
            (self.env_steps, result.env_steps),
            (self.updates, result.updates),
            (self.seconds, result.seconds),
        )
        return any(limit is not None and used >= limit for limit, used in budgets)

    def now(self, result: Result) -> bool:
        """Whether training ends with this result."""
        return (self.return_mean is not None and self.goals_met(result)) or self.budget_used(result)


class RunningStats:
    """Running statistics of the latest episodes and of the parts of a turn, smoothed as set, and what else is logged.

    Args:
        size: How many episodes they are over; see `Window` and `Ema`.
        smoothing: Which of these two.
    """

    def __init__(self, size: int, smoothing: Smoothing) -> None:
        self._size = size
        self._kind = Window if smoothing == "window" else Ema
        self.returns = self._kind(size)
        self.lengths = self._kind(size)
        self.durations = self._kind(size)
        self.agent_returns: dict[str, Window] = {}
        self.module_returns: dict[str, Window] = {}
        self.custom: dict[str, Window] = {}
        self.metrics = Metrics()
        self._turns: dict[str, Window] = {}
        self._turn_ms: dict[str, float] = {}
        self._times: dict[str, float] = {}  # of the runner, when it was last asked
        self._turn_count = 0

    def add(self, finished: Finished) -> None:
        """Take in episodes."""
        self.returns.add(finished.returns)
        self.lengths.add(finished.lengths)
        self.durations.add(finished.durations)
        for windows, found in (
            (self.agent_returns, finished.agent_returns),
            (self.module_returns, finished.module_returns),
            (self.custom, finished.custom),
        ):
            for name, values in found.items():
                if name not in windows:
                    windows[name] = self._kind(self._size)
                windows[name].add(values)

    def add_turns(self, times: Mapping[str, float], turns: int) -> None:
        """Take in the seconds that a runner spent in each phase, and its turns, since it was made."""
        count = turns - self._turn_count
        if count:
            self._turn_ms = {}
        for name, seconds in times.items() if count else ():
            ms = self._turn_ms[name] = 1000 * (seconds - self._times.get(name, 0.0)) / count
            if name not in self._turns:
                self._turns[name] = self._kind(self._size)
            self._turns[name].add(ms)
        self._times, self._turn_count = dict(times), turns

    def fields(self) -> dict[str, Any]:
        """The fields of a `Result` that are about this."""
        fields: dict[str, Any] = {"returns_counted": self.returns.values.size}
        for name, window in (("return", self.returns), ("length", self.lengths), ("duration", self.durations)):
            fields[f"{name}_mean"], fields[f"{name}_min"], fields[f"{name}_max"] = window.spread()
        for name, windows in (("agent_returns", self.agent_returns), ("module_returns", self.module_returns)):
            means, least, greatest = fields[name], fields[f"{name}_min"], fields[f"{name}_max"] = {}, {}, {}
            for key, window in windows.items():
                means[key], least[key], greatest[key] = window.spread()
        custom = fields["custom"] = {}
        for name, window in self.custom.items():
            custom[name] = dict(zip(("mean", "min", "max"), window.spread(), strict=True))
        fields["turn_ms"] = dict(self._turn_ms)  # over the last iteration
        if self._kind is Ema:
            fields["turn_ms"] = {name: window.mean for name, window in self._turns.items()}
        return fields

    def state_dict(self) -> dict[str, Any]:
        """Plain data and arrays; goes into `load_state_dict`."""
        windows = {
            name: {key: window.state_dict() for key, window in windows.items()} for name, windows in self._windows()
        }
        return {**windows, "metrics": self.metrics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, perhaps of a version that had no metrics in it."""
        for name, windows in self._windows():
            for key, saved in state[name].items():
                windows.setdefault(key, self._kind(self._size)).load_state_dict(saved)
        if "metrics" in state:
            self.metrics.load_state_dict(state["metrics"])

    def _windows(self) -> Iterator[tuple[str, dict[str, Window]]]:
        yield "episodes", {"returns": self.returns, "lengths": self.lengths, "durations": self.durations}
        yield "agents", self.agent_returns
        yield "modules", self.module_returns
        yield "custom", self.custom
        yield "turns", self._turns


class Counts(NamedTuple):
    """Steps over the lifetime."""

    env_steps: int
    agent_steps: int
    trained: dict[str, int]
    """Steps that each module was trained on, by its id."""


def log_trained(metrics: Metrics, before: Counts, now: Counts) -> None:
    """Log how many steps were trained on between two counts: of agents, of envs, and of each of several modules.

    What is trained on has no env steps of its own: there are as many to an agent's step as were just sampled.
    """
    new: dict[str, int] = {}
    for name, count in now.trained.items():
        new[name] = count - before.trained.get(name, 0)
    sampled, since = now.agent_steps - before.agent_steps, before
    if not sampled:  # offline, or replaying: as over the lifetime
        sampled, since = now.agent_steps, Counts(0, 0, {})
    share = (now.env_steps - since.env_steps) / sampled if sampled else 1.0
    agent_steps = sum(new.values())
    env_steps = round(agent_steps * share)
    metrics.log("env_steps_trained", env_steps, "sum")
    metrics.log("env_steps_trained_lifetime", env_steps, "lifetime")
    metrics.log("agent_steps_trained", agent_steps, "sum")
    metrics.log("agent_steps_trained_lifetime", agent_steps, "lifetime")
    if len(new) > 1:
        for name, steps in new.items():
            metrics.log(f"{name}/steps_trained", steps, "sum")
            metrics.log(f"{name}/steps_trained_lifetime", steps, "lifetime")


def parameter_counts(modules: Mapping[str, Module]) -> dict[str, float]:
    """How many numbers are trained in all modules and how many stay as they are; also in each of several."""
    counts = {"parameters/trainable": 0, "parameters/frozen": 0}
    for name, module in modules.items():
        own = {"parameters/trainable": 0, "parameters/frozen": 0}
        for parameter in module.parameters():
            own["parameters/trainable" if parameter.requires_grad else "parameters/frozen"] += parameter.numel()
        for kind, count in own.items():
            counts[kind] += count
            if len(modules) > 1:
                counts[f"{name}/{kind}"] = count
    return {name: float(count) for name, count in counts.items()}


TIMES = "times/"
"""What stands before the names of phases among the metrics."""


def together(parts: Mapping[str, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    """Figures by module as one mapping, with the module's id before each name where there are several modules."""
    found: dict[str, float] = {}
    for module, figures in parts.items():
        for name, value in figures.items():
            found[f"{module}/{name}" if several else name] = value
    return found


def joined(updates: Mapping[str, Update], *others: Mapping[str, float], several: bool) -> Update:
    """The updates of all modules as one, named as by `together`, and with ``others`` among its metrics."""
    losses: dict[str, Mapping[str, float]] = {}
    metrics: dict[str, Mapping[str, float]] = {}
    for name, update in updates.items():
        losses[name], metrics[name] = update
    update = Update(together(losses, several=several), together(metrics, several=several))
    for figures in others:
        update.metrics.update(figures)
    return update
