# SPDX-License-Identifier: Apache-2.0
"""Play whole episodes outside training, and record what is played or collected.

Recordings need pyarrow, which acting does not, so they are imported on use.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv

from etude import columns as col
from etude.algorithms.config import ActingConfig, AlgorithmConfig, RecordConfig
from etude.algorithms.policies import MAIN, spaces_in
from etude.algorithms.results import Evaluation
from etude.connectors import Connector, Drop, Pipeline, overrides
from etude.connectors.pipeline import state_to_json
from etude.envs import Arena, EnvLike, Workers, env_name, make_arena
from etude.errors import DataError, EnvError, EtudeError
from etude.experience import Experience
from etude.files import located
from etude.policies import Policy
from etude.policies.policy import check_same_actions
from etude.runners import CallbackLike, Finished, Lengths, Runner
from etude.spaces import Spaces, space_to_json

if TYPE_CHECKING:
    from etude.recordings.module_writers import ModuleWriters

_RULES = ("max_steps", "restart_failed", "max_restarts", "max_failure_rate", "check")  # apply wherever an env runs
_AT_A_TIME = 4  # episodes of each slot held in memory at a time


def play(
    runner: Runner,
    num_episodes: int,
    *,
    explore: bool,
    updates: int,
    to: Callable[[Mapping[str, Experience]], None] | None = None,
) -> Evaluation:
    """Play whole episodes, pass them by module id to ``to``, and close the runner."""
    begin = time.perf_counter()
    finished, faulty = played(runner, num_episodes, explore=explore, to=to)
    return evaluation_of(finished, faulty, updates=updates, seconds=time.perf_counter() - begin)


def played(
    runner: Runner, num_episodes: int, *, explore: bool, to: Callable[[Mapping[str, Experience]], None] | None = None
) -> tuple[Finished, int]:
    """Like `play`, but return the finished episodes, and the number of episodes that were cut because their env
    failed."""
    at_a_time = _AT_A_TIME * runner.arena.num_slots
    with closing(runner):
        for done in range(0, num_episodes, at_a_time):
            experience = runner.collect_each(num_episodes=min(at_a_time, num_episodes - done), explore=explore)
            if to is not None:
                to(by_module(experience))
        return runner.take_finished(), int(runner.stats().get("faulty_episodes", 0))


def evaluation_of(finished: Finished, faulty: int, *, updates: int, seconds: float) -> Evaluation:
    """The evaluation of episodes that were played outside training.

    Args:
        finished: The finished episodes.
        faulty: Number of episodes that were cut because their env failed.
        updates: Gradient steps that the modules had made.
        seconds: Duration of playing.
    """
    returns, lengths = finished.returns, finished.lengths.astype(np.float64)
    steps = int(lengths.sum())
    if not len(returns):  # the env failed in each
        returns = lengths = np.full(1, np.nan)
    return Evaluation(
        episodes=len(finished.returns),
        return_mean=float(returns.mean()),
        return_min=float(returns.min()),
        return_max=float(returns.max()),
        return_std=float(returns.std()),
        length_mean=float(lengths.mean()),
        env_steps=steps,
        updates=updates,
        seconds=seconds,
        sample_steps_per_s=steps / seconds,
        agent_returns={name: float(found.mean()) for name, found in finished.agent_returns.items()},
        module_returns={name: float(found.mean()) for name, found in finished.module_returns.items()},
        faulty_episodes=faulty,
        custom={
            name: {"mean": float(found.mean()), "min": float(found.min()), "max": float(found.max())}
            for name, found in sorted(finished.custom.items())
        },
    )


def check_played(found: Evaluation) -> None:
    """Raise an EnvError if no episode was played to its end."""
    if not found.episodes:
        raise EnvError(
            f"the env broke off every episode ({found.faulty_episodes} in all), so there is nothing to keep and no "
            "return to tell. The warnings say what it raised: correct the env."
        )


def make_runner(
    config: AlgorithmConfig,
    arena: Arena,
    policies: Mapping[str, Policy],
    seed: int | None,
    callbacks: Sequence[CallbackLike],
    lengths: Lengths | None = None,
) -> Runner:
    """Make a runner of an algorithm's policies."""
    runner = Runner(
        arena,
        policies[MAIN] if config.agents.modules is None else policies,
        module_of=config.agents.module_of,
        seed=seed,
        count_steps_by=config.trajectories.count_steps_by if isinstance(config, ActingConfig) else "env_steps",
        callbacks=callbacks,
        lengths=lengths,
    )
    runner.checks_offline = True
    return runner


