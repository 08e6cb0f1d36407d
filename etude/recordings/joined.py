# SPDX-License-Identifier: Apache-2.0
"""Several recordings read as one."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow.compute as pc

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.files import AnyPath
from etude.recordings import tolerance
from etude.recordings.formats.inferring import joint_space
from etude.recordings.formats.parts import Parts, Place, Problem
from etude.recordings.layout import Header
from etude.recordings.own import OwnParts
from etude.recordings.pieces import filtered
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves


class JoinedParts:
    """The parts of several recordings behind each other. See `etude.recordings.formats.parts.Parts`.

    Episode ids are unique within one recording: here, the number of the recording stands in front (``0-``, ``1-``).

    Raises:
        DataError: their spaces or columns are not the same; both are named.
    """

    def __init__(self, recordings: Sequence[Parts]) -> None:
        first = recordings[0]
        for other in recordings[1:]:
            _check_columns(first, other)
        self._recordings = list(recordings)
        formats = list(dict.fromkeys(parts.format for parts in recordings))
        self.format = formats[0] if len(formats) == 1 else "joined"
        self.files: list[AnyPath] = [file for parts in recordings for file in parts.files]
        self.columns = list(first.columns)
        envs = {parts.header.env for parts in recordings}
        self.header = Header(
            _space(recordings, col.OBS),
            _space(recordings, col.ACTION),
            envs.pop() if len(envs) == 1 else None,
            _meta(recordings),
        )
        self._starts = np.cumsum([0, *(parts.num_parts for parts in recordings)])
        self._described: dict[str, str] = {}

    def member(self, k: int) -> tuple[int, Parts, int]:
        """The recording that part ``k`` is of: its number, itself, and the number of the part in it."""
        r = int(np.searchsorted(self._starts, k, side="right")) - 1
        return r, self._recordings[r], k - int(self._starts[r])

    @property
    def num_parts(self) -> int:
        """The parts of all."""
        return int(self._starts[-1])

    def rows(self, k: int) -> int:
        """The steps of part ``k``."""
        _, parts, own = self.member(k)
        return parts.rows(own)

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Part ``k``; see `etude.recordings.formats.parts.Parts`.

        Raises:
            DataError: also where a column is of another dtype or shape than in another recording.
        """
        _, parts, own = self.member(k)
        return self.adopted(k, parts.load(own, columns))

    def load_rest(self, k: int, columns: Sequence[str] | None) -> tuple[Experience, list[Problem]]:
        """What can be read of part ``k``, and what can't; see `etude.recordings.tolerance`."""
        _, parts, own = self.member(k)
        exp, problems = tolerance.load_rest(parts, own, columns)
        return self.adopted(k, exp), problems

    def keys(self, k: int) -> Experience:
        """The segments of part ``k``; see `etude.recordings.tolerance`."""
        _, parts, own = self.member(k)
        return self.adopted(k, tolerance.keys_of(parts, own))

    def place(self, k: int, row: int) -> Place:
        """Where a row of part ``k`` is."""
        _, parts, own = self.member(k)
        return tolerance.place_of(parts, own, row)

    def adopted(self, k: int, exp: Experience) -> Experience:
        """What was loaded as part ``k`` from its own recording, under the episode ids that it has here."""
        r, parts, _ = self.member(k)
        for name, values in exp.steps.items():
            known, own = self._described.setdefault(name, describe(values)), describe(values)
            if known != own:
                raise DataError(
                    f"{_name(parts)}: column `{name}` is {own}, but {known} in another of the recordings that are read "
                    "as one. Read them one by one, or leave the column out with `columns=`."
                )
        ids = [f"{r}-{episode}" for episode in exp.segments.episode_id]
        return Experience(exp.steps, exp.offsets, exp.segments.replace(episode_id=ids), exp.final_obs)

    def problems(self) -> Iterator[Problem]:
        """What is wrong with each as a whole; not what is wrong between them, such as one that is there twice."""
        for parts in self._recordings:
            yield from tolerance.problems_of(parts)


def loaded(parts: Parts, k: int, names: Sequence[str], where: pc.Expression | None) -> Experience:
    """Step columns of part ``k``, with only the rows for which ``where`` holds; files of Etude's are read by it."""
    if isinstance(parts, JoinedParts):
        _, own, i = parts.member(k)
        return parts.adopted(k, loaded(own, i, names, where))
    if isinstance(parts, OwnParts):
        return parts.load(k, names, where)
    if where is None:
        return parts.load(k, names)
    return filtered(parts.load(k), where, names)


def _name(parts: Parts) -> str:
    return str(parts.files[0]) if parts.files else f"a {parts.format} in memory"


def _check_columns(first: Parts, other: Parts) -> None:
    for has, lacks in ((first, other), (other, first)):
        differ = [name for name in has.columns if name not in lacks.columns]
        if not differ:
            continue
        listed = ", ".join(f"`{name}`" for name in differ[:8])
        raise DataError(
            f"{_name(first)} and {_name(other)} can't be read as one recording: only {_name(has)} has {listed}. Open "
            "them one by one, or convert them to the same columns."
        )


def _space(recordings: Sequence[Parts], root: str) -> Space:
    """The space of the observations or actions; one that was only inferred from numbers gives way to one recorded.

    Where all were inferred, it is the one for the numbers of all.
    """
    own = [(parts, parts.header.obs_space if root == col.OBS else parts.header.action_space) for parts in recordings]
    first, space = next(((p, s) for p, s in own if not _is_inferred(p, root)), own[0])
    is_inferred = _is_inferred(first, root)
    for parts, other in own:
        if is_inferred and (joint := joint_space(space, other)) is not None:
            space = joint
            continue
        if other != space and not (_is_inferred(parts, root) and _described(other, root) == _described(space, root)):
            raise DataError(
                f"{_name(first)} and {_name(parts)} can't be read as one recording: the `{root}` space is {space} in "
                f"the first, and {other} in the second. Open them one by one."
            )
    return space


def _is_inferred(parts: Parts, root: str) -> bool:
    told = parts.header.meta.get("inferred") or ()
    return "spaces" in told or any(isinstance(name, str) and col.is_under(name, root) for name in told)


def _described(space: Space, root: str) -> dict[str, str]:
    return {n: f"{type(s).__name__} {leaf_shape(s)} {leaf_dtype(s)}" for n, s in leaves(space, root).items()}


def _meta(recordings: Sequence[Parts]) -> dict[str, object]:
    """What all have alike; the rest for each, by its number."""
    metas = [dict(parts.header.meta) for parts in recordings]
    alike = {key: value for key, value in metas[0].items() if all(key in m and m[key] == value for m in metas)}
    each = {str(i): own for i, m in enumerate(metas) if (own := {k: v for k, v in m.items() if k not in alike})}
    return {**alike, "recordings": each} if each else alike
