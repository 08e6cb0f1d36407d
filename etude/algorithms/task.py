# SPDX-License-Identifier: Apache-2.0
"""Task: an env, a network, acting and a loss of your own, in one class."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from etude import columns as col
from etude.algorithms.acting import ActingAlgorithm
from etude.algorithms.checkpoint import Component
from etude.algorithms.config import ONE_RATE, ActingConfig, ModuleLike, learners_of
from etude.algorithms.policies import spawned
from etude.algorithms.results import joined
from etude.algorithms.slips import arguments_checked
from etude.columns import ACTION, Columns
from etude.connectors.connector import overrides
from etude.envs import EnvLike
from etude.errors import DataError, ModuleError, SettingsError, SpaceError
from etude.experience import Experience
from etude.learners import Batch, Loss, ModuleLearner, Update, seeded
from etude.learners.loss import loss_from
from etude.learners.replay_dataset import MASK, ReplayDataset
from etude.modules import Actor, Module, make_module
from etude.modules.acting import as_tensor
from etude.settings import IntFrom1, settings
from etude.spaces import Flattener, Space, Spaces, check_form, leaf_dtype


class TaskModule(Module):
    """A network that acts through the `act` of its `Task`, and is trained through the task's `forward` and `loss`.

    Args:
        made: The network with its spaces. Only the task knows what it returns, and whether it is recurrent.
        task: The task.
    """

    can_be_exported = False

    def __init__(self, made: Module, task: "Task[Any]") -> None:
        super().__init__(made.net, made.obs_space, made.action_space, made.dist)
        self._state, self.recurrent = {}, False
        self.mask = None
        self._task = task

    @property
    def own_loss(self) -> Callable[[Module, Any], Any] | None:
        """The task's loss, unless the network has its own."""
        return super().own_loss or self._task.loss_of

    def actor(self, *, explore: bool) -> Actor:
        """An actor that calls the task's `act`, with ``optimal`` if it does not explore."""
        return TaskActor(self, self._task, optimal=not explore)


class TaskActor:
    """Acts through `Task.act`. What that draws from torch's random stream depends only on the runner's seed."""

    def __init__(self, module: TaskModule, task: "Task[Any]", *, optimal: bool) -> None:
        self._module = module
        self._task = task
        self._optimal = optimal
        self._flatten = Flattener(module.action_space, ACTION)
        self._device = module.device
        self._rng = np.random.default_rng(0)

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`."""
        self._rng, self._device = rng, self._module.device

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`; only the action is recorded.

        Raises:
            ModuleError: what `act` returned does not fit the action space.
        """
        num = len(next(iter(obs.values())))
        with torch.inference_mode(), seeded(int(self._rng.integers(2**63)), self._device):
            tensors = {name: as_tensor(column).to(self._device) for name, column in obs.items()}
            tensors = {name: c.float() if c.dtype == torch.float64 else c for name, c in tensors.items()}
            action = self._task.act(self._module.net, self._module.obs_from(tensors), self._optimal)
            return self._columns(action, num), {}

    def _columns(self, action: Any, num: int) -> Columns:
        found = {}
        try:
            for name, value in self._flatten(action).items():
                leaf = self._flatten.leaves[name]
                array = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
                if len(array) != num:
                    raise SpaceError(f"`{name}` has {len(array)} rows for {num} observations.")
                check_form(name, leaf, array[0])
                found[name] = array.astype(leaf_dtype(leaf), copy=False)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, SpaceError) as error:
            raise ModuleError(
                f"{type(self._task).__name__}.act returned a {type(action).__name__} that is no action "
                f"({type(error).__name__}: {error}). The action space is {self._module.action_space}: return tensors, "
                "nested as it is, with a row for each observation."
            ) from error
        return found

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """See `Actor.logp`: None, as only `act` knows its probabilities."""
        return None


@settings
class TaskConfig(ActingConfig):
    """Settings of a task."""

    unused: ClassVar[Mapping[str, str]] = {"network": "the net is made by network(), and acts by act()"} | ONE_RATE

    num_samples: IntFrom1 = 1
    """Consecutive steps in a sample, at least 1."""

    stride: IntFrom1 | None = None
    """Steps from the start of a sample to that of the next in the same segment, at least 1. None: `num_samples`, so
    that each step is in one sample."""

    replay_epochs: IntFrom1 = 1
    """Number of collections kept to learn from, the newest included, at least 1. It must be 1 with connectors that
    learn, such as `normalize_obs`."""

    num_update_steps: IntFrom1 = 100
    """Gradient steps of each module after each collection, at least 1."""

    batch_size: IntFrom1 | None = 256
    """Samples in each batch, at least 1; fewer if there are not as many. None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if learners_of(self):
            raise SettingsError(
                f"`engine` has num_learners={learners_of(self)}, but a task makes its gradient steps in the process "
                "that trains: its loss may join steps of a sample in ways that can't be averaged over learners. Leave "
                "`num_learners` out; runners (`num_runners`) work."
            )


