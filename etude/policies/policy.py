# SPDX-License-Identifier: Apache-2.0
"""Policy: a module with its connectors, which acts on the env's observations."""

import os
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Connector, Inputs, Pipeline
from etude.display import short
from etude.errors import SettingsError, SpaceError
from etude.experience.arrays import host, where_rows
from etude.modules import Actor, Module
from etude.policies.export import TracedPolicy, export
from etude.spaces import Flattener, NamedDiscrete, Nester, Space, alike, in_short, leaf_dtype, leaf_shape, leaves

PolicyState: TypeAlias = dict[str, Any]
"""The state of a policy in running episodes: plain data and arrays ``[B, ...]``, from `Policy.initial_state`."""


class Chosen(NamedTuple):
    """The result of `Policy.choose` for a batch of B observations."""

    action: Columns
    """Action for the env: flat columns ``[B, ...]``."""
    chosen: Columns
    """Action of the module, before the connectors, as recordings store it: flat columns ``[B, ...]``."""
    state: PolicyState
    """The next state; {} if the policy has none."""
    logp: NDArray[np.float32] | None
    """Log-probabilities of what was chosen, float32 ``[B]``; 0 without exploration. None: not asked for, or unknown."""


class Policy:
    """A module with its connectors: takes the env's observations, returns the env's actions.

    Args:
        module: The module, which chooses actions.
        connectors: Transform the env's observations for the module, and the module's actions for the env; None: none.
        obs_space: The env's observation space, before the connectors. None: the module's.
        action_space: The env's action space, after the connectors. None: the module's.
    """

    def __init__(
        self,
        module: Module,
        connectors: Pipeline | None = None,
        *,
        obs_space: Space | None = None,
        action_space: Space | None = None,
    ) -> None:
        self.module = module
        self._acting = module.without_value()
        self.connectors = Pipeline() if connectors is None else connectors
        self.obs_space = module.obs_space if obs_space is None else obs_space
        self.action_space = module.action_space if action_space is None else action_space
        self._flatten, self._nest = Flattener(self.obs_space, col.OBS), Nester(self.action_space, col.ACTION)
        self._forms = {name: (leaf_shape(leaf), leaf_dtype(leaf)) for name, leaf in self._flatten.leaves.items()}
        parts = leaves(self.action_space, col.ACTION).items()
        self._named = {name: leaf for name, leaf in parts if isinstance(leaf, NamedDiscrete)}
        self._actors: dict[bool, Actor] = {}
        self._rng = np.random.default_rng()

    def __repr__(self) -> str:
        through = {"connectors": [repr(one) for one in self.connectors.connectors]} if len(self.connectors) else {}
        return short(self, f"{in_short(self.obs_space)} -> {in_short(self.action_space)}", **through)

    @property
    def remembers(self) -> bool:
        """Whether actions depend on earlier steps of the episode, so that `act` needs a state."""
        return self.module.recurrent or bool(self._remembering)

    @cached_property
    def _remembering(self) -> list[Connector]:
        """The connectors that use earlier steps."""
        return [c for c in self.connectors.connectors if c.context or c.new_state(1)]

    # -- acting by hand -----------------------------------------------------------------------------------------

    def initial_state(self, num_rows: int | None = None) -> PolicyState:
        """The state at the start of an episode, for `act`; {} if the policy has no state.

        Args:
            num_rows: The batch size of the observations; None: single observations.
        """
        if not self.remembers:
            return {}
        rows = 1 if num_rows is None else num_rows
        actions = leaves(self.module.action_space, col.ACTION) if self.readers(col.ACTION) else {}
        return {
            "first": np.ones(rows, bool),
            "action": {n: np.zeros((rows, *leaf_shape(leaf)), leaf_dtype(leaf)) for n, leaf in actions.items()},
            "memory": {name: np.repeat(part[None], rows, 0) for name, part in self._acting.initial_state().items()},
            "connectors": self.connectors.new_state(rows),
        }

    def readers(self, column: str) -> list[str]:
        """The names of the connectors that need the action or the reward of the last step, by the column's name."""
        return [c.name for c in self._remembering if column in (c.needs or (col.OBS, col.ACTION))]

    def act(
        self,
        obs: Any,
        state: PolicyState | None = None,
        *,
        reward: ArrayLike | None = None,
        first: ArrayLike | None = None,
        explore: bool = False,
        names: bool = False,
        rng: np.random.Generator | None = None,
    ) -> Any:
        """The action for an observation, or the actions for a batch of observations: the shapes decide.

        Args:
            obs: One observation as the env returns it, nested as `obs_space`; or a batch of arrays ``[B, *shape]``, as
                a vector env returns it. NumPy arrays, or torch tensors on any device. Parts with names
                (`NamedDiscrete`) may be strings.
            state: The state of the episode: `initial_state` at its start, then the state returned with the last action.
                It is not modified. A policy without state needs none.
            reward: The reward of the last step, a number or ``[B]``, for policies that use it (`PrevActionReward`,
                `ReturnToGo`).
            first: bool ``[B]``: rows of a batch that begin an episode, as in a vector env; their state is reset.
            explore: Sample the action from the module's distribution; otherwise take the most likely one.
            names: Return names instead of numbers where the action space has some: `NamedDiscrete`, as of a table whose
                actions were strings. A single action gives a string, a batch an array of strings.
            rng: The generator to sample with; None: the policy's own, seeded by the operating system.

        Returns:
            The action, nested as `action_space`: NumPy, or tensors on the device of the observation if that was of
            tensors. If ``state`` was given, a tuple of the action and the next state, which is always NumPy.

        Raises:
            SpaceError: the observation does not fit `obs_space`.
            SettingsError: the policy needs a state, but there is none, or one with another number of rows; or it needs
                the last reward, but there is none; or names are asked for, and the action space has none.
        """
        if names and not self._named:
            raise SettingsError(f"the actions {self.action_space} have no names: leave names=True out.")
        seen, is_batch, device = self._columns_of(obs)
        action, _, after, _ = self.choose(seen, state, reward=reward, first=first, explore=explore, rng=rng)
        if not is_batch:
            action = {name: column[0] for name, column in action.items()}
        answer: dict[str, Any] = dict(action) if device is None else _tensors(action, device)
        if names:
            answer |= {name: space.named(action[name]) for name, space in self._named.items()}
        nested = self._nest(answer)
        return nested if state is None else (nested, after)

    def choose(
        self,
        obs: Columns,
        state: PolicyState | None = None,
        *,
        reward: ArrayLike | None = None,
        first: ArrayLike | None = None,
        explore: bool = False,
        rng: np.random.Generator | None = None,
        with_logp: bool = False,
    ) -> Chosen:
        """Like `act`, but for flat columns of observations ``[B, ...]``, which are not checked; also returns what
        recordings store.

        Args:
            obs: Columns with the shapes and dtypes of `obs_space`, such as ``obs`` or ``obs/camera``.
            state: See `act`, as for the other arguments.
            with_logp: Also compute the log-probabilities.

        Raises:
            SettingsError: as in `act`.
        """
        rows = len(next(iter(obs.values())))
        actor = self._actor(explore, rng)
        after: PolicyState = {}
        if self.remembers:
            chosen, extras, after = self._step(actor, obs, state, reward, first)
        else:
            if self.connectors.observes:
                nothing = np.zeros(rows)
                obs = self.connectors.online(Inputs(np.arange(rows), obs, np.ones(rows, bool), {}, nothing)).obs
            chosen, extras = actor.step(obs)
        action = self.connectors.act(chosen) if self.connectors.acts else chosen
        logp = actor.logp(extras.get(col.DIST_INPUTS), chosen) if with_logp else None
        return Chosen(action, chosen, after, logp)

    def _actor(self, explore: bool, rng: np.random.Generator | None) -> Actor:
        if explore not in self._actors:
            self._actors[explore] = self._acting.actor(explore=explore)
        if self.module.training:
            self.module.eval()  # no dropout while acting; the learner switches back to training mode
        actor = self._actors[explore]
        actor.start(self._rng if rng is None else rng, 0)  # no random numbers are drawn in advance
        return actor

    def _columns_of(self, obs: Any) -> tuple[Columns, bool, torch.device | None]:
        """The NumPy columns ``[B, ...]`` of an observation or a batch; whether it is a batch; the device of its
        tensors."""
        device = None
        given: Columns = {}
        try:
            for name, value in self._flatten(obs).items():
                if isinstance(value, torch.Tensor):
                    device = value.device
                    value = host(value)
                given[name] = np.asarray(value)
                if given[name].dtype.kind in "UO" and isinstance(leaf := self._flatten.leaves[name], NamedDiscrete):
                    given[name] = leaf.numbers(value)
        except SpaceError as error:
            raise SpaceError(f"`{name}` of the observation: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SpaceError(f"the observation does not fit its space {self.obs_space}: {error!r}.") from error
        is_batch = all(given[name].ndim == len(shape) + 1 for name, (shape, _) in self._forms.items())
        rows = {len(value) for value in given.values()} if is_batch else {1}
        columns: Columns = {}
        for name, (shape, dtype) in self._forms.items():
            value = given[name] if is_batch else given[name][None]
            if len(rows) > 1 or value.shape[1:] != shape:
                raise SpaceError(
                    f"`{name}` has shape {given[name].shape}, but in its space {self.obs_space} it has shape {shape}: "
                    "give one observation, or arrays of observations with the batch axis in front, all of one length."
                )
            if value.dtype != dtype and not np.can_cast(value.dtype, dtype, "same_kind"):
                raise SpaceError(f"`{name}` has dtype {value.dtype}, but in its space {self.obs_space} {dtype}.")
            columns[name] = value.astype(dtype, copy=False)
        return columns, is_batch, device

    def _step(
        self,
        actor: Actor,
        obs: Columns,
        state: PolicyState | None,
        reward: ArrayLike | None,
        first: ArrayLike | None,
    ) -> tuple[Columns, Columns, PolicyState]:
        """The action of a policy with state, the other columns from its actor, and the next state."""
        rows = len(next(iter(obs.values())))
        if state is None or len(state.get("first", ())) != rows:
            raise SettingsError(
                f"this policy has a state: pass the state of {rows} rows, policy.initial_state("
                f"{rows if rows > 1 else ''}) at the start of an episode, then the state that act returned: "
                "`action, state = policy.act(obs, state)`."
            )
        begins = state["first"] if first is None else state["first"] | np.asarray(first, bool)
        if reward is None and not begins.all() and (readers := self.readers(col.REWARD)):
            raise SettingsError(f"{readers[0]} needs the last reward: policy.act(obs, state, reward=...).")
        earned = np.zeros(rows) if reward is None else np.broadcast_to(np.asarray(reward, np.float64), (rows,))
        memory, action = state["memory"], state["action"]
        if begins.any():
            memory = {name: where_rows(begins, 0.0, part).astype(np.float32) for name, part in memory.items()}
            action = {name: where_rows(begins, 0, part).astype(part.dtype) for name, part in action.items()}
            earned = np.where(begins, 0.0, earned)
        inputs, kept = self.connectors.step(Inputs(np.arange(rows), obs, begins, action, earned), state["connectors"])
        chosen, extras = actor.step(inputs.obs, col.prefixed(memory, col.STATE_IN) or None)
        after: PolicyState = {
            "first": np.zeros(rows, bool),
            "action": {name: chosen[name] for name in action},
            "memory": {name: extras[f"{col.STATE_OUT}{col.SEPARATOR}{name}"] for name in memory},
            "connectors": kept,
        }
        return chosen, extras, after

    # -- elsewhere ----------------------------------------------------------------------------------------------

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a file that runs without Etude: `act` with ``explore=False``, connectors included.

        The inputs are the columns of observations ``[B, ...]`` (``obs``, or ``obs/camera`` of a Dict), ``reward`` if it
        is needed, and the state, ``state_in/...``. The outputs are the columns of the action and ``state_out/...``. The
        file's metadata ``etude`` is JSON: the spaces, and the state at the start of an episode.

        Args:
            path: A file ending in ``.onnx``, for ONNX runtimes (needs ``etude[export]``), or in ``.pt2``, for
                `torch.export.load`. An existing file is replaced.

        Raises:
            SettingsError: a connector can't be exported, a package is missing, or the path has another suffix.
            ModuleError: torch can't export the network.
        """
        takes_reward = bool(self.readers(col.REWARD))
        traced = TracedPolicy(
            self._acting, self.connectors, self.obs_space, self.initial_state(1), takes_reward=takes_reward
        )

        def act(obs: Columns) -> Columns:
            rows = len(next(iter(obs.values())))
            actions = self.act(Nester(self.obs_space, col.OBS)(obs), self.initial_state(rows))[0]
            return Flattener(self.action_space, col.ACTION)(actions)

        export(path, traced, (self.obs_space, self.action_space), act)

    # -- other envs ---------------------------------------------------------------------------------------------

    def fitted(self, obs_space: Space, action_space: Space, where: str) -> "Policy":
        """A policy with the same module and copied connectors, for an env with these spaces.

        Raises:
            SettingsError: after the connectors, the spaces are not the module's. The message names ``where``.
        """
        connectors, module = self.connectors.copy(), self.module
        learned = connectors.state_dict()
        seen, acted = connectors.spaces(obs_space, action_space)
        if not (alike(seen, module.obs_space) and acted == module.action_space):
            raise SettingsError(
                f"the env {where} does not fit the module: after the connectors its spaces are {seen} "
                f"and {acted}, but the module was made for {module.obs_space} and {module.action_space}. "
                "If the actions of a recording have other units than the env's, put a connector such as "
                "rescale_action between them."
            )
        connectors.load_state_dict(learned)
        return Policy(module, connectors, obs_space=obs_space, action_space=action_space)


PolicyLike: TypeAlias = Policy | Module
"""A policy; or a module, as a policy without connectors."""


def _tensors(columns: Columns, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(column).to(device) for name, column in columns.items()}
