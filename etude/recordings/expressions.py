# SPDX-License-Identifier: Apache-2.0
"""The one expression language for recordings: conditions on episodes and on single steps, in Python's grammar.

Nothing is run: the text is parsed, every part is checked, and the parts are evaluated on whole columns at once. The
result is what Python gives for each row: ``/`` is true division, whole numbers never overflow or wrap, floats are
float64, and ``a < b < c`` and ``x in (1, 2)`` work. Where Python raises: a division by zero gives infinity or NaN, as
IEEE 754 has it, and ``<`` with a missing text (None) is false.
"""

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import SettingsError
from etude.experience import Experience
from etude.settings import nearest

Values: TypeAlias = NDArray[Any]

REDUCERS: Final = ("sum", "mean", "min", "max", "any", "all")
"""What makes a figure of an episode from a value of each step."""

STEP_FACTS: Final = (col.T_INDEX, col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID, col.TERMINATED, col.TRUNCATED)
"""What each step has beside its columns."""

MAX_LENGTH: Final = 2_000
MAX_DEPTH: Final = 100

_EXACT: Final = 2**53
"""Whole numbers up to this are float64 numbers."""
_SAFE: Final = 2**62
"""Whole numbers up to this are kept as int64, larger ones as Python's."""

_TOKENS: Final = re.compile(r"'[^']*'|\"[^\"]*\"|`([^`]+)`|\breturn\b")
_ARITHMETIC: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
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
    """The value of each step."""
    text: str
    """As it was written."""


