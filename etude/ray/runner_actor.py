# SPDX-License-Identifier: Apache-2.0
"""RunnerActor: a runner with its own envs, in a process on a cluster."""

import dataclasses
import faulthandler
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import ray

from etude.algorithms.config import ActingConfig, AgentsConfig, AlgorithmConfig
from etude.algorithms.play import dropped_by, make_runner, played, runner_for, workers_of
from etude.algorithms.policies import spaces_in
from etude.envs import Arena, make_arena
from etude.experience import Experience
from etude.interruption import when_parent_ends
from etude.policies import Policy
from etude.ray.policies import Acting, Weights, from_arrays, known_as, set_learned, set_plain_attributes
from etude.runners import Finished, ModuleOf, Runner
from etude.runners.callbacks import callback_from
from etude.spaces import Spaces
from etude.threads import for_acting, hold

_STDERR = 2  # Ray writes it to the log of the process


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentReport:
    """The counts of a fragment."""

    env_steps: int
    agent_steps: int
    seq_nos: dict[str | None, int]
    """By module: the number of gradient steps behind the weights that acted."""
    finished: Finished
    times: dict[str, float]
    """Seconds by phase."""
    turns: int
    stats: dict[str, float]
    seconds: float
    """Seconds that collecting took."""


class RunnerActor:
    """Collects fragments of experience with the latest weights that it was sent, or plays whole episodes.

    If no env completes a step, and none is made, within ``ray.step_timeout`` seconds, the process ends:
    `faulthandler` writes the stacks of its threads to its log, and Ray reports that it was lost.

    Args:
        config: The algorithm's settings, for the local engine.
        device: The device on which modules act, as torch names it.
        step_timeout: The limit in seconds; None: no limit.
    """

    def __init__(self, config: AlgorithmConfig, device: str, step_timeout: float | None) -> None:
        when_parent_ends(lambda: os._exit(1))  # a thread may wait for data for ever
        hold(for_acting(config.compute.threads))
        self._config, self._device, self._step_timeout = config, device, step_timeout
        self._callbacks = [callback_from(spec) for spec in config.callbacks]
        self._arena: Arena | None = None
        self._runner: Runner | None = None
        self._policies: dict[str, Policy] = {}
        self._is_only = True
        self._seq_nos: dict[str | None, int] = {}
        self._reported = (0, 0, 0)  # env steps, agent steps and turns
        self._times: dict[str, float] = {}  # as last reported

    @contextmanager
    def _timed_out(self) -> Iterator[None]:
        """A context in which this process ends if `turns` does not change for too long."""
        limit = self._step_timeout
        if limit is None:
            yield
            return
        is_over = threading.Event()
        watcher = threading.Thread(target=_rearm, args=(limit, self.turns, is_over), daemon=True)
        faulthandler.dump_traceback_later(limit, exit=True, file=_STDERR)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()
            faulthandler.cancel_dump_traceback_later()

    def turns(self) -> int:
        """The number of turns since the modules began to act."""
        return 0 if self._runner is None else self._runner.turns

    def open(self) -> tuple[str, int]:
        """Make the envs; return the ids of the node and of the process.

        Raises:
            EnvError: the envs can't be made.
        """
        config = self._config
        assert isinstance(config, ActingConfig)
        assert config.env is not None
        if self._arena is None:
            with self._timed_out():
                self._arena = make_arena(config.env, config.num_envs, workers_of(config), drop=dropped_by(config))
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, before: Mapping[str, Spaces] | None
    ) -> dict[str, Spaces]:
        """See `etude.algorithms.policies.spaces_in`."""
        assert self._arena is not None
        return spaces_in(self._arena, module_ids, module_of, before)

    def begin(self, acting: Acting, seed: int) -> None:
        """Let these policies act, in new episodes."""
        assert self._arena is not None
        for policy in acting.policies.values():
            policy.module.to(self._device)
            policy.connectors.start(self._arena.num_slots)
        self._policies, self._is_only = acting.policies, acting.is_only
        config = _with_agents(self._config, acting)
        lengths = config.trajectories.lengths()
        self._runner = make_runner(config, self._arena, acting.policies, seed, self._callbacks, lengths)
        self._seq_nos, self._reported, self._times = {}, (0, 0, 0), {}

    def collect(
        self, weights: Weights | None, num_steps: int, whole_episodes: bool, explore: bool
    ) -> tuple[FragmentReport, dict[str | None, Experience]]:
        """Collect a fragment, after loading ``weights`` if they are newer; None: keep the present weights."""
        runner = self._runner
        assert runner is not None
        begin = perf_counter()
        if weights is not None:
            self._take(weights, runner)
        with self._timed_out():
            parts = runner.collect_each(num_steps=num_steps, whole_episodes=whole_episodes, explore=explore)
        if runner.arena.device is not None:
            parts = {name: exp.numpy() for name, exp in parts.items()}  # tensors can't be sent
        return self._report(runner, perf_counter() - begin), parts

    def _take(self, weights: Weights, runner: Runner) -> None:
        for name, values in weights.values.items():
            module_id, seq_no = known_as(name, is_only=self._is_only), weights.seq_nos[name]
            # used in place: all runners on a node share this memory
            if runner.take_weights(from_arrays(values), seq_no, module_id, shared=True):
                self._seq_nos[module_id] = seq_no
        for name, policy in self._policies.items():
            set_learned(policy.connectors, weights.learned.get(name, {}))
            set_plain_attributes(policy.module, weights.plain.get(name, {}))

    def _report(self, runner: Runner, seconds: float) -> FragmentReport:
        env_steps, agent_steps, turns = self._reported
        times = {name: spent - self._times.get(name, 0.0) for name, spent in runner.times.items()}
        self._reported, self._times = (runner.env_steps, runner.agent_steps, runner.turns), dict(runner.times)
        return FragmentReport(
            env_steps=runner.env_steps - env_steps,
            agent_steps=runner.agent_steps - agent_steps,
            seq_nos=dict(self._seq_nos),
            finished=runner.take_finished(),
            times=times,
            turns=runner.turns - turns,
            stats=runner.stats(),
            seconds=seconds,
        )

    def play(self, acting: Acting, num_episodes: int, seed: int) -> tuple[Finished, int, float]:
        """Play whole episodes in separate envs, without exploring.

        Returns the results, the number of episodes that were cut, and the seconds that they took.
        """
        begin = perf_counter()
        config = _with_agents(self._config, acting)
        assert config.env is not None
        with self._timed_out():
            self._runner = runner = runner_for(config, config.env, num_episodes, acting.policies, seed)
            finished, faulty = played(runner, num_episodes, explore=False)
        return finished, faulty, perf_counter() - begin

    def close(self) -> None:
        """Close the envs."""
        if self._arena is not None:
            self._arena.close()


def _rearm(limit: float, turns: Callable[[], int], is_over: threading.Event) -> None:
    """Postpone the end of this process as long as there are new turns."""
    seen = turns()
    while not is_over.wait(limit / 4):
        now = turns()
        if now != seen:
            seen = now
            faulthandler.dump_traceback_later(limit, exit=True, file=_STDERR)


def _with_agents(config: AlgorithmConfig, acting: Acting) -> Any:
    modules = None if acting.is_only else tuple(acting.policies)
    own = {name: given for name, given in (config.agents.overrides or {}).items() if name in acting.policies}
    agents = AgentsConfig(modules=modules, module_of=acting.module_of, overrides=own or None)
    return dataclasses.replace(config, agents=agents)


def seed_of(seed: int, number: int, life: int) -> int:
    """The seed of a runner: the algorithm's for the first runner in its first life, others derived from it."""
    if not number and not life:
        return seed
    return int(np.random.SeedSequence([seed, number, life]).generate_state(1, np.uint64)[0] >> 1)
