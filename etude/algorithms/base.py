# SPDX-License-Identifier: Apache-2.0
"""Algorithm: what all algorithms share: training in a loop, evaluating, recording, saving."""

import dataclasses
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import threadpoolctl
import torch

from etude import columns as col
from etude.algorithms import saving
from etude.algorithms.config import AlgorithmConfig, check_device
from etude.algorithms.playing import play, runner_for
from etude.algorithms.result import MIN_EPISODES, Evaluation, Result, Stop
from etude.checkpoints import save_tree
from etude.connectors import GAE, ClipAction, NormalizeAdvantages, Pipeline, RescaleAction
from etude.envs import EnvLike, env_name
from etude.errors import SettingsError
from etude.learners import Batch, Learner, Loss, Update, seeded
from etude.metrics import Window
from etude.modules import Module, make_module
from etude.recordings import Recording, RecordingWriter
from etude.runners import Runner
from etude.spaces import Space, space_to_json

C = TypeVar("C", bound=AlgorithmConfig)

RECORDED = (col.OBS, col.ACTION, col.REWARD, col.LOGP)


class Algorithm(Generic[C]):
    """A module, how it learns, and where it acts.

    To write one, inherit from `OnPolicyAlgorithm` or `OfflineAlgorithm` and define `loss`, and `learner_connectors`
    where the batch must hold more than was recorded.

    Args:
        config: The settings. An algorithm can be built from them alone.
        saved_spaces: What `env_spaces` gave when the algorithm was saved; used by `load`.
    """

    name: ClassVar[str] = ""
    """What it is called in messages and on the command line; the class's name in lower case if not set."""

    needs_value: ClassVar[bool] = True
    """The built-in network has a value function."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    def __init__(self, config: C, *, saved_spaces: tuple[Space, Space] | None = None) -> None:
        self.config = config
        self._saved_spaces = saved_spaces
        torch.set_num_threads(config.threads)
        # BLAS threads beside torch's make both crawl; NumPy's matrices here are too small to gain from them.
        threadpoolctl.threadpool_limits(1, user_api="blas")
        check_device(config.device)
        weights, runner, learner = np.random.SeedSequence(config.seed).spawn(3)
        self._seed = int(runner.generate_state(1)[0])
        self.obs_space, self.action_space = self.env_spaces()
        try:
            self._build(weights, learner)
        except BaseException:
            self.close()
            raise

    def _build(self, weights: np.random.SeedSequence, learner: np.random.SeedSequence) -> None:
        config = self.config
        self.connectors = Pipeline(config.connectors).copy()  # ones in the config may be used by others, too
        if not any(isinstance(c, ClipAction | RescaleAction) for c in self.connectors.connectors):
            self.connectors.add(ClipAction(), at=0)  # a Gaussian does not know the bounds of its Box
        for connector in self.connectors.connectors:
            if isinstance(connector, GAE | NormalizeAdvantages):
                raise SettingsError(
                    f"`connectors` stand between env and module, where {connector.name} has nothing to do: an "
                    "algorithm names it in its learner_connectors()."
                )
        with seeded(int(weights.generate_state(1)[0]), "cpu"):
            seen, acted = self.connectors.spaces(self.obs_space, self.action_space)
            module = make_module(
                config.module, seen, acted, config.network, squash=config.squash, value=self.needs_value
            )
        self.module = module.to(config.device)
        self.learner = Learner(
            self.module,
            self.loss,
            lr=config.lr,
            grad_clip=config.grad_clip,
            grad_clip_by=config.grad_clip_by,
            compile=config.compile,
            device=config.device,
            seed=learner,
        )
        self.returns = Window(self.window)
        self.lengths = Window(self.window)
        self.iteration = self.env_steps = self.episodes = 0
        self.seconds = 0.0
        self._times: dict[str, float] = {}
        self._resumed: str | None = None
        self.setup()

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

    def make_learner_connectors(self) -> Pipeline:
        """`learner_connectors` in a row, prepared.

        Raises:
            SettingsError: they change the spaces that the module was made for.
        """
        pipeline = Pipeline(self.learner_connectors())
        spaces = (self.module.obs_space, self.module.action_space)
        if pipeline.spaces(*spaces) != spaces:
            raise SettingsError(
                f"learner_connectors {pipeline.connectors} change the spaces that the module sees: what stands between "
                "env and module belongs into the setting `connectors`."
            )
        return pipeline

    def env_spaces(self) -> tuple[Space, Space]:
        """The spaces of observations and actions on the env's side."""
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
        begin = time.perf_counter()
        self._times = {}
        steps_before = self.env_steps
        self.learner.set_env_steps(self.env_steps)
        update = self.training_step()
        self.after_update()
        self.iteration += 1
        self.seconds += time.perf_counter() - begin
        result = self._result(update, self.env_steps - steps_before)
        self._resumed = None
        return result

    def _result(self, update: Update, sampled: int) -> Result:
        sampling = self._times.get("sample", 0.0)
        rates = {"lr" if name == "all" else f"lr/{name}": rate for name, rate in self.learner.lr.items()}
        return Result(
            iteration=self.iteration,
            env_steps=self.env_steps,
            updates=self.learner.updates,
            seconds=self.seconds,
            episodes=self.episodes,
            return_mean=self.returns.mean,
            return_min=self.returns.min,
            return_max=self.returns.max,
            length_mean=self.lengths.mean,
            returns_counted=len(self.returns),
            losses=update.losses,
            metrics=update.metrics | rates,
            times=dict(self._times),
            sample_steps_per_s=sampled / sampling if sampling else 0.0,
            resumed=self._resumed,
        )

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
        self, num_episodes: int = 20, *, env: EnvLike | None = None, seed: int | None = None, explore: bool = False
    ) -> Evaluation:
        """Play whole episodes in envs of their own, with the connectors as they are now.

        Args:
            num_episodes: How many, at least 1.
            env: Where; the config's env where None.
            seed: Of the envs and of the actions drawn.
            explore: Draw actions; else take the most likely ones.
        """
        runner = self._new_runner(env, num_episodes, seed)
        return play(runner, num_episodes, explore=explore, updates=self.learner.updates)

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
        meta = {
            "algorithm": saving.name_of(type(self)),
            "module": saving.name_of(type(self.module.net)),
            "connectors": [repr(connector) for connector in self.connectors.connectors],
            "explore": explore,
            "seed": seed,
            "updates": self.learner.updates,
        }
        where = env if env is not None else self.config.env
        assert where is not None  # _new_runner has seen to that
        with RecordingWriter(
            path,
            obs_space=runner.arena.obs_space,
            action_space=self.module.action_space,
            env=env_name(where),
            meta=meta,
            columns=RECORDED,
            append=append,
        ) as writer:
            return play(runner, num_episodes, explore=explore, updates=self.learner.updates, to=writer)

    def _new_runner(self, env: EnvLike | None, num_episodes: int, seed: int | None) -> Runner:
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
        return runner_for(where, num_episodes, self.module, self.connectors.copy(), seed)

    def in_use(self, env: EnvLike) -> bool:
        """Whether ``env`` is an object that training acts in."""
        return False

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that goes on in a resumed run; plain data, arrays and tensors."""
        return {
            "learner": self.learner.state_dict(),
            "returns": self.returns.state_dict(),
            "lengths": self.lengths.state_dict(),
            "seed": self._seed,
            "counters": {name: getattr(self, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.learner.load_state_dict(state["learner"])
        self.returns.load_state_dict(state["returns"])
        self.lengths.load_state_dict(state["lengths"])
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
            "spaces": [space_to_json(self.obs_space), space_to_json(self.action_space)],
            "env_steps": self.env_steps,
            "updates": self.learner.updates,
        }
        save_tree(path, self.state_dict(), meta=meta)

    def close(self) -> None:
        """Close what training acts in."""


_COUNTERS = ("iteration", "env_steps", "episodes", "seconds")
