# SPDX-License-Identifier: Apache-2.0
"""Expressions over episodes, such as ``return > 100 and mean(reward) > 0.5``: read by Python's grammar, never run."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.errors import SettingsError
from etude.settings import nearest

Values: TypeAlias = NDArray[Any]

REDUCERS: Final = ("sum", "mean", "min", "max", "any", "all")
"""What makes a figure of an episode from something that each of its steps has."""

MAX_LENGTH: Final = 2_000

_TOKENS: Final = re.compile(r"'[^']*'|\"[^\"]*\"|`([^`]+)`|\breturn\b")
_BINARY: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
}
_COMPARE: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Reduction(NamedTuple):
    """A figure of an episode that is made from its steps."""

    how: str
    """One of `REDUCERS`."""
    of: ast.expr
    """What each step has."""
    text: str
    """As it was written."""


class Expression:
    """An expression over episodes.

    Names are figures of an episode (given to `__call__`); ``sum``, ``mean``, ``min``, ``max``, ``any`` and ``all`` of
    something over step columns are figures too: ``mean(reward)``, ``any(obs[0] > 2)``, ```max(`obs/speed`)```. Between
    them stand comparisons, ``and``, ``or``, ``not``, ``+ - * / // %``, ``abs()``, numbers and strings.

    Args:
        text: The expression.

    Raises:
        SettingsError: it is something else.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._columns: dict[str, str] = {}  # by the name that stands for them
        self.reductions: dict[str, Reduction] = {}
        """By a name of their own."""
        self.names: set[str] = set()
        """The figures that are named outside of reductions."""
        self.columns: list[str] = []
        """The step columns that reductions look at."""
        if len(text) > MAX_LENGTH:
            raise self._error(f"has {len(text):,} letters, but may have {MAX_LENGTH:,}")
        self._source = _TOKENS.sub(self._renamed, text)
        try:
            self._root = ast.parse(self._source.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
            raise self._error(f"can't be read ({reason})") from None
        self._check(self._root, inside=False)

    def _renamed(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            name = f"_column_{len(self._columns)}"
            self._columns[name] = match[1]
            return name
        return "return_" if match[0] == "return" else match[0]

    def _name(self, node: ast.Name) -> str:
        return self._columns.get(node.id, "return" if node.id == "return_" else node.id)

    def _error(self, what: str) -> SettingsError:
        return SettingsError(
            f"the expression {self.text[:200]!r} {what}. Write comparisons of figures of an episode, such as "
            "`return > 100 and mean(reward) > 0.5`; columns whose names are no plain words go between backticks."
        )

    # -- what may stand in it -----------------------------------------------------------------------------------

    def _check(self, node: ast.AST, *, inside: bool) -> None:
        """Look at every part; ``inside`` of a reduction names are columns."""
        for part in self._parts(node, inside=inside):
            self._check(part, inside=inside)

    def _parts(self, node: ast.AST, *, inside: bool) -> list[ast.expr]:
        match node:
            case ast.BoolOp():
                return node.values
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd()):
                return [node.operand]
            case ast.BinOp() if type(node.op) in _BINARY:
                return [node.left, node.right]
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                return [node.left, *node.comparators]
            case ast.Constant(value=bool() | int() | float() | str()):
                return []
            case ast.Name():
                (self.columns.append if inside else self.names.add)(self._name(node))
                return []
            case ast.Subscript(value=ast.Name(), slice=ast.Constant(value=int())) if inside:
                return [node.value]
            case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]):
                return [inner]
            case ast.Call(func=ast.Name(id=how), args=[inner], keywords=[]) if how in REDUCERS and not inside:
                text = ast.unparse(node)
                self.reductions[text] = Reduction(how, inner, text)
                self._check(inner, inside=True)
                return []
        shown = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
        raise self._error(f"holds `{shown[:60]}`, which can't stand there")

    # -- what it is worth ---------------------------------------------------------------------------------------

    def check_names(self, figures: Iterable[str], columns: Iterable[str]) -> None:
        """Raise a SettingsError where a name is neither among ``figures`` nor, in reductions, among ``columns``."""
        figures, columns = list(figures), list(columns)
        for name in sorted(self.names - set(figures)):
            if name in columns:
                raise self._error(f"names `{name}`, which each step has: say what of it, such as mean({name})")
            raise self._error(f"names `{name}`. Figures are {', '.join(figures)}{_hint(name, figures)}")
        for name in self.columns:
            if name not in columns:
                raise self._error(f"names the column `{name}`. There are {', '.join(columns)}{_hint(name, columns)}")

    def of_steps(self, reduction: Reduction, columns: Mapping[str, Values]) -> Values:
        """float64 ``[rows]``: what `Reduction.of` is worth for each row of ``columns``.

        Raises:
            SettingsError: a column has several numbers in each row, or no such one.
        """
        rows = len(next(iter(columns.values()))) if columns else 0
        found = self._valued(reduction.of, columns, as_number=True)
        if found.ndim > 1:
            shape = list(found.shape[1:])
            raise self._error(f"takes {reduction.text}, but each step has {shape} of it: name one, as in obs[0]")
        return np.broadcast_to(found, (rows,))

    def __call__(self, figures: Mapping[str, Values]) -> NDArray[np.bool_]:
        """bool ``[episodes]``: for which it holds.

        Args:
            figures: ``[episodes]`` each, the reductions by their texts among them.

        Raises:
            SettingsError: it is worth something else than truth.
        """
        found = np.asarray(self._valued(self._root, figures))
        if found.dtype != np.bool_:
            raise self._error("gives numbers, not yes or no: compare them with something")
        count = len(next(iter(figures.values())))
        return np.array(np.broadcast_to(found, (count,)))

    def _valued(self, node: ast.expr, names: Mapping[str, Values], *, as_number: bool = False) -> Any:
        with np.errstate(all="ignore"):
            try:
                found = self._value(node, names)
                return _number(found) if as_number else found
            except (TypeError, ValueError, IndexError, OverflowError) as error:
                raise self._error(f"can't be worked out: {error}") from error

    def _value(self, node: ast.expr, names: Mapping[str, Values]) -> Any:
        match node:
            case ast.BoolOp():
                parts = [_truth(self._value(part, names)) for part in node.values]
                return (np.logical_and if isinstance(node.op, ast.And) else np.logical_or).reduce(
                    np.broadcast_arrays(*parts)
                )
            case ast.UnaryOp():
                value = self._value(node.operand, names)
                return ~_truth(value) if isinstance(node.op, ast.Not) else -value if _is_minus(node) else value
            case ast.BinOp():
                return _BINARY[type(node.op)](
                    _number(self._value(node.left, names)), _number(self._value(node.right, names))
                )
            case ast.Compare():
                sides = [self._value(side, names) for side in (node.left, *node.comparators)]
                if len({_is_text(side) for side in sides} - {None}) > 1:
                    raise TypeError("text is compared with numbers")
                found = [
                    np.asarray(_COMPARE[type(op)](a, b)).astype(bool)
                    for op, a, b in zip(node.ops, sides, sides[1:], strict=False)
                ]
                return np.logical_and.reduce(np.broadcast_arrays(*found))
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[self._name(node)]
            case ast.Subscript(value=ast.Name() as name, slice=ast.Constant(value=int() as index)):
                return names[self._name(name)][:, index]
            case ast.Call(func=ast.Name(id="abs")):
                return np.abs(_number(self._value(node.args[0], names)))
        return names[ast.unparse(node)]


def _is_minus(node: ast.UnaryOp) -> bool:
    return isinstance(node.op, ast.USub)


def _truth(value: Any) -> NDArray[np.bool_]:
    found = np.asarray(value)
    if found.dtype != np.bool_:
        raise TypeError("`and`, `or` and `not` take comparisons, not numbers")
    return found


def _is_text(value: Any) -> bool | None:
    """Whether it is text, not numbers; None where nothing says so."""
    found = np.asarray(value)
    if found.dtype != object:
        return found.dtype.kind == "U"
    return True if any(isinstance(one, str) for one in found.flat) else None


def _number(value: Any) -> Any:
    """Numbers as float64, so that whole ones neither overflow nor wrap."""
    if _is_text(value):
        raise TypeError("text is no number to reckon with")
    return np.asarray(value, np.float64)


def _hint(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    return f"; nearest: `{near}`" if near else ""
