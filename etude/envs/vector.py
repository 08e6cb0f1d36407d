# SPDX-License-Identifier: Apache-2.0
"""VectorArena: Gymnasium's vector envs as an Arena, with the same steps in every autoreset mode."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.display import short
from etude.envs import env_state
from etude.envs.adapters import (
    OFF_POLICY_ACTION,
    bad_step_error,
    reduced_spaces,
    warn_of_closing,
    warn_of_masks,
    warn_of_wrappers,
)
from etude.envs.arena import BoundsCheck, Kind, Turn, closed, turn_from_state, turn_to_state
from etude.envs.registry import env_maker, env_name, make_one, named
from etude.errors import EnvError, SpaceError, described
from etude.experience import arrays
from etude.experience.arrays import Array
from etude.spaces import (
    Flattener,
    Keys,
    Nester,
    Space,
    are_choices,
    check_finite_value,
    check_form,
    check_value,
    choices_of,
    in_short,
    leaf_dtype,
    leaf_shape,
    leaves,
    mismatch,
    part_at,
    walk,
)

if TYPE_CHECKING:
    import torch

_EQUAL: Final = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
}
"""Envs whose vectorised version is known, and tested, to follow the same rules.

No other vectorised version is used unless the user asks for it, because it may differ from the single env that is
evaluated, recorded and filmed. ALE's, for example, stacks, skips and resizes frames.

