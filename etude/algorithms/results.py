# SPDX-License-Identifier: Apache-2.0
"""Results: what training and evaluation report, the running statistics behind them, and when to stop."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from etude.display import rounded, short, table
from etude.learners import Update
from etude.metrics import Ema, Metrics, Window
from etude.metrics.stats import Smoothing
from etude.modules import Module
from etude.runners import Finished
from etude.settings import FloatFrom0, IntFrom0, settings

MIN_EPISODES = 20
"""Fewest episodes over which a mean return counts for the goal of `Stop`."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of one training iteration."""

    iteration: int
    """Iterations over the lifetime of the run, from 1."""
    env_steps: int
    """Environment steps sampled over the lifetime; 0 offline."""
    updates: int
    """Gradient steps over the lifetime."""
    seconds: float
    """Training time over the lifetime: sampling and learning, without evaluations and other episodes played outside
    training."""
    episodes: int
    """Episodes finished over the lifetime."""
    return_mean: float
    """Mean return of the latest episodes: of training or, offline, of the latest evaluation. NaN before there are
    any."""
    return_min: float
    """Smallest of these returns."""
    return_max: float
    """Largest of these returns."""
    length_mean: float
    """Mean length of these episodes, in steps."""
    returns_counted: int
    """Number of these episodes."""
    losses: dict[str, float]
    """Mean of each part of the loss."""
    metrics: dict[str, float]
    """Other metrics: learning rates, gradient norms, and what the loss logs."""
    times: dict[str, float]
    """Seconds in each phase of this iteration."""
    sample_steps_per_s: float
    """Env steps per second of sampling in this iteration, or of the whole iteration if runners sample all the time; 0
    offline."""
    length_min: float = math.nan
    """Length of the shortest of these episodes, in steps."""
    length_max: float = math.nan
    """Length of the longest of these episodes, in steps."""
    duration_mean: float = math.nan
    """Mean duration of these episodes in seconds, from the first observation to the last, without times when nothing
    was sampled."""
    duration_min: float = math.nan
    """Smallest of these durations."""
    duration_max: float = math.nan
    """Largest of these durations."""
    turn_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    """Milliseconds in each phase of a turn, in which every env that is ready makes a step: ``env`` (waiting for envs),
    ``observe`` (connectors to the module), ``infer`` (the module), ``act`` (connectors to the env), ``note`` (storing
    experience); also ``callbacks`` if there are any, and ``render`` if one of them renders. A mean over this iteration,
    or smoothed as `metrics.smoothing` says. {} offline."""
    custom: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """What callbacks logged, by name: ``mean``, ``min`` and ``max`` over the latest episodes that logged it."""
    agent_steps: int = 0
    """Steps of single agents over the lifetime; equal to `env_steps` if agents have no names."""
    agent_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean return of each agent over the latest episodes that it was in, by agent name."""
    agent_returns_min: dict[str, float] = dataclasses.field(default_factory=dict)
    """Smallest of these returns."""
    agent_returns_max: dict[str, float] = dataclasses.field(default_factory=dict)
    """Largest of these returns."""
    module_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean return of each module's agents in the same way, by module id: in each episode, the mean over its agents."""
    module_returns_min: dict[str, float] = dataclasses.field(default_factory=dict)
    """Smallest of these returns."""
    module_returns_max: dict[str, float] = dataclasses.field(default_factory=dict)
    """Largest of these returns."""
    faulty_episodes: int = 0
    """Episodes over the lifetime that were cut because their env failed."""
    resumed: str | None = None
    """In the first result after loading a checkpoint, how the running episodes continued: ``get_state`` (through the
    env's own methods), ``snapshot``, ``new episodes: why``, or ``no episode was running``."""
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    """The latest evaluation during training: ``return_mean``, ``return_min``, ``return_max``, ``length_mean``,
    ``episodes``, and ``updates``, the gradient steps made before it. {} if there is none yet."""
    evaluating: int | None = None
    """Gradient steps made before the evaluation that is running in parallel with training; its figures come in a later
    result. None if there is none."""
    data: dict[str, float] = dataclasses.field(default_factory=dict)
    """Offline, data flow in this iteration: seconds in ``load``, ``connectors`` (prelearner included) and ``shuffle``,
    summed over all workers; seconds of ``wait``, in which the learner had no data; ``steps_per_s`` out of the
    connectors; ``mb_per_s`` loaded from files, as they are in memory; ``queue``, the mean number of blocks ready when
    one was taken. {} otherwise."""
    bottleneck: str = ""
    """Offline, the slowest stage of this iteration: ``update`` if at most a tenth of the time was spent waiting for
    data; else the slowest of ``load``, ``connectors`` and ``shuffle``."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        named = ("iteration", "env_steps", "updates", "episodes", "return_mean", "seconds")
        return short(self, **{name: getattr(self, name) for name in named})

    def _repr_html_(self) -> str:
        rows = {name: f"{getattr(self, name):,}" for name in ("iteration", "env_steps", "updates", "episodes")}
        if self.returns_counted:
            rows["return_mean"] = f"{rounded(self.return_mean)} ({self.return_min:,.5g} to {self.return_max:,.5g})"
            rows["length_mean"] = f"{self.length_mean:,.1f}"
        rows |= {f"losses/{name}": f"{value:.4g}" for name, value in self.losses.items()}
        return table("Result", {**rows, "seconds": f"{self.seconds:,.1f}"})


def result_from(saved: Any) -> Result | None:
    """Make a `Result` from what `Result.to_dict` returned, as a checkpoint stores it; None if it does not fit."""
    hints = get_type_hints(Result)
    if not isinstance(saved, Mapping) or not all(_fits(hints.get(name), value) for name, value in saved.items()):
        return None
    try:
        return Result(**saved)
    except TypeError:  # a field is missing
        return None


def _fits(hint: Any, value: Any) -> bool:
    if hint in (int, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(get_args(hint)[1], item) for item in value.values())
    return hint is not None and isinstance(value, hint)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """The result of an evaluation."""

    episodes: int
    """Whole episodes played; fewer than asked for if the env fails again and again."""
    return_mean: float
    """Mean of their returns; NaN if there are none."""
    return_min: float
    """Smallest of their returns."""
    return_max: float
    """Largest of their returns."""
    return_std: float
    """Standard deviation of their returns."""
    length_mean: float
    """Mean of their lengths, in steps."""
    env_steps: int
    """Env steps of these episodes."""
    updates: int
    """Gradient steps that the policy had made."""
    seconds: float
    """Duration of the evaluation in seconds."""
    sample_steps_per_s: float
    """Env steps per second."""
    agent_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean return of each agent, by agent name."""
    module_returns: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean return of each module's agents in the same way, by module id: in each episode, the mean over its agents."""
    faulty_episodes: int = 0
    """Episodes that were cut because their env failed; not among `episodes`."""
    custom: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """What callbacks logged, by name: ``mean``, ``min`` and ``max`` over the episodes that logged it."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        named = ("episodes", "return_mean", "return_std", "return_min", "return_max", "length_mean", "seconds")
        return short(self, **{name: getattr(self, name) for name in named})


@settings
class Stop:
    """When to stop: at a goal or when a budget is used up, whichever comes first; never, if nothing is set."""

    return_mean: float | None = None
    """Stop at a mean return of at least this, over at least 20 episodes."""

    env_steps: IntFrom0 | None = None
    """Stop after this many env steps over the lifetime of the run, at least 0."""

    updates: IntFrom0 | None = None
    """Stop after this many gradient steps over the lifetime of the run, at least 0. Training ends with the iteration
    that makes the last of them (offline, an iteration makes `updates_per_iteration`)."""

    seconds: FloatFrom0 | None = None
    """Stop after this many seconds of training over the lifetime of the run, at least 0; evaluations don't count."""

    def goals_met(self, result: Result) -> bool:
        """Whether every goal that is set is met; True if none is set."""
        if self.return_mean is None:
            return True
        enough = result.returns_counted >= MIN_EPISODES
        return enough and not math.isnan(result.return_mean) and result.return_mean >= self.return_mean

    def budget_used(self, result: Result) -> bool:
        """Whether any budget is used up."""
        budgets = ((self.env_steps, result.env_steps), (self.updates, result.updates), (self.seconds, result.seconds))
        return any(limit is not None and used >= limit for limit, used in budgets)

    def now(self, result: Result) -> bool:
        """Whether training ends with this result."""
        return (self.return_mean is not None and self.goals_met(result)) or self.budget_used(result)