class Expression:
    """An expression over episodes, or, with ``of_steps``, over single steps.

    It is made of comparisons, ``in (1, 2)``, ``and``, ``or``, ``not``, ``+ - * / // %``, ``abs()``, numbers, strings
    and names. Over steps, names are columns (``reward``, ``obs[0]``, ```obs/speed```) and `STEP_FACTS`. Over episodes,
    names are figures of an episode, and ``sum``, ``mean``, ``min``, ``max``, ``any`` and ``all`` of an expression over
    steps are figures too: ``mean(reward)``, ``any(obs[0] > 2)``.

    Args:
        text: The expression.
        of_steps: Whether it is about single steps.

    Raises:
        SettingsError: it is something else.
    """

    def __init__(self, text: str, *, of_steps: bool = False) -> None:
        self.text = text
        self._of_steps = of_steps
        self._backticked: dict[str, str] = {}  # columns by the names that stand for them
        self.reductions: dict[str, Reduction] = {}
        """By a name of their own."""
        self.names: set[str] = set()
        """The figures that are named outside of reductions."""
        self.columns: list[str] = []
        """The step columns that it looks at."""
        if len(text) > MAX_LENGTH:
            raise self._error(f"has {len(text):,} letters, but may have {MAX_LENGTH:,}")
        source = _TOKENS.sub(self._renamed, text)
        try:
            self._root = ast.parse(source.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
            raise self._error(f"can't be read ({reason})") from None
        if _depth(self._root) > MAX_DEPTH:
            raise self._error(f"is nested more than {MAX_DEPTH} deep")
        self._check(self._root, inside=of_steps)

    def _renamed(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            name = f"_column_{len(self._backticked)}"
            self._backticked[name] = match[1]
            return name
        return "return_" if match[0] == "return" else match[0]

    def _name(self, node: ast.Name) -> str:
        return self._backticked.get(node.id, "return" if node.id == "return_" else node.id)

    def _error(self, what: str) -> SettingsError:
        shown = repr(self.text[:200])
        names = "columns whose names are no plain words go between backticks."
        if self._of_steps:
            return SettingsError(
                f"the filter {shown} can't be used (it {what}). Write a condition on single steps, such as "
                f"`reward > 0 and t < 100`; {names}"
            )
        return SettingsError(
            f"the expression {shown} {what}. Write comparisons of figures of an episode, such as "
            f"`return > 100 and mean(reward) > 0.5`; {names}"
        )

    # -- what may stand in it -----------------------------------------------------------------------------------

    def _check(self, node: ast.AST, *, inside: bool) -> None:
        """Look at every part; over steps (``inside``), names are columns."""
        for part in self._parts(node, inside=inside):
            self._check(part, inside=inside)

    def _parts(self, node: ast.AST, *, inside: bool) -> list[ast.expr]:
        match node:
            case ast.BoolOp():
                return node.values
            case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd()):
                return [node.operand]
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                return [node.left, node.right]
            case ast.Compare() if all(map(_is_comparison, node.ops, node.comparators)):
                return [node.left, *(side for side in node.comparators if not isinstance(side, ast.Tuple | ast.List))]
            case ast.Constant(value=bool() | int() | float() | str()):
                return []
            case ast.Name():
                name = self._name(node)
                self.columns.append(name) if inside else self.names.add(name)
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

    def check_names(self, figures: Iterable[str], columns: Iterable[str]) -> None:
        """Raise a SettingsError where a name is neither among ``figures`` nor, over steps, among ``columns``."""
        figures, columns = list(figures), list(columns)
        for name in sorted(self.names - set(figures)):
            if name in columns or name in STEP_FACTS:
                raise self._error(f"names `{name}`, which each step has: say what of it, such as mean({name})")
            raise self._error(f"names `{name}`. Figures are {', '.join(figures)}{_hint(name, figures)}")
        for name in self.columns:
            if name not in columns and name not in STEP_FACTS:
                facts = ", ".join(fact for fact in STEP_FACTS if fact not in columns)
                raise self._error(
                    f"names the column `{name}`. There are {', '.join(columns)}{_hint(name, [*columns, *STEP_FACTS])}; "
                    f"each step also has {facts}"
                )

    # -- what it is worth ---------------------------------------------------------------------------------------

    def of_steps(self, reduction: Reduction, columns: Mapping[str, Values]) -> Values:
        """float64 ``[rows]``: the value of `Reduction.of` for each row of ``columns``; see `step_values`.

        Raises:
            SettingsError: a column has several numbers in each row, or no such one.
        """
        rows = len(next(iter(columns.values()))) if columns else 0
        found = self._evaluated(lambda: _as_float(self._value(reduction.of, columns)))
        if found.ndim > 1:
            shape = list(found.shape[1:])
            raise self._error(f"takes {reduction.text}, but each step has {shape} of it: name one, as in obs[0]")
        return np.broadcast_to(found, (rows,))

    def __call__(self, values: Mapping[str, Values]) -> NDArray[np.bool_]:
        """bool ``[rows]``: for which it holds.

        Args:
            values: ``[rows, ...]`` each: figures of episodes, the reductions by their texts among them; or, over steps,
                what `step_values` gives.

        Raises:
            SettingsError: it gives something else than truth, or compares what can't be compared.
        """
        found = self._evaluated(lambda: np.asarray(self._value(self._root, values)))
        if found.dtype != np.bool_:
            raise self._error("gives numbers, not yes or no, so it is no condition: compare them with something")
        if found.ndim > 1:
            raise self._error(f"compares {list(found.shape[1:])} values of each row: name one of them, as in obs[0]")
        count = len(next(iter(values.values())))
        return np.array(np.broadcast_to(found, (count,)))

    def _evaluated(self, work: Callable[[], Values]) -> Values:
        with np.errstate(all="ignore"):
            try:
                return work()
            except (TypeError, ValueError, IndexError, OverflowError) as error:
                raise self._error(f"can't be worked out: {error}") from error

    def _value(self, node: ast.expr, names: Mapping[str, Values]) -> Values:
        match node:
            case ast.BoolOp():
                parts = [_truth(self._value(part, names)) for part in node.values]
                both = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
                return np.asarray(both.reduce(np.broadcast_arrays(*parts)))
            case ast.UnaryOp(op=ast.Not()):
                return ~_truth(self._value(node.operand, names))
            case ast.UnaryOp():
                value = _number(self._value(node.operand, names))
                if isinstance(node.op, ast.UAdd):
                    return value
                return -value if value.dtype.kind == "f" else _arithmetic(operator.sub, np.asarray(0), value)
            case ast.BinOp():
                sides = (_number(self._value(side, names)) for side in (node.left, node.right))
                return _arithmetic(_ARITHMETIC[type(node.op)], *sides)
            case ast.Compare():
                return self._compared(node, names)
            case ast.Constant():
                return _loaded(np.asarray(node.value, object if isinstance(node.value, str) else None))
            case ast.Name():
                return _loaded(names[self._name(node)])
            case ast.Subscript(value=ast.Name() as name, slice=ast.Constant(value=int() as index)):
                return _loaded(names[self._name(name)][:, index])
            case ast.Call(func=ast.Name(id="abs")):
                value = _number(self._value(node.args[0], names))
                return np.asarray(np.abs(value))
        return _loaded(names[ast.unparse(node)])  # a reduction

    def _compared(self, node: ast.Compare, names: Mapping[str, Values]) -> Values:
        left, found = self._value(node.left, names), []
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            if isinstance(comparator, ast.Tuple | ast.List):
                same = [_comparison(operator.eq, left, self._value(item, names)) for item in comparator.elts]
                among = np.logical_or.reduce(np.broadcast_arrays(np.zeros(left.shape, bool), *same))
                found.append(among if isinstance(op, ast.In) else ~among)
            else:
                right = self._value(comparator, names)
                found.append(_comparison(_COMPARE[type(op)], left, right))
                left = right
        return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*found)))


