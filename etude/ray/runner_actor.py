# SPDX-License-Identifier: Apache-2.0
"""RunnerActor: a runner over envs of its own, in a process of a cluster."""

import dataclasses
import os
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray

from etude.algorithms.config import ActingConfig
from etude.algorithms.play import by_module, dropped_by, make_runner, workers_of
from etude.algorithms.policies import spaces_in
from etude.envs import Arena, make_arena
from etude.experience import Experience
from etude.policies import Policy
from etude.ray.policies import Acting, News, Weights, known_as, set_learned, set_plain_attributes
from etude.ray.states import from_arrays
from etude.runners import Finished, Lengths, ModuleOf, Runner
from etude.runners.callbacks import callback_from
from etude.spaces import Spaces
from etude.threads import for_acting, hold

if TYPE_CHECKING:
    from etude.ray.recording import RecordJob, RunnerRecorder


class Order(NamedTuple):
    """What a runner is asked for."""

    num_steps: int
    whole_episodes: bool
    explore: bool
    seq_nos: dict[str, int]
    """The gradient steps that made the weights which come along."""
    news: News | None
    """None: nothing has changed."""
    meta: Mapping[str, Any] | None
    """Is kept with the recording from now on; None: as before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a fragment is about."""

    env_steps: int
    agent_steps: int
    seq_nos: dict[str | None, int]
    """By module: the gradient steps that made the weights which acted."""
    finished: Finished
    times: dict[str, float]
    """Seconds by phase."""
    turns: int
    stats: dict[str, float]
    seconds: float
    """How long it took to make."""
    unwritten: int = 0
    """Steps, of this fragment and others, that are to be recorded and are not yet in a finished file."""


class RunnerActor:
    """Makes fragments of experience by the weights that it was sent last.

    Args:
        config: Of the algorithm, for the local engine.
        number: Which runner this is.
        device: Where modules act, as torch names it.
    """

    def __init__(self, config: ActingConfig, number: int, device: str) -> None:
        hold(for_acting(config.threads))
        self._config = config
        self._number = number
        self._device = device
        self._callbacks = [callback_from(spec) for spec in config.callbacks]
        self._arena: Arena | None = None
        self._runner: Runner | None = None
        self._recorder: RunnerRecorder | None = None
        self._policies: dict[str, Policy] = {}
        self._is_only = True
        self._seq_nos: dict[str | None, int] = {}
        self._told = (0, 0, 0)  # env steps, agent steps and turns that were reported
        self._times: dict[str, float] = {}  # likewise

    def open(self) -> tuple[str, int]:
        """Make the envs; gives the id of the node and of the process.

        Raises:
            EnvError: they can't be made.
        """
        assert self._config.env is not None
        if self._arena is None:
            config, env = self._config, self._config.env
            self._arena = make_arena(env, config.num_envs, workers_of(config), drop=dropped_by(config))
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, known: Mapping[str, Spaces] | None
    ) -> dict[str, Spaces]:
        """See `etude.algorithms.policies.spaces_in`."""
        assert self._arena is not None
        return spaces_in(self._arena, module_ids, module_of, known)

    def begin(self, acting: Acting, seed: int, life: int, record: "RecordJob | None") -> None:
        """Let these modules act, in new episodes.

        Args:
            acting: Who.
            seed: Of the runner.
            life: How often one has begun before as this runner, over all processes.
            record: What to record; None is nothing.
        """
        assert self._arena is not None
        for policy in acting.policies.values():
            policy.module.to(self._device)
            policy.connectors.start(self._arena.num_slots)
        self._policies, self._is_only = acting.policies, acting.is_only
        config = dataclasses.replace(
            self._config,
            module=None,
            modules=None if acting.is_only else tuple(acting.policies),
            module_of=acting.module_of,
            overrides=None,
            modules_to_train=None,
        )
        lengths = Lengths(config.min_trajectory_length, config.max_trajectory_length)
        self._runner = make_runner(config, self._arena, acting.policies, seed, self._callbacks, lengths)
        self._seq_nos = {known_as(n, is_only=acting.is_only): seq_no for n, seq_no in acting.seq_nos.items()}
        self._told = (0, 0, 0)
        self._times = {}
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None
        if record is not None:
            from etude.ray.recording import RunnerRecorder  # needs pyarrow, which acting does not

            self._recorder = RunnerRecorder(record, self._number, life)

    @ray.method(num_returns=2)
    def collect(self, order: Order, weights: Weights | None) -> tuple[Report, dict[str | None, Experience]]:
        """Make a fragment, by ``weights`` unless they are older than those that are here; None is those here."""
        runner = self._runner
        assert runner is not None
        begin = perf_counter()
        if weights is not None:
            self._take(weights, order.seq_nos)
        if order.news is not None:
            self._hear(order.news)
        parts = runner.collect_each(
            num_steps=order.num_steps, whole_episodes=order.whole_episodes, explore=order.explore
        )
        if self._recorder is not None:
            self._recorder.take(by_module(parts), order.meta)
        if runner.arena.device is not None:
            parts = {name: exp.numpy() for name, exp in parts.items()}  # tensors can't travel
        return self._report(runner, perf_counter() - begin), parts

    def _take(self, weights: Weights, seq_nos: Mapping[str, int]) -> None:
        assert self._runner is not None
        for name, values in weights.items():
            module_id, seq_no = known_as(name, is_only=self._is_only), seq_nos[name]
            # they are acted with where they lie: all runners of a node share them
            if self._runner.take_weights(from_arrays(values), seq_no, module_id, shared=True):
                self._seq_nos[module_id] = seq_no

    def _hear(self, news: News) -> None:
        for name, policy in self._policies.items():
            set_learned(policy.connectors, news.learned.get(name, {}))
            set_plain_attributes(policy.module, news.plain.get(name, {}))

    def _report(self, runner: Runner, seconds: float) -> Report:
        env_steps, agent_steps, turns = self._told
        times = {name: spent - self._times.get(name, 0.0) for name, spent in runner.times.items()}
        report = Report(
            env_steps=runner.env_steps - env_steps,
            agent_steps=runner.agent_steps - agent_steps,
            seq_nos=dict(self._seq_nos),
            finished=runner.take_finished(),
            times=times,
            turns=runner.turns - turns,
            stats=runner.stats(),
            seconds=seconds,
            unwritten=0 if self._recorder is None else self._recorder.unwritten,
        )
        self._told, self._times = (runner.env_steps, runner.agent_steps, runner.turns), dict(runner.times)
        return report

    @ray.method(concurrency_group="pulse")
    def turns(self) -> int:
        """Turns made since the modules began to act; answered while a fragment is made."""
        return 0 if self._runner is None else self._runner.turns

    def flush(self) -> int:
        """Put on the disk what was recorded; gives the steps that are held, as their episodes have not ended.

        Raises:
            DataError: a write failed.
        """
        if self._recorder is None:
            return 0
        self._recorder.flush()
        return self._recorder.unwritten

    def close(self) -> None:
        """Close the envs, and what is recorded.

        Raises:
            DataError: a write failed.
        """
        recorder, self._recorder = self._recorder, None
        try:
            if recorder is not None:
                recorder.close()
        finally:
            if self._arena is not None:
                self._arena.close()


def seed_of(seed: int, number: int, life: int) -> int:
    """The seed of a runner: that of the algorithm for the first runner in its first life, others drawn from it."""
    if not number and not life:
        return seed
    return int(np.random.SeedSequence([seed, number, life]).generate_state(1, np.uint64)[0] >> 1)
