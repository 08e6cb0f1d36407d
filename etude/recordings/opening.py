# SPDX-License-Identifier: Apache-2.0
"""Open a recording, or several that are read as one, from paths, URLs, globs and sources."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from gymnasium.spaces import Box, Discrete

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.experience.table import KEYS
from etude.files import AnyPath, RemotePath, Systems, expanded, relative, shown
from etude.recordings import footers
from etude.recordings.action_units import ACTIONS, BY_RLLIB, REWRITTEN, before_mapping, env_action_space, is_space
from etude.recordings.files import DataFile, data_files, has_own_columns, open_files, recordings_in
from etude.recordings.format import Contents, Format, Place, Problem, Unit, UnreadableError
from etude.recordings.formats import foreign, format_of, format_of_folder, minari, of_files, usable
from etude.recordings.formats.custom import CustomFormat, CustomSource
from etude.recordings.formats.guessing import Guess, guess_columns
from etude.recordings.formats.inferring import fits, joint_space, widened
from etude.recordings.formats.source import ETUDE, Source, described, spaces_added
from etude.recordings.formats.table import Table
from etude.recordings.formats.table_inputs import NO_VALUE, InFolders, given_twice, in_names, is_table_by_name
from etude.recordings.layout import HEADER_KEY, MANIFEST, Header, shared_meta
from etude.recordings.own import OwnFormat, is_in_order, usable_files
from etude.recordings.pieces import filtered
from etude.spaces import NamedDiscrete, Space, are_permuted, leaf_dtype, leaf_shape, leaves, space_to_json

if TYPE_CHECKING:
    One: TypeAlias = str | os.PathLike[str] | RemotePath | Source | CustomSource | Format
    DataLike: TypeAlias = One | "Places" | Sequence[One]
    """What `Recording.open` takes: a path, a URL, a glob, a `Source`, or a list of these."""

GivenSpaces: TypeAlias = Callable[[], tuple[Space | None, Space | None]]
"""Returns the spaces of observations and actions for data that does not state them; None: infer it."""

_AT_ONCE: Final = 24
_ROOTS: Final = (col.OBS, col.ACTION)
_OF_STEPS: Final = (col.OBS, col.ACTION, col.REWARD, col.LOGP)


class TableError(DataError):
    """Raised if a table is opened without saying what its columns mean."""

    def __init__(self, path: str, guess: Guess) -> None:
        words = f"A guess, for you to check: {guess.words}"
        listed = "; ".join(guess.unsure)
        super().__init__(
            f"{path} is a table with the columns {', '.join(guess.found)}: say what they mean, with --columns, "
            f"or in Python with etude.Source(path, columns=...). {words}{f' (not sure: {listed})' if listed else ''}. "
            f"`etude data info` shows more."
        )
        self.path, self.guess = path, guess

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.guess)


@dataclasses.dataclass(frozen=True)
class Places:
    """What a recording was opened from, if that is not a single path: a list, a glob, or a `Source`."""

    given: Any
    filesystem: Any = None

    def __str__(self) -> str:
        """A description without credentials."""
        if isinstance(self.given, Source):
            return described(self.given.data)
        return shown(self.given.paths if isinstance(self.given, CustomSource) else self.given)

    def __repr__(self) -> str:
        return f"Places({str(self)!r})"


def has_source(place: AnyPath | Places) -> bool:
    """Whether a recording was opened from a `Source`, or a list with one."""
    given = place.given if isinstance(place, Places) else None
    return any(isinstance(one, Source) for one in (given if isinstance(given, list | tuple) else [given]))


class Described(NamedTuple):
    """A recording among those that are read as one."""

    format: Format
    contents: Contents
    path: AnyPath | None = None
    """Its folder or file; None if it was given as several files, or an object describes it."""

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return str(self.contents.files[0]) if self.contents.files else f"a {self.format.name} in memory"


class Units:
    """The units of all ``members``, one after another. Can be pickled and is thread-safe.

    Episode ids are unique within one recording. If there are several, each id is prefixed with the index of its
    recording (``0-``, ``1-``).

    Args:
        members: The recordings, at least one, with the same columns.
        header: The header of the whole.
    """

    def __init__(self, members: Sequence[Described], header: Header) -> None:
        self.members, self.header = tuple(members), header
        self.given: frozenset[str] = frozenset()
        """Those of ``obs`` and ``action`` whose space was given rather than read from the data; see `opened`."""
        self.claimed: frozenset[str] = frozenset()
        """Those whose space is the user's, either given or from a `Source`. The data may exceed it."""
        self.lacking: frozenset[str] = frozenset()
        """Those whose space was inferred."""
        names = list(dict.fromkeys(member.format.name for member in members))
        self.format = names[0] if len(names) == 1 else "joined"
        self.files: list[AnyPath] = [file for member in members for file in member.contents.files]
        self.columns = list(members[0].contents.columns)
        self.problems: list[Problem] = [problem for member in members for problem in member.contents.problems]
        self._units = [(i, unit) for i, member in enumerate(members) for unit in member.contents.units]
        self._rows: dict[int, int] = {}
        self._described: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._units)

    @property
    def own(self) -> OwnFormat | None:
        """The format if this is a single recording in Etude's format, else None."""
        format = self.members[0].format
        return format if len(self.members) == 1 and isinstance(format, OwnFormat) else None

    def is_own(self, k: int) -> bool:
        """Whether unit ``k`` is of a recording in Etude's format."""
        return isinstance(self.members[self._units[k][0]].format, OwnFormat)

    def rows(self, k: int) -> int:
        """Return the number of steps of unit ``k``. If it is unknown, the unit is read.

        Raises:
            DataError: the number is unknown, and the unit can't be read.
        """
        known = self._units[k][1].rows
        if known is None and k not in self._rows:
            self.load(k, ())
        return self._rows[k] if known is None else known

    def load(
        self,
        k: int,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        *,
        finals: bool = True,
        problems: list[Problem] | None = None,
    ) -> Experience:
        """Load unit ``k``: whole segments, except those that are stored in pieces.

        Args:
            k: Index of the unit.
            columns: Full names of the step columns; None is all.
            where: Keep only rows for which this holds. Row groups of Etude's files that can't match are not read.
            finals: If False, final observations may be left out; those of images take long to decode.
            problems: If given, what can't be read is left out and added to it, and so are harmless oddities.

        Raises:
            DataError: something in it can't be read; or a column's dtype or shape differs between the recordings that
                are read as one. With ``problems``, it is an UnreadableError, raised only if nothing can be read.
        """
        member, unit = self._units[k]
        format, contents, _ = self.members[member]
        names = self.columns if columns is None else columns
        if where is not None and len(self.members) > 1 and col.EPISODE_ID in str(where):
            # Joined recordings have other episode ids here than on disk.
            return filtered(self.load(k), where, names)
        try:
            if isinstance(format, OwnFormat):
                exp = format.read(unit, names, problems, where=where, finals=finals)
            elif where is None:
                exp = format.read(unit, names, problems)
            else:
                exp = filtered(format.read(unit, self.columns, problems), where, names)
            exp = exp if len(self.members) == 1 else self._adopted(member, exp)
        except UnreadableError:
            raise
        except DataError as error:
            if problems is None:
                raise
            file = str(unit.file or (contents.files[0] if contents.files else format.name))
            problem = Problem("unreadable", str(error), file, unit.row, count=unit.rows or 0, repairable=True)
            raise UnreadableError(problem) from error
        if where is None and all(problem.harmless for problem in problems or ()):
            self._rows[k] = exp.num_steps
        return exp

    def load_readable(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """Load what is readable of unit ``k``; also returns problems that do not show in its steps, harmless or not.

        Raises:
            UnreadableError: nothing of it can be read.
        """
        problems: list[Problem] = []
        return self.load(k, columns, problems=problems), problems

    def keys(self, k: int) -> Experience:
        """Like `load_readable`, but without columns and problems."""
        return self.load_readable(k, ())[0]

    def place(self, k: int, row: int, exp: Experience | None = None) -> Place:
        """Locate a row of unit ``k`` in its file; ``exp`` is the unit, if it is loaded already."""
        member, unit = self._units[k]
        exp = self.keys(k) if exp is None else exp
        if len(self.members) > 1:
            ids = exp.segments.episode_id.tolist()
            own = [episode.removeprefix(f"{member}-") for episode in ids]
            exp = exp.with_segments(episode_id=own)
        return self.members[member].format.place(unit, row, exp)

    def nothing(self, columns: Sequence[str]) -> Experience:
        """Return an experience of zero rows with these columns.

        Raises:
            DataError: no unit can be read.
        """
        failed: DataError | None = None
        for k in range(len(self)):
            try:
                return self.load_readable(k, columns)[0][:0]
            except DataError as error:
                failed = failed or error
        raise failed or DataError(f"{self.members[0].name}: there is nothing in it.")

    def _adopted(self, member: int, exp: Experience) -> Experience:
        """Put the index of its recording in front of the episode ids of ``exp``, after checking its columns."""
        for name, values in exp.steps.items():
            known, own = self._described.setdefault(name, describe(values)), describe(values)
            if known != own:
                raise DataError(
                    f"{self.members[member].name}: column `{name}` is {own}, but {known} in another of the recordings "
                    "that are read as one. Read them one by one, or leave the column out with `columns=`."
                )
        return exp.with_segments(episode_id=[f"{member}-{episode}" for episode in exp.segments.episode_id])


# -- from what a user gives to units ----------------------------------------------------------------------------


def opened(
    given: "DataLike",
    filesystem: Any = None,
    faults: list[Problem] | None = None,
    spaces: GivenSpaces = lambda: (None, None),
    *,
    of_env: bool = False,
) -> tuple[AnyPath | Places, Units]:
    """Open what a user gives; return where the recording is, and its units.

    Files given one by one form one recording per kind.

    Args:
        given: See `Recording.open`.
        filesystem: The pyarrow or fsspec file system of the paths.
        faults: If given, unusable files are left out and added to it.
        spaces: Returns the spaces of data that does not state its own.
        of_env: Whether these are the spaces of the env. Actions that RLlib has recorded may then still be in [-1, 1],
            before RLlib maps them to the env's bounds.

    Raises:
        DataError: nothing is there, it can't be opened, or there are several that do not belong together; or it does
            not fit ``spaces``.
    """
    if isinstance(given, Places):
        return given, opened(given.given, given.filesystem, faults, spaces, of_env=of_env)[1]
    listed = given if isinstance(given, list | tuple) else [given]
    sources = [one for one in listed if isinstance(one, Source)]
    lacking = {root for one in sources for root in one.lacking}
    try:
        members = _members_of(spaces_added(given, *spaces()) if lacking else given, filesystem, faults)
    except OSError as error:
        raise DataError(f"{Places(given)}: can't be read ({error.strerror or error}).") from error
    lacking |= {root for member in members for root in _ROOTS if _is_inferred(member, root)}
    is_asked = lacking or (not of_env and any(map(_is_mapped, members)))
    found = dict(zip(_ROOTS, spaces(), strict=True)) if is_asked else {}
    units = spaced(members, lacking, found, of_env=of_env)
    if len(sources) == len(listed) and all(source.preset is None for source in sources):
        units.claimed |= {root for source in sources for root in _ROOTS if root not in source.lacking}
    path = members[0].path if len(members) == 1 and isinstance(given, str | os.PathLike | RemotePath) else None
    return path or Places(given, filesystem), units


def spaced(
    members: Sequence[Described], lacking: Set[str], given: Mapping[str, Space | None], *, of_env: bool
) -> Units:
    """The units of ``members``, read with the spaces ``given`` for those that they lack; see `opened`.

    Raises:
        DataError: they do not fit these spaces, or each other.
    """
    known = {root: space for root, space in given.items() if space is not None}
    keeps = len(members) == 1  # several, such as a table, must have the same dtypes
    found = [_read_by(member, known, of_env=of_env, keeps=keeps) for member in members]
    units = joined([one for one, _ in found])
    units.given = units.claimed = frozenset((lacking & known.keys()).union(*(roots for _, roots in found)))
    units.lacking = frozenset(lacking - known.keys())
    return units


def check_stated(place: AnyPath | Places, units: Units, given: GivenSpaces, env: str | None = None) -> None:
    """Raise a DataError if data that states its spaces states others than those given.

    If the spaces are those of ``env``, the data may have actions from before RLlib or connectors mapped them to these.
    """
    for root, space in zip(_ROOTS, given(), strict=True):
        own = units.header.spaces[root]
        if space is None or root in units.given:
            continue
        if env is None and space != own:
            raise DataError(f"{place}: the data states its `{root}` space, {own}: leave out {root}_space={space}.")
        if env is not None and not (
            is_alike(space, own) or is_alike(before_mapping(space), own) or _is_env_of(units, root, space)
        ):
            raise DataError(
                f"{place}: states its `{root}` space, {own}, but that of {env} is {space}. Was it recorded in another "
                "env? If not, leave out --env."
            )


def _is_env_of(units: Units, root: str, space: Space) -> bool:
    """Whether ``space`` is the env's space to which connectors mapped the actions after they were recorded."""
    found = env_action_space(units.header.meta) if root == col.ACTION else None
    several = found.values() if isinstance(found, Mapping) else ()
    return any(is_space(one, space) for one in (found, *several))


def _members_of(given: "One | Sequence[One]", filesystem: Any, faults: list[Problem] | None) -> list[Described]:
    several = isinstance(given, list | tuple)
    if several and not given:
        raise DataError("an empty list was given: there is nothing to open. Give paths, URLs or globs.")
    known: Systems = {}
    places: list[Any] = []
    for one in given if several else [given]:  # type: ignore[union-attr]
        if isinstance(one, str) and one.startswith(minari.URL):
            one = minari.local_dataset(one)
        is_path = isinstance(one, str | os.PathLike | RemotePath)
        places += expanded(one, filesystem, known) if is_path else [one]
    places = _listed(places)
    if len(places) == 1:
        return _of_one(places[0], faults)
    files = [place for place in places if isinstance(place, AnyPath) and not place.is_dir()]
    list(footers.footers([file for file in files if file.suffix == ".parquet" and isinstance(file, RemotePath)]))
    kinds = {file: OwnFormat if is_own(file) else format_of(file) for file in files}
    groups: dict[Any, list[Any]] = {}  # all files of a kind, or a single folder or object, by its index
    for i, place in enumerate(places):
        alike = groups.setdefault(kinds[place] or OwnFormat if place in files else i, [])
        alike += [place] if place not in alike else []
    out: list[Described] = []
    for kind, alike in groups.items():
        if isinstance(kind, int):
            out += _of_one(alike[0], faults)
        elif kind is OwnFormat:
            _check_described([file for file in alike if kinds[file] is None])
            out.append(_own(alike[0], alike, faults))
        else:
            out.append(Described(*of_files(kind, alike, faults), alike[0] if len(alike) == 1 else None))
    return out


def _listed(places: Sequence[Any]) -> list[Any]:
    """The same places, with all remote ones listed, several at a time."""

    def listed(place: Any) -> Any:
        # A single folder may have been listed before files were added to it; several are listed once, by `_members_of`.
        is_new = isinstance(place, RemotePath) and (place.listing is None or len(places) == 1)
        return place.listed() if is_new else place

    if not any(isinstance(place, RemotePath) for place in places):
        return list(places)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(listed, places))


