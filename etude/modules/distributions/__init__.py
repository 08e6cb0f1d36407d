# SPDX-License-Identifier: Apache-2.0
"""Action distributions: NumPy while acting, torch while learning, one object for each action space."""

from gymnasium import spaces

from etude.columns import ACTION
from etude.modules.distributions.base import FORBIDDEN, Distribution
from etude.modules.distributions.composite import Composite
from etude.modules.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from etude.modules.distributions.gaussian import DiagGaussian, SquashedGaussian
from etude.spaces import Space, leaves

__all__ = [
    "FORBIDDEN",
    "Bernoulli",
    "Categorical",
    "Composite",
    "DiagGaussian",
    "Distribution",
    "MultiCategorical",
    "SquashedGaussian",
    "distribution_for",
]


def distribution_for(action_space: Space, *, squash: bool = False, root: str = ACTION) -> Distribution:
    """The distribution that fits an action space.

    Args:
        action_space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them.
        squash: Hold the actions of Boxes inside their bounds by tanh, rather than leave them unbounded.
        root: The first part of the names of the action's columns.

    Raises:
        SpaceError: there is no distribution for a part of the space; the part is named.
    """
    parts = [_leaf_distribution(leaf, name, squash) for name, leaf in leaves(action_space, root).items()]
    if isinstance(action_space, spaces.Dict | spaces.Tuple):
        return Composite(action_space, root, parts)
    return parts[0]


def _leaf_distribution(leaf: Space, name: str, squash: bool) -> Distribution:
    if isinstance(leaf, spaces.Discrete):
        return Categorical(leaf, name)
    if isinstance(leaf, spaces.MultiDiscrete):
        return MultiCategorical(leaf, name)
    if isinstance(leaf, spaces.MultiBinary):
        return Bernoulli(leaf, name)
    assert isinstance(leaf, spaces.Box)
    return SquashedGaussian(leaf, name) if squash else DiagGaussian(leaf, name)
