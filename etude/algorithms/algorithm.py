# SPDX-License-Identifier: Apache-2.0
"""Algorithm: the base class of all algorithms. It trains in a loop, evaluates, records and saves."""

import copy
import dataclasses
import logging
import operator
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NoReturn, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from etude import columns as col
from etude.algorithms import checkpoint, run, saving
from etude.algorithms.checkpoint import Checkpoints, Component, Names
from etude.algorithms.config import AlgorithmConfig, ModuleLike, RecordConfig, learners_of
from etude.algorithms.engine import engine_of
from etude.algorithms.play import Played, Recorder, connectors_meta, play, record, runner_for, seed_after
from etude.algorithms.policies import (
    MAIN,
    check_apart,
    check_owner,
    is_of_another,
    learner_pipeline,
    learning_rates,
    make_policy,
    modules_given,
    own_networks,
    schedules_of_losses,
    spaces_in,
    spawned,
)
from etude.algorithms.progress import Shows, View, say
from etude.algorithms.results import (
    MIN_EPISODES,
    Evaluation,
    Result,
    RunningStats,
    Stop,
    log_trained,
    parameter_counts,
    together,
)
from etude.algorithms.run import Log, Logs
from etude.algorithms.slips import arguments_checked, how_to_train, no_such_attribute
from etude.checkpoints import Where
from etude.connectors import Pipeline
from etude.display import short
from etude.envs import EnvLike, env_name, kill_workers
from etude.errors import CheckpointError, SettingsError
from etude.interruption import INTERRUPTED, Interrupted, Signals, interruptible
from etude.learners import Batch, Learner, Loss, ModuleLearner, Schedule, ScheduleBy, Update, check_device, load_weights
from etude.learners.compiled import load_triton
from etude.modules import Module, make_module
from etude.policies import Policy
from etude.runners import CallbackLike, Finished, Runner
from etude.runners.callbacks import callback_from
from etude.settings import warn_of_misspelt
from etude.spaces import Space, Spaces, space_to_json
from etude.threads import for_acting, held
from etude.urls import redacted

C = TypeVar("C", bound=AlgorithmConfig)

_EVALUATED = ("return_mean", "return_min", "return_max", "length_mean", "episodes", "updates")
_REST: Final = 20.0
"""Minimum time since the last save before a better result is saved, in multiples of how long that save took. Weights
that were evaluated are saved at once."""
_HOOKS: Final = (
    *("learner_connectors", "module_connectors", "make_module", "parameter_groups", "learning_rates", "before_collect"),
    *("before_update", "on_gradients", "after_step", "after_load", "after_update", "prepare", "training_step"),
    *("components", "assign", "update"),
)
_COUNTERS = ("iteration", "env_steps", "agent_steps", "episodes", "faulty_episodes", "seconds")


_log = logging.getLogger("etude.algorithms")


def needs_evaluation(config: AlgorithmConfig, result: Result, stop: Stop) -> bool:
    """Whether a budget ended training with ``result`` before its weights were evaluated.

    False if the goal is met, as another evaluation might fall short of it, and for runs without evaluations.
    """
    is_met = stop.return_mean is not None and stop.goals_met(result)
    if config.env is None or not config.evaluation.interval or not result.iteration or is_met:
        return False
    return stop.budget_used(result) and result.evaluation.get("updates") != result.updates


