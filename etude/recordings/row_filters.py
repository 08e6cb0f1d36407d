# SPDX-License-Identifier: Apache-2.0
"""Conditions on the steps of a recording, from text."""

import ast
import operator
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from etude.errors import SettingsError

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


def row_filter(text: str) -> pc.Expression:
    """``"reward > 0 and t < 100"`` as the expression that `Recording.read` takes.

    Names are columns on the disk that hold one number or text a step, such as ``t``, ``reward``, ``action`` or
    ``episode_id``; between them stand comparisons, ``and``, ``or``, ``not``, ``+ - * /``, ``in (1, 2)``, numbers and
    texts. Nothing is run.

    Raises:
        SettingsError: it is something else.
    """
    try:
        root = ast.parse(text.strip(), mode="eval").body
        found = _made(root)
        if not any(isinstance(node, ast.Name) for node in ast.walk(root)):
            raise ValueError("it names no column")
    except (SyntaxError, ValueError, TypeError, RecursionError, pa.ArrowException) as error:
        raise SettingsError(
            f"the filter {text!r} can't be used ({error}). Write a condition on single steps, such as "
            "`reward > 0 and t < 100`."
        ) from None
    return found


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