C = TypeVar("C", bound=TaskConfig)


class Task(ActingAlgorithm[C]):
    """Base class of an algorithm of your own, in one class: its env, its network, how it acts, and its loss.

    Inherit from ``Task[TaskConfig]``, or from ``Task`` of your own settings that inherit from `TaskConfig`, and define
    `environment`, `network`, `act` and `loss`; if needed also `forward`, `postprocess_trajectory` and
    `postprocess_trajectories`.

    An iteration collects ``num_steps`` steps, cuts them into samples of ``num_samples`` consecutive steps, keeps those
    of the last ``replay_epochs`` collections, and makes ``num_update_steps`` gradient steps on batches of them.
    """

    Config = TaskConfig
    needs_next_obs: ClassVar[bool] = False
    """Whether batches hold ``next_obs``, the observation after each step."""

    recorded: ClassVar[tuple[str, ...]] = (col.OBS, col.ACTION, col.REWARD)
    """The step columns that `record` writes; without log-probabilities, which only the task knows."""

    @arguments_checked
    def __init__(self, config: C, *, saved_spaces: dict[str, Spaces] | None = None) -> None:
        self.config = config
        if config.env is None:
            config = dataclasses.replace(config, env=self.environment())
        super().__init__(config, saved_spaces=saved_spaces)

    # -- to be defined by a task --------------------------------------------------------------------------------

    def environment(self) -> EnvLike:
        """The env to act in if the setting ``env`` is None: an id, or a function or class that makes an env.

        Checkpoints keep ids, and functions and classes at the top of a module.
        """
        raise SettingsError(f"{type(self).__name__} has no env: define environment(), or set `env`.")

    def network(self, obs_space: Any, action_space: Any) -> nn.Module:
        """The network if the setting ``module`` is None; its inputs and outputs are up to the task.

        Args:
            obs_space: The observation space, after the connectors if there are any.
            action_space: The action space.
        """
        raise SettingsError(f"{type(self).__name__} has no net: define network(obs_space, action_space).")

    def act(self, module: nn.Module, obs: Any, optimal: bool) -> Any:
        """Choose actions. Called without gradients, with the network in eval mode.

        Draws from torch's random stream depend only on the seed.

        Args:
            module: The network.
            obs: Tensors nested as in the observation space, each ``[B, *shape]``; float64 arrives as float32.
            optimal: Choose the best actions, as in an evaluation; otherwise explore, as in training.

        Returns:
            Tensors nested as in the action space, each ``[B, *shape]``; integers if it is discrete.
        """
        raise NotImplementedError(f"{type(self).__name__} must define act(module, obs, optimal).")

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """The network's output for a batch, which `loss` gets; by default ``module(batch.obs)``."""
        return module(batch.obs)

    def loss(self, module: nn.Module, batch: Batch, output: Any) -> Loss | torch.Tensor:  # type: ignore[override]
        """The loss: a scalar tensor, or named parts.

        Args:
            module: The network.
            batch: Columns ``[B, num_samples, ...]``: ``obs``, ``action``, ``reward``, ``terminated``, ``truncated``,
                ``mask``, ``next_obs`` (see `needs_next_obs`), and what postprocessing added. ``mask`` is False on steps
                not to be trained on, see `ReplayDataset`; if there are any, the loss must use it.
            output: The output of `forward`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(module, batch, output).")

    def postprocess_trajectory(self, trajectory: Experience) -> Experience:
        """Change one collected segment, such as by adding columns: ``trajectory.with_steps(name=...)``.

        Args:
            trajectory: An episode, or a piece of one, as the module saw it. The lookback steps before it, which
                connectors may need, are dropped later.
        """
        return trajectory

    def postprocess_trajectories(self, trajectories: Experience) -> Experience:
        """Change all segments of a collection at once; called after `postprocess_trajectory`."""
        return trajectories

    # -- how it is trained --------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Make an empty dataset for each module, then what `ActingAlgorithm.setup` makes."""
        seeds = np.random.SeedSequence(self.config.seed, spawn_key=(3,))  # 0 to 2 are those of every algorithm
        self._orders = int(seeds.generate_state(1)[0])
        self._datasets = {name: self._new_dataset(name) for name in self.policies}
        self._has_gaps = False
        super().setup()

    @property
    def datasets(self) -> dict[str, ReplayDataset]:
        """The dataset of each module, by module id; a module that was added later starts with an empty one."""
        there = self._datasets
        self._datasets = {name: there[name] if name in there else self._new_dataset(name) for name in self.policies}
        return self._datasets

    @property
    def dataset(self) -> ReplayDataset:
        """The dataset of the only module."""
        return self.datasets[self.learner.only.name]

    def _new_dataset(self, module_id: str) -> ReplayDataset:
        with self.settings_of(module_id):
            own = self.config
        pipelines = (self.policies[module_id].connectors, self.learner.modules[module_id].connectors)
        learning = [c.name for p in pipelines for c in p.connectors if overrides(c, "update")]
        if own.replay_epochs > 1 and learning:
            raise SettingsError(
                f"`replay_epochs` is {own.replay_epochs}, but {learning[0]} changes after each collection: samples of "
                "earlier ones would keep what it gave then. Leave one of them out; a layer of the network can "
                "normalize instead."
            )
        return ReplayDataset(
            own.num_samples,
            stride=own.stride,
            collections=own.replay_epochs,
            next_obs=self.needs_next_obs,
            seed=spawned(np.random.SeedSequence(self._orders), module_id),
        )

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make the network's module, which acts and learns by the task's methods."""
        made = make_module(given if given is not None else self.network, obs_space, action_space)
        return TaskModule(made, self)

    def training_step(self) -> Update:
        """Run one iteration: collect, postprocess, store, update."""
        self.before_collect(self.env_steps)
        parts = self.collect(num_steps=self.config.num_steps, whole_episodes=self.config.trajectories.whole_episodes)
        self.before_update(self.env_steps)
        updates = {}
        for name, exp in self.learner.chosen(parts).items():
            connectors, learner = self.policies[name].connectors, self.learner.modules[name]
            dataset = self.datasets[name]
            with self.timed("connect"), self.settings_of(name):
                seen = connectors.offline(exp)
                dataset.add(self._postprocessed(learner.connectors.offline(seen, learner.module)))
            with self.timed("update"), self.settings_of(name):
                updates[name] = self._update(learner, dataset)
            connectors.update(exp)
            learner.connectors.update(seen, learner.module)
        return joined(updates, self.counts, several=len(self.policies) > 1)

    def _postprocessed(self, exp: Experience) -> Experience:
        own = type(self)
        if own.postprocess_trajectory is not Task.postprocess_trajectory and exp.num_segments:
            parts = [self._sound(self.postprocess_trajectory(part), "postprocess_trajectory") for part in exp]
            exp = Experience.concat(parts)
        if own.postprocess_trajectories is not Task.postprocess_trajectories:
            exp = self._sound(self.postprocess_trajectories(exp), "postprocess_trajectories")
        return exp

    def _sound(self, made: Any, by: str) -> Experience:
        if not isinstance(made, Experience):
            raise DataError(
                f"{type(self).__name__}.{by} returned a {type(made).__name__}: it must return an Experience, such as "
                "the one it was given .with_steps(name=values)."
            )
        try:
            made.validate(finite=())
        except DataError as error:
            raise DataError(f"what {type(self).__name__}.{by} returned is invalid: {error}") from error
        return made

    def _update(self, learner: ModuleLearner, dataset: ReplayDataset) -> Update:
        self._has_gaps = dataset.has_gaps
        config = self.config
        update = learner.update_from(
            dataset.batches(config.batch_size, config.num_update_steps * config.optimizer.accumulate)
        )
        return update._replace(metrics=update.metrics | {"samples": float(len(dataset))})

    def loss_of(self, module: Module, batch: Batch) -> Loss:
        """The loss of a batch by `forward` and `loss`.

        Raises:
            ModuleError: the loss is not a scalar with a gradient.
            DataError: the batch holds steps that are not to be trained on, and ``mask`` was not used.
        """
        name = f"{type(self).__name__}.loss"
        loss = loss_from(self.loss(module.net, batch, self.forward(module.net, batch)), name, mean="`mask`")
        if self._has_gaps and MASK not in batch.used:
            raise DataError(
                f"there are steps not to be trained on, as segments are shorter than `num_samples` "
                f"({self.config.num_samples}), but neither {name} nor forward looked at batch.mask: leave out the rows "
                "where it is False, such as (error * batch.mask).sum() / batch.mask.sum()."
            )
        return loss

    def scheduled(self, name: str, module: nn.Module) -> Any:
        """As in `Algorithm.scheduled`; ``module`` is the network, as `loss` gets it."""
        owners = (own.module for own in self.learner.modules.values() if own.module.net is module)
        return super().scheduled(name, next(owners, cast(Module, module)))

    def components(self) -> dict[str, Component]:
        """Also ``datasets/NAME`` of each module."""
        own = {
            f"datasets/{name}": Component(dataset.state_dict, dataset.load_state_dict)
            for name, dataset in self.datasets.items()
        }
        return {**super().components(), **own}
