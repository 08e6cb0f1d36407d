# SPDX-License-Identifier: Apache-2.0
"""Served episodes as a recording: each is written when its end was reported, as a whole."""

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
    """An episode of a client as it grows."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.num_steps = 0
        """Actions that were given."""
        self._rows: list[tuple[Columns, Columns, float | None, NDArray[Any] | None]] = []

    def add(self, step: Step, choice: Chosen | None) -> None:
        """Note that an action was given; ``choice`` is what of it is recorded, one row; None: nothing is."""
        self.num_steps += 1
        if choice is not None and step.obs is not None:
            self._rows.append((step.obs, choice.chosen, step.reward, choice.logp))

    def ended(self, step: Step, policy: Policy, module_id: str | None) -> Experience:
        """The episode, which ends with ``step``."""
        obs, chosen, rewards, logp = zip(*self._rows, strict=True)
        steps = {name: np.concatenate([row[name] for row in rows]) for rows in (obs, chosen) for name in rows[0]}
        steps[col.REWARD] = np.array([*rewards[1:], step.reward], np.float64)  # each step has that of the one before
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
    """Writes episodes to a recording, in a thread of its own.

    Whenever the process dies, each episode is in the recording as a whole, or not at all: a file ends only between two
    episodes.

    Args:
        path: The folder, or its URL. What is there is added to.
        policies: What acts, by module id. Where their spaces differ, each has a folder of its name.
        env: The name of the env that they were trained in, if it is known.
        explore: Whether actions are drawn.
        flush_seconds: A file is finished when its first episode is this old, or when it is large.

    Raises:
        DataError: there is a recording of other spaces, or another writer.
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
        """Note that other policies of the same spaces act from now on."""
        self._thread.submit(self._writers.set_meta, _meta(policies, self._explore))

    def write(self, episode: ServedEpisode, step: Step, policy: Policy, name: str) -> "Future[None]":
        """Write an episode that ends with ``step``."""
        return self._thread.submit(self._write, episode, step, policy, name)

    def _write(self, episode: ServedEpisode, step: Step, policy: Policy, name: str) -> None:
        exp = episode.ended(step, policy, self._names[name])
        self._writers.take({name: exp}, self._kinds)
        self._due = time.monotonic() + self._flush_seconds if self._due is None else self._due
        self._bytes += exp.num_steps * row_bytes(exp)
        if self._bytes >= MAX_FILE_SIZE:
            self._flush()

    def flush_if_due(self) -> "Future[None] | None":
        """Finish the files whose time has come."""
        if self._due is None or time.monotonic() < self._due:
            return None
        return self._thread.submit(self._flush)

    def _flush(self) -> None:
        self._due, self._bytes = None, 0
        self._writers.state_dict()

    def close(self) -> None:
        """Put all episodes that have ended on the disk.

        Raises:
            DataError: a write failed.
        """
        self._thread.shutdown()
        self._writers.close()


def _meta(policies: Mapping[str, Policy], explore: bool) -> dict[str, Any]:
    """What is kept beside the episodes; see `Algorithm.recording_meta`."""
    return {**connectors_meta(policies, several=[*policies] != [MAIN]), "explore": explore}
