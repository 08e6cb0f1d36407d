# SPDX-License-Identifier: Apache-2.0
"""RecordingView: the data that the page shows. Each request reads only the parts and columns that it needs."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.recordings.editing import episode_table
from etude.recordings.episodes import LENGTH, RETURN, EpisodeTable
from etude.recordings.pieces import in_order
from etude.recordings.recording import Recording
from etude.recordings.where import STEP_FACTS, Expression, step_values
from etude.settings import choice
from etude.spaces import NamedDiscrete, Space
from etude.viewer import figures

MAX_EPISODES: Final = 5_000
"""The largest number of episodes in one list. A longer list is sorted first and then cut."""
MAX_POINTS: Final = 5_000
"""The largest number of points in a curve. For a longer episode, only every second step is drawn, or every third, and
so on."""
DESCRIBED_BYTES: Final = 2**28
"""Maximum bytes of a column that `RecordingView.describe` reads; a larger column is described by a sample."""
SAMPLED_STEPS: Final = 131_072
"""The approximate number of steps used for the statistics of a column of a larger recording: whole parts, evenly
spread."""


class RecordingView:
    """A view of a recording for the page. `summary`, `list`, `describe` and `episode` return plain JSON data.

    Args:
        recording: The recording to show, of any format.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._leaves = recording.header.leaves()
        self._cached_load = lru_cache(4)(self._load)
        self._part = lru_cache(2)(recording.part)
        self._keys = lru_cache(1024)(lambda k: recording.part(k, ()))

    # -- the recording -------------------------------------------------------------------------------------------

    @cached_property
    def images(self) -> list[str]:
        """The names of the columns with images."""
        return [
            name for name, leaf in self._leaves.items() if name in self.recording.columns and figures.is_image(leaf)
        ]

    @cached_property
    def episodes(self) -> EpisodeTable:
        """A table with one row per episode: its return, length and so on. Reads the reward and key columns once."""
        return self._episode_parts[0]

    @cached_property
    def _episode_parts(self) -> tuple[EpisodeTable, NDArray[np.int64], NDArray[np.int64]]:
        """The episodes, and the parts that hold them.

        Returns:
            The table of episodes, and two int64 arrays ``[n]``: episode ``i`` of the first, an index into the table and
            increasing, has steps in part ``i`` of the second.
        """
        recording, table = self.recording, EpisodeTable()
        rewards = [col.REWARD] if col.REWARD in recording.columns else []
        codes = [np.unique(table.add(self._read(k, rewards))) for k in range(recording.num_parts)]
        parts = np.repeat(np.arange(len(codes)), [len(own) for own in codes])
        episodes = np.concatenate([*codes, np.zeros(0, np.int64)])
        order = np.argsort(episodes, kind="stable")
        return table, episodes[order], parts[order]

    def summary(self) -> dict[str, Any]:
        """A summary of the recording: path, format, spaces, number of episodes and steps, returns, lengths and size."""
        recording, known = self.recording, self.episodes.figures
        lengths, ended = known[LENGTH], int(known["done"].sum())
        return {
            "path": str(recording.path),
            "format": recording.format,
            "env": recording.env,
            "obs": str(recording.obs_space),
            "action": str(recording.action_space),
            "episodes": len(self.episodes),
            "steps": self.episodes.num_steps,
            "agents": sorted(agent for agent in self.episodes.agents if agent is not None),
            "terminated": int(known[col.TERMINATED].sum()),
            "truncated": int(known[col.TRUNCATED].sum()),
            "unfinished": len(self.episodes) - ended,
            "return": figures.statistics(known[RETURN]) if RETURN in known else None,
            "length": figures.statistics(lengths),
            "columns": recording.columns,
            "images": self.images,
            "files": len(recording.files),
            "bytes": sum(path.stat().st_size for path in recording.files),
            "left_out": recording.left_out_report(),
        }

    def list(self, where: str = "", sort: str = "", descending: bool = False) -> dict[str, Any]:
        """List the episodes for which ``where`` holds.

        Args:
            where: An expression over episodes (see `etude.recordings.where`); empty lists all.
            sort: The column to sort by, such as ``return``; empty keeps the order in which they were recorded.
            descending: Whether to list the largest first.

        Returns:
            ``found``, the number of matching episodes; ``of``, the number of all episodes; and the columns of the table
            of episodes by name, as lists with one value for each of the first `MAX_EPISODES` matching episodes.

        Raises:
            SettingsError: ``where`` is not a valid expression, or ``sort`` is not a column.
        """
        known = self.episodes.figures
        rows = np.arange(len(self.episodes))
        if where.strip():
            expression = Expression(where)
            rows = np.flatnonzero(expression(episode_table(self.recording, expression).figures))
        if sort and sort not in known:
            raise SettingsError(f"episodes can't be sorted by `{sort}`. {choice(sort, known)}")
        if sort:
            keys = known[sort][rows]
            order = np.argsort(keys.astype(str) if keys.dtype == object else keys, kind="stable")
            rows = rows[order[::-1] if descending else order]
        columns = {name: figures.plain(values[rows[:MAX_EPISODES]]) for name, values in known.items()}
        return {"found": len(rows), "of": len(self.episodes), **columns}

    def sample(self, name: str) -> NDArray[Any]:
        """The values of a step column, or of a column of the table of episodes.

        Returns:
            ``[steps, ...]``, of about `SAMPLED_STEPS` steps if the recording has more; ``[episodes]`` for a column of
            the table of episodes, also if there is a step column of that name. A discrete space with names gives names
            instead of numbers.

        Raises:
            DataError: there is no such column, or a part can't be read.
        """
        return self.episodes.figures[name] if name in self.episodes.figures else self._steps(name)

    def _steps(self, name: str, num_bytes: int = 0) -> NDArray[Any]:
        """The values of a step column, see `sample`; of more steps as long as they have at most ``num_bytes``."""
        recording, found, rows = self.recording, list[NDArray[Any]](), 0
        if name not in recording.columns:
            raise DataError(f"{recording.path}: there is no column `{name}`. {choice(name, recording.columns)}")
        num = recording.num_parts
        stride = max(round(self.episodes.num_steps / SAMPLED_STEPS), 1)
        for k in sorted(range(num), key=lambda k: (k % stride, k)):
            exp = self._read(k, [name])
            found.append(with_names(self._leaves.get(name), np.array(exp.trained_steps()[name])))
            rows += len(found[-1])
            if rows >= SAMPLED_STEPS and sum(column.nbytes for column in found) >= num_bytes:
                break
        return np.concatenate(found) if found else np.zeros(0)

    def _read(self, k: int, names: Sequence[str]) -> Experience:
        """Read these columns of a part; all columns if ``on_bad`` leaves rows out, because which ones depends on the
        columns read."""
        if self.recording.leaves_out:
            return self._part(k, tuple(self.recording.columns))
        return self.recording.part(k, names, finals=False)

    def describe(self) -> dict[str, dict[str, Any]]:
        """The statistics of each step column, by name: those of `figures.statistics`.

        They are of all steps, or of a sample for images and columns of more than `DESCRIBED_BYTES`. A column with
        several components has an entry for each (``obs[0]``); an image column has one for all pixels.
        """
        out = {}
        for name in self.recording.columns:
            values = self._steps(name, 0 if name in self.images else DESCRIBED_BYTES)
            parts = {name: values.reshape(-1)} if name in self.images else figures.scalars(name, values)
            out.update({part: figures.statistics(column) | {"steps": len(values)} for part, column in parts.items()})
        return out

    # -- one episode ---------------------------------------------------------------------------------------------

    def episode(self, episode_id: str) -> dict[str, Any]:
        """The steps of one episode.

        Returns:
            ``id``, and ``agents``: for each segment (one per agent, or several if steps are missing) the agent and
            module, ``t_start``, ``steps``, ``terminated``, ``truncated``, ``stride`` (the distance in steps between two
            values of a curve), ``curves`` of numbers and ``texts`` by column, and ``frames``, the number of images in
            each image column.

        Raises:
            DataError: there is no such episode, or it can't be read.
        """
        names = tuple(name for name in self.recording.columns if name not in self.images)
        exp = self._cached_load(episode_id, names)
        return {"id": episode_id, "agents": [self._agent(episode_id, exp[i]) for i in range(exp.num_segments)]}

    def _agent(self, episode_id: str, exp: Experience) -> dict[str, Any]:
        steps, curves, texts = exp.trained_steps(), dict[str, list[Any]](), dict[str, list[Any]]()
        num = len(exp.t()[exp.trained()])
        stride = max(-(-num // MAX_POINTS), 1)
        for name, values in steps.items():
            shown = with_names(self._leaves.get(name), np.asarray(values))
            for part, column in figures.scalars(name, shown).items():
                (texts if column.dtype == object else curves)[part] = figures.plain(column[::stride])
        segment = exp.segments
        return {
            "agent": segment.agent_id[0],
            "module": segment.module_id[0],
            "t_start": int(segment.t_start[0] + segment.lookback[0]),
            "steps": num,
            "stride": stride,
            "terminated": bool(segment.terminated[0]),
            "truncated": bool(segment.truncated[0]),
            "curves": curves,
            "texts": texts,
            "frames": num + self._has_final_obs(episode_id, exp),
        }

    def _has_final_obs(self, episode_id: str, exp: Experience) -> bool:
        """Whether the observation after the last step of ``exp``, a segment of the episode, is known."""
        image = next((name for name in self.images if col.is_under(name, col.OBS)), None)
        if image is None or any(col.is_under(name, col.OBS) for name in exp.steps):
            return bool(exp.segments.has_final_obs[0])
        # All observations are images, which were not read: look for a part that has the last one.
        (end,), (agent,) = spans(exp)[1], exp.segments.agent_id
        parts = (self._part(k, (image,)) for k in self._parts_of(episode_id))
        return any(self._segment_at(part, episode_id, agent, int(end)) is not None for part in parts)

    def frame(self, episode_id: str, agent: int, column: str, t: int) -> bytes:
        """The image that an agent observed at step ``t``, as PNG.

        Args:
            episode_id: The id of the episode.
            agent: The index of the agent in ``agents`` of `episode`.
            column: One of `images`.
            t: The step, counted from 0 at the first step of that agent. The number of steps selects the final
                observation.

        Raises:
            DataError: there is no such image.
        """
        if column not in self.images:
            raise DataError(f"{self.recording.path}: `{column}` holds no images. {choice(column, self.images)}")
        whole = self._cached_load(episode_id, ())
        if not 0 <= agent < whole.num_segments:
            raise DataError(
                f"{self._episode_label(episode_id)} has {whole.num_segments} agents, so there is no agent {agent}."
            )
        (begin,), (end,), (name,) = *spans(whole[agent]), whole[agent].segments.agent_id
        for k in self._parts_of(episode_id) if 0 <= t <= end - begin else ():
            # An episode may have too many images to load at once, so only the part with this one is read.
            if self._segment_at(self._keys(k), episode_id, name, begin + t) is None:
                continue
            part = self._part(k, (column,))
            if (i := self._segment_at(part, episode_id, name, begin + t)) is not None:
                images, at = part[i].trained_steps()[column], begin + t - int(spans(part[i])[0][0])
                return figures.png(np.asarray(images[at] if at < len(images) else part[i].final_obs[column][0]))
        raise DataError(f"{self._episode_label(episode_id)} has {end - begin} steps, so there is no step {t}.")

    def _segment_at(self, exp: Experience, episode_id: str, agent: str | None, t: int) -> int | None:
        """The index of the segment of ``exp`` with an agent's observation at step ``t``; None if there is none."""
        begin, end = spans(exp)
        is_own = (self._episode_parts[0].codes(exp) == self._codes[episode_id]) & (
            np.asarray(exp.segments.agent_id) == agent
        )
        has_final = exp.segments.has_final_obs if exp.steps else True  # without columns it is unknown
        found = np.flatnonzero(is_own & (begin <= t) & (t < end + has_final))
        return int(found[0]) if len(found) else None

    def _episode_label(self, episode_id: str) -> str:
        return f"{self.recording.path}: episode {episode_id!r}"

    def _load(self, episode_id: str, names: tuple[str, ...]) -> Experience:
        """Load these columns of an episode: one segment per agent, or several if steps are missing."""
        found = []
        for k in self._parts_of(episode_id):
            exp = self._part(k, names) if names else self._keys(k)
            found.append(exp.select(np.flatnonzero(self._episode_parts[0].codes(exp) == self._codes[episode_id])))
        return in_order(Experience.concat(found), by_episode=True).join()

    def _parts_of(self, episode_id: str) -> Sequence[int]:
        """The indices of the parts that hold steps of an episode."""
        _, episodes, parts = self._episode_parts
        code = self._codes.get(episode_id)
        if code is None:
            raise DataError(f"{self.recording.path}: there is no episode {episode_id!r}.")
        held: Sequence[int] = parts[np.searchsorted(episodes, code) : np.searchsorted(episodes, code, "right")].tolist()
        return held

    @cached_property
    def _codes(self) -> dict[str, int]:
        return {name: code for code, name in enumerate(self.episodes.ids)}


def spans(exp: Experience) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first ``t`` of each segment, without lookback, and one more than its last ``t``: two int64 ``[segments]``."""
    own = exp.segments
    return own.t_start + own.lookback, own.t_start + exp.lengths


def with_names(leaf: Space | None, values: NDArray[Any]) -> NDArray[Any]:
    """``values``, with names instead of numbers if their space ``leaf`` is a `NamedDiscrete`."""
    return np.array(leaf.names, object)[values] if isinstance(leaf, NamedDiscrete) else values


def first_rows(recording: Recording, count: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The first steps of a recording, without lookback.

    Args:
        recording: The recording, of any format.
        count: The number of steps, at least 1.
        columns: The step columns, by name or root; None: all.

    Returns:
        For each step, plain JSON data by column; an image or matrix is replaced by a text with its shape and dtype.

    Raises:
        DataError: a column does not exist, or something can't be read.
    """
    rows: list[dict[str, Any]] = []
    known = recording.header.leaves()
    for exp in recording.stream(columns=columns, max_rows=max(count, 1024)):
        facts = step_values(exp, STEP_FACTS)
        if not any(name is not None for name in exp.segments.agent_id.names):
            facts = {name: facts[name] for name in facts if name not in (col.AGENT_ID, col.MODULE_ID)}
        ends = {name: facts.pop(name) for name in (col.TERMINATED, col.TRUNCATED)}
        steps = {name: with_names(known.get(name), np.asarray(values)) for name, values in exp.steps.items()}
        shown = {col.EPISODE_ID: facts.pop(col.EPISODE_ID), **facts, **steps, **ends}
        for i in np.flatnonzero(exp.trained())[: count - len(rows)].tolist():
            rows.append({name: _value(values[i]) for name, values in shown.items()})
        if len(rows) == count:
            break
    return rows


def _value(value: Any) -> Any:
    """Convert one value of a step to JSON data; an image or matrix becomes a text with its shape and dtype."""
    array = np.asarray(value)
    if array.ndim > 1:
        return f"{'x'.join(map(str, array.shape))} {array.dtype}"
    if array.dtype.kind == "f" and array.ndim == 0 and np.isinf(array):
        return str(float(array))
    return figures.plain(array.reshape(-1)) if array.ndim else figures.plain(array.reshape(1))[0]


def compare_column(views: Sequence[RecordingView], name: str) -> list[dict[str, Any]]:
    """Compare a step column, or a column of the table of episodes, between several recordings.

    Returns:
        For each component of the column (``obs[0]``, ``obs[1]``): its ``name``, the result of `figures.histogram`, and
        ``statistics``, a list with the result of `figures.statistics` for each recording, None if it lacks the column.

    Raises:
        DataError: no recording has the column, or it can't be read.
    """
    has = [name in view.recording.columns or name in view.episodes.figures for view in views]
    if not any(has):
        views[0].sample(name)
    parts = [figures.scalars(name, view.sample(name)) if known else {} for view, known in zip(views, has, strict=True)]
    out = []
    for part in dict.fromkeys(part for own in parts for part in own):
        columns = [own[part] if part in own else np.zeros(0) for own in parts]
        each = [figures.statistics(own[part]) if part in own else None for own in parts]
        out.append({"name": part, **figures.histogram(columns), "statistics": each})
    return out
