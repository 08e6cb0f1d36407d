# SPDX-License-Identifier: Apache-2.0
"""What training and evaluation report, and when to stop."""

import dataclasses
import math
from typing import Any

from etude.errors import SettingsError
from etude.settings import settings

MIN_EPISODES = 20
"""A mean return is taken for a goal only over as many episodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
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
