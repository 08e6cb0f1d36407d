# SPDX-License-Identifier: Apache-2.0
"""The table of segments: what holds for a whole piece of an episode."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Strings: TypeAlias = NDArray[np.object_]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Columns of length ``num_segments``, always in NumPy on the host. Make one with `Segments.of`."""

    episode_id: Strings
    """The episode that each segment belongs to; the same for all agents in it."""
    agent_id: Strings
    """Whose steps these are; None where there is one agent without a name."""
    module_id: Strings
    """The module that acted; None where there is one module without a name."""
    t_start: Ints
    """The index, in its episode, of the segment's first step (its first lookback row where it has any)."""
    lookback: Ints
    """How many leading rows are context only: never trained on."""
    terminated: Bools
    """The episode ended at the last step by the env's own rules: what follows is worth nothing."""
    truncated: Bools
    """The episode was stopped after the last step from outside (a time limit): what follows has a value."""
    has_final_obs: Bools
    """The observation after the last step is known. Where False, ``final_obs`` holds zeros that mean nothing."""

    @classmethod
    def of(
        cls,
        num: int,
        *,
        episode_id: Sequence[str] | Strings,
        agent_id: Sequence[str | None] | Strings | str | None = None,
        module_id: Sequence[str | None] | Strings | str | None = None,
        t_start: ArrayLike = 0,
        lookback: ArrayLike = 0,
        terminated: ArrayLike = False,
        truncated: ArrayLike = False,
        has_final_obs: ArrayLike = True,
    ) -> "Segments":
        """Build the columns for ``num`` segments; a single value stands for all of them."""
        return cls(
            episode_id=_strings(episode_id, num),
            agent_id=_strings(agent_id, num),
            module_id=_strings(module_id, num),
            t_start=_filled(t_start, num, np.int64),
            lookback=_filled(lookback, num, np.int64),
            terminated=_filled(terminated, num, np.bool_),
            truncated=_filled(truncated, num, np.bool_),
            has_final_obs=_filled(has_final_obs, num, np.bool_),
        )

    @classmethod
    def concat(cls, parts: Sequence["Segments"]) -> "Segments":
        """The segments of all ``parts``, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in NAMES))

    def __len__(self) -> int:
        return len(self.episode_id)

    def __getitem__(self, where: Any) -> "Segments":
        """The segments at a slice, index array or boolean mask."""
        return Segments(*(getattr(self, name)[where] for name in NAMES))

    def replace(self, **columns: NDArray[Any]) -> "Segments":
        """The same segments with some columns replaced."""
        return dataclasses.replace(self, **columns)

    @property
    def done(self) -> Bools:
        """The episode ended with this segment, either way."""
        return self.terminated | self.truncated

    def continues(self, lengths: Ints) -> Bools:
        """For each segment after the first: is it the direct continuation of the one before it?"""
        a, b = self[:-1], self[1:]
        same = (a.episode_id == b.episode_id) & (a.agent_id == b.agent_id) & (a.module_id == b.module_id)
        in_time = (a.t_start + lengths[:-1] == b.t_start) & ((b.lookback == 0) | (a.lookback == lengths[:-1]))
        return np.asarray(same & in_time & ~a.done, bool)


NAMES = tuple(field.name for field in dataclasses.fields(Segments))


def _strings(values: Any, num: int) -> Strings:
    column = np.empty(num, object)
    column[:] = values
    return column


def _filled(values: ArrayLike, num: int, dtype: Any) -> NDArray[Any]:
    array = np.asarray(values, dtype)
    return np.full(num, array, dtype) if array.ndim == 0 else array
