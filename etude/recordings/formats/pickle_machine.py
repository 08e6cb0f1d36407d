# SPDX-License-Identifier: Apache-2.0
"""Pickles of plain values and NumPy arrays, read without unpickling.

Pickles are programs. Here a small machine of its own reads them: it knows the opcodes that plain values and NumPy
arrays need, calls nothing that a pickle names, and refuses everything else by name. The few names of NumPy that may
stand in a pickle are symbols; `pickle_names` turns them into arrays after sizes and dtypes were checked.

Source: the opcodes are described in Python's ``pickletools``.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from etude.errors import DataError
from etude.recordings.formats.pickle_names import CALLS, NAMES, Array, Dtype, Refused, Symbol, array_of


def unpickle(data: bytes) -> Any:
    """The value in a pickle of plain values and arrays of numbers.

    Raises:
        DataError: it holds anything else, which is named, or is broken.
    """
    try:
        return _Machine(data).run()
    except Refused as error:
        raise DataError(f"a pickle holds {error}; only arrays of numbers and plain values are read") from error
    except (IndexError, ValueError, TypeError, KeyError, struct.error, OverflowError, RecursionError) as error:
        raise DataError(f"a pickle is broken ({type(error).__name__}: {str(error)[:100]})") from error


class _Machine:
    """Reads one pickle, opcode by opcode."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data = self.data
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                break
            step = _STEPS.get(code)
            if step is None:
                raise Refused(f"the opcode {chr(code)!r} (0x{code:02x})")
            step(self)
        (value,) = self.stack
        return _finished(value)

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size < 0 or size > len(self.data) - self.at:
            raise ValueError("it ends too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def sized(self, width: int) -> bytes:
        """Bytes that follow their length, an unsigned integer of ``width`` bytes."""
        return self.take(int.from_bytes(self.take(width), "little"))

    def line(self) -> str:
        """Text up to the next end of line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode("ascii")

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        """Take what was put on the stack after the last mark."""
        start = self.marks.pop()
        if start > len(self.stack):
            raise ValueError("a mark lies above the stack")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put(self, key: int) -> None:
        """Remember the value on top."""
        self.memo[key] = self.stack[-1]

    def get(self, key: int) -> None:
        """Put a remembered value on the stack. Only flat ones: a nested one used many times could grow without end."""
        value = self.memo[key]
        if isinstance(value, list | dict) or (
            isinstance(value, tuple) and any(isinstance(v, tuple | list | dict) for v in value)
        ):
            raise Refused(f"the same {type(value).__name__} twice")
        self.push(value)


def _named(machine: _Machine, module: Any, name: Any) -> None:
    symbol = NAMES.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
    if symbol is None:
        raise Refused(f"the name `{str(module)[:60]}.{str(name)[:60]}`")
    machine.push(symbol)


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    _named(machine, module, name)


def _reduce(machine: _Machine) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    if not isinstance(function, Symbol) or not isinstance(arguments, tuple):
        raise Refused("a call of something that is no function")
    call = CALLS.get(function)
    if call is None:
        raise Refused("a call of something that is no function")
    machine.push(call(*arguments))


def _build(machine: _Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    if isinstance(target, Dtype) and isinstance(state, tuple) and len(state) >= 2 and state[1] in ("<", ">", "|", "="):
        if any(part is not None for part in state[2:5]):
            raise Refused("a structured dtype")
        target.code = state[1] + target.code.lstrip("<>|=")
    elif isinstance(target, Array) and isinstance(state, tuple) and len(state) == 5 and target.value is None:
        _, shape, dtype, fortran, raw = state
        target.value = array_of(raw, dtype, shape, "F" if fortran else "C")
    else:
        raise Refused("the state of an object")


def _append(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, list):
        raise Refused("items of something that is no list")
    target.extend(items)


def _set_items(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, dict) or len(items) % 2:
        raise Refused("items of something that is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int | float | bool | None) or isinstance(key, Symbol):
            raise Refused("a dict with keys that are no plain values")
        target[key] = value


def _top(machine: _Machine, num: int) -> list[Any]:
    if len(machine.stack) < num:
        raise ValueError("its stack is empty")
    items = machine.stack[len(machine.stack) - num :]
    del machine.stack[len(machine.stack) - num :]
    return items


def _finished(value: Any) -> Any:
    """The value with arrays in the place of what stood for them; symbols are no values."""
    if isinstance(value, Array):
        if value.value is None:
            raise Refused("an array without its bytes")
        return value.value
    if isinstance(value, list | tuple):
        return type(value)(_finished(v) for v in value)
    if isinstance(value, dict):
        return {key: _finished(v) for key, v in value.items()}
    if isinstance(value, Dtype | Symbol):
        raise Refused("a dtype or function as a value")
    return value


def _int(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(int.from_bytes(m.take(width), "little", signed=width == 4))


def _text(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.sized(width).decode("utf-8", "surrogatepass"))


def _bytes(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.sized(width))


def _tuple(num: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(tuple(_top(m, num)))


def _passed(width: int) -> Callable[[_Machine], None]:
    """Past what tells nothing of the value."""

    def step(machine: _Machine) -> None:
        machine.take(width)

    return step


def _pop(machine: _Machine) -> None:
    _top(machine, 1)


_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _passed(1),  # PROTO
    0x95: _passed(8),  # FRAME
    0x28: lambda m: m.marks.append(len(m.stack)),  # MARK
    0x30: _pop,  # POP
    0x94: lambda m: m.put(len(m.memo)),  # MEMOIZE
    0x71: lambda m: m.put(m.take(1)[0]),  # BINPUT
    0x72: lambda m: m.put(int.from_bytes(m.take(4), "little")),  # LONG_BINPUT
    0x68: lambda m: m.get(m.take(1)[0]),  # BINGET
    0x6A: lambda m: m.get(int.from_bytes(m.take(4), "little")),  # LONG_BINGET
    0x4E: lambda m: m.push(None),  # NONE
    0x88: lambda m: m.push(True),  # NEWTRUE
    0x89: lambda m: m.push(False),  # NEWFALSE
    0x4A: _int(4),  # BININT
    0x4B: _int(1),  # BININT1
    0x4D: _int(2),  # BININT2
    0x8A: lambda m: m.push(int.from_bytes(m.sized(1), "little", signed=True)),  # LONG1
    0x47: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    0x8C: _text(1),  # SHORT_BINUNICODE
    0x58: _text(4),  # BINUNICODE
    0x8D: _text(8),  # BINUNICODE8
    0x43: _bytes(1),  # SHORT_BINBYTES
    0x42: _bytes(4),  # BINBYTES
    0x8E: _bytes(8),  # BINBYTES8
    0x96: _bytes(8),  # BYTEARRAY8
    0x29: _tuple(0),  # EMPTY_TUPLE
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x74: lambda m: m.push(tuple(m.since_mark())),  # TUPLE
    0x5D: lambda m: m.push([]),  # EMPTY_LIST
    0x7D: lambda m: m.push({}),  # EMPTY_DICT
    0x61: lambda m: _append(m, _top(m, 1)),  # APPEND
    0x65: lambda m: _append(m, m.since_mark()),  # APPENDS
    0x73: lambda m: _set_items(m, _top(m, 2)),  # SETITEM
    0x75: lambda m: _set_items(m, m.since_mark()),  # SETITEMS
    0x63: lambda m: _named(m, m.line(), m.line()),  # GLOBAL
    0x93: _stack_global,  # STACK_GLOBAL
    0x52: _reduce,  # REDUCE
    0x62: _build,  # BUILD
}
