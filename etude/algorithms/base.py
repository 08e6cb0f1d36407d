# SPDX-License-Identifier: Apache-2.0
"""Algorithm: what all algorithms share: training in a loop, evaluating, recording, saving."""

import dataclasses
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import threadpoolctl
import torch
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms import saving
from etude.algorithms.config import AlgorithmConfig, check_device
from etude.algorithms.figures import Figures
from etude.algorithms.playing import play, runner_for
from etude.algorithms.result import MIN_EPISODES, Evaluation, Result, Stop
from etude.algorithms.students import MAIN, Spaces, Student, make_student, modules_given, spawned
from etude.checkpoints import save_tree
from etude.connectors import Pipeline
from etude.envs import EnvLike, env_name
from etude.errors import CheckpointError, SettingsError
from etude.learners import Batch, Learner, Loss, Update
from etude.modules import Module
from etude.recordings import Recording, RecordingWriter
from etude.runners import CallbackLike, Finished, Runner
from etude.runners.callbacks import callback_from
from etude.spaces import space_to_json

C = TypeVar("C", bound=AlgorithmConfig)

RECORDED = (col.OBS, col.ACTION, col.REWARD, col.LOGP)


class Algorithm(Generic[C]):
    """Modules, how they learn, and where they act.

    To write one, inherit from `OnPolicyAlgorithm` or `OfflineAlgorithm` and define `loss`, and `learner_connectors`
    where the batch must hold more than was recorded.

    Args:
        config: The settings. An algorithm can be built from them alone.
        saved_spaces: What `module_spaces` gave when the algorithm was saved; used by `load`.
    """

    name: ClassVar[str] = ""
    """What it is called in messages and on the command line; the class's name in lower case if not set."""

    needs_value: ClassVar[bool] = True
    """The built-in network has a value function."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __init__(self, config: C, *, saved_spaces: dict[str, Spaces] | None = None) -> None:
        self.config = config
        self._saved_spaces = saved_spaces
        torch.set_num_threads(config.threads)
        # BLAS threads beside torch's make both crawl; NumPy's matrices here are too small to gain from them.
        threadpoolctl.threadpool_limits(1, user_api="blas")
        check_device(config.device)
        weights, runner, learner = np.random.SeedSequence(config.seed).spawn(3)
        self._seed = int(runner.generate_state(1)[0])
        self.spaces = self.module_spaces()
        """On the env's side, of observations and of actions, by module id."""
        try:
            self._build(weights, learner)
        except BaseException:
            self.close()
            raise

    def _build(self, weights: np.random.SeedSequence, learner: np.random.SeedSequence) -> None:
        config, given = self.config, modules_given(self.config)
        # one module alone is drawn as it always was; each of several has streams of its own, whoever is beside it
        seeds = dict.fromkeys(given, (weights, learner))
        if config.modules is not None:
            seeds = {name: (spawned(weights, name), spawned(learner, name)) for name in given}
        self.students = {
            name: make_student(
                config,
                given[name],
                self.spaces[name],
                self.loss,
                self.learner_connectors(),
                seeds[name],
                needs_value=self.needs_value,
            )
            for name in given
        }
        """Each module with its connectors and its learner, by module id."""
        self.callbacks = [callback_from(spec) for spec in config.callbacks]
        self.figures = Figures(self.window, self.config.smoothing)
        """Of the latest episodes."""
        self.histograms: dict[str, NDArray[np.float64]] = {}
        """What callbacks logged to see how it is spread, in the episodes that ended in the newest iteration."""
        self.media: dict[str, bytes] = {}
        """Pictures (PNG) and clips (GIF) that they logged in these, the newest of each name."""
        self.iteration = self.env_steps = self.agent_steps = self.episodes = self.faulty_episodes = 0
        self.seconds = 0.0
        self._times: dict[str, float] = {}
        self._resumed: str | None = None
        self.setup()

    @property
    def student(self) -> Student:
        """The only module with what stands around it.

        Raises:
            SettingsError: there are several.
        """
        if len(self.students) > 1:
            raise SettingsError(f"there are the modules {list(self.students)}: say which, as .students[name].")
        return next(iter(self.students.values()))

    @property
    def module(self) -> Module:
        """The only module."""
        return self.student.module

    @property
    def connectors(self) -> Pipeline:
        """What stands between env and the only module."""
        return self.student.connectors

    @property
    def learner(self) -> Learner:
        """The learner of the only module."""
        return self.student.learner

    @property
    def to_learner(self) -> Pipeline:
        """The connectors of the only module's learner."""
        return self.student.to_learner

    @property
    def updates(self) -> int:
        """Gradient steps over the lifetime, of all modules."""
        return sum(student.learner.updates for student in self.students.values())

    # -- to be defined by an algorithm --------------------------------------------------------------------------

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss of one batch: named parts, which are summed."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(module, batch).")

    def learner_connectors(self) -> list[Any]:
        """Connectors that add to the experience what the loss needs, such as `GAE`; none by default."""
        return []

    def after_update(self) -> None:
        """Called after the updates of each iteration, for target networks and the like."""

    def setup(self) -> None:
        """Called at the end of making the algorithm."""

    def prepare(self) -> None:
        """Make what training needs and a loaded algorithm, which may only play, does not have yet; `train` does it too.

        Nothing, unless an algorithm says otherwise.
        """

    def module_spaces(self) -> dict[str, Spaces]:
        """The spaces of observations and actions on the env's side, by module id."""
        raise NotImplementedError

    def training_step(self) -> Update:
        """One iteration: get experience, and learn from it."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """How many episodes the returns in results are over."""
        return self.config.evaluation_episodes

    # -- training -----------------------------------------------------------------------------------------------

    def train(self) -> Result:
        """One iteration."""
        self.prepare()
        begin = time.perf_counter()
        self._times, self.histograms, self.media = {}, {}, {}
        steps_before = self.env_steps
        for student in self.students.values():
            student.learner.set_env_steps(self.env_steps)
        update = self.training_step()
        self.after_update()
        self.iteration += 1
        self.seconds += time.perf_counter() - begin
        result = self._result(update, self.env_steps - steps_before)
        self._resumed = None
        return result

    def _result(self, update: Update, sampled: int) -> Result:
        sampling = self._times.get("sample", 0.0)
        rates = {name: _rates(student.learner) | student.metrics() for name, student in self.students.items()}
        return Result(
            iteration=self.iteration,
            env_steps=self.env_steps,
            agent_steps=self.agent_steps,
            updates=self.updates,
            seconds=self.seconds,
            episodes=self.episodes,
            **self.figures.fields(),
            losses=update.losses,
            metrics=update.metrics | together(rates, several=len(rates) > 1),
            times=dict(self._times),
            sample_steps_per_s=sampled / sampling if sampling else 0.0,
            faulty_episodes=self.faulty_episodes,
            resumed=self._resumed,
        )

    def take_finished(self, finished: Finished) -> None:
        """Take what finished episodes brought into the figures of results."""
        self.figures.add(finished)
        self.episodes += len(finished.returns)
        for name, values in finished.histograms.items():
            self.histograms[name] = np.append(self.histograms.get(name, np.zeros(0)), values)
        self.media |= finished.media

    def iterate(self, stop: Stop | None = None) -> Iterator[Result]:
        """Train, an iteration at a time, until ``stop`` says so.

        Where a budget is used up already, as a resumed run's may be, one result says how things stand.
        """
        stop = stop or Stop()
        self.check_stop(stop)
        self._times = {}
        standing = self._result(Update({}, {}), 0)
        if stop.budget_used(standing):
            yield standing
            return
        while True:
            result = self.train()
            yield result
            if stop.now(result):
                return

    def check_stop(self, stop: Stop) -> None:
        """Raise a SettingsError where ``stop`` sets a goal that can never be met."""
        if stop.return_mean is not None and self.window < MIN_EPISODES:
            raise SettingsError(
                f"`stop.return_mean` is over at least {MIN_EPISODES} episodes, but results are over {self.window} "
                "only: raise `window` (`evaluation_episodes` offline)."
            )

    def fit(self, stop: Stop) -> Result:
        """Train until ``stop`` says so; gives the last result."""
        if stop == Stop():
            raise SettingsError("fit needs to know when to stop: set something in Stop(...), or use iterate().")
        *_, last = deque(self.iterate(stop), maxlen=1)
        return last

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a ``with`` block to the ``times`` of the running iteration."""
        begin = time.perf_counter()
        yield
        self._times[phase] = self._times.get(phase, 0.0) + time.perf_counter() - begin

    # -- using the policy ---------------------------------------------------------------------------------------

    def evaluate(
        self,
        num_episodes: int = 20,
        *,
        env: EnvLike | None = None,
        seed: int | None = None,
        explore: bool = False,
        callbacks: Sequence[CallbackLike] = (),
    ) -> Evaluation:
        """Play whole episodes in envs of their own, with the connectors as they are now.

        Args:
            num_episodes: How many, at least 1.
            env: Where; the config's env where None.
            seed: Of the envs and of the actions drawn.
            explore: Draw actions; else take the most likely ones.
            callbacks: Called while the episodes run; those of the config are for training.
        """
        runner = self._new_runner(env, num_episodes, seed, callbacks)
        return play(runner, num_episodes, explore=explore, updates=self.updates)

    def record(
        self,
        path: str | os.PathLike[str],
        num_episodes: int,
        *,
        env: EnvLike | None = None,
        seed: int | None = None,
        explore: bool = False,
        append: bool = False,
    ) -> Evaluation:
        """Play whole episodes as `evaluate` does, and write them to a recording.

        Kept are observations and rewards as the env gave them, actions as the module chose them, and their
        log-probabilities (0 where not exploring).

        Args:
            path: The folder of the recording.
            num_episodes: How many, at least 1.
            env: Where; the config's env where None.
            seed: Of the envs and of the actions drawn. Equal seeds give equal episodes, with equal ids.
            explore: Draw actions; else take the most likely ones.
            append: Add to the recording that is there, other episodes than those of this seed before; else one that is
                there is an error.
        """
        if append and seed is not None and any(Path(path).glob("*.parquet")):
            there = Recording.open(path).num_episodes
            seed = int(np.random.SeedSequence([seed, there]).generate_state(1)[0])  # else they might be there already
        runner = self._new_runner(env, num_episodes, seed)
        several = self.config.modules is not None
        nets = {name: saving.name_of(type(student.module.net)) for name, student in self.students.items()}
        first = next(iter(self.students.values()))
        meta = {
            "algorithm": saving.name_of(type(self)),
            "module": nets if several else nets[MAIN],
            "connectors": [repr(connector) for connector in first.connectors.connectors],
            "explore": explore,
            "seed": seed,
            "updates": self.updates,
        }
        where = env if env is not None else self.config.env
        assert where is not None  # _new_runner has seen to that
        if len(runner.arena.kinds) > 1:
            runner.close()
            raise SettingsError(
                f"the agents of {env_name(where)} have different spaces, which one recording can't hold yet: record "
                "envs whose agents have equal spaces."
            )
        with RecordingWriter(
            path,
            obs_space=runner.arena.kinds[0].obs_space,
            action_space=first.module.action_space,
            env=env_name(where),
            meta=meta,
            columns=RECORDED,
            append=append,
        ) as writer:
            return play(runner, num_episodes, explore=explore, updates=self.updates, to=writer)

    def _new_runner(
        self, env: EnvLike | None, num_episodes: int, seed: int | None, callbacks: Sequence[CallbackLike] = ()
    ) -> Runner:
        """A runner apart from training, with the module, and with what the connectors have learned."""
        if num_episodes < 1:
            raise SettingsError(f"num_episodes must be at least 1, not {num_episodes}.")
        if seed is not None and seed < 0:
            raise SettingsError(f"a seed must be at least 0, not {seed}.")
        where = env if env is not None else self.config.env
        if where is None:
            raise SettingsError("there is no env to act in: give one, as env=... here or in the config.")
        if env is None and self.in_use(where):
            raise SettingsError(
                f"config.env is one {type(where).__name__} object, which training is in the middle of: give evaluate "
                "and record an env=... of their own, or a function that makes envs to the config."
            )
        return runner_for(self.config, where, num_episodes, self.students, seed, callbacks)

    def in_use(self, env: EnvLike) -> bool:
        """Whether ``env`` is an object that training acts in."""
        return False

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that goes on in a resumed run; plain data, arrays and tensors."""
        return {
            "students": {name: student.state_dict() for name, student in self.students.items()},
            "figures": self.figures.state_dict(),
            "seed": self._seed,
            "counters": {name: getattr(self, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        if state["students"].keys() != self.students.keys():
            raise CheckpointError(
                f"the checkpoint is of the modules {list(state['students'])}, but here are {list(self.students)}: use "
                "the same ones."
            )
        for name, student in self.students.items():
            student.load_state_dict(state["students"][name])
        self.figures.load_state_dict(state["figures"])
        self._seed = state["seed"]
        for name in _COUNTERS:
            setattr(self, name, state["counters"][name])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint: ``etude.load(path)`` goes on as if this run had never stopped.

        Atomic: a checkpoint that is there is replaced as a whole. Free of pickle.
        """
        meta = {
            "algorithm": saving.name_of(type(self)),
            "config": {f.name: saving.to_plain(getattr(self.config, f.name)) for f in dataclasses.fields(self.config)},
            "spaces": {name: [space_to_json(space) for space in pair] for name, pair in self.spaces.items()},
            "env_steps": self.env_steps,
            "updates": self.updates,
        }
        save_tree(path, self.state_dict(), meta=meta)

    def close(self) -> None:
        """Close what training acts in."""


_COUNTERS = ("iteration", "env_steps", "agent_steps", "episodes", "faulty_episodes", "seconds")


def together(parts: Mapping[str, Mapping[str, float]], *, several: bool) -> dict[str, float]:
    """Figures by module as one mapping, with the module's id before each name where there are several modules."""
    if not several:
        return {name: value for figures in parts.values() for name, value in figures.items()}
    return {f"{module}/{name}": value for module, figures in parts.items() for name, value in figures.items()}


def _rates(learner: Learner) -> dict[str, float]:
    return {"lr" if name == "all" else f"lr/{name}": rate for name, rate in learner.lr.items()}
