# SPDX-License-Identifier: Apache-2.0
"""What a function of the user's gives, as Experience that fits the spaces: every column checked, none dropped."""

import operator
from collections.abc import Hashable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.recordings.formats.inferring import reserved
from etude.spaces import Flattener, Space, leaf_dtype, leaf_shape, leaves

Given: TypeAlias = Experience | Mapping[str, Any] | None
Schema: TypeAlias = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""The dtype and the shape of a row of each column."""

_SEGMENT: Final = (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID, "t_start", col.TERMINATED, col.TRUNCATED, col.FINAL_OBS)


class Fitter:
    """Makes Experience of what a function gives, with the same columns every time.

    Columns are cast where no number changes: integers of any size, and floats. The first Experience says which columns
    there are beside those of the spaces, and what they are.
    """

    def __init__(self, obs_space: Space, action_space: Space) -> None:
        self._spaces = {col.OBS: obs_space, col.ACTION: action_space}
        self.leaves = {**leaves(obs_space, col.OBS), **leaves(action_space, col.ACTION)}
        self.schema: Schema = {name: (leaf_dtype(leaf), leaf_shape(leaf)) for name, leaf in self.leaves.items()}
        self._known = False

    def fitted(self, given: Any, name: str) -> list[Experience]:
        """One Experience for each thing given that has steps.

        Args:
            given: An Experience, a dict of one episode's columns, None, or a list of such.
            name: The id of an episode that has none.

        Raises:
            DataError: it is something else, or does not fit; the column, what was found and what is wanted are named.
        """
        many = given if isinstance(given, list | tuple) else [given]
        made = []
        for i, one in enumerate(many):
            if one is None:
                continue
            if isinstance(one, Mapping):
                one = self._episode(one, name if len(many) == 1 else f"{name}-{i}")
            if not isinstance(one, Experience):
                raise DataError(f"gave a {type(one).__name__}, not an Experience, a dict of columns, or a list of such")
            one.validate(finite=())
            if one.num_steps:
                made.append(self._checked(one))
        return made

    def nothing(self) -> Experience:
        """No rows, with all columns."""
        steps = {name: np.zeros((0, *shape), dtype) for name, (dtype, shape) in self.schema.items()}
        obs = col.subtree(steps, col.OBS)
        return Experience(steps, np.zeros(1, np.int64), Segments.of(0, episode_id=[]), obs)

    def _episode(self, given: Mapping[str, Any], name: str) -> Experience:
        """A dict of columns as one segment."""
        columns: Columns = {}
        for key, value in given.items():
            if key not in _SEGMENT:
                columns |= self._flat(key, value)
        actions = col.subtree(columns, col.ACTION)
        if not actions or not col.subtree(columns, col.OBS):
            raise DataError(f"gave the columns {', '.join(columns) or 'none'}, but `obs` and `action` are needed")
        for key, column in columns.items():
            if not column.ndim:
                raise DataError(f"gave `{key}` as a single number, not one for each step")
            if key in self.leaves:
                columns[key] = self._cast(key, column, "column")
        num = len(next(iter(actions.values())))
        final = self._final(given, columns, num)
        ends: dict[str, Any] = {
            flag: _flag(flag, given.get(flag, False), num) for flag in (col.TERMINATED, col.TRUNCATED)
        }
        episode_id = _id(col.EPISODE_ID, given)
        segments = Segments.of(
            1,
            episode_id=[name if episode_id is None else episode_id],
            agent_id=_id(col.AGENT_ID, given),
            module_id=_id(col.MODULE_ID, given),
            t_start=_step(given.get("t_start", 0)),
            has_final_obs=bool(final),
            **ends,
        )
        for key, column in columns.items():
            if len(column) != num:
                raise DataError(f"gave `{key}` with {len(column)} rows, but there are {num} actions")
        if not num:
            return Experience({}, np.zeros(1, np.int64), segments[:0], {})
        final = final or {key: np.zeros_like(column[:1]) for key, column in col.subtree(columns, col.OBS).items()}
        return Experience(columns, offsets_of(np.array([num])), segments, final)

    def _final(self, given: Mapping[str, Any], columns: Columns, num: int) -> Columns:
        """What was observed after the last step, ``[1, ...]``, taken away from the observations where it is there."""
        obs = col.subtree(columns, col.OBS)
        if col.FINAL_OBS in given:
            flat = self._flat(col.OBS, given[col.FINAL_OBS])
            return {name: self._cast(name, column[None], col.FINAL_OBS) for name, column in flat.items()}
        if not all(len(column) == num + 1 for column in obs.values()):
            return {}
        columns |= {name: column[:-1] for name, column in obs.items()}
        return {name: column[-1:] for name, column in obs.items()}

    def _flat(self, key: str, value: Any) -> Columns:
        if reserved(key):
            hint = " Give `obs` one row more than `action`, or `final_obs`." if key == col.NEXT_OBS else ""
            raise DataError(f"gave the column `{key}`, a name that a recording needs for itself.{hint}")
        if key in self._spaces and (key not in self.leaves or not isinstance(value, np.ndarray)):
            try:
                parts = Flattener(self._spaces[key], key)(value)
            except (LookupError, TypeError) as error:
                wanted = ", ".join(leaves(self._spaces[key], key))
                raise DataError(f"gave `{key}` without the parts of its space: {wanted} ({error!r})") from error
        else:
            parts = {key: value}
        return {name: _array(name, part) for name, part in parts.items()}

    def _checked(self, exp: Experience) -> Experience:
        steps = {name: np.asarray(column) for name, column in exp.numpy().steps.items()}
        if not self._known:
            for name, column in steps.items():
                self.schema.setdefault(name, (column.dtype, column.shape[1:]))
        self._check_names(steps)
        final_obs = {name: np.asarray(column) for name, column in exp.numpy().final_obs.items()}
        if not exp.segments.has_final_obs.all():  # zeros that mean nothing need not fit
            final_obs = {name: _known_or(column, steps[name][0], exp) for name, column in final_obs.items()}
        final_obs = {name: self._cast(name, column, col.FINAL_OBS) for name, column in final_obs.items()}
        fitted = {name: self._cast(name, steps[name], "column") for name in self.schema}
        self._known = True
        return Experience(fitted, exp.offsets, exp.segments, final_obs)

    def _check_names(self, steps: Columns) -> None:
        missing = [name for name in self.schema if name not in steps]
        more = [name for name in steps if name not in self.schema]
        if missing:
            raise DataError(
                f"gave no column `{missing[0]}`; wanted are {', '.join(self.schema)}; found: {', '.join(steps)}"
            )
        if more:
            raise DataError(f"gave a column `{more[0]}`, which the first rows have not: {', '.join(self.schema)}")

    def _cast(self, name: str, column: NDArray[Any], what: str) -> NDArray[Any]:
        dtype, shape = self.schema[name]
        leaf = self.leaves.get(name)
        wanted = f"{dtype} {list(shape)} a step" + (f" ({leaf})" if leaf is not None else ", as in the first rows")
        if column.shape[1:] != shape or not _fits(column.dtype, dtype):
            found = f"{column.dtype} {list(column.shape[1:])}"
            raise DataError(f"gave the {what} `{name}` as {found} a step, but wanted is {wanted}")
        out = column.astype(dtype, copy=False)
        if dtype.kind in "iu" and not np.can_cast(column.dtype, dtype) and (out != column).any():
            value = column[out != column].flat[0]
            raise DataError(f"gave the {what} `{name}` with {value} in it, but wanted is {wanted}")
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete) and len(out):
            _check_choices(f"the {what} `{name}`", out, leaf)
        return out


def _fits(found: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    if wanted.kind in "iu":
        return found.kind in "biu"
    if wanted.kind == "f":
        return found.kind in "biuf"
    return found == wanted


def _check_choices(what: str, column: NDArray[Any], leaf: "spaces.Discrete | spaces.MultiDiscrete") -> None:
    num: Any = leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec
    outside = (column < leaf.start) | (column >= leaf.start + num)
    if outside.any():
        raise DataError(f"gave {what} with {column[outside].flat[0]} in it, but wanted is {leaf}")


def _array(name: str, value: Any) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"gave `{name}`, which is no array of numbers of one shape ({error})") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"gave `{name}` as {array.dtype}, not numbers: turn it into numbers, or leave it out")
    return array


def _id(name: str, given: Mapping[str, Any]) -> str | None:
    value = given.get(name)
    if not isinstance(value, Hashable):
        raise DataError(f"gave `{name}` as {str(value)[:60]!r}: give one text for the whole episode")
    return None if value is None else str(value)


def _step(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**62:
        raise DataError(f"gave `t_start` as {str(value)[:60]!r}: give the number of the first step, from 0")
    return number


def _flag(name: str, value: Any, num: int) -> bool:
    try:
        flags = np.asarray(value)
    except ValueError:  # lists of several lengths
        flags = np.empty(0, object)
    if flags.dtype.kind not in "biu" or flags.shape not in ((), (num,)):
        raise DataError(f"gave `{name}` as {str(value)[:60]!r}: give true or false, or one for each of the {num} steps")
    if flags.ndim and flags[:-1].any():
        raise DataError(f"gave `{name}` true at step {int(flags.argmax())} of {num}: the episode goes on after its end")
    return bool(flags if not flags.ndim else flags.any())


def _known_or(final: NDArray[Any], other: NDArray[Any], exp: Experience) -> NDArray[Any]:
    """Final observations, with another one in place of those that are not known."""
    known = exp.segments.has_final_obs.reshape(-1, *(1,) * (final.ndim - 1))
    return np.where(known, final, other.astype(final.dtype)) if final.shape[1:] == other.shape else final
