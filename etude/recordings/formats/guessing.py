# SPDX-License-Identifier: Apache-2.0
"""Guess what the columns of a table mean, for a person to check. No table is read according to a guess alone.

The rules, in order; they look at the first `MOST_ROWS` rows:

1. A column has the role that its name suggests (`CALLED`, in lower case, with ``_`` between words), if its values fit:
   flags are true or false, propensities are in (0, 1], and so on. Of several columns for one role, the one whose name
   comes first in `CALLED` has it. If several rows have the same episode id and ``t``, but differ in another id or text,
   both columns form the episode id (``van,trip``). With an episode id, the only column of times is ``t``.
2. Without a column named as an action, the action is all columns with names such as ``action_0`` or ``a1``; else the
   only text column with at most `MOST_CHOICES` different values.
3. The observation is a column named as one; else all columns with names such as ``obs_0``, ``state_speed`` or ``x3``;
   else all other columns that can be observed: numbers, booleans, lists, structs, and text with at most `MOST_CHOICES`
   different values. Constants are left out, and so are ids: names that end in ``id`` or ``index``, and text or integers
   that differ in every row. A column such as ``next_speed`` beside ``speed`` is not an observation; if every
   observation has one, these are the next observations.
4. Without a column named as a flag, one that is set in the last row of each episode, and nowhere else, is ``done``. If
   there is none, an episode ends at its last row (``terminated=last-row``). Without flags and without an episode id,
   each row is an episode (``terminated=every-row``), as in a bandit's log, unless ``t`` starts again.
5. With a flag and without an episode id, rows of several machines or people may be mixed. If a column shows that they
   are, the user has to make an episode id, for which the guess has a placeholder (``episode_id=COLUMN``).
"""

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.recordings.formats import table_index
from etude.recordings.formats.arrow import is_list, is_number, is_text, one_array, shown
from etude.recordings.formats.inferring import written_numbers
from etude.recordings.formats.source import (
    DATE_ORDERS,
    DAY_FIRST,
    DONE,
    EVERY_ROW,
    FLAGS,
    LAST_ROW,
    MONTH_FIRST,
    PROPENSITY,
)
from etude.recordings.formats.table_inputs import BROKEN, Group, groups_of, joint_schema, no_rows, unreadable

MOST_ROWS: Final = 65_536
MOST_CHOICES: Final = 100
CALLED: Final[Mapping[str, Sequence[str]]] = {
    name: words.split()
    for name, words in {
        col.EPISODE_ID: "episode_id episode eps_id episode_index ep_id ep trajectory_id trajectory traj_id traj "
        "trip_id trip session_id session rollout_id rollout run_id run trial_id trial game_id match_id visit_id "
        "stay_id",
        col.AGENT_ID: "agent_id agent player_id player",
        col.T_INDEX: "t step time_step timestep step_id step_index frame_index tick turn time timestamp ts datetime "
        "date when",
        col.ACTION: "action actions act action_id action_taken chosen_action command arm treatment decision choice "
        "chosen offer a",
        col.REWARD: "reward rewards rew score payoff payout revenue outcome profit click clicked conversion converted "
        "purchase r",
        col.TERMINATED: "terminated terminateds terminal terminals is_terminal churned churn",
        col.TRUNCATED: "truncated truncateds timeout timeouts",
        DONE: "done dones is_done is_last last end ended is_end finished is_final game_over over",
        PROPENSITY: "propensity propensity_score pscore action_prob action_probability behavior_prob behaviour_prob "
        "prob probability p",
        col.LOGP: "logp log_prob logprob action_logp log_propensity",
        col.NEXT_OBS: "next_obs new_obs next_observation next_observations next_state next_states",
        col.OBS: "obs observation observations state states context features",
    }.items()
}
"""Common column names for each role, the most specific ones first."""
PEOPLE: Final = ("user_id", "user", "customer_id", "customer", "client_id", "member_id", "patient_id", "subject_id")
"""Names of columns that identify people. If a flag ends the rows of each person once, these rows are an episode."""
_MACHINE: Final = (
    r"(vehicle|van|car|truck|bus|robot|machine|device|sensor|station|site|plant|line|building|store|shop|zone|unit)"
    r"(_\w+)?"
)
"""Names of columns that identify things that may number their own episodes."""
_ID: Final = r"(^|_)(id|uuid)$"
_PART: Final = r"(obs|observations?|states?|context|features?|feat)_\w+|x_?\d+|s_?\d+"
_ACTION_PART: Final = r"(actions?|act|a)_?\d+"
PLACEHOLDER: Final = "COLUMN"
_MIXED_ROWS: Final = "docs/your-data.md, Mixed rows"
_RISES: Final = 10
"""How often a reward above 0 must rise further to be taken for a running total."""
_CHANCE: Final = 0.01
"""The probability of a pattern of flags by chance, below which it is taken as evidence."""


