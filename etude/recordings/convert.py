# SPDX-License-Identifier: Apache-2.0
"""From any recording that can be read to one of Etude's."""

import os

from etude.errors import DataError
from etude.recordings.recording import Recording
from etude.recordings.writer import RecordingWriter


def convert(recording: Recording, path: str | os.PathLike[str]) -> Recording:
    """Write all of ``recording``, a piece at a time, to a new recording at ``path``; gives that one.

    Raises:
        DataError: something can't be read, there is a recording already, or nothing to write.
    """
    if not recording.num_steps:
        raise DataError(f"{recording.path}: holds no steps, so that there is nothing to convert.")
    meta = {"converted_from": {"path": str(recording.path), "format": recording.format}, **recording.meta}
    with RecordingWriter(
        path, obs_space=recording.obs_space, action_space=recording.action_space, env=recording.env, meta=meta
    ) as writer:
        for exp in recording.stream():
            writer.write(exp)
    return Recording.open(path)