def _of_one(given: Any, faults: list[Problem] | None) -> list[Described]:
    """Open the recording at a path, several if it is a folder with several of Etude's recordings below it, or the one
    that an object describes: a table, files, or a user's own format."""
    if isinstance(given, CustomSource | Source):
        given = CustomFormat(given) if isinstance(given, CustomSource) else Table(given)
    if isinstance(given, Format):
        return [Described(given, usable(given.describe(), faults))]
    if not isinstance(given, AnyPath):
        raise DataError(
            f"can't open {shown(given)} as a recording: give a path, a URL, a glob, or a list of them; or a Source, "
            "which takes tables in memory too. An Experience must be written first, with a RecordingWriter."
        )
    path = given
    if not is_own(path):
        if found := foreign(path, faults):
            return [Described(*found, path)]
        _check_described([path])
    wholes: dict[AnyPath, list[AnyPath]] = {}  # the folders of each recording
    inside = recordings_in(path) if path.is_dir() else {}
    for folder, files in inside.items():
        wholes.setdefault(_partitioned(folder, path, files[0]) or folder, []).append(folder)
    if not inside:
        return [_own(path, None, faults)]
    top = next(iter(wholes)) if len(wholes) == 1 else None
    return [one for whole, folders in wholes.items() for one in _of_parts(whole, folders, inside, faults, top)]


