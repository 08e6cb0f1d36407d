# SPDX-License-Identifier: Apache-2.0
"""Record the episodes of sessions: each is written as a whole when the client has reported its end."""

import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms.play import connectors_meta
from etude.algorithms.policies import MAIN
from etude.columns import Columns
from etude.experience import Experience, Segments
from etude.policies import Chosen, Policy
from etude.recordings.module_writers import ModuleWriters
from etude.recordings.pieces import row_bytes
from etude.recordings.writer import MAX_FILE_SIZE
from etude.serving.protocol import Step
from etude.spaces import leaf_dtype, leaf_shape, leaves

_NO_LIMIT = 1 << 62


class ServedEpisode:
    """The current episode of a session."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.num_steps = 0
        """Number of actions given so far."""
        self._rows: list[tuple[Columns, Columns, float | None, NDArray[Any] | None]] = []

    def add(self, step: Step, choice: Chosen | None) -> None:
        """Count an action. If ``choice``, one row, is given, keep it and its step for the recording."""
        self.num_steps += 1
        if choice is not None and step.obs is not None:
            self._rows.append((step.obs, choice.chosen, step.reward, choice.logp))

    def ended(self, step: Step, policy: Policy, module_id: str | None) -> Experience:
        """Return the whole episode, as one segment; ``step`` is its last."""
        obs, chosen, rewards, logp = zip(*self._rows, strict=True)
        steps = {name: np.concatenate([row[name] for row in rows]) for rows in (obs, chosen) for name in rows[0]}
        steps[col.REWARD] = np.array([*rewards[1:], step.reward], np.float64)  # a step reports the last action's reward
        if logp[0] is not None:
            steps[col.LOGP] = np.concatenate(logp)
        final = step.obs
        if final is None:
            parts = leaves(policy.obs_space, col.OBS)
            final = {name: np.zeros((1, *leaf_shape(leaf)), leaf_dtype(leaf)) for name, leaf in parts.items()}
        segments = Segments.of(
            1,
            episode_id=self.id,
            module_id=module_id,
            terminated=step.terminated,
            truncated=step.truncated,
            has_final_obs=step.obs is not None,
        )
        return Experience(steps, np.array([0, len(steps[col.REWARD])]), segments, final)


class EpisodeRecorder:
    """Writes episodes to a recording, in its own thread.

    If the process dies, each episode is in the recording either as a whole or not at all, because a file ends only
    between two episodes.

    Args:
        path: Folder or URL of the recording; if it has one already, episodes are added to it.
        policies: The policies that act, by module id. If their spaces differ, each has a subfolder.
        env: Name of the env that they were trained in; None: unknown.
        explore: Whether actions are sampled.
        flush_seconds: Seconds after its first episode until a file is finished, unless it is full earlier.

    Raises:
        DataError: the recording has other spaces, or another process is writing to it.
    """

    def __init__(
        self, path: str, policies: Mapping[str, Policy], *, env: str | None, explore: bool, flush_seconds: float
    ) -> None:
        self._kinds = {name: (policy.obs_space, policy.module.action_space) for name, policy in policies.items()}
        self._names = {name: None if [*policies] == [MAIN] else name for name in policies}
        self._flush_seconds = flush_seconds
        self._due: float | None = None
        self._bytes = 0
        self._explore = explore
        self._writers = ModuleWriters(
            path,
            self._kinds,
            columns=None,
            layout="table",
            append=True,
            is_run=False,
            env=env,
            meta=_meta(policies, explore),
            max_rows_per_file=_NO_LIMIT,
            max_file_size=_NO_LIMIT,
        )
        self._thread = ThreadPoolExecutor(1, "etude-recorder")

    def set_policies(self, policies: Mapping[str, Policy]) -> None:
        """Record in the metadata that other policies, with the same spaces, act from now on."""
        self._thread.submit(self._writers.set_meta, _meta(policies, self._explore))

    def write(self, episode: ServedEpisode, step: Step, policy: Policy, name: str) -> "Future[None]":
        """Write, in the recorder's thread, an episode that ends with ``step``."""
        return self._thread.submit(self._write, episode, step, policy, name)

    def _write(self, episode: ServedEpisode, step: Step, policy: Policy, name: str) -> None:
        exp = episode.ended(step, policy, self._names[name])
        self._writers.take({name: exp}, self._kinds)
        self._due = time.monotonic() + self._flush_seconds if self._due is None else self._due
        self._bytes += exp.num_steps * row_bytes(exp)
        if self._bytes >= MAX_FILE_SIZE:
            self._flush()

    def flush_if_due(self) -> "Future[None] | None":
        """Finish the current files if ``flush_seconds`` have passed; None if there is nothing to do."""
        if self._due is None or time.monotonic() < self._due:
            return None
        return self._thread.submit(self._flush)

    def _flush(self) -> None:
        self._due, self._bytes = None, 0
        self._writers.state_dict()  # which flushes them

    def close(self) -> None:
        """Write all finished episodes to disk, and close the recording.

        Raises:
            DataError: a write failed.
        """
        self._thread.shutdown()
        self._writers.close()


def _meta(policies: Mapping[str, Policy], explore: bool) -> dict[str, Any]:
    """The recording's metadata; see `Algorithm.recording_meta`."""
    return {**connectors_meta(policies, several=[*policies] != [MAIN]), "explore": explore}