"""

_BOOL: Final = np.dtype(bool)
_log = logging.getLogger("etude.envs")
_told: set[str] = set()  # ids whose unused vectorised version was mentioned


class VectorArena:
    """The copies of a vector env, stepped together in this process. See `Arena` for the methods.

    The env's arrays are NumPy arrays; `etude.envs.tensors.TensorArena` is for envs with torch tensors.

    Args:
        env: See `make_vector_env`.
        num_envs: The number of copies, at least 1; each is one slot.
        exact: See `make_vector_env`.
        max_steps: See `Workers.max_steps`.
        check: See `Workers.check`.
        drop: See `make_arena`.

    Raises:
        EnvError: the env can't be made, does not say its autoreset mode, or can't be truncated after ``max_steps``.
        SpaceError: Etude can't handle a space.
    """

    device: "torch.device | None" = None

    def __init__(
        self,
        env: str | VectorEnv[Any, Any, Any] | Callable[[], Any],
        num_envs: int = 1,
        *,
        exact: bool = True,
        max_steps: int | None = None,
        check: int | Literal["always"] = 10,
        drop: Sequence[str] = (),
    ) -> None:
        self.env: VectorEnv[Any, Any, Any] = make_vector_env(env, num_envs, exact=exact, max_steps=max_steps)
        warn_of_wrappers(self.env)
        self._is_given = isinstance(env, VectorEnv)
        self._is_closed = False
        self.num_slots: int = self.env.num_envs
        self.obs_space = reduced_spaces((self.env.single_observation_space,), tuple(drop))[0]
        self.action_space = self.env.single_action_space
        self._mode = self._autoreset_mode()
        self._max_steps = self._own_limit(env, max_steps)
        self._t = np.zeros(self.num_slots, np.int64)  # steps of the running episodes; only counted if max_steps is set
        self._unchecked = 1 << 62 if check == "always" else check
        self._flatten = Flattener(self.obs_space, col.OBS)
        batched = leaves(batch_space(self.obs_space, self.num_slots), col.OBS)
        self._batched = {name: (leaf, leaf_shape(leaf), self._dtype(leaf)) for name, leaf in batched.items()}
        self._choices = {name: leaf for name, leaf in self._flatten.leaves.items() if choices_of(leaf) is not None}
        self._nest_action = Nester(self.action_space, col.ACTION)
        self._action_parts = walk(self.action_space, col.ACTION)
        self._turns: list[Turn] = []
        self._reset_due: NDArray[np.bool_] | None = None  # copies that the next step resets
        self._reset_infos: dict[str, Any] = {}  # from the last resets made here
        self._slots = np.arange(self.num_slots)
        self.num_envs = self.num_slots
        self.env_of: NDArray[np.int64] = self._slots
        self.agents: list[str | None] = [None] * self.num_slots
        self.kinds: tuple[Kind, ...] = (Kind(self.obs_space, self.action_space, range(self.num_slots)),)
        self._bounds = BoundsCheck(self.kinds, self.env_of, self.agents, check)

    def __repr__(self) -> str:
        return short(self, f"{in_short(self.obs_space)} -> {in_short(self.action_space)}", num_envs=self.num_envs)

    def _autoreset_mode(self) -> AutoresetMode:
        mode = (self.env.metadata or {}).get("autoreset_mode")
        for known in AutoresetMode:
            if mode in (known, known.name, known.value):
                return known
        raise EnvError(
            f"{type(self.env).__name__} does not say how it resets: its metadata['autoreset_mode'] is {mode!r}. Set it "
            f"to {', '.join(map(str, AutoresetMode))}. Without it, steps would be credited to wrong episodes."
        )

    def _own_limit(self, env: Any, max_steps: int | None) -> int | None:
        """``max_steps`` if episodes must be truncated here; None if the env does that, or there is no limit.

        Raises:
            EnvError: they can't be truncated.
        """
        if max_steps is None or (isinstance(env, str) and (getattr(self.env.spec, "max_episode_steps", None))):
            return None
        if self._mode is not AutoresetMode.DISABLED:
            raise EnvError(
                f"{type(self.env).__name__} resets its copies itself, so their episodes can't be truncated after "
                f"{max_steps} steps (workers.max_steps, trajectories.at_max_length): give it a limit of its own, such "
                "as max_episode_steps, or give a function that makes one env."
            )
        return max_steps

    def _call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a method of the env. Errors that no env should raise, such as SystemExit, become an EnvError."""
        try:
            return method(*args, **named)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise EnvError(f"{type(self.env).__name__} raised {described(error)}") from error

    @staticmethod
    def _dtype(leaf: Space) -> Any:
        """The dtype of the arrays or tensors of a leaf."""
        return leaf_dtype(leaf)

    def _columns(self, obs: Any) -> Columns:
        """The observations of all copies as flat columns, with the shapes and the dtypes of their space."""
        try:
            columns = {col.OBS: obs} if col.OBS in self._batched else self._flatten(obs)
        except (KeyError, IndexError, TypeError) as error:
            raise mismatch(batch_space(self.obs_space, self.num_slots), obs, col.OBS) from error
        for name, (leaf, shape, dtype) in self._batched.items():
            column = columns[name]
            if getattr(column, "dtype", None) is not dtype or column.shape != shape:
                columns[name] = self._fitted(name, leaf, column)
        return columns

    def _fitted(self, name: str, leaf: Space, column: Any) -> Any:
        """An observation of all copies with the dtype of its space.

        Raises:
            SpaceError: it has another shape, or does not fit the dtype.
        """
        array = np.asarray(column)
        check_form(name, leaf, array)
        return array.astype(leaf_dtype(leaf), copy=False)

    def _check(self, columns: Columns) -> None:
        """Check that the observations of all copies are in their space."""
        self._unchecked -= 1
        host = arrays.host_columns(columns)
        obs = Nester(self.obs_space, col.OBS)(host)
        check_value(batch_space(self.obs_space, self.num_slots), obs, col.OBS)
        self._check_choices(host, self._slots)

    def _check_flags(self, *flags: NDArray[Any]) -> None:
        for name, flag in zip((col.TERMINATED, col.TRUNCATED), flags, strict=True):
            if flag.shape != (self.num_slots,) or flag.dtype.kind != "b":
                raise EnvError(f"`{name}` is {flag!r}, but must be an array of {self.num_slots} booleans.")

    def _check_choices(self, columns: Columns, rows: NDArray[np.int64]) -> None:
        """Check that discrete observations of the copies ``rows`` are in their space; on a GPU, that takes too long."""
        for name, leaf in self._choices.items():
            column: Array = columns[name]
            if isinstance(column, np.ndarray) or column.device.type == "cpu":
                _check_inside(name, leaf, np.asarray(column), rows)

    def reset(self, seed: int | None = None) -> None:
        """See `Arena.reset`."""
        if self._is_closed:
            raise closed()
        obs, info = self._begin(seed)
        self._reset_infos = info = self._infos(info)
        warn_of_masks(self.env_at(0), self.obs_space, info)
        columns = self._columns(obs)
        if self._unchecked:
            self._check(columns)
        self._check_choices(columns, self._slots)
        self._t[:] = 0
        n = self.num_slots
        self._reset_due = None
        self._turns = [Turn(self._slots, columns, np.zeros(n), None, None, np.ones(n, bool), infos=info)]

    def _begin(self, seed: int | None) -> tuple[Any, Any]:
        """Reset the env: its observations and infos."""
        obs, info = self._call(self.env.reset, seed=seed)
        _refuse_tensors(self.env, obs)
        return obs, info

    def _infos(self, infos: Any) -> dict[str, Any]:
        """The infos of a step or a reset.

        Raises:
            EnvError: they are not a mapping.
        """
        if not isinstance(infos, Mapping | None):
            raise EnvError(
                f"the infos of {type(self.env).__name__} are of type {type(infos).__name__}, but must be a dict, {{}} "
                "if there are none. Leave out a wrapper that changes them, such as DictInfoToList."
            )
        return dict(infos or {})

    def _reset_rows(self, rows: NDArray[np.bool_]) -> tuple[Any, Any]:
        """Reset only the copies in ``rows`` (bool ``[num_envs]``): the env's observations and infos."""
        given: tuple[Any, Any] = self._call(self.env.reset, options={"reset_mask": rows.copy()})
        return given

    def _on_host(self, obs: Any, *rest: Any) -> tuple[Any, ...]:
        """The five values of a step with tensors, with rewards and flags as NumPy arrays."""
        raise NotImplementedError

    def recv(self) -> list[Turn]:
        """See `Arena.recv`."""
        if self._is_closed:
            raise closed()
        if not self._turns:
            raise EnvError("the arena was not reset: call reset() before recv().")
        if not self._bounds.is_over:
            self._bounds.look_at(self._turns)
        return self._turns

    def send(self, turn: Turn, action: Columns) -> None:
        """See `Arena.send`."""
        if self._is_closed:
            raise closed()
        given = self._call(self.env.step, self._nest_action(action))
        if len(given) != 5:
            raise bad_step_error(self.env, given)
        if given[4].__class__ is not dict:
            given = *given[:4], self._infos(given[4])
        obs, reward, terminated, truncated, info = given if self.device is None else self._on_host(*given)
        if not (isinstance(reward, np.ndarray) and terminated.__class__ is truncated.__class__ is np.ndarray):
            _refuse_tensors(self.env, (obs, reward, terminated, truncated))
            reward, terminated, truncated = map(np.asarray, (reward, terminated, truncated))
        if reward.shape != self._slots.shape or reward.dtype.kind not in "fiub":
            raise EnvError(
                f"`reward` has shape {np.shape(reward)} and dtype {reward.dtype}, but must have one number for each of "
                f"the {self.num_slots} copies: shape {self._slots.shape}."
            )
        columns = self._columns(obs)
        if self._unchecked:
            self._check(columns)
        if self._max_steps is not None:
            self._t += 1
            truncated = truncated | ((self._t >= self._max_steps) & ~terminated)
            self._t[terminated | truncated] = 0
        if self._choices:
            self._check_choices(columns, self._slots)
        turn = Turn(self._slots, columns, reward, None, None, infos=info)
        if info and OFF_POLICY_ACTION in info:
            turn.taken = self._taken(info)
        self._turns = [turn]
        if self._reset_due is not None:
            turn.first, self._reset_due = self._reset_due, None
        if terminated.dtype is not _BOOL or truncated.dtype is not _BOOL:
            self._check_flags(terminated, truncated)
        done = terminated | truncated
        if done.shape != self._slots.shape:
            self._check_flags(terminated, truncated)
        if not np.count_nonzero(done):
            return
        turn.terminated, turn.truncated = terminated, truncated
        if self._mode is AutoresetMode.NEXT_STEP:
            self._reset_due = done
        else:
            self._turns = [self._end(turn, done, info), self._begun(turn, done, obs)]

    def _end(self, turn: Turn, done: NDArray[np.bool_], info: dict[str, Any]) -> Turn:
        """The turn of the rows whose episodes ended, if the env or this arena resets them in the same step."""
        rows = np.flatnonzero(done)
        end = turn.select(rows)
        end.waits, end.infos = False, info
        if self._mode is AutoresetMode.DISABLED:
            return end
        if "final_obs" not in info:
            raise EnvError(
                f"{type(self.env).__name__} resets in the same step, but its info has no 'final_obs' when an episode "
                f"ended (it has {sorted(info)}): the last observation would be lost."
            )
        try:
            end.obs = self._final_columns(info["final_obs"], rows)
        except (SpaceError, IndexError) as error:
            raise SpaceError(f"the last observations, info['final_obs'], do not fit: {error}") from error
        end.infos = info.get("final_info", {})
        if OFF_POLICY_ACTION in end.infos and (taken := self._taken(end.infos)) is not None:
            which, columns = taken
            there = np.isin(which, rows)
            end.taken = np.searchsorted(rows, which[there]), {name: c[there] for name, c in columns.items()}
        self._check_choices(end.obs, rows)
        return end

    def _begun(self, turn: Turn, done: NDArray[np.bool_], obs: Any) -> Turn:
        """The turn of all rows, in which the rows whose episodes ended begin new ones."""
        columns, taken = turn.obs, turn.taken
        if self._mode is AutoresetMode.DISABLED:
            obs, infos = self._reset_rows(done)
            self._reset_infos = self._infos(infos)
            columns = self._columns(obs)
            self._check_choices(columns, self._slots)
        if taken is not None:
            there = ~done[taken[0]]
            taken = (taken[0][there], {name: column[there] for name, column in taken[1].items()})
        return Turn(self._slots, columns, turn.reward, None, None, done, taken=taken, infos=turn.infos)

    def _taken(self, info: dict[str, Any]) -> tuple[NDArray[np.int64], Columns] | None:
        """The actions that the env took instead, and their rows, marked in Gymnasium's ``_off_policy_action``."""
        given, there = info[OFF_POLICY_ACTION], info.get(f"_{OFF_POLICY_ACTION}")
        rows = self._slots if there is None else np.flatnonzero(arrays.host(there) if arrays.is_array(there) else there)
        columns: Columns = {}
        for name, path, leaf in self._action_parts if len(rows) else ():
            shown = name.replace(col.ACTION, OFF_POLICY_ACTION, 1)
            try:
                column = _rows_at(given, path, rows, self.num_slots)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise mismatch(batch_space(self.action_space, self.num_slots), given, OFF_POLICY_ACTION) from error
            columns[name] = self._fitted(shown, batch_space(leaf, len(rows)), column)
            host = arrays.host(columns[name])
            check_finite_value(shown, host)
            _check_inside(shown, leaf, host, rows)
        return (rows, columns) if columns else None

    def _final_columns(self, final: Any, rows: NDArray[np.int64]) -> Columns:
        if isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object):
            for row in rows:
                check_value(self.obs_space, final[row], f"final_obs of copy {row}")
            parts = [self._flatten(final[row]) for row in rows]
            return {
                name: np.stack([part[name] for part in parts]).astype(leaf_dtype(leaf), copy=False)
                for name, leaf in self._flatten.leaves.items()
            }
        return {name: column[rows] for name, column in self._columns(final).items()}

    def state_dict(self) -> dict[str, Any]:
        """See `Arena.state_dict`."""
        if not self._turns:
            return {"how": "new episodes", "why": "the arena was not reset"}
        return env_state.capture_env(self.env) | {
            "turns": [turn_to_state(turn) for turn in self._turns],
            "reset_due": None if self._reset_due is None else self._reset_due.copy(),
            "t": self._t.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `Arena.load_state_dict`."""
        if state["how"] == "new episodes":
            return f"new episodes: {state['why']}"
        self.reset()  # creates the env's attributes, into which the state is restored
        try:
            env_state.restore_env(self.env, state)
        except env_state.CannotRestoreError as error:
            self.reset()
            return f"new episodes: {error}"
        self._turns = [turn_from_state(turn) for turn in state["turns"]]
        due = state["reset_due"]
        self._reset_due = None if due is None else np.asarray(due, bool).reshape(self.num_slots)
        self._t[:] = state["t"]
        return str(state["how"])

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return self.env.envs[env] if isinstance(self.env, SyncVectorEnv) else self.env

    def info_of(self, turn: Turn, slot: int) -> dict[str, Any]:
        """See `Arena.info_of`."""
        is_reset = self._mode is AutoresetMode.DISABLED and turn.first is not None and turn.first[slot]
        return _info_of(self._reset_infos if is_reset else turn.infos or {}, slot, self.num_slots)

    def stats(self) -> dict[str, float]:
        """See `Arena.stats`. There are no failures to count: an error in a vector env ends the run."""
        return {}

    def close(self) -> None:
        """See `Arena.close`. A VectorEnv object that was given is not closed."""
        self._is_closed, self._turns = True, []
        if not self._is_given:
            try:
                self.env.close()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - nothing is lost
                warn_of_closing(type(self.env).__name__, error)


def _rows_at(values: Any, path: Keys, rows: NDArray[np.int64], num_envs: int) -> Array:
    """The rows of one part of nested values. Gymnasium gathers tuples in an array with one of them for each copy."""
    keys = list(path)
    while keys and not arrays.is_array(values):
        values = values[keys.pop(0)]
    if np.shape(values)[:1] != (num_envs,):
        raise ValueError(f"there is not one value for each of the {num_envs} copies")
    values = values if arrays.is_array(values) else np.asarray(values)
    if keys or values.dtype == object:
        return np.asarray([part_at(keys, values[row]) for row in rows])
    return arrays.take(values, rows)


def _check_inside(name: str, leaf: Space, array: NDArray[Any], rows: NDArray[np.int64]) -> None:
    """Raise a SpaceError if values of the copies ``rows`` are not in their space of choices."""
    are_inside = are_choices(leaf, array)
    if are_inside is not None and not are_inside.all():
        row = int(np.argmin(are_inside))
        raise SpaceError(f"copy {rows[row]}: `{name}` is {array[row]}, outside its space {leaf}.")


def _refuse_tensors(env: VectorEnv[Any, Any, Any], given: Any) -> None:
    """Raise an EnvError if an env returns torch tensors in place of NumPy arrays."""
    if holds_tensors(given):
        raise EnvError(
            f"{type(env).__name__} returns torch tensors, but does not say on which device: set its attribute "
            "`device`, such as env.device = 'cuda', before the run is made. Observations and actions then stay there."
        )


def holds_tensors(value: Any) -> bool:
    """Whether there is a torch tensor in nested dicts and tuples."""
    if isinstance(value, dict | tuple):
        return any(map(holds_tensors, value.values() if isinstance(value, dict) else value))
    torch = sys.modules.get("torch")  # None if nobody imported it: then there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def _info_of(infos: dict[str, Any], env: int, num_envs: int) -> dict[str, Any]:
    """The info of one copy; Gymnasium's mask ``_key`` marks the copies that have a value under ``key``."""
    info = {}
    for key, values in infos.items():
        is_mask = key.startswith("_") and key[1:] in infos
        there = infos.get(f"_{key}")
        if is_mask or key in ("final_obs", "final_info") or (there is not None and not there[env]):
            continue
        if isinstance(values, dict):
            info[key] = _info_of(values, env, num_envs)
        else:
            info[key] = values[env] if np.ndim(values) and len(values) == num_envs else values
    return info


# -- making vector envs ---------------------------------------------------------------------------------------------


def make_vector_env(
    env: str | VectorEnv[Any, Any, Any] | Callable[[], Any],
    num_envs: int,
    *,
    exact: bool = True,
    max_steps: int | None = None,
) -> VectorEnv[Any, Any, Any]:
    """Make a vector env of ``num_envs`` copies.

    Args:
        env: A ``VectorEnv`` object, used as it is; a function or class that makes one, or ``module:function``; or the
            id of an env whose own vectorised version follows the same rules, as CartPole's does.
        num_envs: The number of copies, at least 1.
        exact: Whether a given ``VectorEnv`` must have exactly ``num_envs`` copies.
        max_steps: Steps after which an env's own vectorised version truncates an episode, if it has such a limit.

    Raises:
        EnvError: the id is not registered (the nearest one is named), the module or its function can't be found, or
            the result is not a vector env.
    """
    if num_envs < 1:
        raise EnvError(f"num_envs must be at least 1, not {num_envs}.")
    name = env_name(env)
    if isinstance(env, str) and (spec := vector_spec(env, num_envs)) is not None:
        limits: dict[str, Any] = {"num_envs": num_envs, "vectorization_mode": "vector_entry_point"}
        if max_steps is not None and spec.max_episode_steps is not None:
            limits["max_episode_steps"] = min(max_steps, spec.max_episode_steps)
        env = functools.partial(gym.make_vec, spec, **limits)
    made = env if isinstance(env, VectorEnv) else make_one(env_maker(env)[0], name)
    if isinstance(made, VectorEnv) and not hasattr(made, "num_envs"):
        raise EnvError(f"{type(made).__name__} does not say how many copies it has: set its attribute `num_envs`.")
    if not isinstance(made, VectorEnv) or not hasattr(made, "single_observation_space"):
        raise EnvError(
            f"{name} gives a {type(made).__name__}, not a VectorEnv with single_observation_space: make_arena steps "
            "copies of one env, of PettingZoo's too."
        )
    if exact:
        check_count(made, num_envs)
    return made


def check_count(envs: Any, num_envs: int) -> None:
    """Raise an EnvError if a vector env or an arena does not have ``num_envs`` envs."""
    if envs.num_envs != num_envs:
        raise EnvError(
            f"the {type(envs).__name__} has {envs.num_envs} envs, but num_envs is {num_envs}: set "
            f"num_envs={envs.num_envs}."
        )


def vector_spec(name: str, num_envs: int) -> EnvSpec | None:
    """The spec of the vectorised version of the env ``id`` or ``module:id``; None if none follows the same rules.

    Raises:
        EnvError: there is no such env.
    """
    spec = named(name)
    if not isinstance(spec, EnvSpec) or not spec.vector_entry_point:
        return None
    if isinstance(spec.entry_point, str) and _EQUAL.get(spec.entry_point) == spec.vector_entry_point:
        has_limit = spec.max_episode_steps is not None  # without one, the vectorised version has its own
        return spec if has_limit and not spec.additional_wrappers else None
    if spec.id not in _told:
        _told.add(spec.id)
        _log.warning(
            "%s has a vectorised version of its own (%s), which may differ from the single env that is evaluated, "
            "recorded and watched: copies of the single env are stepped. To use the vectorised version everywhere, "
            "give a function that makes it: env=lambda: gymnasium.make_vec(%r, %d, 'vector_entry_point').",
            spec.id,
            spec.vector_entry_point,
            spec.id,
            num_envs,
        )
    return None