def by_module(parts: Mapping[str | None, Experience]) -> dict[str, Experience]:
    """Experience that a runner from `make_runner` collected, by module id."""
    return {MAIN if name is None else name: exp for name, exp in parts.items()}


def runner_for(
    config: AlgorithmConfig,
    env: EnvLike,
    num_episodes: int,
    policies: Mapping[str, Policy],
    seed: int | None,
    callbacks: Sequence[CallbackLike] = (),
    max_steps: int | None = None,
    spaces: Mapping[str, Spaces] | None = None,
) -> Runner:
    """Make a runner in ``env`` outside training, with one copy of the env per episode, at most 16; a single env object
    is used as it is.

    It truncates episodes after ``max_steps``; None: as the config's workers do. ``spaces`` are those of training.

    Raises:
        SettingsError: after the connectors, the env's spaces are not those that the modules were made for.
    """
    is_one = not isinstance(env, str | VectorEnv | Arena) and not callable(env)
    num_envs = 1 if is_one else min(num_episodes, 16)
    workers = Workers()
    if isinstance(config, ActingConfig) and not isinstance(env, VectorEnv):
        given = workers_of(config)
        if given.num_workers and given.mode == "process" and env is config.env and not callbacks:
            workers = _in_processes(given, num_envs)
        else:
            workers = dataclasses.replace(workers, **{name: getattr(given, name) for name in _RULES})
    if max_steps is not None:
        workers = dataclasses.replace(workers, max_steps=max_steps)
    arena = make_arena(env, num_envs, workers, exact=False, drop=dropped_by(config))
    try:
        there = spaces_in(arena, list(policies), config.agents.module_of, spaces)
        own = {name: policy.fitted(*there[name], env_name(env)) for name, policy in policies.items()}
        for name, policy in policies.items():
            check_same_actions(policy, there[name][1], env_name(env))
    except BaseException:
        arena.close()
        raise
    return make_runner(config, arena, own, seed, callbacks)


