# SPDX-License-Identifier: Apache-2.0
"""OfflineAlgorithm: learn from a recording."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from gymnasium.spaces import Tuple

from etude import columns as col
from etude.algorithms.base import Algorithm
from etude.algorithms.components import Component
from etude.algorithms.config import OfflineConfig
from etude.algorithms.result import Stop
from etude.algorithms.students import MAIN, Spaces
from etude.connectors import overrides
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.learners import Update
from etude.spaces import leaf_dtype, leaf_shape, leaves

if TYPE_CHECKING:
    from etude.recordings import Recording

C = TypeVar("C", bound=OfflineConfig)

MEMORY_LIMIT = 2**30


class OfflineAlgorithm(Algorithm[C]):
    """Learns from a recording, in batches that see every step once an epoch. Define `loss`, and `columns` it needs."""

    columns: ClassVar[tuple[str, ...]] = (col.OBS, col.ACTION)
    """The columns that the loss needs; ``next_obs``, ``terminated`` and ``truncated`` can be among them."""

    def module_spaces(self) -> dict[str, Spaces]:
        """The spaces of the recording; its env is not needed, nor, once saved, the recording itself to act."""
        if self._saved_spaces is not None:
            return self._saved_spaces
        if self.config.modules is not None:
            raise SettingsError("`modules` is set, but several modules can't learn from a recording yet: leave it out.")
        return {MAIN: (self.recording.obs_space, self.recording.action_space)}

    @cached_property
    def recording(self) -> "Recording":
        """The recording, opened when it is first needed.

        Raises:
            DataError: it is not there or broken, or its spaces are others than those that a saved run learned from.
        """
        from etude.recordings import Recording  # needs pyarrow, which acting does not

        recording = Recording.open(self.config.data)
        saved = None if self._saved_spaces is None else self._saved_spaces[MAIN]
        if saved not in (None, (recording.obs_space, recording.action_space)):
            raise DataError(
                f"{self.config.data} has the spaces {recording.obs_space} and {recording.action_space}, but this run "
                f"learned from {saved}: go on with a recording of the same env."
            )
        return recording

    def setup(self) -> None:
        """Nothing is opened before it is needed."""
        self._batches: Iterator[Mapping[str, Any]] | None = None
        self._has_seen_data = False
        """The connectors have learned from the recording."""

    def check_stop(self, stop: Stop) -> None:
        """Also where returns are never measured."""
        if stop.return_mean is not None and (self.config.env is None or not self.config.evaluation_interval):
            raise SettingsError(
                "`stop.return_mean` is set, but returns are measured only where there is an `env` and "
                "`evaluation_interval` is at least 1."
            )
        if stop.env_steps is not None:
            raise SettingsError("`stop.env_steps` is set, but no steps are sampled here: use `updates` or `seconds`.")
        super().check_stop(stop)

    def training_step(self) -> Update:
        """``updates_per_iteration`` gradient steps, and an evaluation when it is due."""
        config = self.config
        if self._batches is None:
            with self.timed("open"):
                self._batches = self._open()
        with self.timed("update"):
            num = config.updates_per_iteration * config.accumulate
            update = self.student.learner.update_from(islice(self._batches, num))
        interval = config.evaluation_interval
        if config.env is not None and interval and (self.iteration + 1) % interval == 0:
            with self.timed("evaluate"):
                self._evaluate()
        return update

    def _evaluate(self) -> None:
        runner = self.new_runner(None, self.config.evaluation_episodes, self._seed, self.callbacks)
        try:
            runner.collect(num_episodes=self.config.evaluation_episodes, explore=False)
            self.take_finished(runner.take_finished())
        finally:
            runner.close()

    def _open(self) -> Iterator[Mapping[str, Any]]:
        """Endless batches, from where the run stands."""
        start = self.learner.updates * self.config.accumulate
        if self._fits_in_memory():
            return self.batches_of(self._prepared(self.recording.read()), start)
        if any(overrides(c, "offline") for c in (*self.connectors.connectors, *self.to_learner.connectors)):
            raise SettingsError(
                f"{self.config.data} is to be streamed, which connectors can't be applied to yet: set in_memory=True, "
                "or leave the connectors out."
            )
        return self.batches_of(self.recording, start)

    def batches_of(self, data: "Experience | Recording", start: int) -> Iterator[Mapping[str, Any]]:
        """Endless batches of ``batch_size`` single steps in random order.

        An algorithm may make others, and may look at the module to do so: a batch is asked for only when the gradient
        step on the one before it has been made.

        Args:
            data: In memory, as the module sees it; or the recording, to be streamed.
            start: The first batch to give, as if that many had been taken before.
        """
        size = self.config.batch_size
        if not isinstance(data, Experience):
            return data.batches(size, columns=self.columns, seed=self._seed, start=start)
        from etude.recordings import sample_batches

        return sample_batches(data, size, columns=self.columns, seed=self._seed, start=start)

    def _fits_in_memory(self) -> bool:
        if self.config.in_memory is not None:
            return self.config.in_memory
        parts = leaves(Tuple((self.recording.obs_space, self.recording.action_space)), "row").values()
        row = sum(int(np.prod(leaf_shape(leaf))) * leaf_dtype(leaf).itemsize for leaf in parts)
        return (row + 64) * self.recording.num_steps <= MEMORY_LIMIT

    def _prepared(self, exp: Experience) -> Experience:
        if not self._has_seen_data:
            self.connectors.update(exp)
        seen = self.connectors.offline(exp)
        if not self._has_seen_data:
            self.to_learner.update(seen)
            self._has_seen_data = True
        return self.to_learner.offline(seen, self.module)

    def components(self) -> dict[str, Component]:
        """Also ``data``: whether the connectors have learned from the recording."""
        return {
            **super().components(),
            "data": Component(
                lambda: {"was_seen": self._has_seen_data},
                lambda state: setattr(self, "_has_seen_data", state["was_seen"]),
            ),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`."""
        super().set_state(state)
        self._batches = None  # to be opened where the run stands
