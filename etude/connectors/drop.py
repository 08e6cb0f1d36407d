# SPDX-License-Identifier: Apache-2.0
"""Parts of the observation that the module does without."""

from typing import TYPE_CHECKING, Any

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.connectors.base import Connector, Inputs, replace_obs
from etude.errors import SettingsError
from etude.experience import Experience
from etude.spaces import Space, without

if TYPE_CHECKING:
    from etude.modules.module import Module


class Drop(Connector):
    """Leaves parts of the observation out: ``drop:mission``, ``drop:info/text,direction``.

    A part that Etude can't handle (a Text space, for example) is left out as soon as the env gives it, so that
    recordings do not have it either. Any other part is recorded as ever, and left out for the module alone.

    Args:
        parts: Paths in the observation's Dict space, separated by commas; keys in a path are separated by ``/``.
    """

    needs = ()

    def __init__(self, parts: str = "") -> None:
        self.parts = parts
        self.paths = tuple(part.strip() for part in parts.split(",") if part.strip())
        """Each path by itself."""
        self._columns = tuple(f"{col.OBS}{SEPARATOR}{path}" for path in self.paths)

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """The observation space without these parts, as far as they are there still.

        Raises:
            SettingsError: it does not say which parts.
            SpaceError: nothing would be left.
        """
        if not self.paths:
            raise SettingsError("the connector `drop` does not say what: name a part of the observation, drop:mission.")
        return without(obs_space, self.paths), action_space

    def _kept(self, obs: Columns) -> Columns:
        return {name: c for name, c in obs.items() if not any(col.is_under(name, gone) for gone in self._columns)}

    def online(self, inputs: Inputs) -> Inputs:
        """Leaves the columns out."""
        return inputs.with_obs(self._kept(inputs.obs))

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Leaves the columns out."""
        obs: dict[str, Any] = {name: c for name, c in exp.steps.items() if col.is_under(name, col.OBS)}
        return replace_obs(exp, self._kept(obs), self._kept(exp.final_obs))

    def __repr__(self) -> str:
        return f"{self.name}:{self.parts}" if self.parts else self.name
