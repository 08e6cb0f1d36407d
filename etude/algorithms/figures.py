# SPDX-License-Identifier: Apache-2.0
"""What results say of episodes, of the time that turns take, of steps trained and of parameters."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from etude.metrics import Ema, Metrics, Window
from etude.metrics.stats import Smoothing
from etude.modules import Module
from etude.runners import Finished


class Figures:
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
                windows.setdefault(name, self._kind(self._size)).add(values)

    def add_turns(self, times: Mapping[str, float], turns: int) -> None:
        """Take in the seconds that a runner spent in each phase, and its turns, since it was made."""
        count = turns - self._turn_count
        if count:
            spent = {name: seconds - self._times.get(name, 0.0) for name, seconds in times.items()}
            self._turn_ms = {name: 1000 * seconds / count for name, seconds in spent.items()}
            for name, ms in self._turn_ms.items():
                self._turns.setdefault(name, self._kind(self._size)).add(ms)
        self._times, self._turn_count = dict(times), turns

    def turn_ms(self) -> dict[str, float]:
        """Milliseconds of each phase of a turn: over the last iteration, or its moving average."""
        if self._kind is Ema:
            return {name: window.mean for name, window in self._turns.items()}
        return dict(self._turn_ms)

    def fields(self) -> dict[str, Any]:
        """The fields of a `Result` that are about this."""
        return {
            **_spread("return", self.returns),
            **_spread("length", self.lengths),
            **_spread("duration", self.durations),
            "returns_counted": len(self.returns),
            **_spreads("agent_returns", self.agent_returns),
            **_spreads("module_returns", self.module_returns),
            "custom": {name: {"mean": w.mean, "min": w.min, "max": w.max} for name, w in self.custom.items()},
            "turn_ms": self.turn_ms(),
        }

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


def _spread(name: str, window: Window) -> dict[str, float]:
    return {f"{name}_mean": window.mean, f"{name}_min": window.min, f"{name}_max": window.max}


def _spreads(name: str, windows: Mapping[str, Window]) -> dict[str, dict[str, float]]:
    return {
        name: {key: window.mean for key, window in windows.items()},
        f"{name}_min": {key: window.min for key, window in windows.items()},
        f"{name}_max": {key: window.max for key, window in windows.items()},
    }


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
    new = {name: count - before.trained.get(name, 0) for name, count in now.trained.items()}
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
