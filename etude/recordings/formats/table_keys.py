# SPDX-License-Identifier: Apache-2.0
"""The key columns of tables: flags and times, as numbers or as text, and ids."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.recordings.formats.arrow import Place, check_nulls, is_text, numbers, one_array, shown, strings
from etude.recordings.formats.source import DATE_ORDERS, DAY_FIRST, FLAGS, MONTH_FIRST

Ints = NDArray[np.int64]

NO: Final = ("no", "false", "n", "f", "0")
YES: Final = ("yes", "true", "y", "t", "1")

_DATE: Final = (
    r"^(?P<one>\d{1,2})(?P<mark>[/.-])(?P<two>\d{1,2})[/.-](?P<year>\d{4})"
    r"(?:,?[ T]+(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:\.(?P<fraction>\d+))?)?"
    r" ?(?P<half>[AaPp]?)(?:\.?[Mm]\.?)?)?$"
)
_ISO: Final = (pa.timestamp("us"), pa.timestamp("us", "UTC"))


WITHOUT_T: Final = f"leave `{col.T_INDEX}` out, if the rows of each episode are in order"
"""Advice where ``t`` does not say the order of steps."""
UNIX_FROM: Final = 10**8
"""Whole numbers from here on are Unix times, in whatever unit (in seconds, this is 1973), and not indices of steps."""


def truths(array: pa.Array) -> pa.Array:
    """``array`` as booleans: `YES` and `NO` in any case; null where it is neither."""
    found = pc.index_in(pc.utf8_lower(_trimmed(array)), value_set=pa.array([*NO, *YES]))
    return pc.greater_equal(found, len(NO))


def date_orders(array: pa.Array) -> tuple[str, ...]:
    """Those of `DATE_ORDERS` that dates such as 1/2/2026 may have: one if a date has a number above 12, or points,
    which stand after the day; none if there is no such date."""
    parts = pc.extract_regex(_trimmed(array), _DATE)
    one, two = (pc.max(pc.cast(pc.struct_field(parts, name), pa.int64())).as_py() for name in ("one", "two"))
    if one is None:
        return ()
    if one > 12 or pc.any(pc.equal(pc.struct_field(parts, "mark"), ".")).as_py():
        return (DAY_FIRST,)
    return (MONTH_FIRST,) if two > 12 else DATE_ORDERS


def date_order(arrays: Iterable[pa.Array]) -> str | None:
    """What comes first in the dates of a column, by the first part of it that shows it; None if none does."""
    for orders in map(date_orders, arrays):
        if orders != DATE_ORDERS:
            return orders[0] if orders else None
    return None


def times(array: pa.Array, place: Place, name: str, order: str | None) -> pa.Array:
    """Convert texts to timestamps in microseconds, without what is finer.

    They are ISO 8601, with zones in all rows or in none, also with slashes in the date; or dates such as 11/24/2026 and
    24.11.2026, alone or with a time such as 15:15 or 3:15 PM.

    Args:
        array: The texts; what is empty stays so.
        place: Describes the location of a row, for errors.
        name: The column's name.
        order: One of `DATE_ORDERS`; None if no date shows it.

    Raises:
        DataError: a text is no time, or could be two; the message names the row.
    """
    texts = pc.replace_substring_regex(_trimmed(array), r" ?(UTC|GMT)$", "Z")
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})\d+", r"\1")
    texts = pc.replace_substring_regex(texts, r"^(\d{4})/(\d\d)/(\d\d)", r"\1-\2-\3")
    for kind in _ISO:
        try:
            return texts.cast(kind)
        except pa.ArrowException:
            continue
    parts = pc.extract_regex(texts, _DATE)
    is_there = np.asarray(texts.is_valid())
    is_date = np.asarray(parts.is_valid())
    if not is_date[is_there.argmax()]:
        row = _not_iso(texts)
        raise DataError(
            f"{place(row)}: the column `{name}` of `{col.T_INDEX}` is text such as {texts[row].as_py()[:40]!r}, "
            "neither the number of a step nor a time such as 2026-03-01 08:30:00 or 3/24/2026 3:15 PM, written alike "
            f"in all rows. Convert it; or {WITHOUT_T}."
        )
    if order is None:
        row = int(is_there.argmax())
        given = " or ".join(f"{col.T_INDEX}={name}:{one}" for one in DATE_ORDERS)
        raise DataError(
            f"{place(row)}: no row of the column `{name}` tells whether the month or the day is first in "
            f"{texts[row].as_py()!r}. Write {given}; or {WITHOUT_T}."
        )
    values, is_right = _dates(parts, order)
    wrong = is_there & ~(is_date & is_right)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{place(row)}: the column `{name}` of `{col.T_INDEX}` is {texts[row].as_py()[:40]!r}, which is no time "
            f"with the {order.partition('-')[0]} first, as in other rows. Write all times alike."
        )
    return pa.array(values, pa.timestamp("us"), mask=~is_there)


def can_be_times(kind: pa.DataType) -> bool:
    """Whether numbers of this type can be times; booleans can not."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def are_times(arrays: Iterable[pa.Array]) -> bool:
    """Whether the numbers of a column, in parts of one type, are times and not indices of steps: some have a fraction,
    or all are at least `UNIX_FROM`."""
    least = math.inf
    for array in arrays:
        values = np.asarray(array.drop_null().cast(pa.float64(), safe=False))
        values = values[np.isfinite(values)]
        if (values != np.floor(values)).any():
            return True
        least = min(least, values.min(initial=math.inf))
        if least < UNIX_FROM and pa.types.is_integer(array.type):
            return False  # without reading the others
    return bool(UNIX_FROM <= least < math.inf)


