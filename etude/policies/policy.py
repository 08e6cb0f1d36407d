# SPDX-License-Identifier: Apache-2.0
"""Policy: a module with its connectors, which acts on the env's observations."""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Connector, Inputs, Pipeline
from etude.display import short
from etude.errors import SettingsError, SpaceError, UnknownNameError
from etude.experience.arrays import host, not_finite
from etude.modules import Actor, Module
from etude.policies.export import TracedPolicy, advanced, export
from etude.spaces import (
    Flattener,
    NamedDiscrete,
    NamedVector,
    Nester,
    Space,
    alike,
    are_choices,
    described_value,
    in_short,
    in_words,
    is_bounded,
    leaf_dtype,
    leaf_shape,
    leaves,
    mismatch,
    same_bounds,
)

PolicyState: TypeAlias = dict[str, Any]
"""The state of a policy in running episodes: plain data and arrays ``[B, ...]``, from `Policy.initial_state`."""


ACT_ELSEWHERE: Final = (
    "predict get_action get_actions compute_action compute_single_action compute_actions select_action choose_action "
    "sample_action infer"
)
"""The names that other libraries use for `Policy.act`."""


LARGEST_REWARD: Final = float(np.finfo(np.float32).max)
"""The largest magnitude of a reward that `Policy.act` accepts."""

_EXPLORE: Final = "It takes the most likely action; explore=True samples one."


F = TypeVar("F", bound=Callable[..., Any])


