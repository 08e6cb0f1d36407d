# SPDX-License-Identifier: Apache-2.0
"""Action masks: which choices an observation allows."""

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from etude.columns import ACTION_MASK, OBS_MASK, Columns
from etude.errors import EnvError, ModuleError
from etude.experience.arrays import Constant
from etude.modules.distributions import FORBIDDEN, Distribution, Floats
from etude.spaces import Space, leaf_shape


class ActionMask:
    """Applies the part `action_mask` of an observation to the inputs of a distribution.

    An entry of 0 forbids one choice: its logit becomes `FORBIDDEN`. Samples, modes, log-probabilities, entropies and
    divergences are then those of the distribution renormalised over the allowed choices, and no gradient flows to the
    forbidden ones (Huang & Ontañón 2022, "A closer look at invalid action masking in policy gradient algorithms", 4).
    The mask has an entry for each choice of the action's discrete parts, in order: ``n`` for a Discrete, the sum of
    ``nvec`` for a MultiDiscrete, one for each bit of a MultiBinary (0: the bit stays 0), none for a Box.

    Args:
        space: The space of the mask: MultiBinary, or a Box or MultiDiscrete of zeros and ones, of any shape.
        dist: The distribution whose inputs are masked.

    Raises:
        ModuleError: the space is not one of a mask, or does not fit the distribution.
    """

    def __init__(self, space: Space, dist: Distribution) -> None:
        sizes = np.array([run.size for run in dist.logits], np.int64)
        self.size = int(sizes.sum())
        _check_space(space, dist, self.size)
        self._axes = len(leaf_shape(space))
        starts = np.cumsum(sizes) - sizes
        entry = np.full(dist.num_inputs, self.size)  # of each input; the last stands for inputs that are not masked
        for start, run in zip(starts, dist.logits, strict=True):
            entry[run.start : run.start + run.copies * run.size] = np.tile(start + np.arange(run.size), run.copies)
        self._entry = None if np.array_equal(entry, np.arange(self.size)) else Constant(entry)
        self._sizes: list[int] = sizes.tolist()
        self._starts = starts
        self._exclusive = np.array([run.exclusive for run in dist.logits])

    def apply(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """``inputs`` ``[..., num_inputs]`` masked by ``mask`` ``[..., *shape of its space]``."""
        forbidden = mask.reshape(*mask.shape[: mask.dim() - self._axes], self.size) == 0
        if self._entry is not None:
            forbidden = F.pad(forbidden, (0, 1))[..., self._entry.like(inputs)]
        return inputs.masked_fill(forbidden, FORBIDDEN)

    def apply_in_place(self, inputs: Floats, obs: Columns, ends: NDArray[np.bool_] | None) -> None:
        """Mask ``inputs`` in place with NumPy, while acting; raises the errors of `check`."""
        forbidden = self.check(obs, ends)
        if self._entry is not None:
            forbidden = np.append(forbidden, np.zeros((len(forbidden), 1), bool), 1).take(self._entry.value, axis=1)
        np.putmask(inputs, forbidden, FORBIDDEN)

    def check(self, obs: Columns, ends: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """bool ``[N, size]``: the forbidden choices, after checking that each row has an allowed one.

        Raises:
            EnvError: a row that is not in ``ends`` has no allowed choice; the message names the row.
        """
        mask = obs[OBS_MASK]
        forbidden: NDArray[np.bool_] = mask.reshape(len(mask), self.size) == 0
        none: NDArray[np.bool_] = np.logical_and.reduceat(forbidden, self._starts, axis=1)
        if none.any():
            self._refuse(none & self._exclusive, ends)
        return forbidden

    def allows_nothing(self, mask: Tensor) -> Tensor:
        """Where a mandatory choice has no allowed option, bool ``[N, choices]``."""
        allowed = mask.reshape(len(mask), self.size) != 0
        runs = torch.split(allowed, self._sizes, 1)
        found = [~run.any(1) for run, one in zip(runs, self._exclusive, strict=True) if one]
        return torch.stack(found, 1) if found else allowed[:, :0]

    def _refuse(self, none: NDArray[np.bool_], ends: NDArray[np.bool_] | None) -> None:
        if ends is not None:
            none = none & ~ends[:, None]
        if not none.any():
            return
        row, run = (int(i) for i in np.argwhere(none)[0])
        first, last = int(self._starts[run]), int(np.append(self._starts, self.size)[run + 1]) - 1
        raise EnvError(
            f"the env's `{OBS_MASK}` allows nothing in row {row} of {len(none)}: its entries {first} to {last} are all "
            "0. Each choice needs at least one 1 while the episode goes on; end the episode if no action is possible."
        )


def action_mask(obs_space: Space, dist: Distribution) -> ActionMask | None:
    """The mask in the observations of ``obs_space`` if it is a Dict with the key `action_mask`; otherwise None.

    Raises:
        ModuleError: see `ActionMask`.
    """
    if isinstance(obs_space, spaces.Dict) and ACTION_MASK in obs_space.spaces:
        return ActionMask(obs_space.spaces[ACTION_MASK], dist)
    return None


def _check_space(space: Space, dist: Distribution, size: int) -> None:
    parts = ", ".join(f"`{name}` {leaf}" for name, leaf in dist.flatten.leaves.items())
    if not size:
        raise ModuleError(
            f"the observation has the key {ACTION_MASK!r}, but the action {parts} has no choices that a mask could "
            "forbid: rename or remove the key."
        )
    zeros_and_ones = (
        isinstance(space, spaces.MultiBinary)
        or (isinstance(space, spaces.MultiDiscrete) and bool((space.nvec == 2).all() and (space.start == 0).all()))
        or (isinstance(space, spaces.Box) and bool((space.low >= 0).all() and (space.high <= 1).all()))
    )
    if isinstance(space, spaces.Dict | spaces.Tuple):
        wrong = f"is a {type(space).__name__} space, but a mask is one row of numbers"
    elif (has := int(np.prod(leaf_shape(space)))) != size:
        wrong = f"{space} holds {has} numbers"
    elif not zeros_and_ones:
        wrong = f"{space} holds other numbers than 0 and 1"
    else:
        return
    raise ModuleError(
        f"`{OBS_MASK}` {wrong}. It needs {size}, one for each choice of {parts}, in this order: 1 where it is allowed, "
        "0 where not (none for a Box). Connectors that change the mask can't be used."
    )