def _of_parts(
    whole: AnyPath,
    folders: Sequence[AnyPath],
    inside: Mapping[AnyPath, Sequence[AnyPath]],
    faults: list[Problem] | None,
    top: AnyPath | None = None,
) -> list[Described]:
    """Open folders below ``whole`` with names such as ``agent_id=a``, as one recording or as several.

    In one recording, the folder names below ``top`` (by default, below ``whole``) are columns.
    """
    if list(folders) == [whole] and top in (None, whole):
        return [_own(whole, None, faults)]
    firsts = {relative(folder, whole).parts[:1] for folder in folders}
    if len(firsts) == 1 and (first := firsts.pop()) and first[0].partition("=")[0] not in (*KEYS, *_OF_STEPS):
        return _of_parts(whole / first[0], folders, inside, faults, top)  # all have this name
    files = [file for folder in folders for file in inside[folder]]
    if len(folders) == 1 or _is_one(whole, files):
        return [_rewritten(Source(InFolders(top or whole, files), preset=ETUDE), _header_of(files), whole, faults)]
    parts: dict[AnyPath, list[AnyPath]] = {}
    for folder in folders:
        first = relative(folder, whole).parts[:1]  # none: there are files in `whole` itself
        parts.setdefault(whole / first[0] if first else whole, []).append(folder)
    return [one for part, own in parts.items() for one in _of_parts(part, own, inside, faults)]


