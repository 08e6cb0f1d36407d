# SPDX-License-Identifier: Apache-2.0
"""What is made of parts of a recording, as Ray Data's blocks: Arrow tables whose columns share memory with NumPy's.

A row is a step, or a whole segment, so that a block can be split between learners anywhere. Numbers stay as they lie in
memory, whatever their dtype: a row is so many bytes. What belongs to the block, not to its rows, is in the metadata of
its schema: which parts it is made of, what was spent on each, and dtypes and shapes.
"""

import base64
import dataclasses
import json
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude.columns import Columns
from etude.errors import DataError, EtudeError
from etude.experience import Experience, Segments
from etude.recordings.batches import rows_of
from etude.recordings.layers import LAYERS, Spent

_KEY: Final = b"etude:block"
Column: TypeAlias = tuple[NDArray[Any], NDArray[np.int64] | None]
_FACTS: Final = tuple(field.name for field in dataclasses.fields(Segments))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What was made of one part."""

    made: Columns | Experience | None
    """None: nothing."""
    spent: Spent
    cut_from: tuple[int, int] | None = None
    """Of a block that was split: its first part, and the steps that it had before."""

    @property
    def rows(self) -> int:
        """The rows that it takes in a block."""
        if self.made is None:
            return 0
        return len(self.made) if isinstance(self.made, Experience) else rows_of(self.made)


def to_block(loaded: Sequence[Loaded]) -> pa.Table:
    """The parts, one after the other, as one block; without rows where nothing was made of any.

    Raises:
        DataError: a column holds objects that are not text.
    """
    there = [one for one in loaded if one.rows]
    about: dict[str, Any] = {
        "rows": [None if one.made is None else one.rows for one in loaded],
        # Ray brings it from one of its processes to another; it is in no file.
        "spent": base64.b64encode(pickle.dumps([one.spent for one in loaded])).decode(),
        "segments": False,
        "columns": {},
    }
    if not there:
        return pa.table({"nothing": pa.array([], pa.bool_())}).replace_schema_metadata(_metadata(about))
    first = there[0].made
    about["segments"] = isinstance(first, Experience)
    given = [_columns(one.made) for one in there]
    fields, arrays = [], []
    for name, (values, _) in given[0].items():
        about["columns"][name] = (values.dtype.str, list(values.shape[1:]))
        chunks = [_array(name, *columns[name]) for columns in given]
        fields.append(pa.field(name, chunks[0].type))
        arrays.append(pa.chunked_array(chunks))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=_metadata(about)))


def failed(error: EtudeError) -> pa.Table:
    """A block that raises this error where it is opened: of what fails in an actor, Ray keeps the text alone."""
    about = {"error": base64.b64encode(pickle.dumps(error)).decode()}
    return pa.table({"nothing": pa.array([True])}).replace_schema_metadata(_metadata(about))


def _metadata(about: dict[str, Any]) -> dict[bytes, bytes]:
    return {_KEY: json.dumps(about).encode()}


def _columns(made: Any) -> dict[str, Column]:
    """By name, all columns; those of which a row, a segment, has several values, with where its values begin."""
    if not isinstance(made, Experience):
        return {name: (np.asarray(values), None) for name, values in made.items()}
    out: dict[str, Column] = {f"segment/{name}": (np.asarray(getattr(made.segments, name)), None) for name in _FACTS}
    out |= {f"steps/{name}": (np.asarray(values), made.offsets) for name, values in made.steps.items()}
    out |= {f"final/{name}": (np.asarray(values), None) for name, values in made.final_obs.items()}
    return out


def _array(name: str, values: NDArray[Any], offsets: NDArray[np.int64] | None) -> pa.Array:
    if values.dtype == object:
        try:
            flat = pa.array(values, pa.string())
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
            raise DataError(f"column `{name}` holds objects that are not text: {error}. Make numbers of it.") from None
    else:
        width = values.dtype.itemsize * int(np.prod(values.shape[1:]))
        data = pa.py_buffer(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        flat = pa.Array.from_buffers(pa.binary(width), len(values), [None, data])
    return flat if offsets is None else pa.LargeListArray.from_arrays(pa.array(offsets), flat)


def from_block(table: pa.Table) -> Iterator[Loaded]:
    """What `to_block` was given, part by part; of a block that was split, all its rows at once.

    Arrays share the block's memory, and can't be written to.

    Raises:
        EtudeError: the work on these parts has failed.
    """
    about = json.loads(table.schema.metadata[_KEY])
    if "error" in about:
        raise pickle.loads(base64.b64decode(about["error"]))  # noqa: S301 - see `to_block`
    spent: list[Spent] = pickle.loads(base64.b64decode(about["spent"]))  # noqa: S301 - see `to_block`
    total = sum(rows or 0 for rows in about["rows"])
    if table.num_rows == total:
        start = 0
        for rows, one in zip(about["rows"], spent, strict=True):
            yield Loaded(None if rows is None else _part(table, start, rows, about), one)
            start += rows or 0
        return
    share = Spent(rows=table.num_rows)
    for one in spent:
        yield Loaded(None, Spent(part=one.part, bad=one.bad))
        _add_share(share, one, table.num_rows / total)
    made = _made(table, about)
    if isinstance(made, Experience):
        share.rows = made.num_steps - int(made.segments.lookback.sum())
    yield Loaded(made, share, (next(one.part or 0 for one in spent), sum(one.rows for one in spent)))


def _add_share(share: Spent, spent: Spent, part: float) -> None:
    """Add of ``spent`` what fits some of its rows; whoever has the others adds the rest."""
    for layer in LAYERS:
        share.seconds[layer] += spent.seconds[layer] * part
    share.bytes += round(spent.bytes * part)
    share.left_out += round(spent.left_out * part)


def _part(table: pa.Table, start: int, rows: int, about: dict[str, Any]) -> Columns | Experience:
    if rows:
        return _made(table.slice(start, rows), about)
    made = _made(table.slice(0, 1), about)  # nothing, but of these columns
    return made[:0] if isinstance(made, Experience) else {name: column[:0] for name, column in made.items()}


def _made(table: pa.Table, about: dict[str, Any]) -> Columns | Experience:
    columns = about["columns"]
    if not about["segments"]:
        return {name: _values(_one(table[name]), *columns[name]) for name in columns}
    facts = {name: _values(_one(table[f"segment/{name}"]), *columns[f"segment/{name}"]) for name in _FACTS}
    steps: Columns = {}
    offsets = np.zeros(1, np.int64)
    for name in columns:
        if name.startswith("steps/"):
            lists = _one(table[name])
            places = np.asarray(lists.offsets)
            values = lists.values.slice(places[0], places[-1] - places[0])
            steps[name.removeprefix("steps/")] = _values(values, *columns[name])
            offsets = places - places[0]
    finals = {
        name.removeprefix("final/"): _values(_one(table[name]), *columns[name])
        for name in columns
        if name.startswith("final/")
    }
    return Experience(steps, offsets, Segments.of(len(offsets) - 1, **facts), finals)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _values(array: pa.Array, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    if np.dtype(dtype) == object:
        out = np.empty(len(array), object)
        out[:] = array.to_pylist()
        return out
    data = array.buffers()[1]
    width = array.type.byte_width
    flat = np.frombuffer(data, np.uint8)[array.offset * width : (array.offset + len(array)) * width]
    return np.asarray(flat.view(dtype).reshape(len(array), *shape))