def number_times(array: pa.Array, place: Place) -> pa.Array:
    """Convert times that are numbers to timestamps that sort alike. Their unit is unknown, so these are no dates.

    Raises:
        DataError: one is missing, or not finite; the message names the row.
    """
    values = numbers(array, col.T_INDEX, place)
    if values.dtype.kind == "f":
        if not (is_there := np.isfinite(values)).all():
            row = int(is_there.argmin())
            raise DataError(f"{place(row)}: the column of `{col.T_INDEX}` is {values[row]}, which is no time.")
        bits = (values.astype(np.float64) + 0.0).view(np.int64)  # of positive numbers they sort alike; -0 becomes 0
        values = np.where(bits < 0, np.iinfo(np.int64).min - bits, bits)
    return pa.array(values.astype(np.int64), pa.timestamp("us"))


def _trimmed(array: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(array.cast(pa.string()))


def _not_iso(texts: pa.Array) -> int:
    """The first row that is no time where the rows before it are; 0 if only some have a zone."""
    for kind in _ISO:
        for row, text in enumerate(texts):
            try:
                text.cast(kind)
            except pa.ArrowException:
                if row:
                    return row
                break
    return 0


def _dates(parts: pa.Array, order: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """datetime64[us] ``[n]``, and whether there is such a time: bool ``[n]``."""

    def numbers(name: str) -> NDArray[np.int64]:
        digits = pc.fill_null(pc.struct_field(parts, name), "0")
        digits = pc.utf8_slice_codeunits(pc.utf8_rpad(digits, 6, "0"), 0, 6) if name == "fraction" else digits
        return np.asarray(pc.cast(pc.if_else(pc.equal(digits, ""), "0", digits), pa.int64()))

    year, hour, minute, second, fraction = map(numbers, ("year", "hour", "minute", "second", "fraction"))
    month, day = (numbers(name) for name in (("one", "two") if order == MONTH_FIRST else ("two", "one")))
    half = np.asarray(pc.fill_null(pc.utf8_lower(pc.struct_field(parts, "half")), "").to_numpy(zero_copy_only=False))
    has_half = half != ""
    is_right = (month >= 1) & (month <= 12) & (day >= 1) & (minute < 60) & (second < 60)
    is_right &= np.where(has_half, (hour >= 1) & (hour <= 12), hour < 24)
    hour = np.where(has_half, hour % 12 + 12 * (half == "p"), hour)
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1)
    is_right &= days.astype("datetime64[M]") == months
    seconds = (hour * 60 + minute) * 60 + second
    return days.astype("datetime64[us]") + (seconds * 1_000_000 + fraction), is_right


# -- flags, steps and ids ----------------------------------------------------------------------------------------------


_BITS: Final = {16: 11, 32: 24, 64: 53}
"""The bits of whole numbers that floats hold, by the bits of their type."""


def ends_of(
    keys: Mapping[str, pa.ChunkedArray], num_rows: int, place: Place
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each row terminates its episode, and whether it truncates it."""
    return ends_by({n: flags_of(keys[n], n, place) for n in FLAGS if n in keys}, num_rows)


def ends_by(flags: Mapping[str, NDArray[np.bool_]], num_rows: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return ``(terminated, truncated)`` by the flags that exist, of these two and ``done``, which is either one."""
    none = np.zeros(num_rows, bool)
    terminated, truncated, done = (flags.get(name, none) for name in FLAGS)
    rest = done & ~terminated & ~truncated
    if col.TERMINATED in flags and col.TRUNCATED not in flags:
        return terminated, truncated | rest
    return terminated | rest, truncated


def flags_of(column: pa.ChunkedArray | pa.Array, name: str, place: Place) -> NDArray[np.bool_]:
    """Convert a flag of numbers 0 and 1, booleans, or texts such as yes and no; others are a DataError."""
    array = one_array(column)
    found = truths(array) if is_text(array.type) else array
    wrong = np.asarray(pc.and_(found.is_null(), array.is_valid()))  # texts that are neither
    if not wrong.any():
        values = numbers(found, name, place)
        wrong = (values != 0) & (values != 1) if values.ndim == 1 else np.ones(len(values), bool)
    if wrong.any():
        row = int(wrong.argmax())
        found_there = f"{place(row)}: the column of `{name}` is {shown(array[row])!r}"
        raise DataError(f"{found_there}, not true or false. Write yes and no, true and false, or 1 and 0.")
    return values.astype(bool)


def is_time(kind: pa.DataType) -> bool:
    """Whether a column holds points in time."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind))


def steps_or_times(column: pa.ChunkedArray, place: Place) -> Ints:
    """Convert ``t``: the number of a step, or a point in time as a number."""
    array = one_array(column)
    if is_time(array.type):
        array = array.cast({32: pa.int32(), 64: pa.int64()}[array.type.bit_width])
        return numbers(array, col.T_INDEX, place).astype(np.int64)
    values = numbers(array, col.T_INDEX, place)
    is_right = np.zeros(len(values), bool)
    if values.ndim == 1 and values.dtype.kind in "iuf":
        limit = 2**53 if values.dtype.kind == "f" else 2**62
        is_right = (values >= 0) & (values < limit) & (values == np.round(values))
    if not is_right.all():
        row = int(is_right.argmin())
        what = f"the column of `{col.T_INDEX}` is {values[row]}, but counts steps from 0"
        raise DataError(f"{place(row)}: {what}. Correct it; or {WITHOUT_T}.")
    return values.astype(np.int64)


def key_codes(column: pa.ChunkedArray, name: str, place: Place) -> tuple[Ints, NDArray[np.object_]]:
    """Convert a key to codes, in order of first appearance, and the texts that they stand for."""
    array = one_array(column)
    if array.null_count == len(array) and name != col.EPISODE_ID:
        return np.zeros(len(array), np.int64), np.array([None], object)
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if name == col.EPISODE_ID:
        check_nulls(array, name, place)
    array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    if pa.types.is_floating(array.type):
        most, bits = pc.max(pc.abs(array.cast(pa.float64()))).as_py(), _BITS[array.type.bit_width]
        if most is not None and most >= 1 << bits:
            raise DataError(
                f"{place(0)}: the column of `{name}` holds numbers up to {most:.17g} as floats of {bits} bits: "
                "different ids may be equal. Write them as text (in a CSV file with a letter in front)."
            )
        array = pc.add(array, pa.scalar(0.0, array.type))  # 0.0 and -0.0 are one id
    try:
        encoded = array.dictionary_encode(null_encoding="encode")
    except pa.ArrowException as error:
        raise DataError(f"{place(0)}: the column of `{name}` is of type {array.type}, not text or numbers.") from error
    return np.asarray(encoded.indices).astype(np.int64), strings(encoded.dictionary, name, place)