def _partitioned(folder: AnyPath, path: AnyPath, file: AnyPath) -> AnyPath | None:
    """The folder of the recording that ``folder`` may be a part of, at ``path`` or below it. None if it is not a part.

    Other tools divide recordings by the values of a column, into folders such as ``agent_id=a``. ``file`` is one of the
    files in ``folder``.
    """
    names = relative(folder, path).parts
    depth = next((k for k, name in enumerate(names) if "=" in name), None)
    data_file = None if depth is None else next(open_files([file]))
    if depth is None or (isinstance(data_file, DataFile) and not data_file.is_rewritten):
        return None  # Etude wrote it: a module may have such a name
    return path / "/".join(names[:depth]) if depth else path


def _is_one(whole: AnyPath, files: Sequence[AnyPath]) -> bool:
    """Whether folders with names such as ``agent_id=a`` are parts of one recording, and not several recordings.

    With a name that is not a column of recordings, both are possible: ``seed=1`` and ``seed=2`` are several recordings
    if they have the same steps of the same episodes.
    """
    readable = [file for file in open_files(files) if isinstance(file, DataFile)]
    if len({str(file.header.to_json()["spaces"]) for file in readable if file.header}) > 1:
        return False
    folders = {file.path: relative(file.path, whole).parts[:-1] for file in readable}
    own = {name for file in readable for name in file.schema.names}
    if {name.partition("=")[0] for names in folders.values() for name in names} <= {*KEYS, *_OF_STEPS} - own:
        return True
    if len({relative(file, whole).parts[:-1] for file in files}) < 2:
        return False
    by_folder: dict[tuple[str, ...], list[DataFile]] = {}
    for file in readable:
        by_folder.setdefault(folders[file.path], []).append(file)
    episodes = [_different(_steps_in(whole, parts, _IDS)) for parts in by_folder.values()]
    counts = pa.concat_tables(episodes).group_by([*_IDS]).aggregate([([], "count_all")])
    in_several = counts.filter(pc.greater(counts["count_all"], 1))[col.EPISODE_ID].unique()
    known, fresh, num = _NO_STEPS, list[pa.Table](), 0
    rest = list(by_folder.values()) if len(in_several) else []
    while rest:
        fresh.append(_different(_steps_in(whole, rest.pop(), (*_IDS, col.T_INDEX), in_several)))
        num += len(fresh[-1])
        if num >= len(known) or not rest:  # so that each step is compared only a few times
            known, expected = _different([known, *fresh]), len(known) + num
            if len(known) < expected:
                return False
            fresh, num = [], 0
    return True