def step_values(exp: Experience, names: Collection[str]) -> dict[str, Values]:
    """``[num_steps, ...]``: those of ``names`` that each step of ``exp`` has: its columns, and `STEP_FACTS`."""
    of_segment: dict[str, Values] = {name: getattr(exp.segments, name) for name in STEP_FACTS[1:4]}
    out: dict[str, Values] = {}
    for name in names:
        if name in exp.steps:
            out[name] = np.asarray(exp.steps[name])
        elif name == col.T_INDEX:
            out[name] = exp.t()
        elif name in of_segment:
            out[name] = of_segment[name].repeat(exp.lengths)
        elif name in STEP_FACTS:
            out[name] = exp.at_ends(getattr(exp.segments, name))
    return out


# -- values: arrays of bool, int64, float64, or object for text and for whole numbers that int64 may not hold ---------


def _loaded(values: Values) -> Values:
    """A column or constant as one of the kinds of values."""
    values = np.asarray(values)
    if values.dtype.kind == "f":
        return values.astype(np.float64, copy=False)
    if values.dtype.kind in "iu":
        return values.astype(np.int64, copy=False) if _largest(values) < _SAFE else values.astype(object)
    return values if values.dtype == np.bool_ else values.astype(object, copy=False)


def _largest(values: Values) -> float:
    """The largest absolute value of whole numbers; infinity where they are Python's."""
    if values.dtype == object:
        return float("inf")
    return max(abs(int(values.min())), abs(int(values.max()))) if values.size else 0


def _arithmetic(op: Callable[[Any, Any], Any], a: Values, b: Values) -> Values:
    """``op`` of numbers, as Python has it for each pair."""
    if "f" in (a.dtype.kind, b.dtype.kind):
        return np.asarray(op(_as_float(a), _as_float(b)))
    x, y = _largest(a), _largest(b)
    if op is operator.truediv:
        is_plain = max(x, y) <= _EXACT
    elif op in (operator.floordiv, operator.mod):
        is_plain = max(x, y) < _SAFE and bool((b != 0).all())
    else:
        is_plain = (x * y if op is operator.mul else x + y) < _SAFE
    if is_plain:
        return np.asarray(op(a, b))
    out = np.asarray(np.frompyfunc(lambda p, q: _of_pair(op, p, q), 2, 1)(a.astype(object), b.astype(object)), object)
    if op is operator.truediv:
        return out.astype(np.float64)
    return out.astype(np.int64) if all(type(one) is int and abs(one) < _SAFE for one in out.flat) else out


def _of_pair(op: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    try:
        return op(a, b)
    except ZeroDivisionError:
        return float(op(np.float64(a), np.float64(b)))


def _comparison(op: Callable[[Any, Any], Any], a: Values, b: Values) -> Values:
    """``op`` of two values, as Python has it for each pair.

    Raises:
        TypeError: text is compared with numbers.
    """
    if len({_is_text(side) for side in (a, b)} - {None}) > 1:
        raise TypeError("text is compared with numbers")
    if any(_is_text(side) is not False for side in (a, b)):
        return np.asarray(np.frompyfunc(_of_text(op), 2, 1)(a, b)).astype(bool)
    if "f" in (a.dtype.kind, b.dtype.kind) and any(v.dtype.kind != "f" and _largest(v) > _EXACT for v in (a, b)):
        a, b = a.astype(object), b.astype(object)
    return np.asarray(op(a, b)).astype(bool)


def _of_text(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``op`` for text that may be missing."""
    if op in (operator.eq, operator.ne):
        return op
    return lambda a, b: a is not None and b is not None and op(a, b)


def _is_comparison(op: ast.cmpop, comparator: ast.expr) -> bool:
    if isinstance(comparator, ast.Tuple | ast.List):
        return isinstance(op, ast.In | ast.NotIn) and all(map(_is_literal, comparator.elts))
    return type(op) in _COMPARE


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
        return isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return isinstance(node, ast.Constant) and type(node.value) in (bool, int, float, str)


def _truth(values: Values) -> NDArray[np.bool_]:
    if values.dtype != np.bool_:
        raise TypeError("`and`, `or` and `not` take comparisons, not numbers")
    return values


def _is_text(values: Values) -> bool | None:
    """Whether they are text, not numbers; None where all are missing, so that nothing says so."""
    if values.dtype != object:
        return False
    first = next((one for one in values.flat if one is not None), None)
    return None if first is None else isinstance(first, str)


def _number(values: Values) -> Values:
    """The same; truth as the whole numbers 0 and 1."""
    if _is_text(values) is not False:
        raise TypeError("text is no number to calculate with")
    return values.astype(np.int64) if values.dtype == np.bool_ else values


def _as_float(values: Values) -> NDArray[np.float64]:
    """Numbers as float64, each rounded to the nearest."""
    if _is_text(values) is not False:
        raise TypeError("text is no number to calculate with")
    return values.astype(np.float64, copy=False)


def _depth(root: ast.AST) -> int:
    """How deep an expression is nested; not by recursion, which may end too early."""
    deepest, waiting = 0, [(root, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [(child, depth + 1) for child in ast.iter_child_nodes(node)]
    return deepest


def _hint(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    return f"; nearest: `{near}`" if near else ""
