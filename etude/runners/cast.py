# SPDX-License-Identifier: Apache-2.0
"""Cast: the modules that act in a runner, with what each has to itself, and who acts for whom."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from etude.connectors import Pipeline
from etude.envs import Arena
from etude.errors import EtudeError
from etude.modules import Module
from etude.modules.module import load_weights
from etude.runners.episodes import EpisodeBook
from etude.runners.lookback import Lookback
from etude.runners.routes import ModuleOf, Routes
from etude.runners.track import Track


class Cast:
    """The modules of a runner.

    Args:
        modules: One for all slots, or several by id.
        connectors: By module id where there are several.
        module_of: See `ModuleOf`.
        arena: Where they act.
        book: Which episodes run there.
    """

    def __init__(
        self,
        modules: Module | Mapping[str, Module],
        connectors: Pipeline | Mapping[str, Pipeline] | None,
        module_of: ModuleOf | None,
        arena: Arena,
        book: EpisodeBook,
    ) -> None:
        by_id: Mapping[Any, Module] = {None: modules} if isinstance(modules, Module) else modules
        slots = arena.num_slots
        self._seq_nos: dict[str | None, int] = {}  # of the weights that were taken from elsewhere
        self.tracks: dict[str | None, Track] = {}
        """By module id; None is that of the only one."""
        for module_id, module in by_id.items():
            pipeline = connectors.get(module_id) if isinstance(connectors, Mapping) else connectors
            pipeline = Pipeline([]) if pipeline is None else pipeline
            self.tracks[module_id] = Track(module, pipeline, module_id, slots)
        self.lookbacks = {name: Lookback(track.connectors.context, slots) for name, track in self.tracks.items()}
        """By module id."""
        self.routes = Routes(self.tracks, module_of, arena, book)

    @property
    def first(self) -> Track:
        """That of the only module, or of the first."""
        return next(iter(self.tracks.values()))

    def start(self, rng: np.random.Generator, explore: bool) -> None:
        """Be ready to act."""
        for track in self.tracks.values():
            track.start(rng, explore)

    def clear(self) -> None:
        """Forget what was not given out: every slot begins a new episode."""
        for module_id, track in self.tracks.items():
            track.clear()
            self.lookbacks[module_id].clear()

    def take_weights(
        self, weights: Mapping[str, torch.Tensor], seq_no: int, module_id: str | None, *, shared: bool
    ) -> bool:
        """See `Runner.take_weights`."""
        if module_id not in self.tracks:
            raise EtudeError(f"there is no module {module_id!r} here, but {list(self.tracks)}.")
        if seq_no < self._seq_nos.get(module_id, 0):
            return False
        load_weights(self.tracks[module_id].module, weights, shared=shared)
        self._seq_nos[module_id] = seq_no
        return True

    def state_dict(self) -> dict[str, Any]:
        """What each module has to itself, and who acts for whom now; plain data and arrays."""
        return {
            "tracks": [track.state_dict() for track in self.tracks.values()],
            "lookbacks": [lookback.state_dict() for lookback in self.lookbacks.values()],
            "routes": self.routes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of as many slots."""
        for track, stored in zip(self.tracks.values(), state["tracks"], strict=True):
            track.load_state_dict(stored)
        for lookback, stored in zip(self.lookbacks.values(), state["lookbacks"], strict=True):
            lookback.load_state_dict(stored)
        self.routes.load_state_dict(state["routes"])

    def load_connectors(self, state: Mapping[str, Any]) -> None:
        """Take only what the connectors have learned from `state_dict`, whatever slots it is of."""
        for track, stored in zip(self.tracks.values(), state["tracks"], strict=True):
            track.connectors.load_state_dict(stored["connectors"])
