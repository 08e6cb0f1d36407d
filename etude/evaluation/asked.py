# SPDX-License-Identifier: Apache-2.0
"""What an off-policy evaluation can be asked for."""

from typing import Final, Literal

from etude.errors import SettingsError
from etude.evaluation.fqe import FQEConfig
from etude.settings import nearest, settings

METHODS: Final = ("is", "wis", "pdis", "wpdis", "dm", "dr", "wdr", "fqe")
"""The estimators."""

WEIGHING: Final = ("is", "wis", "pdis", "wpdis", "dr", "wdr")
"""Those that need probabilities of actions."""

VALUING: Final = ("dm", "dr", "wdr", "fqe")
"""Those that need fitted values."""

BehaviourLike = Literal["recorded", "fit"]


@settings
class EvaluateOn:
    """How to evaluate; see `evaluate_on`."""

    methods: tuple[str, ...]
    gamma: float
    confidence: float
    seed: int
    explore: bool
    behaviour: BehaviourLike
    resamples: int
    fqe: FQEConfig

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                near = nearest(method, METHODS)
                hint = f" Nearest: `{near}`." if near else ""
                raise SettingsError(f"there is no method `{method}`; there are {', '.join(METHODS)}.{hint}")
        for name, right, words in (
            ("methods", len(self.methods) > 0, f"some of {', '.join(METHODS)}"),
            ("gamma", 0 <= self.gamma <= 1, "between 0 and 1"),
            ("confidence", 0 < self.confidence < 1, "between 0 and 1, both left out"),
            ("seed", self.seed >= 0, "at least 0"),
            ("resamples", self.resamples >= 1, "at least 1"),
        ):
            if not right:
                raise SettingsError(f"`{name}` is {getattr(self, name)!r}, but must be {words}.")

    @property
    def weighs(self) -> bool:
        """Whether probabilities are needed."""
        return bool(set(self.methods) & set(WEIGHING))

    @property
    def values(self) -> bool:
        """Whether fitted values are needed."""
        return bool(set(self.methods) & set(VALUING))
