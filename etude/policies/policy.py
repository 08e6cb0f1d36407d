# SPDX-License-Identifier: Apache-2.0
"""Policy: a module with its connectors, which acts on the env's observations."""

import copy
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Connector, Inputs, Pipeline
from etude.connectors.pipeline import overrides
from etude.errors import SettingsError, SpaceError
from etude.modules import Actor, Module
from etude.spaces import Flattener, Nester, Space, alike, leaf_dtype, leaf_shape, leaves

PolicyState: TypeAlias = dict[str, Any]
"""The state of a policy in running episodes: plain data and arrays ``[B, ...]``, from `Policy.initial_state`."""


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
        self.connectors = Pipeline() if connectors is None else connectors
        self.obs_space = module.obs_space if obs_space is None else obs_space
        self.action_space = module.action_space if action_space is None else action_space
        self._flatten, self._nest = Flattener(self.obs_space, col.OBS), Nester(self.action_space, col.ACTION)
        self._forms = {name: (leaf_shape(leaf), leaf_dtype(leaf)) for name, leaf in self._flatten.leaves.items()}
        self._actors: dict[bool, Actor] = {}

    @property
    def remembers(self) -> bool:
        """Whether actions depend on earlier steps of the episode, so that `act` needs a state."""
        return self.module.recurrent or any(map(_has_memory, self.connectors.connectors))

    # -- acting by hand -----------------------------------------------------------------------------------------

    def initial_state(self, num_rows: int | None = None) -> PolicyState:
        """The state at the start of an episode, for `act`; {} if the policy has no state.

        Args:
            num_rows: The batch size of the observations; None: single observations.
        """
        if not self.remembers:
            return {}
        rows = 1 if num_rows is None else num_rows
        actions = leaves(self.module.action_space, col.ACTION)
        pipeline = self._own_pipeline()
        pipeline.start(rows)
        return {
            "first": np.ones(rows, bool),
            "action": {n: np.zeros((rows, *leaf_shape(leaf)), leaf_dtype(leaf)) for n, leaf in actions.items()},
            "memory": {name: np.repeat(part[None], rows, 0) for name, part in self.module.initial_state().items()},
            "connectors": _slots_of(pipeline),
        }

    def act(
        self,
        obs: Any,
        state: PolicyState | None = None,
        *,
        reward: ArrayLike | None = None,
        first: ArrayLike | None = None,
        explore: bool = False,
        rng: np.random.Generator | None = None,
    ) -> Any:
        """The action for an observation, or the actions for a batch of observations, as told by the shapes.

        Args:
            obs: One observation as the env returns it, nested as `obs_space`; or a batch of arrays ``[B, *shape]``.
            state: The state of the episode: `initial_state` at its start, then the state returned with the last action.
                It is not modified. A policy without state needs none.
            reward: The reward of the last step, a number or ``[B]``, for policies that use it (`PrevActionReward`).
            first: bool ``[B]``: rows of a batch that begin an episode, as in a vector env; their state is reset.
            explore: Sample the action from the module's distribution; otherwise take the most likely one.
            rng: The generator to sample with; None: one that is seeded by the operating system.

        Returns:
            The action, nested as `action_space`; if ``state`` was given, a tuple of the action and the next state.

        Raises:
            SpaceError: the observation does not fit `obs_space`.
            SettingsError: the policy needs a state, but there is none, or one with another number of rows; or it needs
                the last reward, but there is none.
        """
        seen, is_batch = self._columns_of(obs)
        rows = len(next(iter(seen.values())))
        actor, pipeline = self._actor(explore, rng, rows), self.connectors
        if not self.remembers:
            if pipeline.observes:
                nothing = np.zeros(rows)
                seen = pipeline.online(Inputs(np.arange(rows), seen, np.ones(rows, bool), {}, nothing)).obs
            action = self._nested(actor.step(seen)[0], is_batch)
            return action if state is None else (action, {})
        inputs, memory, pipeline = self._resumed(seen, state, reward, first)
        if pipeline.observes:
            seen = pipeline.online(inputs).obs
        chosen, extras = actor.step(seen, col.prefixed(memory, col.STATE_IN) or None)
        after: PolicyState = {
            "first": np.zeros(rows, bool),
            "action": chosen,
            "memory": {name: extras[f"{col.STATE_OUT}{col.SEPARATOR}{name}"] for name in memory},
            "connectors": _slots_of(pipeline),
        }
        return self._nested(chosen, is_batch), after

    def _actor(self, explore: bool, rng: np.random.Generator | None, rows: int) -> Actor:
        if explore not in self._actors:
            self._actors[explore] = self.module.actor(explore=explore)
        if self.module.training:
            self.module.eval()  # no dropout while acting; the learner switches back to training mode
        actor = self._actors[explore]
        if explore:
            rng = np.random.default_rng() if rng is None else rng
        actor.start(_NOTHING_IS_DRAWN if rng is None else rng, rows)
        return actor

    def _columns_of(self, obs: Any) -> tuple[Columns, bool]:
        """The columns ``[B, ...]`` of an observation or of a batch, and whether it is a batch."""
        try:
            given = {name: np.asarray(value) for name, value in self._flatten(obs).items()}
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
                    "give one observation, or arrays of observations with the batch's axis in front, all of one length."
                )
            if not np.can_cast(value.dtype, dtype, "same_kind"):
                raise SpaceError(f"`{name}` has dtype {value.dtype}, but in its space {self.obs_space} {dtype}.")
            columns[name] = value.astype(dtype, copy=False)
        return columns, is_batch

    def _resumed(
        self, obs: Columns, state: PolicyState | None, reward: ArrayLike | None, first: ArrayLike | None
    ) -> tuple[Inputs, Columns, Pipeline]:
        """The inputs of a policy with state: rows for the connectors, the module's state, and the connectors."""
        rows = len(next(iter(obs.values())))
        if state is None or len(state.get("first", ())) != rows:
            raise SettingsError(
                f"this policy has a state: pass the state of {rows} rows, policy.initial_state("
                f"{rows if rows > 1 else ''}) at the start of an episode, then the state that act returned: "
                "`action, state = policy.act(obs, state)`."
            )
        begins = state["first"] if first is None else state["first"] | np.asarray(first, bool)
        readers = [c.name for c in self.connectors.connectors if _has_memory(c) and col.REWARD in (c.needs or ())]
        if readers and reward is None and not begins.all():
            raise SettingsError(f"{readers[0]} needs the last reward: policy.act(obs, state, reward=...).")
        earned = np.zeros(rows) if reward is None else np.broadcast_to(np.asarray(reward, np.float64), (rows,))
        initial = self.module.initial_state()
        memory = {name: _with_rows(part, begins, initial[name]) for name, part in state["memory"].items()}
        action = {name: _with_rows(part, begins, 0) for name, part in state["action"].items()}
        pipeline = self._own_pipeline()
        for i, kept in state["connectors"].items():
            pipeline.connectors[int(i)].load_state_dict(kept)
        return Inputs(np.arange(rows), obs, begins, action, np.where(begins, 0.0, earned)), memory, pipeline

    def _own_pipeline(self) -> Pipeline:
        """The connectors, with copies of those that have state per slot, which a runner may be using."""
        return Pipeline([copy.deepcopy(c) if _has_slots(c) else c for c in self.connectors.connectors])

    def _nested(self, chosen: Columns, is_batch: bool) -> Any:
        action = self.connectors.act(chosen) if self.connectors.acts else chosen
        if not is_batch:
            action = {name: column[0] for name, column in action.items()}
        return self._nest(action)

    # -- other envs ---------------------------------------------------------------------------------------------

    def fitted(self, obs_space: Space, action_space: Space, where: str) -> "Policy":
        """A policy with the same module and copied connectors, for an env with these spaces.

        Raises:
            SettingsError: after the connectors, the spaces are not those of the module. The message names ``where``.
        """
        connectors, module = self.connectors.copy(), self.module
        learned = connectors.state_dict()
        seen, acted = connectors.spaces(obs_space, action_space)
        if not (alike(seen, module.obs_space) and acted == module.action_space):
            raise SettingsError(
                f"the env {where} does not fit the module: behind the connectors it has the spaces {seen} "
                f"and {acted}, but the module was made for {module.obs_space} and {module.action_space}. "
                "Where the actions of a recording are in other units than the env's, a connector such as "
                "rescale_action goes between."
            )
        connectors.load_state_dict(learned)
        return Policy(module, connectors, obs_space=obs_space, action_space=action_space)


PolicyLike: TypeAlias = Policy | Module
"""A policy; or a module, as a policy without connectors."""

_NOTHING_IS_DRAWN = np.random.default_rng(0)


def _has_slots(connector: Connector) -> bool:
    return overrides(connector, "start")


def _has_memory(connector: Connector) -> bool:
    return bool(connector.context) or _has_slots(connector)


def _slots_of(pipeline: Pipeline) -> dict[str, Any]:
    return {str(i): c.state_dict() for i, c in enumerate(pipeline.connectors) if _has_slots(c)}


def _with_rows(column: NDArray[Any], rows: NDArray[np.bool_], value: Any) -> NDArray[Any]:
    """A copy of a column with a value in some rows."""
    column = np.array(column)
    column[rows] = value
    return column
