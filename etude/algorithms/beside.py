# SPDX-License-Identifier: Apache-2.0
"""An evaluation beside training."""

import threading
from typing import Final

from etude.errors import EtudeError
from etude.experience import Experience
from etude.runners import Finished, Runner

PATIENCE: Final = 5.0
"""Seconds that an env may take for its step when the evaluation is not wanted any more."""


class Beside:
    """Whole episodes, played in a thread while training goes on.

    Args:
        runner: With modules that nobody else changes; it is closed when the episodes are over.
        num_episodes: How many.
        updates: The gradient steps that made the modules.
    """

    def __init__(self, runner: Runner, num_episodes: int, updates: int) -> None:
        self.updates = updates
        self.parts: dict[str | None, Experience] = {}
        """What was lived through, by module; when it has `finished`."""
        self._runner = runner
        self._finished: Finished | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._play, args=(num_episodes,), name="etude-evaluation", daemon=True)
        self._thread.start()

    def _play(self, num_episodes: int) -> None:
        try:
            try:
                self.parts = self._runner.collect_each(num_episodes=num_episodes, explore=False)
                self._finished = self._runner.take_finished()
            finally:
                self._runner.close()
        except BaseException as error:  # noqa: BLE001 - raised again in `finished`
            self._error = error

    def close(self) -> None:
        """Play no further. An env that hangs is left behind, with its thread."""
        self._runner.stop()
        self._thread.join(PATIENCE)

    def finished(self) -> Finished:
        """What the episodes brought; waits for their end.

        Raises:
            Exception: what went wrong in them.
        """
        self._thread.join()
        if self._error is not None and not isinstance(self._error, Exception):  # it must not end this thread's program
            raise EtudeError(f"an evaluation was ended by {type(self._error).__name__}: {self._error}") from self._error
        if self._error is not None:
            raise self._error
        assert self._finished is not None
        return self._finished