def _arguments_hinted(method: F) -> F:
    """Decorate a method: wrong arguments raise a SettingsError that says what it takes. Correct calls are not slowed
    down."""

    @functools.wraps(method)
    def called(*given: Any, **named: Any) -> Any:
        try:
            return method(*given, **named)
        except TypeError:
            signature = inspect.signature(method)
            try:
                signature.bind(*given, **named)
            except TypeError as wrong:
                takes = ", ".join(name for name in signature.parameters if name != "self")
                hint = f" {_EXPLORE}" if "explore" in signature.parameters else ""
                raise SettingsError(f"Policy.{method.__name__}: {wrong}. It takes {takes}.{hint}") from None
            raise

    return cast(F, called)


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

    Raises:
        SettingsError: ``module`` is something else.
    """

    def __init__(
        self,
        module: Module,
        connectors: Pipeline | None = None,
        *,
        obs_space: Space | None = None,
        action_space: Space | None = None,
    ) -> None:
        if not isinstance(module, Module):
            raise SettingsError(
                f"Policy takes a module, not {module!r:.100}. The policy of a run is etude.load_policy(folder), that "
                "of an algorithm is algorithm.policy."
            )
        self.module = module
        self._acting = module.without_value()
        self.connectors = Pipeline() if connectors is None else connectors
        self.obs_space = module.obs_space if obs_space is None else obs_space
        self.action_space = module.action_space if action_space is None else action_space
        self._flatten, self._nest = Flattener(self.obs_space, col.OBS), Nester(self.action_space, col.ACTION)
        self._forms = {name: (leaf_shape(leaf), leaf_dtype(leaf)) for name, leaf in self._flatten.leaves.items()}
        parts = leaves(self.action_space, col.ACTION).items()
        self._named = {name: leaf for name, leaf in parts if isinstance(leaf, NamedDiscrete)}
        self._actors: dict[tuple[bool, int], Actor] = {}  # by exploration and thread, as actors have buffers
        self._rng = np.random.default_rng()

    def __repr__(self) -> str:
        through = {"connectors": [repr(one) for one in self.connectors.connectors]} if len(self.connectors) else {}
        return short(self, f"{in_short(self.obs_space)} -> {in_short(self.action_space)}", **through)

    if not TYPE_CHECKING:  # else mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that names the counterpart of other libraries' methods that act."""
            if name in ACT_ELSEWHERE.split():
                raise UnknownNameError(
                    f"Policy has no `{name}`. policy.act(obs) takes the most likely action; "
                    "policy.act(obs, explore=True) samples one."
                )
            return object.__getattribute__(self, name)  # raises the original error

    @property
    def remembers(self) -> bool:
        """Whether actions depend on earlier steps of the episode, so that `act` needs a state."""
        return self.module.recurrent or bool(self._remembering)

    @cached_property
    def _remembering(self) -> list[Connector]:
        """The connectors that use earlier steps."""
        return [c for c in self.connectors.connectors if c.context or c.new_state(1)]

    # -- acting in your own loop --------------------------------------------------------------------------------

    def initial_state(self, num_rows: int | None = None) -> PolicyState:
        """The state at the start of an episode, for `act`; {} if the policy has no state.

        Args:
            num_rows: The batch size of the observations; None: single observations.

        Raises:
            SettingsError: ``num_rows`` is not a number of rows.
        """
        if not self.remembers:
            return {}
        rows = 1 if num_rows is None else num_rows
        if not isinstance(rows, int | np.integer) or rows < 0:
            raise SettingsError(
                f"`num_rows` is {num_rows!r}, but must be a number of rows, or None for one observation."
            )
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

    @_arguments_hinted
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
            SpaceError: the observation does not fit `obs_space`: a part is missing, has another shape or kind of
                numbers, is NaN or infinite, or is no choice of its `Discrete` space. Numbers outside the bounds of a
                Box are accepted, and parts that the space does not have are ignored.
            SettingsError: ``state`` is missing, has another number of rows, is of another policy, or is given to a
                policy without state; the policy needs the last reward, and it is missing; ``names`` is set, and the
                action space has none; or an argument has the wrong type or is unknown.
        """
        if not isinstance(state, Mapping | None):
            raise SettingsError(
                f"`state` is {state!r:.50}, but must be the state that policy.initial_state() or the last act returned."
                + (f" {_EXPLORE}" if isinstance(state, bool) else "")
            )
        if rng is not None and not isinstance(rng, np.random.Generator):
            raise SettingsError(f"`rng` is {rng!r}, but must be a generator, such as numpy.random.default_rng(3).")
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
            action, chosen, extras, after = self._step(actor, obs, state, reward, first)
        else:
            if state:
                raise SettingsError(
                    "this policy has no state, but was given one, as of another policy: give {}, or leave `state` out."
                )
            if self.connectors.observes:
                nothing = np.zeros(rows)
                obs = self.connectors.online(Inputs(np.arange(rows), obs, np.ones(rows, bool), {}, nothing)).obs
            chosen, extras = actor.step(obs)
            action = self.connectors.act(chosen) if self.connectors.acts else chosen
        logp = actor.logp(extras.get(col.DIST_INPUTS), chosen) if with_logp else None
        return Chosen(action, chosen, after, logp)

    def _actor(self, explore: bool, rng: np.random.Generator | None) -> Actor:
        own = explore, threading.get_ident()
        if own not in self._actors:
            self._actors[own] = self._acting.actor(explore=explore)
        if self.module.training:
            self.module.eval()  # no dropout while acting; the learner switches back to training mode
        actor = self._actors[own]
        actor.start(self._rng if rng is None else rng, 0)  # no random numbers are drawn in advance
        return actor

    def _columns_of(self, obs: Any) -> tuple[Columns, bool, torch.device | None]:
        """The NumPy columns ``[B, ...]`` of an observation or a batch; whether it is a batch; the device of its
        tensors."""
        device = None
        given: Columns = {}
        try:
            parts = self._flatten(obs)
        except (KeyError, IndexError, TypeError) as error:
            raise mismatch(self.obs_space, obs, col.OBS) from error
        for name, value in parts.items():
            device = value.device if isinstance(value, torch.Tensor) else device
            given[name] = _array(name, self._flatten.leaves[name], value)
        is_batch = all(given[name].ndim == len(shape) + 1 for name, (shape, _) in self._forms.items())
        rows = {len(value) for value in given.values()} if is_batch else {1}
        columns: Columns = {}
        for name, (shape, dtype) in self._forms.items():
            value = given[name] if is_batch else given[name][None]
            if len(rows) > 1 or value.shape[1:] != shape:
                raise SpaceError(
                    f"`{name}` has shape {given[name].shape}, but in its space {in_words(self.obs_space)} it has "
                    f"shape {shape}: give one observation, or arrays of observations with the batch axis in front, all "
                    "of one length."
                )
            columns[name] = value if value.dtype == dtype else _cast(name, value, dtype)
            _check(name, self._flatten.leaves[name], columns[name], is_batch=is_batch)
        return columns, is_batch, device

    def _step(
        self,
        actor: Actor,
        obs: Columns,
        state: PolicyState | None,
        reward: ArrayLike | None,
        first: ArrayLike | None,
    ) -> tuple[Columns, Columns, Columns, PolicyState]:
        """The env's action from a policy with state, the module's, other columns from its actor, and the next state."""
        rows = len(next(iter(obs.values())))
        if state is None or len(state.get("first", ())) != rows:
            raise SettingsError(
                f"this policy has a state: pass that of {rows} row{'s' if rows > 1 else ''}, policy.initial_state("
                f"{rows if rows > 1 else ''}) at the start of an episode, then the state that act returned: "
                "`action, state = policy.act(obs, state)`."
            )
        self._check_state(state, rows)
        begins = state["first"] if first is None else state["first"] | _for_rows("first", first, rows, bool)
        if reward is None and not begins.all() and (readers := self.readers(col.REWARD)):
            raise SettingsError(f"{readers[0]} needs the last reward: policy.act(obs, state, reward=...).")
        if reward is None:
            earned = np.zeros(rows)
        else:
            earned = _for_rows("reward", reward, rows, np.float64)
            if not (fits := begins | (np.abs(earned) <= LARGEST_REWARD)).all() and self.readers(col.REWARD):
                raise SettingsError(
                    f"`reward` is {earned[~fits][0]}, but must be finite, and no larger than float32 allows."
                )

        def choose(seen: Columns, memory: Columns) -> tuple[Columns, Columns]:
            return actor.step(seen, col.prefixed(memory, col.STATE_IN) or None)

        return advanced(self.connectors, Inputs(np.arange(rows), obs, begins, state["action"], earned), state, choose)

    @cached_property
    def _state_forms(self) -> dict[str, dict[str, tuple[tuple[int, ...], np.dtype[Any]]]]:
        """The shapes, without the rows, and the dtypes of the memory and the action in a state."""
        start = self.initial_state(1)
        return {
            part: {name: (array.shape[1:], array.dtype) for name, array in start[part].items()}
            for part in ("memory", "action")
        }

    def _check_state(self, state: PolicyState, rows: int) -> None:
        """Raise a SettingsError for a state of another policy, or one that was changed."""
        wrong = "" if isinstance(state["first"], np.ndarray) else "first"
        for part, forms in self._state_forms.items():
            given = state.get(part)
            if not isinstance(given, Mapping) or given.keys() != forms.keys():
                wrong = part
                continue
            for name, (shape, dtype) in forms.items():
                array = given[name]
                is_ours = isinstance(array, np.ndarray) and array.shape == (rows, *shape)
                if not is_ours or not np.can_cast(array.dtype, dtype, "safe" if part == "memory" else "same_kind"):
                    wrong = f"{part}/{name}"
        if wrong or not isinstance(state.get("connectors"), Mapping):
            raise SettingsError(
                f"`state` is not one of this policy: its `{wrong or 'connectors'}` has another form. Pass what "
                "policy.initial_state() or the last act of the same policy returned."
            )

    # -- elsewhere ----------------------------------------------------------------------------------------------

    @_arguments_hinted
    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a file that runs without Etude: `act` with ``explore=False``, connectors included.

        The inputs are the columns of observations ``[B, ...]`` (``obs``, or ``obs/camera`` of a Dict), ``reward`` if it
        is needed, and the state, ``state_in/...``. The outputs are the columns of the action and ``state_out/...``. The
        file's metadata ``etude`` is JSON: the spaces, and the state at the start of an episode.

        Args:
            path: A file ending in ``.onnx``, for ONNX runtimes (needs ``etude[export]``), or in ``.pt2``, for
                `torch.export.load`. An existing file is replaced, and the folder is created if there is none.

        Raises:
            SettingsError: the module, its distribution or a connector can't be exported, a package is missing, or the
                path has another suffix or can't be written.
            ModuleError: torch can't export the network.
        """
        if not self.module.can_be_exported:
            raise SettingsError(
                f"{type(self.module).__name__} acts by code of your own, which can't be exported: export its network "
                "(policy.module.net) with torch.export or torch.onnx, and write the rest where it runs."
            )
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
            hint = "If the actions of a recording have other units than the env's, put a connector such as "
            hint += "rescale_action between them."
            if is_bounded(acted) and not is_bounded(module.action_space):
                hint = "The recording that it learned from does not state the bounds of actions: set `env` when "
                hint += "training begins, or open the recording with the env's `action_space`."
            raise SettingsError(
                f"the env {where} does not fit the module: after the connectors its spaces are {seen} "
                f"and {acted}, but the module was made for {module.obs_space} and {module.action_space}. {hint}"
            )
        connectors.load_state_dict(learned)
        return Policy(module, connectors, obs_space=obs_space, action_space=action_space)


