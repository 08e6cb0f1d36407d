# SPDX-License-Identifier: Apache-2.0
"""Recordings: Experience at rest, as a folder of Parquet files."""

from etude.recordings.batches import sample_batches
from etude.recordings.converting import convert
from etude.recordings.edited import Edited
from etude.recordings.editing import filter_recording, sample_recording, split_recording
from etude.recordings.format import Contents, Format, Problem, Unit
from etude.recordings.formats.custom import CustomSource, RawRow, read_binary, read_text
from etude.recordings.formats.source import Source
from etude.recordings.layout import Header
from etude.recordings.merging import merge_recordings
from etude.recordings.recording import Recording
from etude.recordings.segment_batches import sample_segments
from etude.recordings.validate import Report, validate
from etude.recordings.writer import RecordingWriter

__all__ = [
    "Contents",
    "CustomSource",
    "Edited",
    "Format",
    "Header",
    "Problem",
    "RawRow",
    "Recording",
    "RecordingWriter",
    "Report",
    "Source",
    "Unit",
    "convert",
    "filter_recording",
    "merge_recordings",
    "read_binary",
    "read_text",
    "sample_batches",
    "sample_recording",
    "sample_segments",
    "split_recording",
    "validate",
]