def _in_processes(workers: Workers, num_envs: int) -> Workers:
    """Settings for ``num_envs`` envs in worker processes, as in training, because they may crash their process.

    They step together, so that equal seeds give equal episodes.
    """
    count = max(n for n in range(1, workers.num_workers + 1) if num_envs % n == 0)
    lock_step: dict[str, Any] = {"min_batch": num_envs, "max_batch": None, "max_wait": None}
    return dataclasses.replace(workers, num_workers=count, envs_per_worker=num_envs // count, **lock_step)


def dropped_by(config: AlgorithmConfig) -> list[str]:
    """The parts of observations that the config's connectors `drop`."""
    each = [config, *(config.with_overrides(name, own) for name, own in (config.agents.overrides or {}).items())]
    connectors: list[Connector] = [Pipeline(one.connectors) for one in each]
    paths: list[str] = []
    for connector in connectors:
        if isinstance(connector, Pipeline):
            connectors += connector.connectors  # the loop visits these, too
        elif isinstance(connector, Drop):
            paths += connector.paths
    return list(dict.fromkeys(paths))


def workers_of(config: ActingConfig) -> Workers:
    """The config's workers, with `max_steps` lowered to where the config truncates episodes."""
    if config.trajectories.at_max_length != "reset":
        return config.workers
    limits = [limit for limit in (config.workers.max_steps, config.trajectories.max_length) if limit is not None]
    return dataclasses.replace(config.workers, max_steps=min(limits))


PATIENCE: Final = 5.0
"""Seconds that an env may take for its step once the evaluation is no longer wanted."""


class Played(NamedTuple):
    """Whole episodes of an evaluation."""

    evaluation: Evaluation
    """The figures of the evaluation."""
    finished: Finished | None = None
    """The finished episodes, if they are to count in the figures of results."""
    parts: Mapping[str, Experience] = {}
    """Their experience, by module id, if it was kept."""


def played_once(runner: Runner, num_episodes: int, updates: int) -> Played:
    """Play whole episodes without exploration; ``updates`` are the gradient steps that the modules had made."""
    begin = time.perf_counter()
    parts, finished = by_module(runner.collect_each(num_episodes=num_episodes, explore=False)), runner.take_finished()
    faulty = int(runner.stats().get("faulty_episodes", 0))
    seconds = time.perf_counter() - begin
    return Played(evaluation_of(finished, faulty, updates=updates, seconds=seconds), finished, parts)


class BackgroundEvaluation(Future[Played]):
    """A future of whole episodes that are played in a thread during training.

    Args:
        runner: A runner whose modules nothing else changes; it is closed when the episodes are over.
        num_episodes: Number of episodes.
        updates: Gradient steps that the modules had made.
    """

    def __init__(self, runner: Runner, num_episodes: int, updates: int) -> None:
        super().__init__()
        self._runner = runner
        play = partial(self._play, num_episodes, updates)
        self._thread = threading.Thread(target=play, name="etude-evaluation", daemon=True)
        self._thread.start()

    def _play(self, num_episodes: int, updates: int) -> None:
        try:
            with closing(self._runner):
                played = played_once(self._runner, num_episodes, updates)
            self.set_result(played)
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            self.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - it must not end the program
            self.set_exception(EtudeError(f"an evaluation was ended by {type(error).__name__}: {error}"))

    def close(self) -> None:
        """Stop playing. An env that hangs is left behind with its thread."""
        self._runner.stop()
        self._thread.join(PATIENCE)


# -- recording --------------------------------------------------------------------------------------------------------


class Recorder:
    """Records what an algorithm's modules experience, if its settings ask for it.

    Args:
        algorithm: An `Algorithm`. The type is Any because that class imports this file.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self.settings: RecordConfig = algorithm.config.record
        self.is_on = self.settings.path is not None
        """Whether anything is recorded."""
        self._began_in = Path.cwd() if self.is_on else None  # an env may change the current folder
        self.has_new_settings = False
        """Whether a loaded run continues with other settings than it was saved with."""
        self._writers: ModuleWriters | None = None
        self._state: Mapping[str, Any] | None = None
        """The state of a loaded run's writers, or of this one's when they were closed."""

    def go_on(self, *, new_episodes: bool, same_again: bool) -> None:
        """Set how a loaded run continues; see `ModuleWriters.go_on`.

        Args:
            new_episodes: Its running episodes do not continue.
            same_again: The run is repeatable: its next steps equal those that followed this state before.
        """
        self.open()
        if self._writers is not None:
            is_other = self.has_new_settings or not same_again
            other_ids = is_other and self._writers.has_later_steps
            self._writers.go_on(new_episodes=new_episodes, other_ids=other_ids)

    def open(self) -> None:
        """Make the recording's folder if necessary, so that problems are raised before training.

        Raises:
            DataError: the recording can't be written.
        """
        if self._writers is not None or self.settings.path is None:
            return
        from etude.recordings.module_writers import ModuleWriters

        own, algorithm = self.settings, self._algorithm
        self._writers = ModuleWriters(
            self.settings.path,
            algorithm.recorded_spaces(),
            columns=algorithm.recorded,
            below=self._began_in,
            layout=own.layout,
            append=own.append,
            state=self._state,
            env=None if algorithm.config.env is None else env_name(algorithm.config.env),
            meta=self._meta(),
            compression=own.compression,
            max_rows_per_file=own.max_rows_per_file,
            max_file_size=own.max_file_size,
        )
        if self._state is not None and not isinstance(algorithm.config, ActingConfig):  # no episode is running
            is_other = self.has_new_settings and self._writers.has_later_steps
            self._writers.go_on(new_episodes=False, other_ids=is_other)

    def take(self, parts: Mapping[str, Experience], tag: str = "") -> None:
        """Record raw experience by module id, if recording is on; ``tag`` is appended to the ids of episodes."""
        if not self.is_on:
            return
        self.open()
        assert self._writers is not None
        self._writers.take(parts, self._algorithm.recorded_spaces(), tag)
        if self._writers.meta_is_due:
            self._writers.set_meta(self._meta())

    def _meta(self) -> Any:
        """The current metadata of the recording; only algorithms that act in training explore."""
        config = self._algorithm.config
        return self._algorithm.recording_meta(explore=isinstance(config, ActingConfig), seed=config.seed)

    def state_dict(self) -> Any:
        """The state of the writers; all but unfinished episodes is then on disk."""
        if self._writers is None:
            return self._state
        self._writers.set_meta(self._meta())
        return self._writers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned; the files are opened with the next recorded step."""
        was_open = self._writers is not None
        self.close()
        own = self._state if was_open else None
        if own is None or (state is not None and state["path"] == own["path"]):  # else of another recording
            self._state = state

    def close(self) -> None:
        """Write everything to disk.

        Raises:
            DataError: a write failed.
        """
        if self._writers is not None:
            self._writers.set_meta(self._meta())
            writers, self._writers = self._writers, None
            self._state = writers.close()


def record(
    runner: Runner,
    folder: str,
    num_episodes: int,
    kinds: Mapping[str, Spaces],
    *,
    explore: bool,
    updates: int,
    **written: Any,
) -> Evaluation:
    """Play whole episodes, write them to a recording, and close the runner.

    Args:
        runner: Plays the episodes.
        folder: The folder of the recording.
        num_episodes: Number of episodes.
        kinds: The spaces of observations and actions as they are recorded, by module id.
        explore: Sample actions; otherwise take the most likely ones.
        updates: Gradient steps that the modules had made.
        written: Arguments of `ModuleWriters`.

    Raises:
        DataError: the recording can't be written.
        EnvError: the env failed in every episode.
    """
    from etude.recordings.module_writers import ModuleWriters

    try:
        # episodes arrive whole, so the table layout holds none back; when appending, the caller has changed the seed
        writers = ModuleWriters(folder, kinds, layout="table", is_run=False, **written)
    except BaseException:
        runner.close()
        raise
    with closing(writers):
        found = play(
            runner, num_episodes, explore=explore, updates=updates, to=lambda parts: writers.take(parts, kinds)
        )
    check_played(found)
    return found


def seed_after(folder: str, kinds: Mapping[str, Spaces], seed: int) -> int:
    """A seed for episodes that are added to a recording: it differs from ``seed`` if the recording has episodes."""
    from etude.recordings import Recording
    from etude.recordings.module_writers import folders_of

    inner = next(iter(folders_of(kinds).values()))
    try:
        there = Recording.open(located(folder) / inner if inner else located(folder)).num_episodes
    except DataError:
        there = 0  # the writer raises if something unreadable is there
    return int(np.random.SeedSequence([seed, there]).generate_state(1)[0]) if there else seed


def connectors_meta(policies: Mapping[str, Policy], *, several: bool) -> dict[str, Any]:
    """Metadata of recordings: ``connectors``; ``filter``, what they have learned; and, if they map actions,
    ``env_action_space``. Each is by module id if there are ``several`` modules."""
    found: dict[str, dict[str, Any]] = {
        "connectors": {name: [*map(repr, own.connectors.connectors)] for name, own in policies.items()},
        "filter": {name: state_to_json(own.connectors) for name, own in policies.items() if own.connectors.learns},
        col.ENV_ACTION_SPACE: {
            name: space_to_json(own.action_space)
            for name, own in policies.items()
            if own.action_space != own.module.action_space
            or any(overrides(connector, "unact") for connector in own.connectors.connectors)
        },
    }
    return {key: by_name if several else by_name[MAIN] for key, by_name in found.items() if by_name}
