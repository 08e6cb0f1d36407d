# SPDX-License-Identifier: Apache-2.0
"""CSV: metrics as a table, of which a row is what was written at a time."""

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import DataError
from etude.files import write_atomically
from etude.metrics.sinks import AppendFile, Failures, named_errors


class CSV:
    """A CSV file with a row for each `write`, readable at any time; an existing one is continued.

    Nested names are columns such as ``losses/policy``. When new names come, the file is replaced at one stroke by one
    with more columns, on the right, that are empty in the rows before. None is empty, too, NaN is ``nan`` and lists are
    JSON; a line break in a text becomes a space, so that each line is a row.

    Raises:
        DataError: the file can't be made, or is no such table.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._failures = Failures(f"metrics to {self.path}")
        with named_errors(self._failures.what):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows, whole = _rows(self.path)
            self._columns = rows[0] if rows else []
            if not whole:
                write_atomically(self.path, _lines(rows))
            self._file: AppendFile | None = AppendFile(self.path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one row and hand it to the system at once: if the process dies, the row is there.

        Raises:
            DataError: this is the first row that can't be written.
        """
        if self._file is None:
            raise ValueError(f"{self.path} is closed.")
        with self._failures.noted():
            cells = dict(_cells(metrics, ""))
            new = [name for name in cells if name not in self._columns]
            if new:
                self._widen(new)
            self._file.append(_lines([[cells.get(name, "") for name in self._columns]]))

    def close(self) -> None:
        """Close the file; a second time does nothing.

        Raises:
            DataError: some rows could not be written.
        """
        if self._file is not None:
            file, self._file = self._file, None
            self._failures.close(file)
            self._failures.raise_at_close()

    def _widen(self, names: Sequence[str]) -> None:
        assert self._file is not None
        self._file.append(b"")  # raises where the file was deleted, which must not be made anew
        _, *rows = _rows(self.path)[0] or [[]]
        columns = [*self._columns, *names]
        write_atomically(self.path, _lines([columns, *([*row, *[""] * len(names)] for row in rows)]))
        self._columns = columns
        self._file.close()
        self._file = AppendFile(self.path)


def cut_csv(path: str | os.PathLike[str], iteration: int) -> None:
    """Remove the rows whose ``iteration`` is after ``iteration``, as `cut_jsonl` does.

    Raises:
        DataError: the file can't be read or replaced, or is no table that `CSV` wrote.
    """
    path = Path(path)
    with named_errors(f"metrics to {path}"):
        if not path.exists():
            return
        columns, *rows = _rows(path)[0] or [[]]
        if "iteration" in columns:
            at = columns.index("iteration")
            kept = [row for row in rows if not row[at] or float(row[at]) <= iteration]
            if len(kept) < len(rows):
                write_atomically(path, _lines([columns, *kept]))


def _rows(path: Path) -> tuple[list[list[str]], bool]:
    """The rows, that of the names first, and whether that is the whole file: a killed writer may leave a torn line."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    try:
        rows = list(csv.reader(io.StringIO(data[:end].decode(), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no CSV file ({error}): move it away, or give another one.") from error
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise DataError(
                f"{path}, line {number} has {len(row)} cells, but the first line names {len(rows[0])} columns. Mend or "
                "remove the line and try again."
            )
    return rows, end == len(data)


def _lines(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _cells(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _cells(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", _cell(value)


def _cell(value: Any) -> str:
    if not isinstance(value, str | int | float | bool | list | tuple | None) and hasattr(value, "item"):
        value = value.item()
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return " ".join(str(value).splitlines()) if isinstance(value, str) else repr(value)
