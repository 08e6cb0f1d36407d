# SPDX-License-Identifier: Apache-2.0
"""ActingAlgorithm: the base class of algorithms that act in envs while they learn."""

import copy
import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.checkpoint import Component, what_fits
from etude.algorithms.config import ActingConfig, ModuleLike
from etude.algorithms.play import Played, by_module
from etude.algorithms.policies import modules_given, own_networks
from etude.envs import EnvLike, env_name
from etude.errors import CheckpointError, SettingsError
from etude.experience import Experience
from etude.learners import load_weights
from etude.policies import Policy
from etude.runners import ModuleOf, Runner
from etude.spaces import Spaces
from etude.threads import held

C = TypeVar("C", bound=ActingConfig)

_log = logging.getLogger("etude.algorithms")

_TAKEN_APART = "of the runner and the connectors, not all were taken from the checkpoint"


class ActingAlgorithm(Algorithm[C]):
    """Base class of algorithms that own envs and a runner and collect experience. Define `loss` and `training_step`."""

    Config = ActingConfig
    collects_in_background: ClassVar[bool] = False
    """Whether remote runners keep collecting while it learns. It must be able to learn from steps collected with older
    weights."""

    learns_on_device: ClassVar[bool] = False
    """Whether `collect` leaves experience on the device of an env that returns tensors; else it is copied to the
    host."""

    _runner: Runner | None = None
    _saved_runner: dict[str, Any] | None = None
    """The state of a loaded run's runner, until its envs are made."""
    counts: dict[str, float]
    """Counts of the runner in the latest `collect`, such as ``restarts``."""

    def module_spaces(self) -> dict[str, Spaces]:
        """The spaces of the config's env.

        Makes the env, unless a checkpoint supplies the spaces.
        """
        return self._spaces_there() if self._saved_spaces is None else self._saved_spaces

    def setup(self) -> None:
        """Make the runner, unless the algorithm is being loaded from a checkpoint: it may only be needed to act."""
        if self._saved_spaces is None:
            self.prepare()

    def prepare(self) -> None:
        """Make the envs and the runner if there are none yet; a loaded run continues where it was saved."""
        if self._runner is not None:
            return
        env, interval = self.config.env, self.config.evaluation.interval
        if interval and env is not None and self.in_use(env):
            raise SettingsError(
                f"`evaluation.interval` is {interval}, but `env` is one {type(env).__name__} object, which training "
                "uses: give a function that makes envs, or no interval."
            )
        try:
            if not self.engine.has_envs:
                self._fit_to(self._spaces_there())
            self._runner = self.engine.runner()
            self._go_on()
        except BaseException:
            self.close()
            self._runner = None
            raise

    @property
    def runner(self) -> Runner:
        """The runner, which collects experience; made on first use."""
        if self._runner is None:
            self.prepare()
        assert self._runner is not None
        return self._runner

    def _spaces_there(self) -> dict[str, Spaces]:
        if self.config.env is None:
            raise SettingsError(f"{type(self).__name__} needs an env to act in: set `env`, such as env='CartPole-v1'.")
        try:
            names, module_of = list(modules_given(self.config)), self.config.agents.module_of
            return self.engine.spaces(names, module_of, self._saved_spaces)
        except BaseException:
            self.close()
            raise

    def _fit_to(self, spaces: dict[str, Spaces]) -> None:
        """Fit a loaded run's connectors to an env with other spaces, if it was given one."""
        assert self.config.env is not None
        for name, policy in self.policies.items():
            if spaces[name] != self.spaces[name]:
                self.policies[name] = policy.fitted(*spaces[name], env_name(self.config.env))
        self.spaces = spaces

    def _go_on(self) -> None:
        """Let the runner continue where a loaded run was saved."""
        saved = self._saved_runner
        if self._runner is None or (saved is None and not self.env_steps):
            return
        remedy = " Create the algorithm again, and load the checkpoint with not_components='runner'."
        with what_fits("the component `runner` of the checkpoint", remedy):
            if saved is None:
                self._start_new_episodes("the state of the runner was not loaded")
            elif self.engine.can_resume(saved):
                self._resumed = self._runner.load_state_dict(saved)
                self._record_on(new_episodes=self._resumed.startswith("new episodes"))
            else:  # only the counts are kept
                self.env_steps, self.agent_steps = saved["steps"]
                self._start_new_episodes("the run went on with another engine")
        self._saved_runner = None
        if self._resumed is not None and self._resumed.startswith("new episodes"):
            _log.warning("The run goes on, in %s.", self._resumed)

    def _start_new_episodes(self, why: str) -> None:
        """Start new episodes, and continue the runner's counts from the algorithm's."""
        assert self._runner is not None
        self._runner.env_steps, self._runner.agent_steps = self.env_steps, self.agent_steps
        self._runner.abandon_episodes()
        # A new runner would otherwise repeat the run's first episodes.
        self._runner.restart_episodes(
            int(np.random.SeedSequence([self.runner_seed, self.env_steps]).generate_state(1)[0])
        )
        self._resumed = f"new episodes: {why}"
        self._record_on(new_episodes=True)

    def _record_on(self, *, new_episodes: bool) -> None:
        self.recorder.go_on(new_episodes=new_episodes, same_again=self.engine.is_repeatable)

    @property
    def window(self) -> int:
        """The number of latest episodes over which results average returns."""
        return self.config.metrics.window

    # -- a league -----------------------------------------------------------------------------------------------

    def add_module(
        self,
        module_id: str,
        module: ModuleLike | None = None,
        *,
        like: str | None = None,
        module_of: ModuleOf | None = None,
    ) -> Policy:
        """Add a module that acts and learns from the next iteration on. The running episodes are abandoned.

        Args:
            module_id: Its id.
            module: Its network, as in the setting `modules`; None: that of ``like``, or the built-in one.
            like: Id of a module whose weights and connector states are copied at the start, but not its `overrides`;
                None: it starts with new weights.
            module_of: Chooses the module of an agent from now on; None: the same function as before.

        Raises:
            SettingsError: the config has no `modules`, this id is taken, or there is no module ``like``.
        """
        self._check_league(module_id, is_there=False)
        config, known = self.config, self.spaces
        if like is not None:
            self._check_league(like, is_there=True)
            known = {**self.spaces, module_id: self.spaces[like]}
            module = copy.deepcopy(modules_given(config)[like]) if module is None else module
        before = self.spaces
        try:
            self._set_league({**modules_given(config), module_id: module}, module_of, known)
            policy = self._add_policy(module_id, module)
            if like is not None:
                load_weights(policy.module, self.policies[like].module.state_dict())
                with self.settings_of(module_id):
                    self.after_load(policy.module)
                policy.connectors.load_state_dict(self.policies[like].connectors.state_dict())
        except BaseException:  # as if it had not been called
            self.policies.pop(module_id, None)
            self.learner.modules.pop(module_id, None)
            self.config, self.spaces, self._parameters = config, before, None
            self._built_from = config
            raise
        own_networks(self, {module_id: policy})
        self._set_policies()
        return policy

    def remove_module(self, module_id: str, *, module_of: ModuleOf | None = None) -> None:
        """Remove a module, which then neither acts nor learns. The running episodes are abandoned.

        Args:
            module_id: Its id.
            module_of: Chooses the module of an agent from now on; None: the same function as before.

        Raises:
            SettingsError: there is no such module, or it is the only one.
        """
        self._check_league(module_id, is_there=True)
        if len(self.policies) == 1:
            raise SettingsError(f"{module_id!r} is the only module: add another before it is removed.")
        others = {name: net for name, net in modules_given(self.config).items() if name != module_id}
        self._set_league(others, module_of, self.spaces)
        del self.policies[module_id]
        self.learner.updates_of_removed += self.learner.modules.pop(module_id).updates
        self.figures.forget(module_id)
        self._parameters = None
        self._set_policies()

    def _check_league(self, module_id: str, *, is_there: bool) -> None:
        if self.config.agents.modules is None:
            raise SettingsError("modules can be added and removed where the config names them: set `modules`.")
        if (module_id in self.policies) != is_there:
            what = "no" if is_there else "already a"
            raise SettingsError(f"there is {what} module {module_id!r}: there are {list(self.policies)}.")

    def _set_league(
        self, modules: dict[str, ModuleLike | None], module_of: ModuleOf | None, known: Mapping[str, Spaces]
    ) -> None:
        self.prepare()
        self._pull()  # a remote update may be under way
        old = self.config.agents
        trained, now = old.modules_to_train, self.learner.modules_to_train
        agents = dataclasses.replace(
            old,
            modules=modules,
            module_of=old.module_of if module_of is None else module_of,
            overrides={name: own for name, own in (old.overrides or {}).items() if name in modules} or None,
            modules_to_train=_those_in(modules, trained),
        )
        config = dataclasses.replace(self.config, agents=agents)
        found = self.engine.spaces(list(modules), config.agents.module_of, known)
        self.spaces = {name: known.get(name, found[name]) for name in modules}
        self.config = self._built_from = config
        self.learner.modules_to_train = _those_in(modules, now)  # may have been changed since construction

    def _set_policies(self) -> None:
        self.runner.set_policies(self.policies, module_of=self.config.agents.module_of)
        self._trained = self._steps_trained()
        self.engine.push()

    # -- acting -------------------------------------------------------------------------------------------------

    def collect(self, *, num_steps: int, whole_episodes: bool = False, explore: bool = True) -> dict[str, Experience]:
        """Collect steps, and return the raw experience of each module that has some; see `Runner.collect_each`.

        Also updates the counts of steps and the statistics of finished and faulty episodes.

        Raises:
            SettingsError: every segment is shorter than `trajectories.min_length`.
        """
        runner = self.runner
        with self.timed("sample"), held(self.num_threads):
            given = runner.collect_each(num_steps=num_steps, whole_episodes=whole_episodes, explore=explore)
        parts = by_module(given)
        if not self.learns_on_device:
            parts = {name: exp.numpy() for name, exp in parts.items()}
        if self.recorder.is_on:
            with self.timed("record"):
                self.recorder.take(parts)
        self.env_steps, self.agent_steps = runner.env_steps, runner.agent_steps
        self.take_finished(runner.take_finished())
        self.figures.add_turns(runner.times, runner.turns)
        least = self.config.trajectories.min_length
        if least > 1 and not any(exp.num_steps for exp in parts.values()):
            raise SettingsError(
                f"every segment of this iteration was shorter than `trajectories.min_length` ({least}), so there is "
                "nothing to learn from: lower it, or raise `num_steps`, or set `trajectories.whole_episodes`."
            )
        self.counts = runner.stats()
        self.faulty_episodes += int(self.counts.pop("faulty_episodes", 0))
        if "policy_lag" in self.counts:  # a mean, which is not added up
            self.metrics.log("policy_lag", self.counts.pop("policy_lag"))
        return parts

    def evaluated(self, num_episodes: int, seed: int) -> Played:
        """Play whole episodes now, in this process."""
        return Played(self.evaluate(num_episodes, seed=seed))

    def in_use(self, env: EnvLike) -> bool:
        """Whether ``env`` is an object that training is using."""
        return not isinstance(env, str) and not callable(env)

    def components(self) -> dict[str, Component]:
        """Also ``runner``: running episodes and random streams, without the connectors' state, which is its own
        component."""
        return {**super().components(), "runner": Component(self._runner_state, self._set_runner)}

    def _runner_state(self) -> dict[str, Any]:
        state = self._saved_runner if self._saved_runner is not None else self.runner.state_dict()
        if "rollouts" not in state:  # remote runners do not save running episodes
            return state
        return state | {
            "rollouts": [{k: v for k, v in rollout.items() if k != "connectors"} for rollout in state["rollouts"]]
        }

    def _set_runner(self, state: Mapping[str, Any]) -> None:
        if "rollouts" in state and len(state["rollouts"]) != len(self.policies):
            raise CheckpointError(
                f"the state's runner acted with {len(state['rollouts'])} modules, but here are {len(self.policies)}: "
                "leave it out, with not_components='runner'."
            )
        self._saved_runner = dict(state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `get_state` returned. The envs are not made here, but by `prepare` or the next iteration.

        Running episodes continue if the state holds both the runner and the connectors of all modules. If it holds only
        some of these, new episodes start.
        """
        super().set_state(state)
        connectors = [name for name in state if name.startswith("connectors/")]
        is_whole = "runner" in state and len(connectors) == len(self.policies)
        if "runner" not in state and not connectors:
            return
        if self._saved_runner is None:
            if self._runner is not None:
                self._start_new_episodes(_TAKEN_APART)
            return
        if "rollouts" in self._saved_runner:
            policies = zip(self.policies.values(), self._saved_runner["rollouts"], strict=True)
            self._saved_runner["rollouts"] = [
                {**rollout, "connectors": policy.connectors.state_dict()} for policy, rollout in policies
            ]
        if not is_whole:
            self._saved_runner["arena"] = {"how": "new episodes", "why": _TAKEN_APART}
        self._go_on()


def _those_in(modules: Collection[str], trained: Any) -> Any:
    """``modules_to_train`` without what is not in ``modules``."""
    return trained if trained is None or callable(trained) else tuple(name for name in trained if name in modules)
