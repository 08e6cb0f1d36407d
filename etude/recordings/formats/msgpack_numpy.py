# SPDX-License-Identifier: Apache-2.0
"""msgpack with NumPy arrays in it, as the package msgpack-numpy writes them; nothing is unpickled.

An array is a map with the binary keys ``nd type kind shape data``, a scalar one with ``nd type data``. Lists whose
entries are alike but for their numbers, as the steps of an episode are, are read as columns without making an object
for each entry: their bytes repeat with one stride, so that each number of the entry is a strided view of them.

Source: the formats of msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md) and of msgpack-numpy 0.4.
"""

from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.recordings.formats.msgpack_templates import MALFORMED, Path, Template, header_of, template_of

Columns = dict[Path, NDArray[Any]]


def unpack(data: bytes) -> Any:
    """The document ``data``: plain values, dicts, lists and NumPy arrays.

    Raises:
        DataError: it is not valid msgpack, or holds an object array, which would need unpickling.
    """
    return Reader(data).value()


class Reader:
    """Walks one document from its beginning to its end. Every method raises a DataError where it is not valid."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._unpacker = msgpack.Unpacker(
            raw=False, strict_map_key=False, max_buffer_size=max(1, len(data)), object_hook=_value_of, ext_hook=_refuse
        )
        self._unpacker.feed(data)

    @property
    def place(self) -> int:
        """The bytes read so far."""
        place: int = self._unpacker.tell()
        return place

    def raw(self) -> bytes:
        """The bytes of the next value, not decoded."""
        start = self.place
        self.skip()
        return self.data[start : self.place]

    def passes(self, raw: bytes) -> bool:
        """Go past these bytes, whole values all of them, where they come next."""
        found = self.data.startswith(raw, self._unpacker.tell())
        if found:
            self._unpacker.read_bytes(len(raw))
        return found

    def next_is_list(self) -> bool:
        """The next value is a list."""
        byte = self._peek()
        return 0x90 <= byte <= 0x9F or byte in (0xDC, 0xDD)

    def next_is_map(self) -> bool:
        """The next value is a map."""
        byte = self._peek()
        return 0x80 <= byte <= 0x8F or byte in (0xDE, 0xDF)

    def _peek(self) -> int:
        if self.place >= len(self.data):
            raise DataError("the document ends too early")
        return self.data[self.place]

    def map_size(self) -> int:
        """The entries of the map that comes next; their keys and values follow."""
        try:
            return int(self._unpacker.read_map_header())
        except MALFORMED as error:
            raise _malformed(error) from error

    def list_size(self) -> int:
        """The entries of the list that comes next; they follow."""
        try:
            return int(self._unpacker.read_array_header())
        except MALFORMED as error:
            raise _malformed(error) from error

    def key(self) -> str | int:
        """The next value, a key of a map."""
        at = self._unpacker.tell()
        is_short_text = at < len(self.data) and self.data[at] & 0xE0 == 0xA0
        try:
            value = self._unpacker.unpack() if is_short_text else self.scalar()
        except MALFORMED as error:
            raise _malformed(error) from error
        if not isinstance(value, str | int):
            raise DataError(f"a map has the key {str(value)[:40]!r}, which is neither text nor an integer")
        return value

    def scalar(self) -> Any:
        """The next value, which may be a map only where it stands for a number."""
        at = self._unpacker.tell()
        if at < len(self.data) and (0x80 <= self.data[at] <= 0x9F or 0xDC <= self.data[at] <= 0xDF):
            return self.value()
        try:
            return self._unpacker.unpack()
        except MALFORMED as error:
            raise _malformed(error) from error

    def skip(self) -> None:
        """Go past the next value."""
        try:
            self._unpacker.skip()
        except MALFORMED as error:
            raise _malformed(error) from error

    def value(self) -> Any:
        """The next value."""
        data = self.raw()  # makes sure that every size is backed by bytes, before anything is allocated
        try:
            return msgpack.unpackb(
                data,
                raw=False,
                strict_map_key=False,
                object_hook=_value_of,
                ext_hook=_refuse,
            )
        except MALFORMED as error:
            raise _malformed(error) from error

    def entries(self, template: Template | None = None) -> tuple[Columns | list[Any], Template | None]:
        """The list that comes next, as columns by path where its entries are alike, else as values.

        Args:
            template: What entries of such a list looked like before; tried first.

        Returns:
            The columns ``[N, ...]`` (the path of a bare number or array is ``()``) or the list of values, and the
            template that fitted, if one did.
        """
        start = self.place
        num = self.list_size()
        first = self.place
        if num == 0:
            return [], template
        columns = self._fitted(first, num, template) if template else None
        if columns is None:
            template = template_of(self.data, first)
            columns = self._fitted(first, num, template) if template else None
        if columns is not None and template is not None:
            self._unpacker.read_bytes(num * template.size)
            return columns, template
        values = Reader(self.data[start:]).value() if start else unpack(self.data)
        for _ in range(num):
            self.skip()
        return values, None

    def _fitted(self, first: int, num: int, template: Template) -> Columns | None:
        """The columns, where all entries are as the template says."""
        if first + num * template.size > len(self.data):
            return None
        entries = np.frombuffer(self.data, np.uint8, num * template.size, first).reshape(num, template.size)
        for start, constant in template.constants:
            if not (entries[:, start : start + len(constant)] == np.frombuffer(constant, np.uint8)).all():
                return None
        columns: Columns = {}
        for slot in template.slots:
            values = np.ascontiguousarray(entries[:, slot.start : slot.start + slot.size])
            if slot.kind == "bool":
                if not ((values == 0xC2) | (values == 0xC3)).all():
                    return None
                columns[slot.path] = (values == 0xC3).reshape(num)
                continue
            if (slot.kind == "fix" and (values > 0x7F).any()) or (slot.kind == "negfix" and (values < 0xE0).any()):
                return None
            columns[slot.path] = _native(values.view(slot.dtype).reshape(num, *slot.shape), slot.kind != "data")
        return columns


def _native(values: NDArray[Any], plain: bool) -> NDArray[Any]:
    """In the machine's byte order; plain msgpack integers have no size of their own and become int64."""
    if plain and values.dtype.kind in "iu":
        return values.astype(np.uint64 if values.dtype.itemsize == 8 and values.dtype.kind == "u" else np.int64)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _value_of(value: dict[Any, Any]) -> Any:
    """A map, or the array or scalar that it stands for."""
    if b"nd" not in value:
        if b"complex" in value:
            raise ValueError("it holds a complex number")
        return value
    raw = value.get(b"data")
    if not isinstance(raw, bytes):
        raise ValueError("an array has no bytes")
    dtype, shape = header_of(value, len(raw))
    array = _native(np.frombuffer(raw, dtype).reshape(shape), False)
    return array[()] if not value[b"nd"] else array


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"it holds an extension value of type {code}")


def _malformed(error: BaseException) -> DataError:
    text = str(error) or type(error).__name__
    return DataError(f"not valid msgpack of numbers and arrays ({text[:200]})")