_IDS: Final = (col.EPISODE_ID, col.AGENT_ID)
_NO_STEPS: Final = pa.table(
    {name: pa.array([], pa.string()) for name in _IDS} | {col.T_INDEX: pa.array([], pa.int64())}
)


def _steps_in(
    whole: AnyPath, files: Sequence[DataFile], names: Sequence[str], episodes: pa.Array | None = None
) -> list[pa.Table]:
    """The different rows of each row group, as tables with the columns ``names``, among `_IDS` and ``t``.

    Columns that a file lacks are taken from the names of its folders. ``episodes`` are the ids to keep; None: all.
    """
    found = [_NO_STEPS.select(names)]
    for file in files:
        said = {name: text for name, text in in_names(whole, file.path).items() if text != NO_VALUE}
        for group in range(file.metadata.num_row_groups if col.T_INDEX in file.schema.names else 0):
            with contextlib.suppress(DataError, pa.ArrowException):  # reported when it is read
                rows = file.read_group(group, [name for name in names if name in file.schema.names], None)
                steps = {
                    name: rows[name] if name in rows.column_names else pa.repeat(pa.scalar(said.get(name)), len(rows))
                    for name in names
                }
                table = pa.table(steps).cast(_NO_STEPS.select(names).schema)
                kept = table if episodes is None else table.filter(pc.is_in(table[col.EPISODE_ID], episodes))
                found.append(_different([kept]))
    return found


