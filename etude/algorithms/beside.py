# SPDX-License-Identifier: Apache-2.0
"""An evaluation beside training."""

import threading

from etude.experience import Experience
from etude.runners import Finished, Runner


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
        self._finished: Finished | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._play, args=(runner, num_episodes), name="etude-evaluation", daemon=True
        )
        self._thread.start()

    def _play(self, runner: Runner, num_episodes: int) -> None:
        try:
            self.parts = runner.collect_each(num_episodes=num_episodes, explore=False)
            self._finished = runner.take_finished()
        except BaseException as error:  # noqa: BLE001 - raised again in `finished`
            self._error = error
        finally:
            runner.close()

    def close(self) -> None:
        """Wait for the episodes' end."""
        self._thread.join()

    def finished(self) -> Finished:
        """What the episodes brought; waits for their end.

        Raises:
            Exception: what went wrong in them.
        """
        self.close()
        if self._error is not None:
            raise self._error
        assert self._finished is not None
        return self._finished
