# SPDX-License-Identifier: Apache-2.0
"""`Source`: a table of steps, and a mapping from Etude's columns to the table's."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from etude import columns as col
from etude.columns import SEPARATOR
from etude.display import short
from etude.errors import DataError, SettingsError
from etude.files import RemotePath, shown
from etude.settings import choice, suggestion
from etude.spaces import Space

C = TypeVar("C")
KEYS: Final = (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID)
DONE: Final = "done"
FLAGS: Final = (col.TERMINATED, col.TRUNCATED, DONE)
EVERY_ROW: Final = "every-row"
LAST_ROW: Final = "last-row"
"""Values that a flag can be mapped to instead of a column: set in every row, or in the last row of each episode."""
MONTH_FIRST: Final = "month-first"
DAY_FIRST: Final = "day-first"
DATE_ORDERS: Final = (MONTH_FIRST, DAY_FIRST)
"""Suffixes of the column of ``t``, as in ``date:day-first``: how to read dates such as 1/2/2026."""
PROPENSITY: Final = "propensity"
"""The probability of the action taken; its logarithm is ``logp``."""
OUTPUTS: Final = (
    *(col.REWARD, col.ENV_T, col.LOGP, col.DIST_INPUTS, col.VALUE, col.ADVANTAGE, col.VALUE_TARGET, col.WEIGHT),
    *(col.STATE_IN, col.STATE_OUT, col.INFO),
)
NAMES: Final = (col.OBS, col.ACTION, col.NEXT_OBS, col.FINAL_OBS, *OUTPUTS, PROPENSITY, *FLAGS, *KEYS, col.T_INDEX)
"""What a table's columns can be mapped to; a part of a nested column is written ``obs/camera``."""

_ROOTS: Final = (col.OBS, col.ACTION, col.NEXT_OBS, col.FINAL_OBS, *OUTPUTS)
_OWN: Final = (*KEYS, col.SEGMENT, col.T_INDEX, *FLAGS)
PRESETS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "rllib": {
        col.OBS: ("obs",),
        col.ACTION: ("actions", "action"),
        col.REWARD: ("rewards", "reward"),
        col.NEXT_OBS: ("new_obs", "next_obs"),
        col.TERMINATED: ("terminateds", "terminated"),
        col.TRUNCATED: ("truncateds", "truncated"),
        DONE: ("dones", "done"),
        col.EPISODE_ID: ("eps_id",),
        col.AGENT_ID: ("agent_id",),
        col.MODULE_ID: ("module_id",),
        col.T_INDEX: ("t",),
        col.LOGP: ("action_logp",),
        col.DIST_INPUTS: ("action_dist_inputs",),
        col.VALUE: ("vf_preds",),
    },
    "d4rl": {
        col.OBS: ("observations",),
        col.ACTION: ("actions",),
        col.REWARD: ("rewards",),
        col.NEXT_OBS: ("next_observations",),
        col.TERMINATED: ("terminals",),
        col.TRUNCATED: ("timeouts",),
        DONE: ("dones", "done"),
    },
}
"""Column names of other tools; the first name that a table has is used."""
_SUCH: Final = {"obs": ["speed", "angle"], "action": "command"}
ETUDE: Final = "etude"
"""The preset for an Etude recording that another tool has rewritten: each column is mapped to its own name."""


def _arguments_checked(cls: type[C]) -> type[C]:
    """Make unknown arguments of a dataclass raise a SettingsError that says where they belong."""
    made: Any = cls
    plain_init, known = made.__init__, [field.name for field in dataclasses.fields(made)]

    @functools.wraps(plain_init)
    def checked_init(self: Any, *unnamed: Any, **given: Any) -> None:
        others = [name for name in given if name not in known]
        if mapped := {name: given[name] for name in others if name in NAMES}:
            raise SettingsError(
                f"{cls.__name__} has no argument `{next(iter(mapped))}`: which of the table's columns is what "
                f"goes into `columns`. Write {cls.__name__}(..., columns={mapped})."
            )
        if others:
            raise SettingsError(f"{cls.__name__} has no argument `{others[0]}`. {choice(others[0], known)}")
        plain_init(self, *unnamed, **given)

    made.__init__ = checked_init
    return cls


