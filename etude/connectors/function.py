# SPDX-License-Identifier: Apache-2.0
"""A plain function as a connector."""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.connectors.base import Connector, Inputs, column, replace_obs
from etude.errors import SpaceError
from etude.experience import Experience
from etude.spaces import Flattener, Nester, Space, leaf_dtype, leaf_shape

if TYPE_CHECKING:
    from etude.modules.module import Module

_PROBES = 2


class FunctionConnector(Connector):
    """Maps observations by a plain function: ``fn(obs) -> obs``, both nested and with the batch's axis in front.

    The space of what it gives is found by calling it on two samples: arrays that it hands through keep their space,
    others become Boxes of their shape and dtype without bounds (MultiBinary for bool).

    Args:
        fn: Works on each row by itself, remembers nothing, and does not write to what it is given.
    """

    needs = (col.OBS,)

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn
        self._nest: Nester
        self._flatten: Flattener

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.fn, "__name__", type(self.fn).__name__))

    def __repr__(self) -> str:
        return self.name

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Calls the function on two samples of ``obs_space``.

        Raises:
            SpaceError: it fails, changes its input, or gives something else than arrays of two rows.
        """
        samples = copy.deepcopy(obs_space)
        samples.seed(0)
        self._nest = Nester(obs_space, col.OBS)
        flat = Flattener(obs_space, col.OBS)
        drawn = [flat(samples.sample()) for _ in range(_PROBES)]
        given = {name: np.stack([one[name] for one in drawn]) for name in flat.leaves}
        passed = {name: values.copy() for name, values in given.items()}
        try:
            result = self.fn(self._nest(passed))
        except Exception as error:
            raise SpaceError(
                f"the connector function `{self.name}` fails on {_PROBES} samples of {obs_space}: {error!r}."
            ) from error
        for name, values in given.items():
            if not np.array_equal(values, passed[name], equal_nan=values.dtype.kind == "f"):
                raise SpaceError(
                    f"the connector function `{self.name}` writes to its input `{name}`: let it return a copy."
                )
        kept = {id(values): flat.leaves[name] for name, values in passed.items()}
        space = self._space_of(result, kept, col.OBS)
        self._flatten = Flattener(space, col.OBS)
        return space, action_space

    def _space_of(self, result: Any, kept: Mapping[int, Space], name: str) -> Space:
        if isinstance(result, Mapping):
            return spaces.Dict([(key, self._space_of(v, kept, f"{name}{SEPARATOR}{key}")) for key, v in result.items()])
        if isinstance(result, tuple):
            return spaces.Tuple([self._space_of(v, kept, f"{name}{SEPARATOR}{i}") for i, v in enumerate(result)])
        if id(result) in kept:
            return kept[id(result)]
        if not isinstance(result, np.ndarray) or result.shape[:1] != (_PROBES,) or result.dtype.kind not in "fiub":
            found = f"{result.dtype}{list(result.shape)}" if isinstance(result, np.ndarray) else type(result).__name__
            raise SpaceError(
                f"the connector function `{self.name}` gives {found} as `{name}` for {_PROBES} observations; expected "
                f"a NumPy array of numbers with {_PROBES} rows, or a dict or tuple of them."
            )
        return _box(result)

    def _mapped(self, obs: Columns, rows: int) -> Columns:
        if not rows:  # functions such as a maximum fail on nothing
            return {n: np.zeros((0, *leaf_shape(at)), leaf_dtype(at)) for n, at in self._flatten.leaves.items()}
        out: dict[str, NDArray[Any]] = self._flatten(self.fn(self._nest(obs)))
        for name, values in out.items():
            if len(values) != rows:
                raise SpaceError(
                    f"the connector function `{self.name}` gives {len(values)} rows as `{name}` for {rows}."
                )
            if values.dtype == np.bool_:
                out[name] = values.view(np.int8)
        return out

    def online(self, inputs: Inputs) -> Inputs:
        """Maps the rows."""
        return inputs.with_obs(self._mapped(inputs.obs, len(inputs.slots)))

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Maps all steps, and ``final_obs``."""
        obs = {name: column(exp, name, self.name) for name in exp.final_obs}
        final_obs = {name: np.asarray(final) for name, final in exp.final_obs.items()}
        return replace_obs(exp, self._mapped(obs, exp.num_steps), self._mapped(final_obs, exp.num_segments))


def _box(values: NDArray[Any]) -> Space:
    shape, dtype = values.shape[1:], values.dtype
    if dtype.kind == "b":
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else list(shape))
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype.type)
