# SPDX-License-Identifier: Apache-2.0
"""Algorithm: what all algorithms share: training in a loop, evaluating, recording, saving."""

import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from torch import nn

from etude import columns as col
from etude.algorithms.checkpointing import save_state, take_state
from etude.algorithms.cluster import Cluster, Evaluators, Learners
from etude.algorithms.components import Component, Names, chosen, put_back, shared_components
from etude.algorithms.config import AlgorithmConfig, ModuleLike, learners_of
from etude.algorithms.engines import connect
from etude.algorithms.figures import Figures
from etude.algorithms.playing import play, runner_apart
from etude.algorithms.policies import Spaces, make_learner, make_policy, modules_given, spawned
from etude.algorithms.recorder import RecordConfig, Recorder
from etude.algorithms.reporting import TIMES, counts_of, result_of
from etude.algorithms.result import MIN_EPISODES, Evaluation, Result, Stop
from etude.algorithms.slips import arguments_checked, how_to_train, no_such_attribute
from etude.checkpoints import Where
from etude.connectors import Pipeline
from etude.envs import EnvLike
from etude.errors import SettingsError
from etude.learners import Batch, Learner, Loss, Schedule, ScheduleBy, Update, check_device
from etude.modules import Module, make_module
from etude.policies import Policy
from etude.runners import CallbackLike, Finished, Runner
from etude.runners.callbacks import callback_from
from etude.spaces import Space
from etude.threads import for_acting, held

C = TypeVar("C", bound=AlgorithmConfig)
F = TypeVar("F", bound=Callable[..., Any])


def _does_nothing(method: F) -> F:
    """Mark a method that does nothing unless an algorithm defines it, so that it need not be called."""
    method.does_nothing = True  # type: ignore[attr-defined]
    return method


