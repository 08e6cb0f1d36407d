# SPDX-License-Identifier: Apache-2.0
"""Random changes to bytes, to trees of plain values (JSON, msgpack) and to Arrow tables."""

import json
from typing import Any

import numpy as np
import pyarrow as pa

Rng = np.random.Generator

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        255,
        2**31 - 1,
        2**31,
        -(2**31),
        2**53 + 1,
        2**62,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
    ),
    *(0.5, -0.0, 1e308, -1e308, float("nan"), float("inf"), 1e-320),
    *("", "x", "nan", "0", "1e9", "é☃", "\x00", "x" * 5000, "<f8", "|O", ">U99999999", "BCJNG", "/", "a/b", "."),
    *([], [0], [[]], [1, [2]], {}, {"a": 1}, {"": {}}, [None] * 3, ["x"], [2**40, 2**40], [-1], [0, 0], [1] * 70),
)
"""Values that stand where others are expected; JSON has all of them."""
BYTES: tuple[Any, ...] = (
    b"",
    b"\x00",
    b"\xff" * 8,
    b"x" * 3000,
    b"\x93NUMPY",
    b"\x80\x05.",
    {b"nd": True},
    {b"nd": False},
)
NUMBERS = (b"\xff\xff\xff\xff", b"\xff" * 8, b"\x00" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80")


def of_bytes(data: bytes, rng: Rng) -> bytes:
    """Flipped, cut off, cut out, doubled, spliced, and numbers made huge."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        if not out:
            break
        at, kind = int(rng.integers(len(out))), int(rng.integers(8))
        if kind == 0:
            out[at] = int(rng.integers(256))
        elif kind == 1:
            out[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            del out[at : at + int(rng.integers(1, 20))]
        elif kind == 3:
            number = NUMBERS[int(rng.integers(len(NUMBERS)))]
            out[at : at + len(number)] = number
        elif kind == 4:
            out[at:at] = out[at : at + int(rng.integers(1, 64))]
        elif kind == 5 and rng.random() < 0.3:
            del out[at:]
        elif kind == 6:
            other = int(rng.integers(len(out)))
            size = int(rng.integers(1, 200))
            out[at : at + size] = out[other : other + size]
        elif kind == 7:
            out[at : at + 8] = bytes(rng.integers(0, 256, 8, np.uint8))
    return bytes(out)


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(tree, dict):
        for key in tree:
            found += _nodes(tree[key], (*path, key))
    elif isinstance(tree, list):
        for i in range(min(len(tree), 12)):
            found += _nodes(tree[i], (*path, i))
    return found


def of_tree(tree: Any, rng: Rng, odd: tuple[Any, ...] = ODD) -> Any:
    """A tree of dicts and lists with one to three nodes replaced, left out, doubled, renamed or moved."""
    for _ in range(int(rng.integers(1, 4))):
        paths = _nodes(tree)
        path = paths[int(rng.integers(len(paths)))]
        tree = _changed(tree, path, rng, odd, paths)
    return tree


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _changed(tree: Any, path: tuple[Any, ...], rng: Rng, odd: tuple[Any, ...], paths: list[tuple[Any, ...]]) -> Any:
    if not path:
        return odd[int(rng.integers(len(odd)))] if rng.random() < 0.05 else tree
    key, kind = path[0], int(rng.integers(7))
    out = dict(tree) if isinstance(tree, dict) else list(tree)
    if len(path) > 1:
        out[key] = _changed(out[key], path[1:], rng, odd, [p[1:] for p in paths if p[:1] == (key,)])
    elif kind < 3:
        value = odd[int(rng.integers(len(odd)))]
        if isinstance(out[key], int | float) and rng.random() < 0.3:
            value = out[key] * (2 ** int(rng.integers(0, 40))) * (1 if rng.random() < 0.5 else -1)
        if isinstance(out[key], str | bytes) and rng.random() < 0.5:
            raw = of_bytes(out[key].encode() if isinstance(out[key], str) else out[key], rng)
            value = raw.decode("utf8", "replace") if isinstance(out[key], str) else raw
        out[key] = value
    elif kind == 3:
        del out[key]
    elif kind == 4:
        out[key] = _at(tree, paths[int(rng.integers(len(paths)))])
    elif kind == 5 and isinstance(out, list):
        out[key:key] = [out[key]] * int(rng.integers(1, 4))
    elif isinstance(out, dict):
        out["renamed" if rng.random() < 0.5 else str(key) + "/x"] = out.pop(key)
    return out


def of_json(text: bytes, rng: Rng) -> bytes:
    """One JSON document, or lines of them."""
    lines = text.splitlines()
    i = int(rng.integers(len(lines)))
    try:
        if text.lstrip()[:1] == b"{" and len(lines) > 1 and lines[0].strip() == b"{":
            return json.dumps(of_tree(json.loads(text), rng)).encode()
        lines[i] = json.dumps(of_tree(json.loads(lines[i]), rng)).encode()
    except ValueError:
        return of_bytes(text, rng)
    return b"\n".join(lines)


TYPES = (
    pa.string(),
    pa.float16(),
    pa.int8(),
    pa.uint64(),
    pa.float64(),
    pa.binary(),
    pa.bool_(),
    pa.null(),
    pa.date32(),
)


def of_table(table: pa.Table, rng: Rng) -> pa.Table:
    """Columns left out, renamed, of another type, with nulls, with odd values, in another order; other metadata."""
    for _ in range(int(rng.integers(1, 3))):
        if not table.num_columns:
            break
        i = int(rng.integers(table.num_columns))
        name, column, field = table.column_names[i], table.column(i), table.schema.field(i)
        kind = int(rng.integers(10))
        try:
            if kind == 0:
                table = table.remove_column(i)
            elif kind == 1:
                table = table.set_column(
                    i, field.with_name(str(rng.choice(["x", "", "t", "obs", "a/b", "obs/x"]))), column
                )
            elif kind == 2:
                table = table.set_column(i, name, column.cast(TYPES[int(rng.integers(len(TYPES)))], safe=False))
            elif kind == 3:
                table = table.take(
                    pa.array(rng.integers(0, max(1, table.num_rows), int(rng.integers(0, table.num_rows + 9))))
                )
            elif kind == 4:
                metadata = {k: of_bytes(v, rng) for k, v in (field.metadata or {b"etude:shape": b"[3]"}).items()}
                table = table.set_column(i, field.with_metadata(metadata), column)
            elif kind == 5 and table.schema.metadata:
                table = table.replace_schema_metadata(of_metadata(table.schema.metadata, rng))
            elif kind == 6:
                table = (
                    table.append_column(name, column) if rng.random() < 0.3 else table.slice(int(rng.integers(0, 5)))
                )
            else:
                table = table.set_column(i, field.with_nullable(True), _with_odd(column, rng))
        except (pa.ArrowException, ValueError, TypeError, IndexError, OverflowError, NotImplementedError):
            continue
    return table


def of_metadata(metadata: dict[bytes, bytes], rng: Rng) -> dict[bytes, bytes]:
    return {key: of_json(value, rng) if rng.random() < 0.7 else of_bytes(value, rng) for key, value in metadata.items()}


def _with_odd(column: pa.ChunkedArray, rng: Rng) -> pa.Array:
    values = column.to_pylist()
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(max(1, len(values))))
        old = values[at]
        if isinstance(old, list) and rng.random() < 0.7:
            values[at] = old[: int(rng.integers(0, len(old) + 1))] if rng.random() < 0.5 else [*old[:-1], float("nan")]
        elif isinstance(old, str | bytes) and rng.random() < 0.7:
            raw = of_bytes(old.encode() if isinstance(old, str) else old, rng)
            values[at] = raw.decode("utf8", "replace") if isinstance(old, str) else raw
        elif isinstance(old, dict):
            values[at] = {**old, next(iter(old), "x"): None}
        else:
            values[at] = ODD[int(rng.integers(24))]
    return pa.array(values, column.type, from_pandas=False)