def _different(tables: Sequence[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(tables)
    return rows.group_by(rows.column_names).aggregate([])


def _header_of(files: Sequence[AnyPath]) -> Header | None:
    """The header of the first file that has one."""
    return next((file.header for file in open_files(files) if isinstance(file, DataFile) and file.header), None)


def _check_described(paths: Sequence[AnyPath]) -> None:
    """Raise a TableError if there are tables without a description of their columns.

    Raises:
        DataError: a table can't be read.
    """
    try:
        guess = guess_columns(list(paths)) if paths else None
    except DataError:
        if any(path.exists() and is_table_by_name(path) for path in paths):
            raise
        return  # not a table
    if guess is not None:
        raise TableError(f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}", guess)


def _own(path: AnyPath, given: Sequence[AnyPath] | None, faults: list[Problem] | None) -> Described:
    """Open a recording in Etude's format. One that another tool has rewritten is read as a table.

    Raises:
        DataError: a file is broken or missing, or the files do not belong together.
    """
    files, header = usable_files(path, given, faults)
    where = path if len(given or ()) < 2 else None
    if header is not None and is_in_order(files):
        own = OwnFormat(files, header)
        return Described(own, own.describe(), where)
    return _rewritten(Source([file.path for file in files], preset=ETUDE), header, where, faults)


def _rewritten(source: Source, header: Header | None, where: AnyPath | None, faults: list[Problem] | None) -> Described:
    """Open a recording that another tool has rewritten, as a table; ``header`` is None if it was lost."""
    if header is not None:
        source = Source(source.data, {}, ETUDE, header.obs_space, header.action_space, header.env)
    table = Table(source)
    contents = usable(table.describe(), faults)
    told = {ACTIONS: REWRITTEN} if header is None else header.meta
    kept = dataclasses.replace(contents.header, meta={**told, **contents.header.meta})
    contents = dataclasses.replace(contents, header=kept)
    return Described(table, contents, where)


def is_own(path: AnyPath) -> bool:
    """Whether Etude's own reader is to open ``path``: there is a file in its format or with its metadata, or nothing.

    That reader reports what is missing.
    """
    if not path.exists() or (path / MANIFEST).exists():
        return True
    files = [file for file in ([path] if path.is_file() else data_files(path)) if file.suffix == ".parquet"]
    is_first_broken = False
    for k, (file, footer) in enumerate(zip(files, footers.footers(files), strict=True)):
        if isinstance(footer, DataError):
            is_first_broken |= k == 0
            continue
        names = [*footer.schema.to_arrow_schema().names, *in_names(path, file)]  # folder names may be columns
        if HEADER_KEY in (footer.metadata or {}) or has_own_columns(names):
            return True
    # If nothing says whose format it is, Etude's own reader reports what is wrong.
    return is_first_broken and format_of_folder(path) is None and not any(map(format_of, files))


# -- spaces of data that does not state them -----------------------------------------------------------------------


class _WithSpaces(Format):
    """Data that does not state its spaces, read with spaces that were given.

    Args:
        own: The data.
        header: With the given spaces.
    """

    def __init__(self, own: Format, header: Header) -> None:
        self.own, self.header, self.name = own, header, own.name
        self._leaves = header.leaves()

    def describe(self) -> Contents:
        """Return the contents, with the given spaces."""
        return dataclasses.replace(self.own.describe(), header=self.header)

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read a unit, with the dtypes and shapes of the spaces.

        Raises:
            DataError: nothing of it can be read, or a number does not fit in the dtype of its space.
        """
        exp = self.own.read(unit, columns, problems)
        steps, final_obs = ({n: self._fit(n, v) for n, v in part.items()} for part in (exp.steps, exp.final_obs))
        return Experience(steps, exp.offsets, exp.segments, final_obs)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row of the data."""
        return self.own.place(unit, row, exp)

    def _fit(self, name: str, values: Any) -> Any:
        leaf = self._leaves.get(name)
        if leaf is None:
            return values
        dtype = leaf_dtype(leaf)
        with np.errstate(invalid="ignore"):
            out = values.astype(dtype, copy=False)
        if dtype.kind in "iu" and not np.array_equal(out, values):
            raise DataError(f"{self.name}: column `{name}` has numbers that its space, {leaf}, can't hold.")
        return out.reshape(len(values), *leaf_shape(leaf))


def _is_mapped(member: Described) -> bool:
    """Whether RLlib may have mapped the actions to the env's bounds after recording them."""
    return member.contents.header.meta.get(ACTIONS) == BY_RLLIB


def _read_by(
    member: Described, given: Mapping[str, Space], *, of_env: bool, keeps: bool
) -> tuple[Described, list[str]]:
    """Use the given spaces for those that a recording lacks; also returns for which of ``obs`` and ``action``.

    For RLlib's recordings, which state the env's action space, the space before RLlib maps actions to it, or the stated
    space itself, may be given as well.

    Raises:
        DataError: the columns do not fit the spaces.
    """
    roots = [root for root in given if _is_inferred(member, root)]
    if not of_env and _is_mapped(member) and col.ACTION in given and col.ACTION not in roots:
        stated = member.contents.header.action_space
        before = before_mapping(stated)
        is_either = before != stated and any(is_alike(given[col.ACTION], one) for one in (before, stated))
        roots += [col.ACTION] if is_either else []
    if not roots:
        return member, []
    header, mapped = member.contents.header, None  # the env's space, if RLlib maps actions to it
    meta = dict(header.meta)
    if _is_mapped(member) and col.ACTION in roots:
        mapped = given[col.ACTION] if of_env else header.action_space
        if of_env:
            given = {**given, col.ACTION: before_mapping(mapped)}
    if col.ACTION in roots and (mapped is not None or not of_env):
        meta.pop(ACTIONS, None)  # the given space says in which units the actions are
    fitted = {root: _fitted(member.name, root, header.spaces[root], given[root], keeps=keeps) for root in roots}
    spaces = {**header.spaces, **fitted}
    inferred = meta.pop("inferred", ())
    if rest := [name for name in inferred if not any(col.is_under(name, root) for root in roots)]:
        meta["inferred"] = {name: inferred[name] for name in rest} if isinstance(inferred, Mapping) else rest
    if mapped is not None and (before := before_mapping(mapped)) != mapped and is_alike(spaces[col.ACTION], before):
        meta[col.ENV_ACTION_SPACE] = space_to_json(mapped)
    new_header = Header(spaces[col.OBS], spaces[col.ACTION], header.env, meta)
    is_as_stored = all(_form(leaf) == _form(new_header.leaves()[name]) for name, leaf in header.leaves().items())
    format = member.format if is_as_stored else _WithSpaces(member.format, new_header)
    return member._replace(format=format, contents=dataclasses.replace(member.contents, header=new_header)), roots


def is_alike(first: Space, second: Space) -> bool:
    """Whether two spaces have the same kinds, shapes and bounds, perhaps with other dtypes or with names."""
    ours, others = leaves(first, ""), leaves(second, "")
    return ours.keys() == others.keys() and all(_is_alike(leaf, others[name]) for name, leaf in ours.items())


def _is_alike(leaf: Space, other: Space) -> bool:
    if isinstance(leaf, Discrete) and isinstance(other, Discrete):
        return bool(leaf.n == other.n and leaf.start == other.start)
    if not (isinstance(leaf, Box) and isinstance(other, Box)):
        return bool(leaf == other)
    if (leaf.dtype.kind == "f") != (other.dtype.kind == "f") or leaf.shape != other.shape:
        return False
    with np.errstate(over="ignore"):  # bounds may be the largest numbers
        return bool(np.allclose(leaf.low, other.low) and np.allclose(leaf.high, other.high))


def _fitted(where: str, root: str, own: Space, given: Space, *, keeps: bool) -> Space:
    """The given space, after checking that it fits; if ``keeps``, float observations keep the dtype that is stored."""
    stored, wanted = leaves(own, root), leaves(given, root)
    if stored.keys() != wanted.keys() or not all(_can_read_as(leaf, wanted[name]) for name, leaf in stored.items()):
        are_choices = stored.keys() == wanted.keys() and all(
            leaf_dtype(leaf).kind == "f" and leaf_shape(leaf) in ((), (1,)) and isinstance(wanted[name], Discrete)
            for name, leaf in stored.items()
        )
        what = "If these are choices, convert them to integers." if are_choices else "Was it recorded in another env?"
        what = "Map the columns in the same order." if are_permuted(own, given) else what
        raise DataError(
            f"{where}: its `{root}` looks like {own}, which does not fit the space given (if there is an `env`, that "
            f"of the env), {given}. {what}"
        )
    kept = {name for name, leaf in stored.items() if keeps and root == col.OBS and leaf_dtype(leaf).kind == "f"}
    return widened(given, root, {n: leaf_dtype(stored[n] if n in kept else leaf) for n, leaf in wanted.items()})


def _can_read_as(stored: Space, wanted: Space) -> bool:
    """Whether a column can be read with another space than the one that it is stored with."""
    is_float, to_float = leaf_dtype(stored).kind == "f", leaf_dtype(wanted).kind == "f"
    is_image = leaf_dtype(stored) == np.uint8 and len(leaf_shape(stored)) > 1
    has_other_names = stored != wanted if isinstance(stored, NamedDiscrete) else getattr(wanted, "has_numbers", False)
    if (is_float and not to_float) or (is_image and to_float) or has_other_names:
        return False
    return fits(leaf_shape(stored), leaf_shape(wanted)) and not are_permuted(stored, wanted)


def _form(leaf: Space) -> tuple[Any, ...]:
    return leaf_dtype(leaf), leaf_shape(leaf)


# -- several recordings as one -----------------------------------------------------------------------------------


def joined(members: Sequence[Described]) -> Units:
    """Join the units of all ``members``.

    Raises:
        DataError: their spaces or columns differ, or a file is in two of them; the message names both.
    """
    if len(members) == 1:
        return Units(members, members[0].contents.header)
    _check_files(members)
    members = _with_known_units(members)
    for other in members[1:]:
        _check_columns(members[0], other)
    envs = {member.contents.header.env for member in members}
    env = envs.pop() if len(envs) == 1 else None
    return Units(members, Header(_space(members, col.OBS), _space(members, col.ACTION), env, _meta(members)))


def _with_known_units(members: Sequence[Described]) -> list[Described]:
    """Assume that the actions of members that another tool has rewritten are in the units of the other members."""
    metas = [dict(member.contents.header.meta) for member in members]
    known = next((meta for meta in metas if meta.get(ACTIONS) != REWRITTEN), None)
    out = []
    for member, meta in zip(members, metas, strict=True):
        if known is not None and meta.get(ACTIONS) == REWRITTEN:
            del meta[ACTIONS]
            meta |= {key: known[key] for key in (ACTIONS, col.ENV_ACTION_SPACE) if key in known}
            header = dataclasses.replace(member.contents.header, meta=meta)
            member = member._replace(contents=dataclasses.replace(member.contents, header=header))
        out.append(member)
    return out


def _check_files(members: Sequence[Described]) -> None:
    known: set[AnyPath] = set()
    for member in members:
        own = {file.resolve() if isinstance(file, Path) else file for file in member.contents.files}
        if twice := own & known:
            raise given_twice(min(twice, key=str))
        known |= own


def _check_columns(first: Described, other: Described) -> None:
    for has, lacks in ((first, other), (other, first)):
        differ = [name for name in has.contents.columns if name not in lacks.contents.columns]
        if not differ:
            continue
        listed = ", ".join(f"`{name}`" for name in differ[:8])
        advice = "Open them one by one, or merge them (`etude data merge`), which leaves out columns that not all have."
        if any(col.is_under(name, root) for name in differ for root in (col.OBS, col.ACTION)):
            advice = "Open them one by one: they have different spaces, as modules that are recorded apart."
        raise DataError(
            f"{first.name} and {other.name} can't be read as one recording: only {has.name} has {listed}. {advice}"
        )
    if (ours := first.contents.header.units) != (others := other.contents.header.units):
        raise DataError(
            f"{first.name} and {other.name} can't be read as one recording: the actions of the first are {ours}, those "
            f"of the second {others}. Open them one by one."
        )


def _space(members: Sequence[Described], root: str) -> Space:
    """The common space of observations or actions. A recorded space takes precedence over inferred ones.

    If all were inferred, it is a space that fits the numbers of all.
    """
    own = [(member, member.contents.header.spaces[root]) for member in members]
    first, space = next(((m, s) for m, s in own if not _is_inferred(m, root)), own[0])
    is_inferred = _is_inferred(first, root)
    for member, other in own:
        if is_inferred and (joint := joint_space(space, other)) is not None:
            space = joint
            continue
        is_like = _is_inferred(member, root) and _leaves(other, root) == _leaves(space, root)
        if are_permuted(space, other) or (other != space and not is_like):
            raise DataError(
                f"{first.name} and {member.name} can't be read as one recording: the `{root}` space is {space} in "
                f"the first, and {other} in the second. Open them one by one; files of one table can be given as one "
                "Source([file, file], ...), whose space fits all."
            )
    return space


def _is_inferred(member: Described, root: str) -> bool:
    told = member.contents.header.meta.get("inferred") or ()
    return "spaces" in told or any(isinstance(name, str) and col.is_under(name, root) for name in told)


def _leaves(space: Space, root: str) -> dict[str, str]:
    def kind_of(leaf: Space) -> str:
        names = leaf.names if isinstance(leaf, NamedDiscrete) else ""
        kind = type(leaf).__name__.removeprefix("" if names else "Named")
        return f"{kind} {leaf_shape(leaf)} {leaf_dtype(leaf)} {names}"

    return {name: kind_of(leaf) for name, leaf in leaves(space, root).items()}


def _meta(members: Sequence[Described]) -> dict[str, object]:
    """Merge metadata: entries that all have in common, and the others under ``recordings``, by index."""
    same, rest = shared_meta([member.contents.header.meta for member in members])
    each = {str(i): own for i, own in enumerate(rest) if own}
    return {**same, "recordings": each} if each else same