@dataclasses.dataclass(frozen=True)
class ColumnFacts:
    """Facts about a column of a table, from its first rows."""

    type: str
    """The name of its Arrow type."""
    distinct: int | None
    """The number of different values; None for lists and similar types."""
    missing: int
    """The number of empty rows."""
    examples: tuple[str, ...]
    """The first three values that are not missing, as text."""


@dataclasses.dataclass(frozen=True)
class Guess:
    """A guess of the ``columns`` of a `Source`."""

    columns: Mapping[str, str | tuple[str, ...]]
    """The table's columns by Etude's names; ``COLUMN`` if none was found for a required name."""
    unsure: tuple[str, ...]
    """What to check, in words; empty if the names of all columns say what they are."""
    found: Mapping[str, ColumnFacts]
    """Facts about each column of the table."""
    rows: int
    """The number of rows in the table."""

    @property
    def words(self) -> str:
        """The guess as a command line option: ``--columns obs=speed,load action=command``."""
        return " ".join(["--columns", *(shlex.quote(f"{name}={_word(own)}") for name, own in self.columns.items())])

    def to_json(self) -> dict[str, Any]:
        """Return the guess as JSON data."""
        return {**dataclasses.asdict(self), "words": self.words}


def guess_columns(data: Any, filesystem: Any = None) -> Guess:
    """Guess what the columns of a table mean. Check the guess: it is based on names and the first 65,536 rows.

    Args:
        data: A path, URL, glob, folder, list of them, or a table in memory; see `Source.data`.
        filesystem: The file system of the paths; see `Source.filesystem`.

    Raises:
        DataError: there is no table, the table can't be read, or it has no rows or no columns.
    """
    found = groups_of(data, filesystem)
    groups = [group for group in found if group.num_rows]
    if not groups:
        raise no_rows(data, found)
    if not any(group.schema.names for group in groups):
        raise DataError("the table has no columns: there is nothing to guess from.")
    first: list[pa.Table] = []
    try:
        for group in groups:
            if sum(table.num_rows for table in first) < MOST_ROWS:
                first.append(group.read(group.schema.names))
        table = _as_one(groups, first).slice(0, MOST_ROWS)
        return _Guessing(table, sum(group.num_rows for group in groups)).guess()
    except BROKEN as error:
        raise unreadable(groups[0].file, error) from error


def _as_one(groups: Sequence[Group], first: Sequence[pa.Table]) -> pa.Table:
    """The ``first`` tables of ``groups`` as one; ids that are text in some and numbers in others are text."""
    names = dict.fromkeys(name for group in groups for name in group.schema.names)
    schema, _ = joint_schema(groups, [name for name in names if _is_called_id(name)])
    same = [table.cast(pa.schema([schema.field(name) for name in table.column_names])) for table in first]
    return pa.concat_tables(same, promote_options="permissive")


def _is_person(name: str) -> bool:
    return _plain_name(name) in PEOPLE


def _is_called_id(name: str) -> bool:
    called = _plain_name(name)
    return called in (*CALLED[col.EPISODE_ID], *CALLED[col.AGENT_ID], *PEOPLE) or re.search(_ID, called) is not None


def _names_of_next(name: str) -> tuple[str, ...]:
    """Names for the column of the next values of the column ``name``."""
    called = _plain_name(name)
    return f"next_{called}", f"{called}_next", f"new_{called}"


