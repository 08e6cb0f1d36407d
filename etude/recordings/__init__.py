# SPDX-License-Identifier: Apache-2.0
"""Recordings: experience stored on disk, as a folder of Parquet files."""

from etude.recordings.batches import sample_batches, sample_segments
from etude.recordings.converting import convert
from etude.recordings.editing import Edited, filter_recording, merge_recordings, sample_recording, split_recording
from etude.recordings.format import Contents, Format, Problem, Unit
from etude.recordings.formats.custom import CustomSource, RawRow, read_binary, read_text
from etude.recordings.formats.guessing import Guess, guess_columns
from etude.recordings.formats.source import Source
from etude.recordings.layout import Header
from etude.recordings.opening import TableError
from etude.recordings.recording import Recording
from etude.recordings.screening import Report, validate
from etude.recordings.writer import RecordingWriter

__all__ = [
    "Contents",
    "CustomSource",
    "Edited",
    "Format",
    "Guess",
    "Header",
    "Problem",
    "RawRow",
    "Recording",
    "RecordingWriter",
    "Report",
    "Source",
    "TableError",
    "Unit",
    "convert",
    "filter_recording",
    "guess_columns",
    "merge_recordings",
    "read_binary",
    "read_text",
    "sample_batches",
    "sample_recording",
    "sample_segments",
    "split_recording",
    "validate",
]