class RunningStats:
    """Running statistics of the latest episodes and of the phases of a turn, and other logged metrics.

    Args:
        size: Number of episodes; see `Window` and `Ema`.
        smoothing: Whether to use `Window` or `Ema`.
    """

    def __init__(self, size: int, smoothing: Smoothing) -> None:
        self._smoothing = smoothing
        kinds = ("episodes", "agents", "modules", "custom", "turns")
        new_window = partial(Window if smoothing == "window" else Ema, size)
        self._windows = {kind: defaultdict[str, Window](new_window) for kind in kinds}
        self.metrics = Metrics()
        self._turn_ms: dict[str, float] = {}
        self._times: dict[str, float] = {}  # the runner's at the last call
        self._turn_count = 0

    def add(self, finished: Finished) -> None:
        """Add finished episodes."""
        found: dict[str, Mapping[str, Any]] = {
            "episodes": {"returns": finished.returns, "lengths": finished.lengths, "durations": finished.durations},
            "agents": finished.agent_returns,
            "modules": finished.module_returns,
            "custom": finished.custom,
        }
        for kind, figures in found.items():
            for name, values in figures.items():
                self._windows[kind][name].add(values)

    def forget(self, module_id: str) -> None:
        """Drop the statistics of a module that was removed."""
        self._windows["modules"].pop(module_id, None)

    def add_turns(self, times: Mapping[str, float], turns: int) -> None:
        """Add turns, given a runner's seconds by phase and its number of turns since it was made."""
        count = turns - self._turn_count
        if count:
            self._turn_ms = {}
            for name, took in times.items():
                self._turn_ms[name] = 1000 * (took - self._times.get(name, 0.0)) / count
                self._windows["turns"][name].add(self._turn_ms[name])
        self._times, self._turn_count = dict(times), turns

    def fields(self) -> dict[str, Any]:
        """The fields of a `Result` that these statistics fill."""
        episodes = self._windows["episodes"]
        fields: dict[str, Any] = {"returns_counted": episodes["returns"].values.size}
        for name in ("return", "length", "duration"):
            fields[f"{name}_mean"], fields[f"{name}_min"], fields[f"{name}_max"] = episodes[f"{name}s"].spread()
        for name, kind in (("agent_returns", "agents"), ("module_returns", "modules")):
            means, least, greatest = fields[name], fields[f"{name}_min"], fields[f"{name}_max"] = {}, {}, {}
            for key, window in self._windows[kind].items():
                means[key], least[key], greatest[key] = window.spread()
        custom = fields["custom"] = {}
        for name, window in self._windows["custom"].items():
            custom[name] = dict(zip(("mean", "min", "max"), window.spread(), strict=True))
        fields["turn_ms"] = dict(self._turn_ms)  # a mean over the last iteration
        if self._smoothing == "ema":
            fields["turn_ms"] = {name: window.mean for name, window in self._windows["turns"].items()}
        return fields

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data and arrays, for `load_state_dict`."""
        windows = {
            name: {key: window.state_dict() for key, window in own.items()} for name, own in self._windows.items()
        }
        return {**windows, "metrics": self.metrics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for kind, windows in self._windows.items():
            windows.clear()
            for key, saved in state[kind].items():
                windows[key].load_state_dict(saved)
        self.metrics.load_state_dict(state["metrics"])


def log_trained(
    metrics: Metrics,
    trained_before: Mapping[str, int],
    trained: Mapping[str, int],
    sampled_before: tuple[int, int],
    sampled: tuple[int, int],
) -> None:
    """Log how many steps were trained on between two times: agent steps, env steps, and steps of each of several
    modules.

    Training counts agent steps. They are converted to env steps by the ratio of the two in the steps just sampled.

    Args:
        metrics: Where to log.
        trained_before: Steps that each module had been trained on over the lifetime, by module id.
        trained: The same, now.
        sampled_before: Env steps and agent steps that had been sampled.
        sampled: The same, now.
    """
    new: dict[str, int] = {}
    for name, count in trained.items():
        new[name] = count - trained_before.get(name, 0)
    since = sampled_before if sampled[1] > sampled_before[1] else (0, 0)  # nothing sampled: the lifetime's ratio
    share = (sampled[0] - since[0]) / (sampled[1] - since[1]) if sampled[1] else 1.0
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
    """Numbers of trainable and frozen parameters of all modules, and of each one if there are several."""
    counts = {"parameters/trainable": 0.0, "parameters/frozen": 0.0}
    for name, module in modules.items():
        own = {"parameters/trainable": 0.0, "parameters/frozen": 0.0}
        for parameter in module.parameters():
            own["parameters/trainable" if parameter.requires_grad else "parameters/frozen"] += parameter.numel()
        for kind, count in own.items():
            counts[kind] += count
            if len(modules) > 1:
                counts[f"{name}/{kind}"] = count
    return counts


def together(parts: Mapping[str, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    """Figures by module merged into one mapping; names get the prefix ``module_id/`` if there are several modules."""
    found: dict[str, float] = {}
    for module, figures in parts.items():
        for name, value in figures.items():
            found[f"{module}/{name}" if several else name] = value
    return found


def joined(updates: Mapping[str, Update], *others: Mapping[str, float], several: bool) -> Update:
    """The updates of all modules merged into one, named as by `together`, with ``others`` added to its metrics."""
    whole = Update({}, {})
    for name, update in updates.items():
        whole.losses.update(together({name: update.losses}, several=several))
        whole.metrics.update(together({name: update.metrics}, several=several))
    for figures in others:
        whole.metrics.update(figures)
    return whole
