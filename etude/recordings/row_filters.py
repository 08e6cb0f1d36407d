# SPDX-License-Identifier: Apache-2.0
"""Conditions on the steps of a recording, from text."""

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from etude.errors import SettingsError
from etude.experience import Experience

_BINARY: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class RowFilter:
    """A condition on single steps, such as ``reward > 0 and t < 100``.

    Names are columns that hold one number or text a step, such as ``t``, ``reward``, ``action`` or ``episode_id``;
    between them stand comparisons, ``and``, ``or``, ``not``, ``+ - * /``, ``in (1, 2)``, numbers and texts. Nothing is
    run.

    Args:
        text: The condition.

    Raises:
        SettingsError: it is something else.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            root = ast.parse(text.strip(), mode="eval").body
            self._expression = _made(root)
            self.names = sorted({node.id for node in ast.walk(root) if isinstance(node, ast.Name)})
            """The columns that it looks at."""
            if not self.names:
                raise ValueError("it names no column")
        except (SyntaxError, ValueError, TypeError, RecursionError, pa.ArrowException) as error:
            raise self._wrong(error) from None

    def _wrong(self, reason: Any) -> SettingsError:
        return SettingsError(
            f"the filter {self.text!r} can't be used ({str(reason).splitlines()[0]}). Write a condition on single "
            "steps, such as `reward > 0 and t < 100`."
        )

    def columns(self, there: Sequence[str]) -> tuple[str, ...]:
        """The step columns that it looks at, of those that are there; others are of the segments."""
        return tuple(name for name in self.names if name in there)

    def holds(self, exp: Experience) -> NDArray[np.bool_]:
        """bool ``[num_steps]``: the steps for which it holds; False where something that it names is not known.

        Raises:
            SettingsError: it names what is not there, or compares what can't be compared.
        """
        seen = {name: exp.steps[name] for name in self.columns(tuple(exp.steps))}
        table = Experience(seen, exp.offsets, exp.segments, {}).to_table()
        missing = [name for name in self.names if name not in table.column_names]
        if missing:
            known = ", ".join(dict.fromkeys([*table.column_names, *exp.steps]))
            raise self._wrong(f"there is no column `{missing[0]}`; there are {known}")
        try:
            found = ds.dataset(table).to_table(columns={"holds": self._expression})["holds"]
            if not pa.types.is_boolean(found.type):
                raise ValueError("it is no condition")
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise self._wrong(error) from None
        return np.asarray(found.fill_null(False)).astype(bool)

    def __call__(self, exp: Experience) -> Experience:
        """The steps for which it holds, in segments that know what was observed after each."""
        kept = self.holds(exp)
        if kept.all():
            return exp
        changes = np.flatnonzero(np.diff(kept)) + 1
        bounds = np.union1d(exp.offsets, changes)
        start, stop = bounds[:-1], bounds[1:]
        parent = np.searchsorted(exp.offsets, start, side="right") - 1
        return exp.pieces(parent, start, stop).select(kept[start])


def _made(node: ast.expr) -> pc.Expression:
    match node:
        case ast.Name():
            return pc.field(node.id)
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return pc.scalar(value)
        case ast.UnaryOp(op=ast.Not()):
            return ~_made(node.operand)
        case ast.UnaryOp(op=ast.USub()):
            return pc.negate(_made(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](_made(node.left), _made(node.right))
        case ast.BoolOp():
            parts = [_made(part) for part in node.values]
            found = parts[0]
            for part in parts[1:]:
                found = found & part if isinstance(node.op, ast.And) else found | part
            return found
        case ast.Compare(ops=[ast.In()], comparators=[ast.Tuple() | ast.List() as values]):
            return _made(node.left).isin(ast.literal_eval(ast.List(values.elts)))
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _BINARY:
            return _BINARY[type(op)](_made(node.left), _made(right))
    raise ValueError(f"`{ast.unparse(node)}` is not known here")
