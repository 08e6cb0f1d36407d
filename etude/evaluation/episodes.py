# SPDX-License-Identifier: Apache-2.0
"""Iterate over the recorded whole episodes of one module's agents, in bounded memory and several times."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from etude import columns as col
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.feed import modules_of
from etude.connectors import RescaleAction, overrides
from etude.connectors.actions import BoundedActions
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import not_finite
from etude.experience.experience import without_lookback
from etude.policies import Policy
from etude.recordings import Recording, Source
from etude.recordings.action_units import AS_THE_ENV_GOT, units
from etude.recordings.episodes import Assembler
from etude.recordings.pieces import pieces, row_bytes
from etude.recordings.screening import OnBad
from etude.spaces import Space, Spaces, alike, is_bounded, leaf_shape, leaves, same_bounds

HeldOutLike: TypeAlias = str | os.PathLike[str] | Source | Recording | Experience
"""Held-out episodes: a path, a `Source`, an open `Recording`, or `Experience` in memory."""

CHUNK_ROWS = 16_384
CHUNK_BYTES: Final = 64 * 2**20

NOT_DONE: Final = "not done"
BROKEN: Final = "with a gap or without their beginning"
NO_MODULE: Final = "of agents that no module acts for"


def opened(data: HeldOutLike, on_bad: OnBad, spaces: Spaces | tuple[None, None]) -> Recording | Experience:
    """Open the data with ``on_bad`` if it is a path or a `Source`.

    If the data does not state its spaces, ``spaces``, those of the policies, are used, so that names stand for the same
    numbers as in training.

    Raises:
        DataError: there is no data, or it lacks observations, actions or rewards.
        SettingsError: ``on_bad`` is given for data that was opened with another.
    """
    held = data
    if not isinstance(held, Recording | Experience):
        held = Recording.open_with(held, on_bad, lambda: spaces, of_env=True)
        held.warn_of_mapped_actions()
    elif isinstance(held, Recording):
        held.check_on_bad(on_bad)
    elif on_bad != "strict":
        raise SettingsError(f"`on_bad` is {on_bad!r}, but has no effect on Experience, which is used as it is.")
    columns = held.columns if isinstance(held, Recording) else list(held.steps)
    for root in (col.OBS, col.ACTION, col.REWARD):
        if not col.under(columns, root):
            raise DataError(
                f"{where(held)}: there is no column `{root}`, which off-policy evaluation requires; there are "
                f"{', '.join(columns)}."
            )
    return held


def where(data: Recording | Experience) -> str:
    """Name the data, for messages."""
    return str(data.path) if isinstance(data, Recording) else "the experience"


class WholeEpisodes:
    """The whole episodes of one module's agents.

    An agent's part in an episode is whole if it has its first step, and its last step is terminated or truncated. Its
    pieces are joined, whatever their order; until it is whole, they are held in memory. Parts that are not whole are
    left out, and counted.

    With a single module, all agents belong to it, unless the setting ``module_of`` says otherwise.

    Args:
        data: The source of the episodes.
        columns: The step columns to read.
        algorithm: The algorithm with the module.
        name: Id of the module.
    """

    def __init__(
        self, data: Recording | Experience, columns: Sequence[str], algorithm: Algorithm[Any], name: str
    ) -> None:
        self._data = data.numpy() if isinstance(data, Experience) else data
        self._columns = list(columns)
        self._modules, self._module_of = list(algorithm.policies), algorithm.config.agents.module_of
        self._name = name
        self._rows_read = 0
        self.left_out: Counter[str] = Counter()
        """The number of agents' parts in episodes that are left out, by reason; known after a pass."""

    def chunks(self) -> Iterator[Experience]:
        """Iterate over the whole episodes in chunks, always in the same order: a segment each, without lookback.

        Raises:
            DataError: a reward is not finite.
        """
        self.left_out, self._rows_read = Counter(), 0
        assembler = Assembler()
        ready: list[Experience] = []
        for piece in self._pieces():
            self._rows_read += piece.num_steps
            own = without_lookback(self._own(piece))  # lookback is also in the piece before
            if own.num_segments:
                ready += self._whole(own, assembler)
            rows = sum(exp.num_steps for exp in ready)
            if rows and rows >= min(CHUNK_ROWS, CHUNK_BYTES // row_bytes(ready[0])):
                yield self._checked(Experience.concat(ready))
                ready = []
        if ready:
            yield self._checked(Experience.concat(ready))
        for held in assembler.waiting.values():
            self.left_out[NOT_DONE if held.total is None else BROKEN] += 1

    def share_read(self) -> float:
        """How much of the data the current pass has read, 0 to 1."""
        return min(self._rows_read / self._data.num_steps, 1.0)

    def _pieces(self) -> Iterator[Experience]:
        if isinstance(self._data, Recording):
            return self._data.stream(columns=self._columns, max_rows=CHUNK_ROWS)
        names = [name for name in self._data.steps if any(col.is_under(name, root) for root in self._columns)]
        return pieces(self._data.only(names), CHUNK_ROWS)

    def _own(self, piece: Experience) -> Experience:
        if self._module_of is None and len(self._modules) == 1:
            return piece
        of = modules_of(piece.segments, self._module_of, self._modules)
        if nobodys := sum(name not in self._modules for name in of.tolist()):
            self.left_out[NO_MODULE] += nobodys
        return piece.select(of == self._name)

    def _whole(self, own: Experience, assembler: Assembler) -> list[Experience]:
        """The episodes that are whole in ``own``, or became whole with the pieces held so far."""
        segments = own.segments
        at_once = (segments.t_start == 0) & segments.done
        found = [own.select(at_once)] if at_once.any() else []
        for joined in assembler.add(own.select(~at_once)):
            if joined.num_segments == 1:
                found.append(joined)
            else:
                self.left_out[BROKEN] += 1
        return found

    def _checked(self, exp: Experience) -> Experience:
        rows = not_finite(exp.steps[col.REWARD])
        if len(rows):
            remedy = "its return can't be computed. Correct it, or leave the episode out."
            raise value_error(exp, col.REWARD, int(rows[0]), where(self._data), remedy)
        return exp


def value_error(episodes: Experience, name: str, row: int, place: str, remedy: str) -> DataError:
    """Return the error for an invalid value: the one in step ``row`` of column ``name`` of whole episodes."""
    segment = int(episodes.segment_of_step()[row])
    return DataError(
        f"{place}: `{name}` is {episodes.steps[name][row]} at t {row - episodes.offsets[segment]} of episode "
        f"{episodes.segments.episode_id[segment]!r}: {remedy}"
    )


# -- whether the episodes fit a module -------------------------------------------------------------------------------


def why_unfit(algorithm: Algorithm[Any], name: str, data: Recording | Experience) -> str | None:
    """Return why the data does not fit the spaces of a module; None if it fits."""
    policy = algorithm.policies[name]
    wanted = {col.OBS: algorithm.spaces[name][0], col.ACTION: policy.module.action_space}
    for root, what in ((col.OBS, "observations"), (col.ACTION, "actions")):
        found: Any
        if isinstance(data, Recording):
            found = data.header.spaces[root]
            fits = alike(found, wanted[root])
            if root == col.ACTION:
                fits = fits and (_in_units_of_module(policy, found) or are_of_env(policy, data))
        else:
            found = {column: tuple(c.shape[1:]) for column, c in col.subtree(data.steps, root).items()}
            fits = found == {column: leaf_shape(leaf) for column, leaf in leaves(wanted[root], root).items()}
        if not fits:
            return (
                f"{where(data)}: the {what} are {found}, but module {name!r} was made for {wanted[root]}: use "
                "episodes of the same env, with actions in the units of the env or of the module, as the bounds of "
                "their space say: Recording.open(path, action_space=...)."
            )
    return None


def _in_units_of_module(policy: Policy, space: Space) -> bool:
    if _rescales(policy) and not is_bounded(space):
        return False  # nothing says in which units they are
    return same_bounds(space, policy.module.action_space)


def _rescales(policy: Policy) -> bool:
    return any(isinstance(connector, RescaleAction) for connector in policy.connectors.connectors)


def are_of_env(policy: Policy, data: Recording | Experience) -> bool:
    """Whether recorded actions are in the env's units, so that `rescale_action` must convert them to the module's."""
    if not isinstance(data, Recording) or not _rescales(policy) or _in_units_of_module(policy, data.action_space):
        return False
    changing = [connector for connector in policy.connectors.connectors if overrides(connector, "act")]
    return (
        all(isinstance(connector, BoundedActions) for connector in changing)
        and units(data.action_space, data.meta) == AS_THE_ENV_GOT
        and is_bounded(data.action_space)
        and alike(data.action_space, policy.action_space)
        and same_bounds(data.action_space, policy.action_space)
    )
