# SPDX-License-Identifier: Apache-2.0
"""Recordings: Experience at rest, as a folder of Parquet files and one ``recording.json``."""

from etude.recordings.batches import sample_batches
from etude.recordings.convert import convert
from etude.recordings.formats.parts import Problem
from etude.recordings.formats.source import Source
from etude.recordings.recording import Recording
from etude.recordings.segment_batches import sample_segments
from etude.recordings.validate import Report, validate
from etude.recordings.writer import RecordingWriter

__all__ = [
    "Problem",
    "Recording",
    "RecordingWriter",
    "Report",
    "Source",
    "convert",
    "sample_batches",
    "sample_segments",
    "validate",
]