def check_same_actions(policy: Policy, action_space: Space, where: str) -> None:
    """Raise a SettingsError if an env's bounds of actions are not those that the policy acts in: connectors such as
    `rescale_action` would map the same choice to another action there."""
    if not same_bounds(action_space, policy.action_space):
        raise SettingsError(
            f"the env {where} takes actions in {action_space}, but the policy acts in {policy.action_space}: its "
            "connectors would give other actions there than policy.act does. Play it in an env with the same "
            "bounds; if it learns from a recording, open that with the env's `action_space`."
        )


PolicyLike: TypeAlias = Policy | Module
"""A policy; or a module, as a policy without connectors."""


def _for_rows(name: str, value: ArrayLike, rows: int, dtype: type) -> NDArray[Any]:
    """One number for all rows, or an array ``[rows]``."""
    try:
        array = np.asarray(host(value) if isinstance(value, torch.Tensor) else value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"an array of dtype {array.dtype}")
        return np.broadcast_to(array.astype(dtype), (rows,))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"`{name}` is {value!r}, but must be a number, or one for each of {rows} rows.") from error


def _array(name: str, leaf: Space, value: Any) -> NDArray[Any]:
    """A part of an observation as an array of numbers."""
    if hasattr(value, "columns") and hasattr(value, "to_numpy"):
        raise SpaceError(
            f"`{name}` is a {type(value).__name__}, whose column names are not looked at: give an array of the columns "
            "in the order of the observation, such as table[[...]].to_numpy()."
        )
    if isinstance(leaf, NamedVector) and hasattr(value, "to_numpy"):  # a row of pandas
        labels = tuple(getattr(value, "index", ()))
        if labels != leaf.names and {*labels} == {*leaf.names}:
            raise SpaceError(
                f"`{name}` has its numbers in the order {', '.join(labels)}, but the policy learned from "
                f"{', '.join(leaf.names)}: write row[{list(leaf.names)}]."
            )
    try:
        if isinstance(value, torch.Tensor):
            value = host(value.float() if value.dtype == torch.bfloat16 else value)  # NumPy has no bfloat16
        array = np.asarray(value)
        if array.dtype.kind in "UO" and isinstance(leaf, NamedDiscrete):
            return leaf.numbers(value)
    except SpaceError as error:
        raise SpaceError(f"`{name}` of the observation: {error}") from error
    except ValueError as error:
        raise SpaceError(f"`{name}` is no array of numbers: its rows differ in length or depth.") from error
    except (TypeError, RuntimeError) as error:  # such as of tensors on meta, or lists of tensors on a GPU
        raise SpaceError(f"`{name}` can't be read as an array of numbers: {error}") from error
    if array.dtype.kind not in "biuf":
        found = described_value(value) if array.ndim == 0 else f"an array of dtype {array.dtype}"
        hint = " Convert it first, such as with .astype(float)." if array.dtype == object and array.ndim else ""
        raise SpaceError(f"`{name}` is {found}, but must be numbers of its space {in_words(leaf)}.{hint}")
    return array


def _cast(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array in the dtype of its space; numbers may not lose their fractions, or leave its range."""
    if not (np.can_cast(array.dtype, dtype, "same_kind") or array.dtype.kind + dtype.kind in ("iu", "ui")):
        raise SpaceError(f"`{name}` has dtype {array.dtype}, but in its space {dtype}.")
    with np.errstate(over="ignore"):  # becomes infinite, which is refused
        cast = array.astype(dtype)
    if dtype.kind in "iu" and (cast != array).any():
        raise SpaceError(f"`{name}` has a number outside the range of {dtype}, the dtype of its space.")
    return cast


def _check(name: str, leaf: Space, batch: NDArray[Any], *, is_batch: bool) -> None:
    """Raise a SpaceError for NaN, infinity, and numbers that are no choices of their space."""
    inside = are_choices(leaf, batch)
    rows = not_finite(batch) if inside is None else np.flatnonzero(~inside)
    if len(rows):
        fault = "is not finite" if inside is None else f"is outside its space {leaf}"
        raise SpaceError(f"`{name}`{f' of row {rows[0]}' if is_batch else ''} {fault}: {batch[rows[0]]}.")


def _tensors(columns: Columns, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(column).to(device) for name, column in columns.items()}