class Algorithm(Generic[C]):
    """Modules, how they learn, and where they act.

    To write one, inherit from `OnPolicyAlgorithm` or `OfflineAlgorithm` and define `loss`, and `learner_connectors`
    where the batch must hold more than was recorded.

    Args:
        config: The settings. An algorithm can be built from them alone.
        saved_spaces: What `module_spaces` gave when the algorithm was saved; used by `load`.
    """

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """The class of its settings. A subclass with settings of its own says so: ``Config = MyConfig``, or where it
    inherits from a base class that leaves them open, ``OnPolicyAlgorithm[MyConfig]``."""

    name: ClassVar[str] = ""
    """What it is called in messages and on the command line; the class's name in lower case if not set."""

    needs_value: ClassVar[bool] = True
    """The built-in network has a value function."""

    schedules_by: ClassVar[ScheduleBy] = "env_steps"
    """What schedules in the settings count."""

    recorded: ClassVar[tuple[str, ...]] = (col.OBS, col.ACTION, col.REWARD, col.LOGP)
    """The columns of steps that `record` keeps."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        given = [arg for base in cls.__dict__.get("__orig_bases__", ()) for arg in get_args(base)]
        configs = [arg for arg in given if isinstance(arg, type) and issubclass(arg, AlgorithmConfig)]
        if configs and "Config" not in cls.__dict__:
            cls.Config = configs[0]
        wanted = next(base.__dict__["Config"] for base in cls.__mro__[1:] if "Config" in base.__dict__)
        if not (isinstance(cls.Config, type) and issubclass(cls.Config, wanted)):
            raise SettingsError(
                f"{cls.__name__}.Config is {cls.Config!r}, but must be a class of settings that inherits from "
                f"{wanted.__name__}, such as @etude.settings class MyConfig({wanted.__name__})."
            )
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()

    @arguments_checked
    def __init__(self, config: C, *, saved_spaces: dict[str, Spaces] | None = None) -> None:
        self.config = config
        self._saved_spaces = saved_spaces
        self.recorder = Recorder(config.record)
        """Keeps what is lived through, where `record` asks for it."""
        check_device(config.device)
        weights, runner, learner = np.random.SeedSequence(config.seed).spawn(3)
        self._seed = int(runner.generate_state(1)[0])
        with self.threads_held():
            self.spaces = self.module_spaces()
            """On the env's side, of observations and of actions, by module id."""
            try:
                self._build(weights, learner)
            except BaseException:
                self.close()
                raise

    if not TYPE_CHECKING:  # mypy would take it for the promise of any attribute

        def __getattr__(self, name: str) -> Any:
            """Say what there is in place of what other libraries have."""
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises what it raised before
            raise no_such_attribute(self, name)

    def _build(self, weights: np.random.SeedSequence, learner: np.random.SeedSequence) -> None:
        config = self.config
        self._seeds = (weights, learner)
        self.policies: dict[str, Policy] = {}
        """What acts: each module with the connectors between it and its envs, by module id."""
        self.learner = Learner(modules_to_train=config.modules_to_train)
        """What trains all modules: ``learner.modules[module_id]`` trains one of them."""
        for name, given in modules_given(config).items():
            self._add_policy(name, given)
        self.callbacks = [callback_from(spec) for spec in config.callbacks]
        self.figures = Figures(self.window, self.config.smoothing)
        """Of the latest episodes."""
        self.metrics = self.figures.metrics
        """What else is logged: phases, steps trained, and figures of one's own. They go into the next `Result`."""
        self.histograms: dict[str, NDArray[np.float64]] = {}
        """What callbacks logged to see how it is spread, in the episodes that ended in the newest iteration."""
        self.media: dict[str, bytes] = {}
        """Pictures (PNG) and clips (GIF) that they logged in these, the newest of each name."""
        self.iteration = self.env_steps = self.agent_steps = self.episodes = self.faulty_episodes = 0
        self.seconds = 0.0
        self._seconds_apart = 0.0
        self.evaluation: dict[str, float] = {}
        """See `Result.evaluation`."""
        self.data_flow: dict[str, float] = {}
        """See `Result.data`."""
        self.bottleneck = ""
        """The slowest layer on the way of the data, see `Result.bottleneck`."""
        self.left_out: dict[str, str] = {}
        """What the last checkpoint was saved without, and why: parts that can't be saved."""
        self._resumed: str | None = None
        self.setup()

    def _add_policy(self, name: str, given: ModuleLike | None) -> Policy:
        weights, learner = self._seeds
        if self.config.modules is not None:  # a module has streams of its own, whoever is beside it
            weights, learner = spawned(weights, name), spawned(learner, name)
        with self.settings_of(name):
            policy = self.policies[name] = make_policy(self, given, self.spaces[name], weights)
            self.learner.add_module(name, make_learner(self, policy.module, learner, name))
        return policy

    @contextmanager
    def settings_of(self, module_id: str) -> Iterator[None]:
        """Within it, ``self.config`` are the settings of one module, with its `overrides`."""
        whole, given = self.config, (self.config.overrides or {}).get(module_id)
        if given is None:
            yield
            return
        self.config = whole.with_overrides(module_id, given)
        try:
            yield
        finally:
            self.config = whole

    def threads_held(self) -> AbstractContextManager[None]:
        """Within it, torch has the threads of the settings (one where they are `auto`) and BLAS has one."""
        return held(for_acting(self.config.threads))

    @cached_property
    def cluster(self) -> Cluster | None:
        """Where runners and learners live, if not here; reached when it is first needed."""
        return connect(self.config)

    @cached_property
    def learners(self) -> Learners | None:
        """The learners that share each update, if there are some; started when they are first needed."""
        return self.cluster.learners(self) if self.cluster is not None and self.cluster.num_learners else None

    @cached_property
    def evaluators(self) -> Evaluators | None:
        """Runners that play evaluations while training goes on, if there are some."""
        return self.cluster.evaluators(self) if self.cluster is not None and self.cluster.has_evaluators else None

    @property
    def policy(self) -> Policy:
        """What acts: the only module with its connectors.

        Raises:
            SettingsError: there are several.
        """
        if len(self.policies) > 1:
            raise SettingsError(f"there are the modules {list(self.policies)}: say which, as .policies[name].")
        return next(iter(self.policies.values()))

    @property
    def module(self) -> Module:
        """The only module."""
        return self.policy.module

    @property
    def connectors(self) -> Pipeline:
        """What stands between env and the only module."""
        return self.policy.connectors

    @property
    def updates(self) -> int:
        """Gradient steps over the lifetime, of all modules."""
        return self.learner.updates

    # -- to be defined by an algorithm --------------------------------------------------------------------------

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss of one batch: named parts, which are summed."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(module, batch).")

    def learner_connectors(self) -> list[Any]:
        """Connectors that add to the experience what the loss needs, such as `GAE`; none by default."""
        return []

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make one module.

        Args:
            given: The user's network; None for the built-in one.
            obs_space: What the module sees.
            action_space: What it chooses from.
        """
        config = self.config
        return make_module(given, obs_space, action_space, config.network, squash=config.squash, value=self.needs_value)

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]] | None:
        """The parameters of each named optimizer; None: one, ``all``, of all that need a gradient."""
        return None

    def learning_rates(self) -> Schedule | Mapping[str, Schedule]:
        """The learning rate of all optimizers that have none of their own (such as `actor_lr`); or of each by name."""
        return self.config.lr

    def scheduled(self, name: str, module: Module) -> Any:
        """The value now of a setting that may be a schedule, for `loss`: a number, or a tensor where it changes."""
        value = getattr(self.config, name)
        return module.scheduled[name] if isinstance(value, tuple) else float(value)

    def before_update(self, env_steps: int) -> None:
        """Called before the updates of each iteration, with the steps sampled over the lifetime until then."""

    @_does_nothing
    def on_gradients(self, module: Module) -> None:
        """Called before a module's gradients are clipped and applied: read and change ``parameter.grad`` in place."""

    @_does_nothing
    def after_step(self, module: Module) -> None:
        """Called after each gradient step of a module, without gradients: for target networks and the like."""

    def after_update(self, env_steps: int) -> None:
        """Called after the updates of each iteration, with the steps sampled over the lifetime until then."""

    def setup(self) -> None:
        """Called at the end of making the algorithm."""

    def prepare(self) -> None:
        """Make what training needs and a loaded algorithm, which may only play, does not have yet; `train` does it too.

        Nothing, unless an algorithm says otherwise.
        """

    def module_spaces(self) -> dict[str, Spaces]:
        """The spaces of observations and actions on the env's side, by module id."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say its spaces: inherit from OnPolicyAlgorithm, OffPolicyAlgorithm or "
            "OfflineAlgorithm, or define module_spaces()."
        )

    def training_step(self) -> Update:
        """One iteration: get experience, and learn from it."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """How many episodes the returns in results are over."""
        return self.config.evaluation_episodes

    # -- training -----------------------------------------------------------------------------------------------

    @arguments_checked
    def train(self) -> Result:
        """One iteration."""
        with self.threads_held():
            return self._train()

    def _train(self) -> Result:
        self.prepare()
        begin, apart = time.perf_counter(), self._seconds_apart
        self.histograms, self.media = {}, {}
        before = counts_of(self)
        self.learner.set_env_steps(self.env_steps)
        update = self.training_step()
        num = learners_of(self.config)
        if num and "learners" not in vars(self):
            raise SettingsError(
                f"`engine` has num_learners={num}, but {type(self).__name__}.training_step made its gradient steps in "
                "this process, without asking self.learners: leave `num_learners` out, or call "
                "super().training_step(), which asks them. Runners work all the same."
            )
        self.after_update(self.env_steps)
        self.iteration += 1
        self.evaluate_when_due()
        self.seconds += time.perf_counter() - begin - (self._seconds_apart - apart)
        result, self._resumed = result_of(self, update, before, resumed=self._resumed), None
        return result

    def evaluate_when_due(self) -> None:
        """Called after each iteration: for evaluations during training."""

    def take_finished(self, finished: Finished) -> None:
        """Take what finished episodes brought into the figures of results."""
        self.figures.add(finished)
        self.episodes += len(finished.returns)
        for name, values in finished.histograms.items():
            self.histograms[name] = np.append(self.histograms.get(name, np.zeros(0)), values)
        self.media |= finished.media

    @arguments_checked
    def iterate(self, stop: Stop | None = None) -> Iterator[Result]:
        """Train, an iteration at a time, until ``stop`` says so.

        Where a budget is used up already, as a resumed run's may be, one result says how things stand.
        """
        stop = Stop() if stop is None else self._a_stop(stop)
        self.check_stop(stop)
        standing = self.standing()
        if stop.budget_used(standing):
            yield standing
            return
        while True:
            result = self.train()
            yield result
            if stop.now(result):
                return

    def standing(self) -> Result:
        """How things stand, without another iteration."""
        return result_of(self, Update({}, {}), resumed=self._resumed)

    def check_stop(self, stop: Stop) -> None:
        """Raise a SettingsError where ``stop`` sets a goal that can never be met."""
        if stop.return_mean is not None and self.window < MIN_EPISODES:
            raise SettingsError(
                f"`stop.return_mean` is over at least {MIN_EPISODES} episodes, but results are over {self.window} "
                "only: raise `window` (`evaluation_episodes` offline)."
            )

    def _a_stop(self, stop: Any) -> Stop:
        if not isinstance(stop, Stop):
            raise SettingsError(f"`stop` is {stop!r}, but must be a Stop. {how_to_train(self, [stop])}")
        return stop

    @arguments_checked
    def fit(self, stop: Stop) -> Result:
        """Train until ``stop`` says so; gives the last result.

        Raises:
            SettingsError: ``stop`` sets nothing, or is no `Stop`.
        """
        if self._a_stop(stop) == Stop():
            raise SettingsError("fit needs to know when to stop: set something in Stop(...), or use iterate().")
        *_, last = deque(self.iterate(stop), maxlen=1)
        return last

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Add the time of a ``with`` block to the ``times`` of the running iteration."""
        return self.metrics.timed(f"{TIMES}{phase}")

    def took(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase, as `timed` does."""
        self.metrics.log(f"{TIMES}{phase}", seconds, by="sum")

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Leave the time of a ``with`` block out of `Result.seconds`, as that of evaluations is."""
        begin, before = time.perf_counter(), self._seconds_apart
        try:
            yield
        finally:
            self._seconds_apart = before + time.perf_counter() - begin

    # -- using the policy ---------------------------------------------------------------------------------------

    @arguments_checked
    def evaluate(
        self,
        num_episodes: int = 20,
        *,
        env: EnvLike | None = None,
        seed: int | None = None,
        explore: bool = False,
        max_steps: int | None = None,
        callbacks: Sequence[CallbackLike] = (),
    ) -> Evaluation:
        """Play whole episodes in envs of their own, with the connectors as they are now.

        Args:
            num_episodes: How many, at least 1.
            env: Where; the config's env where None.
            seed: Of the envs and of the actions drawn.
            explore: Draw actions; else take the most likely ones.
            max_steps: Steps after which an episode is truncated, at least 1; None: as in training.
            callbacks: Called while the episodes run; those of the config are for training.
        """
        with self.untimed(), self.threads_held():
            runner = self.new_runner(env, num_episodes, seed, callbacks, max_steps)
            return play(runner, num_episodes, explore=explore, updates=self.updates)

    @arguments_checked
    def record(
        self,
        path: str | os.PathLike[str],
        num_episodes: int,
        *,
        env: EnvLike | None = None,
        seed: int | None = None,
        explore: bool = False,
        max_steps: int | None = None,
        append: bool = False,
        compression: str | Mapping[str, str] | None = None,
        max_rows_per_file: int = RecordConfig.max_rows_per_file,
        max_file_size: int = RecordConfig.max_file_size,
    ) -> Evaluation:
        """Play whole episodes as `evaluate` does, and write them to a recording.

        Kept are observations and rewards as the env gave them, actions as the module chose them, and their
        log-probabilities (0 where not exploring). Modules with different spaces have a recording each, in a folder of
        the module's name.

        Args:
            path: The folder of the recording.
            num_episodes: How many, at least 1.
            env: Where; the config's env where None.
            seed: Of the envs and of the actions drawn. Equal seeds give equal episodes, with equal ids.
            explore: Draw actions; else take the most likely ones.
            max_steps: Steps after which an episode is truncated, at least 1; None: as in training.
            append: Add to the recording that is there, other episodes than those of this seed before; else one that is
                there is an error.
            compression: Codecs, see `RecordingWriter`.
            max_rows_per_file: A file holds at most this many steps.
            max_file_size: A file is closed once it has this many bytes.
        """
        from etude.algorithms.recording import record  # needs pyarrow, which acting does not

        with self.untimed(), self.threads_held():
            return record(
                self,
                path,
                num_episodes,
                env=env,
                seed=seed,
                explore=explore,
                max_steps=max_steps,
                append=append,
                compression=compression,
                max_rows_per_file=max_rows_per_file,
                max_file_size=max_file_size,
            )

    def new_runner(
        self,
        env: EnvLike | None,
        num_episodes: int,
        seed: int | None,
        callbacks: Sequence[CallbackLike] = (),
        max_steps: int | None = None,
    ) -> Runner:
        """A runner apart from training, with the module, and with what the connectors have learned."""
        return runner_apart(self, env, num_episodes, seed, callbacks, max_steps)

    def in_use(self, env: EnvLike) -> bool:
        """Whether ``env`` is an object that training acts in."""
        return False

    # -- state --------------------------------------------------------------------------------------------------

    def components(self) -> dict[str, Component]:
        """The parts of the state, by name; see `components_of` for those of each module.

        An algorithm that keeps more adds it: ``{**super().components(), "mine": Component(get, set)}``.
        """
        seed = Component(lambda: self._seed, lambda seed: setattr(self, "_seed", operator.index(seed)))
        return {**shared_components(self), "seed": seed}

    def get_state(self, components: Names = None, not_components: Names = None) -> dict[str, Any]:
        """Everything that goes on in a resumed run, or parts of it: plain data, arrays and tensors by component.

        Args:
            components: Which; None is all. ``modules/p1`` is one, ``modules`` all whose names begin so.
            not_components: Which of these not.

        Raises:
            CheckpointError: there are no such components; those that there are are named.
        """
        self.pull_learners()
        parts = self.components()
        return {name: parts[name].get() for name in chosen(parts, components, not_components)}

    def pull_learners(self) -> None:
        """Have here what learners elsewhere know, if there are some."""
        learners: Learners | None = vars(self).get("learners")  # none are started for it
        if learners is not None:
            learners.pull()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`; of components that are not in ``state``, nothing is changed.

        Tensors may be on any device.

        Raises:
            CheckpointError: there are components that are not here, or that do not fit what is here.
        """
        parts = self.components()
        # what goes on with recording or without it needs no other state
        put_back(parts, {name: part for name, part in state.items() if name != "recorder" or name in parts})
        learners: Learners | None = vars(self).get("learners")
        if learners is not None:
            learners.push()

    @arguments_checked
    def save(
        self,
        path: Where,
        *,
        components: Names = None,
        not_components: Names = None,
        result: Result | None = None,
    ) -> None:
        """Write a checkpoint: ``etude.load(path)`` goes on as if this run had never stopped.

        Atomic: a checkpoint that is there is replaced as a whole. Free of pickle. A component that can't be saved, such
        as a callback whose state is no plain data, is left out, and a warning says so: the weights are always saved.

        Args:
            path: A folder, or its URL (``s3://...``).
            components: Which parts of the state, see `get_state`. If not all, it is for `load` of an algorithm.
            not_components: Which of these not.
            result: Is kept with it, as ``load_meta(path)["result"]``.

        Raises:
            CheckpointError: there are no such components, or the folder can't be written.
        """
        save_state(self, path, components, not_components, result)

    @arguments_checked
    def load(self, path: Where, components: Names = None, not_components: Names = None) -> None:
        """Take the state, or parts of it, from a checkpoint, which may be one of another run.

        Only what is asked for is read, and settings stay as they are. To go on with a whole run, see `etude.load`.

        Args:
            path: The folder of a checkpoint, or its URL.
            components: Which of the components that it has, see `get_state`; None is all.
            not_components: Which of these not.

        Raises:
            CheckpointError: the folder is no checkpoint of an algorithm or is broken, has no such components, or they
                do not fit what is here; nothing has changed then, but that running episodes may begin anew.
        """
        take_state(self, path, components, not_components)

    def close(self) -> None:
        """Close what training acts in, what is recorded, and what was started elsewhere."""
        try:
            self.recorder.close(self)
        finally:
            cluster: Cluster | None = vars(self).get("cluster")
            if cluster is not None:
                cluster.close()