class Algorithm(Generic[C]):
    """Base class of all algorithms.

    To write your own, inherit from `OnPolicyAlgorithm`, `OffPolicyAlgorithm` or `OfflineAlgorithm` and define `loss`.
    Define `learner_connectors`, too, if the loss needs columns that are not recorded.

    Args:
        config: The settings.
        saved_spaces: What `module_spaces` returned when the algorithm was saved; used by `etude.load`.
    """

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """The settings class. A subclass with its own settings sets ``Config = MyConfig``, or names the class in its base
    class: ``OnPolicyAlgorithm[MyConfig]``."""

    name: ClassVar[str] = ""
    """Name in messages and on the command line; by default the class name in lower case."""

    needs_value: ClassVar[bool] = True
    """Whether the built-in network has a value function."""

    schedules_by: ClassVar[ScheduleBy] = "env_steps"
    """Unit of the steps in schedules: ``env_steps``, or gradient steps (``updates``)."""

    is_policy_alone: bool = False
    """Whether this object only makes a policy, without `setup`, for `etude.load_policy`."""

    recorded: ClassVar[tuple[str, ...]] = (col.OBS, col.ACTION, col.REWARD, col.LOGP)
    """The step columns that `record` writes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_misspelt(cls, _HOOKS)
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
        self.config = self._built_from = config
        self._saved_spaces = saved_spaces
        self.recorder = Recorder(self)
        """Records the experience of training if `record` is set."""
        check_device(config.compute.device)
        for message in config.without_effect():
            warnings.warn(message, stacklevel=3)
        if config.compute.compile:
            load_triton(torch.device(config.compute.device))  # before an env renders
        weights, runner, learner, self._draws = np.random.SeedSequence(config.seed).spawn(4)  # the last is for replays
        self.runner_seed = int(runner.generate_state(1)[0])
        """Seed from which the seeds of everything that acts in training are derived."""
        self.num_threads = for_acting(config.compute.threads)
        """Torch's CPU threads for everything except gradient steps."""
        self.engine = engine_of(self)
        """Runs the runners and learners: in this process, or on a Ray cluster."""
        with held(self.num_threads):
            self.spaces = self.module_spaces()
            """Observation and action spaces on the env's side, by module id."""
            try:
                self._build(weights, learner)
            except BaseException:
                self.close()
                raise

    if not TYPE_CHECKING:  # else mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that names Etude's counterpart of another library's attribute."""
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the original error
            raise no_such_attribute(self, name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} holds envs and processes, so it can't be copied. To make another, "
            "save() it and etude.load() the folder; a policy, a module and the config can be copied."
        )

    def __repr__(self) -> str:
        where = [] if self.config.env is None else [f"on {env_name(self.config.env)}"]
        if not {"policies", "learner", "iteration", "env_steps"} <= vars(self).keys():
            return short(self, *where)  # still being constructed
        agents = {} if len(self.policies) == 1 else {"modules": [*self.policies]}
        counts = {name: getattr(self, name) for name in ("iteration", "env_steps", "updates")}
        return short(self, *where, **agents, **counts)

    def _build(self, weights: np.random.SeedSequence, learner: np.random.SeedSequence) -> None:
        config = self.config
        self._seeds = (weights, learner)
        self._parameters: dict[str, float] | None = None  # counts for results; None: modules have changed
        self.policies: dict[str, Policy] = {}
        """The policies that act, by module id: each is a module with the connectors between it and its envs."""
        self.learner = Learner(modules_to_train=config.agents.modules_to_train)
        """Trains all modules; ``learner.modules[module_id]`` trains one of them."""
        for name, given in modules_given(config).items():
            self._add_policy(name, given)
        self.callbacks = [callback_from(spec) for spec in config.callbacks]
        self.figures = RunningStats(self.window, self.config.metrics.smoothing)
        """Statistics of the latest episodes."""
        self.metrics = self.figures.metrics
        """Everything else that is logged: steps trained, and your own metrics. They go into the next `Result`."""
        self.times: dict[str, float] = {}
        """Seconds of the current iteration, by phase."""
        self.histograms: dict[str, NDArray[np.float64]] = {}
        """Values that callbacks logged as histograms in the episodes that ended in the latest iteration: float64
        ``[N]`` by name."""
        self.media: dict[str, bytes] = {}
        """Images (PNG) and clips (GIF) that callbacks logged in these episodes, the newest of each name."""
        self.iteration = self.env_steps = self.agent_steps = self.episodes = self.faulty_episodes = 0
        self.seconds = self._seconds_apart = 0.0
        self.evaluation: dict[str, float] = {}
        """See `Result.evaluation`."""
        self._evaluating: int | None = None
        self.data_flow: dict[str, float] = {}
        """See `Result.data`."""
        self.bottleneck = ""
        """The slowest stage of the data pipeline, see `Result.bottleneck`."""
        self.left_out: dict[str, str] = {}
        """Parts that could not be saved in the last checkpoint, and why."""
        self._resumed: str | None = None
        self._trained: dict[str, int] = {}
        """By module id: the steps trained on that `metrics` has already counted."""
        self._run: dict[str, Any] = {}
        """The arguments of `fit` that checkpoints store, so that ``etude train --resume`` uses them again."""
        self.setup()
        own_networks(self, self.policies)  # last: if construction fails, another algorithm may still use the networks

    def _add_policy(self, name: str, given: ModuleLike | None) -> Policy:
        weights, learner = self._seeds
        if self.config.agents.modules is not None:  # a module's random numbers must not depend on the other modules
            weights, learner = spawned(weights, name), spawned(learner, name)
        with self.settings_of(name):
            policy = self.policies[name] = self._new_policy(given, self.spaces[name], weights)
            check_apart(self.policies, self.config.agents.modules_to_train)
            self.learner.modules[name] = self._new_learner(name, policy.module, learner)
        self._parameters = None
        return policy

    def _new_policy(self, given: ModuleLike | None, spaces: Spaces, weights: np.random.SeedSequence) -> Policy:
        own = self.module_connectors()
        if self._saved_spaces is not None and isinstance(given, nn.Module) and is_of_another(self, given):
            given = copy.deepcopy(given)  # loading weights must not change the other algorithm's network
        policy = make_policy(self.config, partial(self.make_module, given), spaces, weights, own)
        check_owner(self, policy.module.net)
        return policy

    @classmethod
    def only_policy(cls, config: C, spaces: Spaces, env_steps: int, weights: Mapping[str, torch.Tensor]) -> Policy:
        """Make one policy and nothing else of the algorithm, without `setup`, for `load_policy`.

        Args:
            config: The settings of a run with this policy alone.
            spaces: Its observation and action spaces on the env's side.
            env_steps: Env steps that the run had sampled, which determine how much it explores.
            weights: The weights of its module.
        """
        maker = cls.__new__(cls)
        maker.is_policy_alone = True
        maker.config, maker._saved_spaces = config, {MAIN: spaces}
        policy = maker._new_policy(config.module, spaces, np.random.SeedSequence(0))
        maker.policies = {MAIN: policy}
        load_weights(policy.module, weights)
        maker.after_load(policy.module)
        maker.before_collect(env_steps)
        return policy

    def _new_learner(self, name: str, module: Module, seed: np.random.SeedSequence) -> ModuleLearner:
        own = module.own_loss is not None
        connectors = module.own_learner_connectors() if own else self.learner_connectors()
        groups = self.parameter_groups(module)
        return ModuleLearner(
            module,
            module.own_loss or self.loss,
            connectors=learner_pipeline(connectors, module, self.config),
            name=name,
            lr=learning_rates(self.config, self.learning_rates(), groups, self.name),
            schedules_by=self.schedules_by,
            scheduled=schedules_of_losses(self.config),
            parameters=groups,
            optimizer=self.config.optimizer,
            compute=self.config.compute,
            seed=seed,
            on_gradients=self._hook("on_gradients"),
            after_step=self._hook("after_step"),
        )

    def _hook(self, name: str) -> Callable[[Module], None] | None:
        """The method ``name`` if the algorithm overrides it; None if it is the default, which does nothing."""
        return None if getattr(type(self), name) is getattr(Algorithm, name) else getattr(self, name)

    @contextmanager
    def settings_of(self, module_id: str) -> Iterator[None]:
        """Context in which ``self.config`` holds one module's settings, with its `overrides`."""
        whole, given = self.config, (self.config.agents.overrides or {}).get(module_id)
        if given is None:
            yield
            return
        self.config = whole.with_overrides(module_id, given)
        try:
            yield
        finally:
            self.config = whole

    @property
    def policy(self) -> Policy:
        """The only policy: the module and its connectors.

        Raises:
            SettingsError: there are several policies.
        """
        if len(self.policies) > 1:
            raise SettingsError(
                f"there are several modules ({', '.join(self.policies)}): choose one with .policies[name]."
            )
        return next(iter(self.policies.values()))

    @property
    def module(self) -> Module:
        """The only module."""
        return self.policy.module

    @property
    def connectors(self) -> Pipeline:
        """The connectors between env and the only module."""
        return self.policy.connectors

    @property
    def updates(self) -> int:
        """Total gradient steps of all modules so far."""
        return self.learner.updates

    # -- to be defined by an algorithm --------------------------------------------------------------------------

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss of one batch, as named parts that are summed."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(module, batch).")

    def learner_connectors(self) -> list[Any]:
        """Connectors that add the columns that the loss needs, such as `GAE`; none by default."""
        return []

    def module_connectors(self) -> list[Any]:
        """Connectors that the algorithm puts between env and module, after those of the settings; none by default."""
        return []

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make one module.

        Args:
            given: The user's network; None for the built-in one.
            obs_space: The observation space that the module sees.
            action_space: The action space that it acts in.
        """
        config = self.config
        network = config.network
        squash = bool(network.squash)
        return make_module(given, obs_space, action_space, network, squash=squash, value=self.needs_value)

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]] | None:
        """The parameters of each named optimizer; None: a single optimizer, ``all``, for all parameters that need a
        gradient."""
        return None

    def learning_rates(self) -> Schedule | Mapping[str, Schedule]:
        """The learning rate of all optimizers that have none of their own (such as `actor_lr`), or rates by optimizer
        name."""
        return self.config.lr

    def scheduled(self, name: str, module: Module) -> Any:
        """The current value of a setting that may be a schedule, for `loss`: a float, or a 0-d tensor if it is a
        schedule."""
        value = getattr(self.config, name)
        return module.scheduled[name] if isinstance(value, tuple) else float(value)

    def before_collect(self, env_steps: int) -> None:
        """Called before steps are collected. Override it to change how modules explore.

        With a replay, it is also called when the algorithm is made or its state restored. `etude.load_policy` calls it,
        too.

        Args:
            env_steps: Env steps sampled so far.
        """

    def before_update(self, env_steps: int) -> None:
        """Called in each iteration before its updates, with the env steps sampled so far.

        On-policy algorithms have collected the iteration's steps by then; those with a replay have not.
        """

    def on_gradients(self, module: Module) -> None:
        """Called before a module's gradients are clipped and applied: read or change ``parameter.grad`` in place.

        If policy and value function share layers and are clipped separately (`grad_clip_by` ``loss_norm``), it is
        called after clipping, because their gradients are summed only then.
        """

    def after_step(self, module: Module) -> None:
        """Called after each gradient step of a module, under ``no_grad``: for target networks and the like."""

    def after_load(self, module: Module) -> None:
        """Called after weights were loaded into a module: restore here what the settings determine, whatever was
        saved."""

    def after_update(self, env_steps: int) -> None:
        """Called after the updates of each iteration, with the env steps sampled so far."""

    def setup(self) -> None:
        """Called at the end of the constructor."""

    def prepare(self) -> None:
        """Make what training needs but acting does not.

        `train` calls it. Does nothing by default.
        """

    def module_spaces(self) -> dict[str, Spaces]:
        """The observation and action spaces on the env's side, by module id."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say its spaces: inherit from OnPolicyAlgorithm, OffPolicyAlgorithm or "
            "OfflineAlgorithm, or define module_spaces()."
        )

    def training_step(self) -> Update:
        """Run one iteration: get experience and learn from it."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """The number of episodes over which results average returns."""
        return self.config.evaluation.episodes

    # -- training -----------------------------------------------------------------------------------------------

    @arguments_checked
    def train(self) -> Result:
        """Run one iteration.

        Raises:
            SettingsError: ``config`` was replaced since the algorithm was made, or `training_step` does not return an
                `Update`.
        """
        if self.config is not self._built_from:
            raise SettingsError(
                "`config` was replaced after the algorithm was made, when envs, networks and learners have their "
                "settings already: save it, and etude.load(folder, lr=1e-4) makes it anew with other settings. A "
                "schedule, such as lr=((0, 1e-3), (100_000, 0.0)), changes a setting during a run."
            )
        with held(self.num_threads):
            self.prepare()
            begin, apart = time.perf_counter(), self._seconds_apart
            self.histograms, self.media = {}, {}
            before, updates = (self.env_steps, self.agent_steps), self.learner.updates
            self.learner.set_env_steps(self.env_steps)
            update = self.training_step()
            if not isinstance(update, Update):
                raise SettingsError(
                    f"training_step() of {type(self).__name__} returned {update!r:.50}, but must return an Update, "
                    "such as that of super().training_step() or of learner.update_from(batches)."
                )
            if not self.engine.is_asked and self.learner.updates > updates:
                raise SettingsError(
                    f"`engine` has num_learners={learners_of(self.config)}, but {type(self).__name__}.training_step "
                    "made its gradient steps in this process, without asking self.engine: leave `num_learners` out, "
                    "or call super().training_step(), which asks them. Runners work all the same."
                )
            self.after_update(self.env_steps)
            self.iteration += 1
            interval = self.config.evaluation.interval
            if self.config.env is not None and interval and self.iteration % interval == 0:
                with suppress(Interrupted), self.timed("evaluate"):  # without it, the iteration is still complete
                    self.evaluate_now()
            seconds = time.perf_counter() - begin - (self._seconds_apart - apart)
            self.seconds += seconds
            self._log_trained(before)
            sampling = seconds if self.engine.samples_in_background else self.times.get("sample", 0.0)
            speed = (self.env_steps - before[0]) / sampling if sampling else 0.0
            result = self._result(update, self.metrics.reduce(), speed)
            self.times, self._resumed = dict.fromkeys(self.times, 0.0), None
            return result

    def _steps_trained(self) -> dict[str, int]:
        return {name: learner.steps_trained for name, learner in self.learner.modules.items()}

    def _log_trained(self, before: tuple[int, int]) -> None:
        """Log the steps that were trained on since the last call; ``before`` are the env steps and the agent steps that
        had been sampled when the iteration began."""
        trained = self._steps_trained()
        log_trained(self.metrics, self._trained, trained, before, (self.env_steps, self.agent_steps))
        self._trained = trained

    def _pull(self) -> None:
        """Fetch what remote learners have learned, before something is saved or changed here."""
        before = self._steps_trained()
        self.engine.pull()
        if self._steps_trained() != before:
            self._log_trained((self.env_steps, self.agent_steps))

    def _result(self, update: Update, logged: dict[str, float], sample_steps_per_s: float = 0.0) -> Result:
        """The result with the current counts, the metrics of ``update``, and the ``logged`` ones."""
        rates: dict[str, dict[str, float]] = {}  # learning rates and other schedules, and the connectors' metrics
        for module_id, learner in self.learner.modules.items():
            own = rates[module_id] = {}
            for name in learner.scheduled:
                own[name] = float(learner.module.scheduled[name])
            for name, rate in learner.lr.items():
                own["lr" if name == "all" else f"lr/{name}"] = rate
            own |= self.policies[module_id].connectors.metrics()
            own |= learner.connectors.metrics()
        if self._parameters is None:
            self._parameters = parameter_counts({name: policy.module for name, policy in self.policies.items()})
        return Result(
            iteration=self.iteration,
            env_steps=self.env_steps,
            agent_steps=self.agent_steps,
            updates=self.learner.updates,
            seconds=self.seconds,
            episodes=self.episodes,
            **self.figures.fields(),
            losses=update.losses,
            metrics=update.metrics | together(rates, several=len(rates) > 1) | self._parameters | logged,
            times=dict(self.times),
            sample_steps_per_s=sample_steps_per_s,
            faulty_episodes=self.faulty_episodes,
            resumed=self._resumed,
            evaluation=self.evaluation,
            evaluating=self._evaluating,
            data=self.data_flow,
            bottleneck=self.bottleneck,
        )

    @interruptible
    def evaluate_now(self) -> None:
        """Evaluate the current weights, in this process or on the cluster.

        An evaluation that runs in parallel with training is reported by the next call, or by `last_evaluations`.
        """
        with held(self.num_threads), self.untimed():
            played = self.engine.evaluate(self.config.evaluation.episodes, self.runner_seed)
            is_done = played is not None and played.evaluation.updates == self.updates
            self._evaluating = None if is_done else self.updates
            if played is not None:
                self.take_evaluation(played)

    @interruptible
    def last_evaluations(self, result: Result, stop: Stop) -> Iterator[Result]:
        """Yield ``result`` again with the evaluations that are still missing: first one that is still running, then one
        of the final weights. Yields nothing unless the result `needs_evaluation`."""
        if not needs_evaluation(self.config, result, stop):
            return
        self._pull()
        if self._evaluating is not None:
            yield self._with_evaluation(result)
        if self.evaluation.get("updates") != self.updates:
            self.histograms, self.media = {}, {}
            self.evaluate_now()
            yield self._with_evaluation(result)

    def _with_evaluation(self, result: Result) -> Result:
        if self._evaluating is not None:
            try:
                with self.untimed():
                    played = self.engine.last_evaluation()
            except Exception:
                self._evaluating = None
                raise
            self._evaluating = None
            if played is not None:
                self.take_evaluation(played)
        return dataclasses.replace(
            result,
            **self.figures.fields(),
            updates=self.updates,
            episodes=self.episodes,
            evaluation=self.evaluation,
            evaluating=None,
        )

    def take_evaluation(self, played: Played) -> None:
        """Show an evaluation that `Engine.evaluate` returned in all further results."""
        self.evaluation = {name: float(getattr(played.evaluation, name)) for name in _EVALUATED}

    def take_finished(self, finished: Finished) -> None:
        """Add finished episodes to the figures of results."""
        self.figures.add(finished)
        self.episodes += len(finished.returns)
        for name, values in finished.histograms.items():
            self.histograms[name] = np.append(self.histograms.get(name, np.zeros(0)), values)
        self.media |= finished.media

    @arguments_checked
    def iterate(self, stop: Stop | None = None) -> Iterator[Result]:
        """Train one iteration at a time until ``stop`` is met, and yield each result.

        If a budget is already used up, as a resumed run's may be, yield one result with the current state instead. A
        goal is checked only after an iteration, as earlier episodes may be of another env, opponent or recording.
        """
        stop = Stop() if stop is None else self._a_stop(stop)
        self.check_stop(stop)
        current_result = self.current_result()
        if stop.budget_used(current_result):
            yield current_result
            return
        while True:
            result = self.train()
            yield result
            if stop.now(result):
                return

    def current_result(self) -> Result:
        """A result with the current state, without another iteration."""
        return self._result(Update({}, {}), self.metrics.peek())

    def check_stop(self, stop: Stop) -> None:
        """Raise a SettingsError if ``stop`` sets a goal that can never be met."""
        if stop.return_mean is not None and self.window < MIN_EPISODES:
            raise SettingsError(
                f"`stop.return_mean` is over at least {MIN_EPISODES} episodes, but results are over {self.window} "
                "only: raise `metrics.window` (`evaluation.episodes` offline)."
            )

    def _a_stop(self, stop: Any) -> Stop:
        if not isinstance(stop, Stop):
            raise SettingsError(f"`stop` is {stop!r}, but must be a Stop. {how_to_train(self, [stop])}")
        return stop

    @arguments_checked
    def fit(
        self,
        stop: Stop,
        *,
        out: str | os.PathLike[str] | None = None,
        progress: bool = False,
        overwrite: bool = False,
        log: Sequence[Log] = ("jsonl", "tensorboard"),
        checkpoints: Checkpoints | None = None,
        save_interval: float = 60.0,
    ) -> Result:
        """Train until ``stop`` is met, and return the last result.

        If a budget ends training, and `evaluation.interval` is not 0, the last result has an evaluation of the last
        weights, even if none is due.

        With ``out``, the run writes what ``etude train`` writes: metrics, and a checkpoint from which
        ``etude.load(out)`` resumes it. On Ctrl-C it then finishes the iteration, saves, and raises KeyboardInterrupt. A
        run that was loaded from ``out`` continues there.

        Args:
            stop: When to stop; at least one field must be set.
            out: The folder of the run, on this machine; None writes nothing.
            progress: Show figures and the time left: live in a terminal or a notebook, else as lines on standard error.
            overwrite: Replace the run that is in ``out``.
            log: Where metrics go: jsonl, csv, tensorboard (in ``out``), wandb, mlflow.
            checkpoints: Which checkpoints to keep in addition to the newest one in ``out``.
            save_interval: Seconds between checkpoints, at least 0; one is always saved at the end.

        Raises:
            SettingsError: ``stop`` sets nothing or is no `Stop`; ``out`` can't be written, is in use, or holds another
                run.
            KeyboardInterrupt: it was interrupted; with ``out``, the run is saved.
        """
        if self._a_stop(stop) == Stop():
            raise SettingsError("fit needs to know when to stop: set something in Stop(...), or use iterate().")
        if out is None:
            with closing(self.view(stop, quiet=not progress)) as view:
                for result in self.iterate(stop):
                    view.show(result)
                for evaluated in self.last_evaluations(result, stop):
                    view.show(result := evaluated)
            return result
        folder = run.folder_of(out).absolute()  # an env may change the current folder
        run.check_logs(log)
        with Signals(quiet=not progress, kill=kill_workers) as signals, run.claimed(folder):
            goes_on = run.is_run_of(folder, saving.name_of(type(self)), self.iteration)
            run.check_free(folder, goes_on, overwrite=overwrite)
            self.check_stop(stop)  # before anything is replaced
            self.prepare()
            if overwrite:
                run.clear(folder)
            view = self.view(stop, quiet=not progress)
            result = self.fit_in(folder, stop, signals, view, log, checkpoints, save_interval)
        if signals.is_set() and (not stop.now(result) or needs_evaluation(self.config, result, stop)):
            raise KeyboardInterrupt(f"the run is saved in {folder}")
        return result

    def view(self, stop: Stop, *, quiet: bool, say: Callable[[str], None] = say) -> View:
        """The progress display of training; ``say`` receives its lines."""
        env = self.config.env
        return View(f"{self.name} on {env_name(env)}" if env is not None else self.name, stop, quiet=quiet, say=say)

    def fit_in(
        self,
        out: Path,
        stop: Stop,
        signals: Signals,
        view: Shows,
        log: Sequence[Log],
        checkpoints: Checkpoints | None,
        save_interval: float,
        *,
        each: Callable[[Result, Logs], None] = lambda result, log: None,
        concluded: Callable[[Result], int] = lambda result: INTERRUPTED,
    ) -> Result:
        """Train in the folder ``out``, as `fit` and ``etude train`` do, and return the last result. The caller has
        locked the folder.

        Args:
            out: The folder.
            stop: When to stop.
            signals: Watches for signals; the first one ends the run.
            view: Shows results; it is closed at the end.
            log: Where metrics go.
            checkpoints: Which checkpoints to keep in addition to the newest.
            save_interval: Seconds between checkpoints.
            each: Called with each new result and the logs.
            concluded: If the process must be killed, called after the run is saved; returns the exit code.
        """
        start, saved, took, result = self.iteration, time.monotonic(), 0.0, self.current_result()
        self._run = {"log": [*log], "save_interval": save_interval}
        if checkpoints is not None and checkpoints.keep_last and Path(checkpoints.folder) == out / run.CHECKPOINTS:
            self._run["checkpoints"] = checkpoints.rule()

        def save(*, between: bool = False) -> None:
            run.check_same(out, begun)
            if between:  # these weights have no score, so kept checkpoints stay as they are
                self._log_trained((self.env_steps, self.agent_steps))
            self.save(out, result=self.current_result() if between else result)
            if checkpoints is not None and not between:
                checkpoints.add(out, result)

        def conclude() -> int:
            save(between=True)
            view.close()
            return concluded(result)

        if self.config.engine != "local":
            signals.wait()
        with run.opened_logs(log, out, result) as logs, closing(view):
            begun = os.stat(out)
            signals.conclude = conclude
            signals.stuck = f"the run hangs where it can't be interrupted: {out} keeps its last checkpoint, if any."
            is_whole, failure = False, None
            with suppress(Interrupted):  # in the middle of an iteration
                for result in self.iterate(stop):
                    if result.iteration > start:  # else nothing was left to do
                        logs.write(result, self.histograms, self.media)
                        each(result, logs)
                    view.show(result)
                    if signals.is_set():
                        break
                    since = time.monotonic() - saved
                    is_best = checkpoints is not None and checkpoints.would_be_best(result)
                    is_last_chance = result.updates in (result.evaluation.get("updates"), result.evaluating)
                    if since >= save_interval or (is_best and (is_last_chance or since >= _REST * took)):
                        begin = time.monotonic()
                        try:
                            save()
                        except CheckpointError as error:
                            if not isinstance(error.__cause__, OSError):
                                raise
                            _log.warning("%s The run goes on, and is saved again later.", error)  # disks may recover
                        saved = time.monotonic()
                        took = saved - begin
                is_whole = True
                if needs_evaluation(self.config, result, stop) and not signals.is_set():
                    save(between=True)  # evaluations may take long
                    try:
                        for evaluated in self.last_evaluations(result, stop):
                            logs.write(result := evaluated, self.histograms, self.media)
                            view.show(result)
                            if checkpoints is not None:
                                checkpoints.add_late_evaluation(result)
                    except Exception as error:  # noqa: BLE001  raised once the weights are saved
                        failure = error
            with signals.concluding():
                save(between=not is_whole)
        if failure is not None:
            raise failure
        return result

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a ``with`` block to the current iteration's ``times``; nothing if the block raises."""
        begin = time.perf_counter()
        yield
        self.times[phase] = self.times.get(phase, 0.0) + time.perf_counter() - begin

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the time of a ``with`` block, such as an evaluation, from `Result.seconds`."""
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
        """Play whole episodes in separate envs, with the connectors in their current state.

        Args:
            num_episodes: Number of episodes, at least 1.
            env: The env to act in; None: the config's env.
            seed: Seed of the envs and of action sampling, at least 0.
            explore: Sample actions; otherwise take the most likely ones.
            max_steps: Steps after which an episode is truncated, at least 1; None: as in training.
            callbacks: Called while the episodes run. The config's callbacks are for training only.

        Raises:
            SettingsError: an argument is wrong, there is no env to act in, or its spaces do not fit the modules.
        """
        with self.untimed(), held(self.num_threads):
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

        The recording holds observations and rewards as the env returned them, actions as the module chose them, and
        their log-probabilities (0 without exploration). Modules with different spaces each get a recording in a
        subfolder named after the module.

        Args:
            path: The folder of the recording.
            num_episodes: Number of episodes, at least 1.
            env: The env to act in; None: the config's env.
            seed: Seed of the envs and of action sampling, at least 0. Equal seeds give equal episodes with equal ids.
            explore: Sample actions; otherwise take the most likely ones.
            max_steps: Steps after which an episode is truncated, at least 1; None: as in training.
            append: Add episodes to an existing recording; ``seed`` then gives other episodes than those already
                recorded. Otherwise an existing recording is an error.
            compression: Codecs, see `RecordingWriter`.
            max_rows_per_file: Maximum number of steps in a file.
            max_file_size: Size in bytes at which a file is closed.

        Raises:
            DataError: the recording can't be written.
            EnvError: the env failed in every episode.
            SettingsError: as in `evaluate`.
        """
        with self.untimed(), held(self.num_threads):
            if not isinstance(path, str | os.PathLike):
                raise SettingsError(f"`path` is {path!r}, but must be the path of the recording's folder, or its URL.")
            folder = os.fspath(path)
            below = Path.cwd()  # an env may change the current folder
            if append and seed is not None:  # else the recording might hold these episodes already
                seed = seed_after(folder, self.recorded_spaces(), seed)
            runner = self.new_runner(env, num_episodes, seed, max_steps=max_steps)
            where = env if env is not None else self.config.env
            assert where is not None  # new_runner has checked it
            return record(
                runner,
                folder,
                num_episodes,
                self.recorded_spaces(
                    spaces_in(runner.arena, list(self.policies), self.config.agents.module_of, self.spaces)
                ),
                explore=explore,
                updates=self.updates,
                columns=self.recorded,
                below=below,
                append=append,
                env=env_name(where),
                meta=self.recording_meta(explore=explore, seed=seed),
                compression=compression,
                max_rows_per_file=max_rows_per_file,
                max_file_size=max_file_size,
            )

    def recorded_spaces(self, spaces: Mapping[str, Spaces] | None = None) -> dict[str, Spaces]:
        """The spaces of what is recorded, by module id: observations as the env returns them, actions as modules choose
        them.

        Args:
            spaces: The spaces on the env's side; None: those of the training env.
        """
        given = self.spaces if spaces is None else spaces
        return {name: (given[name][0], policy.module.action_space) for name, policy in self.policies.items()}

    def recording_meta(self, *, explore: bool, seed: int | None) -> dict[str, Any]:
        """Metadata of recordings: the algorithm, networks, connectors and how actions were chosen.

        If a connector learns, ``filter`` holds what `etude.connectors.pipeline.state_to_json` returns; if connectors
        change actions, ``env_action_space`` is the env's space as JSON. They are by module id if there are several
        ``modules``.
        """
        several = self.config.agents.modules is not None
        nets = {name: saving.name_of(type(policy.module.net)) for name, policy in self.policies.items()}
        connectors = connectors_meta(self.policies, several=several)
        return {
            "algorithm": saving.name_of(type(self)),
            "module": nets if several else nets[MAIN],
            "connectors": connectors.pop("connectors"),
            "explore": explore,
            "seed": seed,
            "updates": self.updates,
            **connectors,
        }

    def new_runner(
        self,
        env: EnvLike | None,
        num_episodes: int,
        seed: int | None,
        callbacks: Sequence[CallbackLike] = (),
        max_steps: int | None = None,
    ) -> Runner:
        """Make a runner that is separate from training, with the current modules and connectors.

        Raises:
            SettingsError: an argument is wrong, or there is no env to act in.
        """
        if not isinstance(num_episodes, int | np.integer) or isinstance(num_episodes, bool) or num_episodes < 1:
            hint = "." if isinstance(num_episodes, int | float | np.number) else "; give an env as env=..."
            raise SettingsError(f"`num_episodes` is {num_episodes!r}, but must be a whole number of at least 1{hint}")
        if seed is not None and not (isinstance(seed, int | np.integer) and seed >= 0):
            raise SettingsError(f"a seed must be a whole number of at least 0, not {seed!r}.")
        where = self.env_to_play(env)
        return runner_for(self.config, where, num_episodes, self.policies, seed, callbacks, max_steps, self.spaces)

    def env_to_play(self, env: EnvLike | None) -> EnvLike:
        """The env in which to play outside training: ``env``, or the config's if it is None.

        Raises:
            SettingsError: there is none, or the config's is an object that training is using.
        """
        where = env if env is not None else self.config.env
        if where is None:
            raise SettingsError("there is no env to act in: give one, as env=... here or in the config.")
        if env is None and self.in_use(where):
            raise SettingsError(
                f"config.env is one {type(where).__name__} object, which training is in the middle of: give an "
                "env=... of its own here, or a function that makes envs to the config."
            )
        return where

    def in_use(self, env: EnvLike) -> bool:
        """Whether ``env`` is an object that training is using."""
        return False

    # -- state --------------------------------------------------------------------------------------------------

    def components(self) -> dict[str, Component]:
        """The parts of the state, by name; see `components_of` for those of each module.

        Override it to save more: ``{**super().components(), "mine": Component(get, set)}``.
        """
        modules = self.learner.modules
        own = [checkpoint.components_of(name, self.policies[name], learner) for name, learner in modules.items()]
        recorder, figures = self.recorder, self.figures
        return {name: component for parts in own for name, component in parts.items()} | {
            **({"recorder": Component(recorder.state_dict, recorder.load_state_dict)} if recorder.is_on else {}),
            "counters": Component(self._counters, self._set_counters),
            "figures": Component(figures.state_dict, figures.load_state_dict),
            "seed": Component(
                lambda: self.runner_seed, lambda seed: setattr(self, "runner_seed", operator.index(seed))
            ),
        }

    def _counters(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in _COUNTERS}
        removed = {"updates_of_removed": self.learner.updates_of_removed}
        return {**counts, **(removed if any(removed.values()) else {}), "evaluation": dict(self.evaluation)}

    def _set_counters(self, counters: Mapping[str, Any]) -> None:
        found = {name: (float if name == "seconds" else operator.index)(counters[name]) for name in _COUNTERS}
        self.evaluation = {str(name): float(value) for name, value in counters.get("evaluation", {}).items()}
        self.learner.updates_of_removed = operator.index(counters.get("updates_of_removed", 0))
        vars(self).update(found)

    def get_state(self, components: Names = None, not_components: Names = None) -> dict[str, Any]:
        """The state from which a run resumes, or parts of it: plain data, arrays and tensors by component.

        Args:
            components: Names of components; None: all. ``modules/p1`` names one, ``modules`` all under that prefix.
            not_components: Names of components to leave out.

        Raises:
            CheckpointError: there is no such component; the message lists those that exist.
        """
        self._pull()
        parts = self.components()
        return {name: parts[name].get() for name in checkpoint.chosen(parts, components, not_components)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `get_state` returned; components that are not in ``state`` stay as they are.

        Tensors may be on any device.

        Raises:
            CheckpointError: ``state`` holds a component that does not exist here or does not fit.
        """
        parts = self.components()
        # whether a run is recorded does not change the rest of its state
        checkpoint.put_back(parts, {name: part for name, part in state.items() if name != "recorder" or name in parts})
        for name, policy in self.policies.items():
            if f"{checkpoint.MODULES}{name}" in state:
                with self.settings_of(name):
                    self.after_load(policy.module)
        self._trained = self._steps_trained()
        self.engine.push()

    @arguments_checked
    def save(
        self, path: Where, *, components: Names = None, not_components: Names = None, result: Result | None = None
    ) -> None:
        """Write a checkpoint from which ``etude.load(path)`` continues as if the run had never stopped.

        If it is called within an iteration, such as from a hook, the resumed run begins with the next iteration: an
        on-policy algorithm loses steps that it has collected but not yet learned from.

        Writing is atomic: an existing checkpoint is replaced as a whole. Nothing is pickled. A component that can't be
        saved, such as a callback whose state is not plain data, is left out with a warning; the weights are always
        saved.

        Args:
            path: A folder, or its URL (``s3://...``).
            components: Names of the components to save, see `get_state`. Only `Algorithm.load` can read a partial
                checkpoint.
            not_components: Names of components to leave out.
            result: Stored with the checkpoint, as ``load_meta(path)["result"]``.

        Raises:
            CheckpointError: there is no such component, or the folder can't be written.
        """
        self._pull()
        parts = self.components()
        wanted = {name: parts[name] for name in checkpoint.chosen(parts, components, not_components)}
        failures = checkpoint.write_components(path, wanted, self._description(result), self.left_out)
        self.left_out = {name: checkpoint.reason_of(error) for name, error in failures.items()}
        if "recorder" in failures:  # recorded steps may be lost
            raise failures["recorder"]

    def _description(self, result: Result | None) -> dict[str, Any]:
        """The metadata of a checkpoint, from which `etude.load` rebuilds the run."""
        config = self.config
        saved = {field.name: saving.to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
        saved["engine"] = "local" if config.engine == "local" else "ray"  # for readers only: `load` is given an engine
        return {
            "algorithm": saving.name_of(type(self)),
            "config": saved,
            "config_class": saving.name_of(type(config)),
            "spaces": {name: [space_to_json(space) for space in pair] for name, pair in self.spaces.items()},
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "updates": self.updates,
            "time": time.time(),
            "result": None if result is None else result.to_dict(),
            "run": self._run,
        }

    @arguments_checked
    def load(self, path: Where, components: Names = None, not_components: Names = None) -> None:
        """Load the state, or parts of it, from a checkpoint, which may be of another run.

        Only the components asked for are read; settings stay as they are. To continue a whole run, see `etude.load`.

        Args:
            path: The folder of a checkpoint, or its URL.
            components: Names of the components to load, see `get_state`; None: all that it has.
            not_components: Names of components to leave out.

        Raises:
            CheckpointError: the folder is not an algorithm's checkpoint or is broken, or it lacks these components, or
                they do not fit. The state is then unchanged, but running episodes may start again.
        """
        state, saved = checkpoint.read_components(path, components, not_components)
        saving.drop_other_episodes(state, saved, self.config.env)
        before = self.get_state([name for name in state if name in self.components()])
        try:
            with checkpoint.what_fits(redacted(os.fspath(path))):
                self.set_state(state)
        except BaseException:
            self.set_state(before)  # all or nothing
            raise

    def close(self) -> None:
        """Close the training envs, the recorder, and whatever was started on other machines."""
        try:
            self.engine.close()
        finally:
            self.recorder.close()