def _word(own: str | Sequence[str]) -> str:
    names = [own] if isinstance(own, str) else list(own)
    return json.dumps(names) if any("," in name or name[:1] in "[{" for name in names) else ",".join(names)


def _plain_name(name: str) -> str:
    """Turn names such as ``EpisodeId`` and ``episode id`` into ``episode_id``."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"\W+", "_", split).strip("_").lower()


class _Guessing:
    """The columns of a table, the roles found so far, and what is uncertain."""

    def __init__(self, table: pa.Table, num_rows: int) -> None:
        self._columns = {name: _decoded(one_array(table[name])) for name in table.column_names}
        self._rows, self._all_rows = int(table.num_rows), num_rows
        self._distinct = {name: _num_distinct(array) for name, array in self._columns.items()}
        self._left = list(self._columns)
        self._taken: dict[str, tuple[str, ...]] = {}
        self._unsure: list[str] = []

    def guess(self) -> Guess:
        """Apply the rules."""
        for role in CALLED:
            self._take_called(role)
        self._take_time()
        self._take_count()
        self._take_episode()
        self._take_person()
        entities = self._entities()
        self._take_ends()
        if col.ACTION not in self._taken:
            self._take_action()
        self._take_observations()
        if col.REWARD not in self._taken:
            self._note("no column is named like a reward: without one, only imitation (bc) can learn")
        self._end_episodes()
        self._check_mixed(entities)
        self._check_total()
        self._check_values()
        first = (col.OBS, col.ACTION, col.REWARD, col.EPISODE_ID, col.AGENT_ID, col.T_INDEX)
        taken = {role: self._taken[role] for role in (*first, *self._taken) if role in self._taken}
        columns = {role: own[0] if len(own) == 1 else own for role, own in taken.items()}
        found = {name: self._facts(name) for name in self._columns}
        return Guess(columns, tuple(self._unsure), found, self._all_rows)

    def _facts(self, name: str) -> ColumnFacts:
        array = self._columns[name]
        examples = tuple(shown(value) for value in array.drop_null().slice(0, 3))
        return ColumnFacts(str(array.type), self._distinct[name], array.null_count, examples)

    def _one(self, role: str) -> str | None:
        """The (first) column with this role; None if there is none."""
        return self._taken[role][0] if role in self._taken else None

    def _named(self, words: Iterable[str]) -> list[str]:
        """The columns without a role whose names are among ``words``, in the order of ``words``."""
        named = {_plain_name(name): name for name in reversed(self._left)}
        return [named[word] for word in words if word in named]

    @property
    def _has_flag(self) -> bool:
        return any(flag in self._taken for flag in FLAGS)

    def _note(self, text: str) -> None:
        """Add something for the user to check."""
        self._unsure.append(text)

    def _take(self, role: str, *names: str) -> None:
        self._taken[role] = names
        self._left = [name for name in self._left if name not in names]

    # -- by name ------------------------------------------------------------------------------------------------

    def _take_called(self, role: str) -> None:
        fits, what = _FITS.get(role, (None, ""))
        good = []
        for name in self._named(CALLED[role]):
            if fits is None or fits(self._columns[name]):
                good.append(name)
            else:
                self._note(f"`{name}` is named like a {role}, but does not hold {what}")
        known = {col.LOGP: (PROPENSITY,), DONE: (col.TERMINATED, col.TRUNCATED)}.get(role)
        if known and all(other in self._taken for other in known):
            good = []  # the same information again
        if role == col.AGENT_ID and col.EPISODE_ID not in self._taken:
            good = [name for name in good if "player" not in _plain_name(name)]  # a customer, outside a game
        if good:
            self._take(role, good[0])
        if len(good) > 1:
            self._left = [name for name in self._left if name not in good]
            self._note(f"{role} could also be {_listed(good[1:])}")

    def _take_time(self) -> None:
        """Use the only column of times as ``t`` if no column is named as ``t`` and there is an episode id."""
        found = [name for name in self._left if table_index.is_time(self._columns[name].type)]
        if len(found) != 1 or self._columns[found[0]].null_count or col.T_INDEX in self._taken:
            return
        episode = self._one(col.EPISODE_ID)
        if episode is not None and self._num_combinations([episode, *found]) > self._num_combinations([episode]):
            self._take(col.T_INDEX, *found)
            self._note(f"`{found[0]}` is the only column of times: rows are put in its order")

    def _take_count(self) -> None:
        """Use the column named as an action as ``t`` if it counts the rows of each episode."""
        episode, action = self._one(col.EPISODE_ID), self._one(col.ACTION)
        if episode is None or action is None or col.T_INDEX in self._taken:
            return
        array, order = self._columns[action], np.argsort(_codes(self._columns[episode]), kind="stable")
        if not pa.types.is_integer(array.type) or array.null_count or self._distinct[episode] == self._rows:
            return
        goes_on = np.diff(_codes(self._columns[episode])[order]) == 0
        counts = np.asarray(array, np.float64)[order]
        is_told = goes_on.sum() > 3  # fewer rows may be choices that look like counts
        if is_told and (np.diff(counts)[goes_on] == 1).all() and np.ptp(counts[np.append(True, ~goes_on)]) == 0:
            del self._taken[col.ACTION]
            self._take(col.T_INDEX, action)
            self._note(f"`{action}` counts the rows of each `{episode}`: taken for the step, not the action")

    def _by_episode(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Sort the rows by a column, then by time.

        If a time occurs twice with one value of the column, as when it starts again in each episode, time is ignored.

        Returns:
            The order of the rows; and in this order, whether each row is the last one with its value.
        """
        codes, t = _codes(self._columns[name]), self._times
        order = np.lexsort((codes,)) if t is None else np.lexsort((t, codes))
        is_last = np.append(np.diff(codes[order]) != 0, True)
        if t is not None and (~is_last[:-1] & (np.diff(t[order]) == 0)).any():
            order = np.lexsort((codes,))
        return order, is_last

    @functools.cached_property
    def _times(self) -> NDArray[np.int64] | None:
        """Numbers that sort like the column of ``t``; None if there is no such column."""
        t = self._one(col.T_INDEX)
        return None if t is None else _time_codes(self._columns[t])

    def _flags(self) -> list[str]:
        """The flag columns without missing values."""
        found = [name for flag in FLAGS for name in self._taken.get(flag, ()) if name in self._columns]
        return [name for name in found if not self._columns[name].null_count]

    def _ends(self) -> NDArray[np.bool_]:
        """Whether any flag is set, bool ``[rows]``."""
        return np.asarray(np.any([_truths(self._columns[name]) for name in self._flags()], axis=0))

    def _take_episode(self) -> None:
        """Use a column as the episode id if nearly all its values have a flag in their last row and nowhere else."""
        if col.EPISODE_ID in self._taken or not (flags := self._flags()):
            return
        ends = self._ends()
        for name in self._entities():
            if _is_person(name) or not self._is_text_or_id(name) or self._columns[name].null_count:
                continue
            order, is_last = self._by_episode(name)
            if 20 * (ends[order] != is_last).sum() <= ends.sum():
                self._take(col.EPISODE_ID, name)
                self._note(f"each `{name}` ends with {_listed(flags)}: taken for the episode's id")
                return

    def _take_person(self) -> None:
        """Use a person's id as the episode id if there is none, ids occur several times, and there is a flag.

        This is not done if a person has rows after one with a flag, because an episode can't continue after its end.
        """
        person = next((name for name in self._named(PEOPLE) if _is_key(self._columns[name])), None)
        if person is None or col.EPISODE_ID in self._taken or self._distinct[person] in (None, self._rows):
            return
        if self._has_flag and not (self._flags() and self._has_several(person)):
            self._take(col.EPISODE_ID, person)
            self._note(f"the rows of each `{person}` are taken for an episode")

    def _has_several(self, name: str) -> bool:
        """Whether any value of a column has several episodes: it has rows after one where a flag is set."""
        order, is_last = self._by_episode(name)
        return bool((self._ends()[order] & ~is_last).any())

    # -- mixed rows ---------------------------------------------------------------------------------------------

    def _entities(self) -> list[str]:
        """The columns that may identify the machine or person that a row belongs to, the likeliest ones first.

        These are columns named after people, then ids, texts and whole numbers.
        """
        ranks: dict[str, int] = {}
        texts = [n for n in self._taken.get(col.OBS, ()) if is_text(self._columns[n].type)]
        for name in [*self._left, *texts]:
            kind, called, distinct = self._columns[name].type, _plain_name(name), self._distinct[name] or 0
            if not _is_key(self._columns[name]) or not 1 < distinct < self._rows:
                continue
            if _is_person(name):
                ranks[name] = 0
            elif re.search(_ID, called):
                ranks[name] = 1
            elif is_text(kind):
                ranks[name] = 2
            elif 2 * distinct <= self._rows and not re.fullmatch(_PART, called):
                ranks[name] = 3
        return sorted(ranks, key=lambda name: ranks[name])

    def _is_text_or_id(self, name: str) -> bool:
        """Whether a column holds text, or has the name of an id."""
        return bool(is_text(self._columns[name].type) or re.search(_ID, _plain_name(name)) or _is_person(name))

    def _check_mixed(self, entities: Sequence[str]) -> None:
        """Note if only a flag separates episodes, and rows of different machines or people are or may be mixed."""
        flags, stand_alone = self._flags(), col.NEXT_OBS in self._taken and col.T_INDEX not in self._taken
        if col.EPISODE_ID in self._taken or stand_alone or not flags:
            return
        ends = self._ends()
        if not (changing := [name for name in entities if self._changes_between(name, ends)]):
            return
        named = [name for name in changing if self._is_text_or_id(name)]
        mixed = next((name for name in named if self._is_mixed_by(name, ends)), None)
        if mixed is not None:
            self._taken[col.EPISODE_ID] = (PLACEHOLDER,)
            what = f"rows of different `{mixed}` are mixed, and {_listed(flags)} alone does not tell whose episode ends"
            several = f"make an id of `{mixed}` and the number of its episode ({_MIXED_ROWS}), and map that"
            self._unsure.insert(0, f"{what}: {several if self._has_several(mixed) else f'map episode_id={mixed}'}")
            return
        whose = f"different `{named[0]}`" if named else "several machines or people"
        is_id = named and not self._has_several(named[0])
        how = f"map episode_id={named[0]}" if is_id else f"map an episode_id ({_MIXED_ROWS})"
        alone = f"{_listed(flags)} alone tells episodes apart, in the order of the rows"
        self._note(f"{alone}: if rows of {whose} are mixed, {how}")

    def _changes_between(self, name: str, ends: NDArray[np.bool_]) -> bool:
        """Whether a column changes between two adjacent rows where no episode ends."""
        codes = _codes(self._columns[name])
        return bool(((codes[1:] != codes[:-1]) & ~ends[:-1]).any())

    def _is_mixed_by(self, name: str, ends: NDArray[np.bool_]) -> bool:
        """Whether a column that changes between flags shows that rows of several episodes are mixed: a flag is set in
        the last row of each of its values."""
        order, is_last = self._by_episode(name)
        is_whole = self._rows == self._all_rows  # else the last row of a value here may not be its last
        by_chance = ends.mean() ** (is_last.sum() - 1)
        return bool(is_whole and ends[order][is_last].all() and by_chance < _CHANCE)

    def _take_ends(self) -> None:
        """Use a flag that is set in the last row of each episode, and nowhere else, as ``done`` if none is named."""
        episode = self._one(col.EPISODE_ID)
        if episode is None or self._has_flag or self._distinct[episode] is None:
            return
        order, is_last = self._by_episode(episode)
        for name in self._left:
            array = self._columns[name]
            if array.null_count or self._distinct[name] != 2 or not _is_flag(array):
                continue
            flags = _truths(array)[order]
            # If not all rows were read, the last row of an episode here may not be its real last row.
            is_set = 2 * flags.sum() >= is_last.sum() if self._rows < self._all_rows else (flags >= is_last).all()
            if is_set and (flags <= is_last).all():
                self._take(DONE, name)
                self._note(f"`{name}` is set in the last row of each episode alone: taken for its end")
                return

    def _take_action(self) -> None:
        if parts := self._parts(_ACTION_PART):
            self._take(col.ACTION, *parts)
            return
        few = [name for name in self._left if is_text(self._columns[name].type) and self._is_choice(name)]
        self._take(col.ACTION, few[0] if len(few) == 1 else PLACEHOLDER)
        why = f"`{few[0]}` is the only text with few different values" if len(few) == 1 else "say which it is"
        self._note(f"no column is named like an action: {why}")

    def _check_total(self) -> None:
        """Note if the rewards look like a running total: they never fall within an episode, but often rise."""
        episode, reward = self._one(col.EPISODE_ID), self._one(col.REWARD)
        if episode is None or reward is None or episode not in self._columns or self._columns[reward].null_count:
            return
        order, is_last = self._by_episode(episode)
        so_far = np.asarray(self._columns[reward], np.float64)[order]
        change = np.diff(so_far)[~is_last[:-1]]
        if (change >= 0).all() and (change[so_far[:-1][~is_last[:-1]] > 0] > 0).sum() >= _RISES:
            self._note(
                f"`{reward}` never falls within an episode: if it is the total so far, the reward of a row is its "
                "difference to the row before"
            )

    def _check_values(self) -> None:
        """Note which columns with a role hold values that are an error."""
        for role, name in [(role, name) for role, own in self._taken.items() for name in own if name in self._columns]:
            array = self._columns[name]
            if role == PROPENSITY and (zeros := pc.sum(pc.equal(array, 0)).as_py()):
                self._note(f"`{name}` is 0 in {zeros:,} rows, which is an error: correct it, or leave them out")
            may_miss = role == col.NEXT_OBS or (role == col.AGENT_ID and array.null_count == len(array))
            if (missing := array.null_count) and not may_miss:
                rows = f"{missing:,} row{'s' * (missing > 1)}"
                how = " (--on-bad repair)" * pa.types.is_floating(array.type)  # only floats can be read with gaps
                self._note(f"`{name}` is empty in {rows}, which is an error: fill it, or leave them out{how}")
            if not is_text(array.type):
                continue
            texts = pc.unique(array.drop_null()).to_pylist() if role in (col.OBS, col.ACTION) else []
            if is_like := written_numbers(texts):
                self._note(f"`{name}` is text that {is_like}, which is an error: convert it to numbers")
            if role == col.T_INDEX and table_index.date_orders(array) == DATE_ORDERS:
                self._taken[role] = (f"{name}:{MONTH_FIRST}",)
                self._note(f"no row of `{name}` tells whether the month or the day is first: or {name}:{DAY_FIRST}")

    # -- observations -------------------------------------------------------------------------------------------

    def _take_observations(self) -> None:
        if col.OBS in self._taken:
            return
        named = self._parts(_PART)
        others = named or [name for name in self._left if self._can_be_observed(name)]
        nexts = {name: found[0] for name in others if (found := self._named(_names_of_next(name)))}
        observed = [name for name in others if name not in nexts.values()]
        self._take(col.OBS, *(observed or [PLACEHOLDER]))
        if observed and all(name in nexts for name in observed):
            self._take(col.NEXT_OBS, *(nexts[name] for name in observed))
        if named:
            return
        if not observed:
            self._note("no column can be an observation: say which it is")
            return
        self._note(f"obs is all that is left ({', '.join(observed)}): leave out what is not known before the action")
        if self._left:
            why = "as an id, a constant, the next value of another column, or no numbers"
            self._note(f"left out of obs, {why}: {', '.join(self._left)}")

    def _parts(self, pattern: str) -> list[str]:
        """The columns without a role whose names are those of parts of a vector."""
        named = (name for name in self._left if re.fullmatch(pattern, _plain_name(name)))
        return [name for name in named if self._can_be_observed(name, is_named=True)]

    def _is_choice(self, name: str) -> bool:
        distinct = self._distinct[name] or 0
        return 1 < distinct <= min(MOST_CHOICES, max(2, self._rows // 2))

    def _can_be_observed(self, name: str, *, is_named: bool = False) -> bool:
        kind, distinct = self._columns[name].type, self._distinct[name]
        if is_list(kind) or pa.types.is_struct(kind):
            return True
        if is_text(kind) and not self._is_choice(name):
            return False
        if not is_named and (distinct == 1 or re.search(r"(^|_)(id|uuid|index|unnamed_\d+)$", _plain_name(name))):
            return False
        is_id = not is_named and pa.types.is_integer(kind) and distinct == self._rows > 2
        return is_text(kind) or (is_number(kind) and not is_id)

    # -- episodes -----------------------------------------------------------------------------------------------

    def _end_episodes(self) -> None:
        episode, t = self._one(col.EPISODE_ID), self._one(col.T_INDEX)
        if episode is not None:
            self._check_time(episode, t)
            if len(self._taken[col.EPISODE_ID]) == 1:
                self._check_counted(episode)
        if self._has_flag or (col.NEXT_OBS in self._taken and episode is None):
            return
        if episode is not None:
            alone = self._distinct[episode] == self._rows
            self._taken[col.TERMINATED] = (EVERY_ROW if alone else LAST_ROW,)
            if not alone:
                how = f"terminated={LAST_ROW} takes the last row of each for its end; write truncated={LAST_ROW}"
                self._note(f"no column says where episodes end: {how} where they were cut off")
            return
        array = pa.nulls(0) if t is None else self._columns[t]
        if table_index.can_be_times(array.type) and not table_index.are_times([array]):
            if (np.diff(np.asarray(array)) <= 0).any():
                self._taken[col.TERMINATED] = (LAST_ROW,)
                self._note(f"no column has the episode's id: one begins where `{t}` falls")
                return
            del self._taken[col.T_INDEX]  # it counts the rows
        self._taken[col.TERMINATED] = (EVERY_ROW,)
        self._note("nothing tells episodes apart: each row is taken for one (a bandit). Else map episode_id, or a flag")

    def _check_time(self, episode: str, t: str | None) -> None:
        if t is None:
            if self._distinct[episode] != self._rows:
                self._note("no column is named like a step or a time: rows are taken as they stand")
            return
        tracks = [name for name in (episode, self._one(col.AGENT_ID)) if name is not None]
        self._check_uneven(tracks, t)
        keys = [*tracks, t]
        if not self._are_repeated(keys):
            return
        several = f"several rows have the same `{'`, `'.join(keys)}`"
        for name in self._entities():
            if self._is_text_or_id(name) and not self._are_repeated([name, *keys]):
                self._taken[col.EPISODE_ID] = (name, episode)
                self._note(f"{several}, but never of the same `{name}`: both are taken for the episode's id")
                return
        self._note(f"{several}: a step would be there twice")

    def _check_counted(self, episode: str) -> None:
        """Note if the episode id is a number, and each machine may have its own, such as the trips of a van."""
        if not pa.types.is_integer(self._columns[episode].type):
            return
        codes = _codes(self._columns[episode])
        for name in self._entities():
            other = _codes(self._columns[name])
            order = np.lexsort((other, codes))
            may_count = re.fullmatch(f"{_MACHINE}|.*{_ID}", _plain_name(name)) or _is_person(name)
            if may_count and ((np.diff(codes[order]) == 0) & (np.diff(other[order]) != 0)).any():
                both = f"map episode_id={_word((name, episode))} if each counts its own"
                self._note(f"rows of one `{episode}` have different `{name}`: {both}")
                return

    def _are_repeated(self, names: Sequence[str]) -> bool:
        """Whether several rows have the same values in all of these columns."""
        return self._num_combinations(names) < self._rows

    def _num_combinations(self, names: Sequence[str]) -> int:
        """The number of different combinations of values in these columns."""
        table = pa.table({name: self._columns[name] for name in names})
        return int(table.group_by(list(names)).aggregate([]).num_rows)

    def _check_uneven(self, tracks: Sequence[str], t: str) -> None:
        """Leave out ``t`` if most of its increases are larger than one step, as those of a time.

        In a shuffled table, the first rows lack most steps of an episode. Then ``t`` is kept, with a note if its range
        has more steps than the whole table has rows.
        """
        array = self._columns[t]
        if not table_index.can_be_times(array.type) or array.null_count or table_index.are_times([array]):
            return
        codes = [_codes(self._columns[name]) for name in tracks]
        order = np.lexsort((_codes(array), *codes))
        is_same = np.all([np.diff(own[order]) == 0 for own in codes], axis=0)
        rises = np.diff(np.asarray(array, np.float64)[order])[is_same].astype(np.int64)
        step = np.gcd.reduce(rises)
        if 2 * (rises > step).sum() <= len(rises):
            return
        what = f"`{t}` rises unevenly, like a time, so it does not number the steps"
        if (order == np.lexsort(codes)).all():
            del self._taken[col.T_INDEX]
            self._note(f"{what}: left out, as the rows of each episode are in order")
        elif rises.sum() // step + (~is_same).sum() + 1 > self._all_rows:
            self._note(f"{what}: turn it into times, such as 2026-03-01 08:30:00")


def _decoded(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _codes(array: pa.Array) -> NDArray[np.int64]:
    """Numbers that sort like the values of a column."""
    return np.asarray(pc.rank(array, tiebreaker="dense"), np.int64)


def _time_codes(array: pa.Array) -> NDArray[np.int64]:
    """Numbers that sort like the steps or times of a column."""
    try:
        return _codes(_times_in(array) if is_text(array.type) else array)
    except DataError:  # a text is not a time
        return _codes(array)


def _times_in(texts: pa.Array) -> pa.Array:
    """The times that texts name; a DataError if one of them names none."""
    return table_index.times(texts, str, "", (*table_index.date_orders(texts), None)[0])


def _listed(names: Sequence[str]) -> str:
    return f"`{'` or `'.join(names)}`"


def _truths(array: pa.Array) -> NDArray[np.bool_]:
    """The values of a flag that has no missing ones."""
    return np.asarray(table_index.truths(array) if is_text(array.type) else array.cast(pa.bool_()))


def _num_distinct(array: pa.Array) -> int | None:
    try:
        return int(pc.count_distinct(array).as_py())
    except pa.ArrowException:
        return None


def _is_number(array: pa.Array) -> bool:
    return is_number(array.type)


def _range(array: pa.Array) -> tuple[float, float]:
    """The smallest and largest number; NaN if there are none."""
    found: Mapping[str, Any] = pc.min_max(array).as_py() if _is_number(array) else {"min": None, "max": None}
    low, high = (np.nan if found[key] is None else float(found[key]) for key in ("min", "max"))
    return low, high


def _is_flag(array: pa.Array) -> bool:
    found = array.drop_null()
    try:
        return bool(len(found) and len(table_index.flags_of(found, "", str)))
    except DataError:
        return False


def _is_count(array: pa.Array) -> bool:
    if table_index.is_time(array.type):
        return True
    if is_text(array.type):
        try:
            return len(_times_in(array.drop_null().slice(0, 100))) > 0
        except DataError:
            return False
    if pa.types.is_integer(array.type) and _range(array)[0] >= 0:
        return True
    return table_index.can_be_times(array.type) and table_index.are_times([array])


def _is_chance(array: pa.Array) -> bool:
    low, high = _range(array)
    return bool(pa.types.is_floating(array.type)) and low >= 0 and 0 < high <= 1


def _is_log(array: pa.Array) -> bool:
    return bool(pa.types.is_floating(array.type)) and _range(array)[1] <= 0


def _is_key(array: pa.Array) -> bool:
    return bool(is_text(array.type) or pa.types.is_integer(array.type))


_FITS: Final[Mapping[str, tuple[Callable[[pa.Array], bool], str]]] = {
    **dict.fromkeys(FLAGS, (_is_flag, "true and false, or yes and no")),
    **dict.fromkeys((col.EPISODE_ID, col.AGENT_ID), (_is_key, "text or whole numbers")),
    col.T_INDEX: (_is_count, "whole numbers from 0 or times"),
    col.REWARD: (_is_number, "numbers"),
    PROPENSITY: (_is_chance, "probabilities"),
    col.LOGP: (_is_log, "logarithms of probabilities"),
}
"""The check of the values for each role, and a description of valid ones."""