@_arguments_checked
@dataclasses.dataclass(frozen=True)
class Source:
    """A table of steps, and what its columns mean.

    ```python
    Source("logs/*.parquet", columns={"obs": ["speed", "angle"], "action": "command", "episode_id": "trip", "t": "i"})
    ```
    """

    data: Any
    """A path, URL, glob or folder of Parquet, JSON, CSV or Arrow IPC files (by suffix), or a list of these; or a table
    in memory: a pyarrow table, a table of a library that exports Arrow data (pandas, polars, a Ray dataset), or a dict
    of arrays ``[rows, ...]``. Without `columns` and `preset`, the keys of a dict are taken as Etude's names."""
    columns: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)
    """Maps Etude's columns to the table's. Etude's columns are ``obs``, ``action``, ``next_obs``, ``reward``,
    ``terminated``, ``truncated``, ``done`` (either of the two, as in older tools), ``episode_id``, ``t``, ``agent_id``,
    ``module_id``, ``logp`` and so on; ``obs/camera`` is a part of a nested observation. ``final_obs`` is an alternative
    to ``next_obs``: the observation after a row, empty where the next row holds it. A list of scalar columns forms one
    vector. If some columns of a list hold text or lists, each of them is a part of its own, and the others form the
    vector ``numbers``. A list of columns for ``episode_id``, such as a vehicle and the number of its trip, forms one
    id. ``state.speed`` is a member of the struct ``state``. The table's other columns keep their names, with the prefix
    ``extra/`` if Etude uses the name itself.

    ``propensity`` is the probability of the action taken, above 0 and at most 1, from which ``logp`` is computed. A
    flag can be ``every-row`` instead of a column (each row ends its episode, as in a bandit's log), or ``last-row``
    (the last row of each episode ends it). ``:month-first`` or ``:day-first`` after the name of the column of ``t``
    says how to read dates such as 1/2/2026."""
    preset: str | None = None
    """Column names to use for what `columns` does not map. ``rllib`` and ``d4rl`` are the names of these tools.
    ``etude`` is for an Etude recording that another tool has rewritten: sorted, filtered, or stripped of its
    metadata."""
    obs_space: Space | None = None
    """The observation space. None infers it from the values: an unbounded Box, Discrete for scalar integers from 0,
    NamedDiscrete for text."""
    action_space: Space | None = None
    """The action space. None infers it, as for `obs_space`."""
    env: str | None = None
    """The id of the env, if known."""
    filesystem: Any = dataclasses.field(default=None, repr=False)
    """The pyarrow or fsspec file system of the paths; by default, the URL's, or the local one."""

    def __repr__(self) -> str:
        """Leave out credentials, which a URL may contain."""
        return short(self, described(self.data), columns=dict(self.columns))

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping):
            raise SettingsError(f"Source.columns is {self.columns!r}, but must map names of columns, such as {_SUCH}.")
        for name, own in self.columns.items():
            if name not in NAMES and name.split(SEPARATOR)[0] not in _ROOTS:
                known = f"known are {', '.join(NAMES)}.{suggestion(name, NAMES)}"
                raise SettingsError(f"Source.columns has `{name}`; {known}")
            is_single = name in (*FLAGS, *KEYS[1:], col.T_INDEX, PROPENSITY)
            several = own if isinstance(own, list | tuple) and not is_single else ()
            if not isinstance(own, str) and not (several and all(isinstance(part, str) for part in several)):
                what = "the name of one column" if is_single else "a column's name, or a list of names"
                raise SettingsError(f"Source.columns[{name!r}] is {own!r}: give {what}.")
            if twice := [part for part in several if several.count(part) > 1]:
                raise SettingsError(f"Source.columns[{name!r}] has `{twice[0]}` twice: name each column once.")
        if self.preset is not None and self.preset not in (*PRESETS, ETUDE):
            raise SettingsError(f"Source.preset is {self.preset!r}; known are {', '.join((*PRESETS, ETUDE))}.")

    @property
    def lacking(self) -> list[str]:
        """Those of ``obs`` and ``action`` that have no space."""
        return [root for root, space in ((col.OBS, self.obs_space), (col.ACTION, self.action_space)) if space is None]

    @property
    def named(self) -> list[str]:
        """The table's columns that `columns` names, each once."""
        given = (own for each in self.columns.values() for own in ([each] if isinstance(each, str) else each))
        return list(dict.fromkeys(without_order(own, ())[0] for own in given))

    def mapped(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the mapped columns of a table that has the columns ``names``, by Etude's names.

        A flag may have `EVERY_ROW` or `LAST_ROW` in place of a column.

        Raises:
            DataError: a mapped column does not exist, observations or actions are not mapped, or both ``propensity``
                and ``logp`` are.
        """
        out = {name: (own,) if isinstance(own, str) else tuple(own) for name, own in self.columns.items()}
        if col.T_INDEX in out:
            out[col.T_INDEX] = (without_order(out[col.T_INDEX][0], names)[0],)
        for name, own in out.items():
            for part in own:
                if part not in names and not (name in FLAGS and part in (EVERY_ROW, LAST_ROW)):
                    there = f"there are {', '.join(names)}.{suggestion(part, names)}"
                    raise DataError(f"there is no column `{part}` for `{name}`; {there}")
        if self.preset == ETUDE or (isinstance(self.data, Mapping) and not self.columns and self.preset is None):
            out = {name: (name,) for name in names if name in _OWN or name.split(SEPARATOR)[0] in _ROOTS} | out
            if {*FLAGS[:2]} <= out.keys() and DONE not in self.columns:
                out.pop(DONE, None)
        for name, known in PRESETS.get(self.preset or "", {}).items():
            found = next((own for own in known if own in names), None)
            taken = name == DONE and {*FLAGS[:2]} <= out.keys()
            if found and not taken and not any(col.is_under(mapped, name) for mapped in out):
                out[name] = (found,)
        if PROPENSITY in out and col.LOGP in out:
            raise DataError(f"`{PROPENSITY}` and `{col.LOGP}` mean the same: map only one of them.")
        for root in (col.OBS, col.ACTION):
            if not col.under(out, root):
                raise DataError(f"`{root}` is not mapped: name its column; the table has {', '.join(names)}.")
        return out


def without_order(own: str, names: Sequence[str]) -> tuple[str, str | None]:
    """Split the column of ``t`` into its name and a suffix in `DATE_ORDERS`.

    The suffix is None if there is none, or if one of the table's columns ``names`` has the whole name.
    """
    column, _, order = own.rpartition(":")
    return (column, order) if order in DATE_ORDERS and column and own not in names else (own, None)


def spaces_added(data: Any, obs_space: Space | None, action_space: Space | None) -> Any:
    """Fill in the spaces of each `Source` in ``data`` that lacks them; its numbers and names are then read by these."""
    if isinstance(data, list | tuple):
        return type(data)(spaces_added(one, obs_space, action_space) for one in data)
    if not isinstance(data, Source):
        return data
    seen = obs_space if data.obs_space is None else data.obs_space
    acted = action_space if data.action_space is None else data.action_space
    return dataclasses.replace(data, obs_space=seen, action_space=acted)


def is_paths(data: Any) -> bool:
    """Whether ``data`` is a path or URL, or a list of them, rather than a table."""
    several = data if isinstance(data, list | tuple) and data else [data]
    return all(isinstance(part, str | os.PathLike | RemotePath) for part in several)


def described(data: Any) -> str:
    """Describe the data of a `Source`, without credentials."""
    return shown(data) if is_paths(data) else "the table"
