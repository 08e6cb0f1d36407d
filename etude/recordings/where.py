# SPDX-License-Identifier: Apache-2.0
"""The expression language for recordings: conditions on episodes (``where``) and on single steps (``filter``).

The text is parsed by Python's grammar and never run: every part of it becomes a function of whole columns. The result
is what Python gives for each row: ``/`` is true division, whole numbers never overflow or wrap, floats are float64, and
``a < b < c`` and ``x in (1, 2)`` work. There are two differences: a division by zero gives infinity or NaN, as in IEEE
754, and ``<`` with a missing text (None) is false.
"""

import ast
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import SettingsError
from etude.experience import Experience
from etude.recordings.pieces import cut_where, with_known_finals
from etude.settings import nearest

Values: TypeAlias = NDArray[Any]
"""Arrays of bool, float64, int64 up to `_EXACT`, or object: text (or None), and larger integers."""
Evaluate: TypeAlias = Callable[[Mapping[str, Values]], Values]
"""Evaluates an expression for each row of some columns."""

REDUCERS: Final = ("sum", "mean", "min", "max", "any", "all")
"""Functions that reduce the values of an episode's steps to one figure (statistic) of the episode."""
STEP_FACTS: Final = (col.T_INDEX, col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID, col.TERMINATED, col.TRUNCATED)
"""What each step has in addition to its columns."""
MAX_LENGTH: Final = 2_000
MAX_DEPTH: Final = 100
_EXACT: Final = 2**53
"""Integers up to this are exact in float64."""

_TOKENS: Final = re.compile(r"'[^']*'|\"[^\"]*\"|`([^`]+)`|\breturn\b")
_Op: TypeAlias = Callable[[Any, Any], Any]
_ARITHMETIC: Final[Mapping[type, _Op]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
_COMPARE: Final[Mapping[type, _Op]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne},
}


class Reduction(NamedTuple):
    """A figure of an episode that is computed from its steps, such as ``mean(reward)``."""

    how: str
    """One of `REDUCERS`."""
    of: Evaluate
    """The value of each step."""


class Expression:
    """An expression over episodes, or with ``of_steps`` over single steps.

    It consists of comparisons, ``in (1, 2)``, ``and``, ``or``, ``not``, ``+ - * / // %``, ``abs()``, numbers, strings
    and names. Over steps, names are columns (``reward``, ``obs[0]``, ```obs/speed```) and `STEP_FACTS`. Over episodes,
    names are figures of an episode; ``sum``, ``mean``, ``min``, ``max``, ``any`` and ``all`` of an expression over
    steps are figures too: ``mean(reward)``, ``any(obs[0] > 2)``.

    Args:
        text: The expression, at most 2,000 characters long and nested at most 100 levels deep.
        of_steps: Whether it is about single steps.

    Raises:
        SettingsError: the text is not such an expression.
    """

    def __init__(self, text: str, *, of_steps: bool = False) -> None:
        self.text, self._of_steps = text, of_steps
        self._written = {"_etude_return": "return"}  # names as written, by their replacements in Python's grammar
        self.reductions: dict[str, Reduction] = {}
        """The reductions, by their text."""
        self.names: set[str] = set()
        """The figures named outside of reductions."""
        self.columns: list[str] = []
        """The step columns that it uses."""
        if len(text) > MAX_LENGTH:
            raise self._error(f"has {len(text):,} letters, but may have {MAX_LENGTH:,}")
        try:
            self._root = ast.parse(_TOKENS.sub(self._token, text).strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
            raise self._error(f"can't be read ({reason})") from None
        level: list[ast.AST] = [self._root]
        for _ in range(MAX_DEPTH):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise self._error(f"is nested more than {MAX_DEPTH} deep")
        self._evaluate = self._compiled(self._root, of_steps)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the text, because compiled functions can't be pickled."""
        return type(self), (self.text,)

    def _token(self, match: re.Match[str]) -> str:
        if match[1] is None:
            return "_etude_return" if match[0] == "return" else match[0]
        name = f"_etude_column_{len(self._written)}"
        self._written[name] = match[1]
        return name

    def _name(self, node: ast.Name) -> str:
        return self._written.get(node.id, node.id)

    def _error(self, what: str) -> SettingsError:
        kind, advice = (
            ("filter", "a condition on single steps, such as `reward > 0 and t < 100`")
            if self._of_steps
            else ("expression", "comparisons of figures of an episode, such as `return > 100 and mean(reward) > 0.5`")
        )
        return SettingsError(
            f"the {kind} {self.text[:200]!r} can't be used (it {what}). Write {advice}; column names that are not "
            "plain words go between backticks."
        )

    def _compiled(self, node: ast.expr, of_steps: bool) -> Evaluate:
        """Compile ``node`` to a function; ``of_steps`` says whether names in it are columns.

        Raises:
            SettingsError: something is not allowed where it is.
        """
        match node:
            case ast.BoolOp():
                parts, is_and = [self._compiled(part, of_steps) for part in node.values], isinstance(node.op, ast.And)
                both = operator.and_ if is_and else operator.or_
                return lambda v: functools.reduce(both, (_truth(part(v)) for part in parts), np.array(is_and))
            case ast.UnaryOp(op=ast.Not()):
                inner = self._compiled(node.operand, of_steps)
                return lambda v: ~_truth(inner(v))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                sign = operator.neg if isinstance(node.op, ast.USub) else operator.pos
                return self._changed(sign, node.operand, of_steps)
            case ast.Call(func=ast.Name(id="abs"), args=[argument], keywords=[]):
                return self._changed(abs, argument, of_steps)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                left, right = (self._compiled(side, of_steps) for side in (node.left, node.right))
                return lambda v: _calculated(_ARITHMETIC[type(node.op)], _number(left(v)), _number(right(v)))
            case ast.Compare() if _is_comparison(node):
                return self._comparison(node, of_steps)
            case ast.Constant(value=bool() | int() | float() | str()):
                constant = _loaded(np.asarray(node.value, object if isinstance(node.value, str) else None))
                return lambda v: constant
            case ast.Name():
                name = self._name(node)
                self.columns.append(name) if of_steps else self.names.add(name)
                return lambda v: _loaded(v[name])
            case ast.Subscript(value=ast.Name() as vector, slice=ast.Constant(value=int() as index)) if of_steps:
                name = self._name(vector)
                self.columns.append(name)
                return lambda v: _loaded(v[name][:, index])
            case ast.Call(func=ast.Name(id=how), args=[argument], keywords=[]) if how in REDUCERS and not of_steps:
                text = ast.unparse(node)
                self.reductions[text] = Reduction(how, self._compiled(argument, True))
                return lambda v: _loaded(v[text])
        found = ast.unparse(node)
        for name in reversed(self._written):  # the longest numbers first
            found = found.replace(name, self._written[name])
        raise self._error(f"holds `{found[:60]}`, which is not allowed there")

    def _changed(self, op: Callable[[Any], Any], operand: ast.expr, of_steps: bool) -> Evaluate:
        inner = self._compiled(operand, of_steps)
        return lambda v: np.asarray(op(number := _number(inner(v))), number.dtype)

    def _comparison(self, node: ast.Compare, of_steps: bool) -> Evaluate:
        """Compile a chain of comparisons; each side is evaluated once."""
        *inner, last = node.comparators
        choices = last.elts if isinstance(last, ast.Tuple | ast.List) else None
        sides = [self._compiled(side, of_steps) for side in (node.left, *inner, *([last] if choices is None else []))]
        items = [self._compiled(item, of_steps) for item in choices or ()]
        ops = [_COMPARE[type(op)] for op in node.ops if type(op) in _COMPARE]

        def evaluate(v: Mapping[str, Values]) -> Values:
            values = [side(v) for side in sides]
            found = [_compared(op, a, b) for op, a, b in zip(ops, values, values[1:], strict=False)]
            if choices is not None:
                same = (_compared(operator.eq, values[-1], item(v)) for item in items)
                among = functools.reduce(operator.or_, same, np.array(False))
                found.append(among if isinstance(node.ops[-1], ast.In) else ~among)
            return functools.reduce(operator.and_, found)

        return evaluate

    def check_names(self, figures: Iterable[str], columns: Iterable[str]) -> None:
        """Raise a SettingsError if a name is neither in ``figures`` nor, over steps, in ``columns``."""
        figures, columns = list(figures), list(columns)
        facts = [fact for fact in STEP_FACTS if fact not in columns]
        for name in sorted(self.names - set(figures)):
            if name in columns or name in facts:
                raise self._error(
                    f"names `{name}`, which has a value for each step: reduce it, as in mean({name}) or "
                    f"any({name} == 1)"
                )
            raise self._error(f"names `{name}`. Figures are {', '.join(figures)}{_hint(name, figures)}")
        for name in self.columns:
            if name not in columns and name not in facts:
                raise self._error(
                    f"names the column `{name}`. There are {', '.join(columns)}{_hint(name, [*columns, *facts])}; "
                    f"each step also has {', '.join(facts)}"
                )

    def of_steps(self, reduction: str, columns: Mapping[str, Values]) -> Values:
        """Evaluate one of `reductions` for each row of ``columns`` (see `step_values`): float64 ``[rows]``.

        Raises:
            SettingsError: a column has several numbers per row, or no number with the index used.
        """
        of = self.reductions[reduction].of
        return self._evaluated(lambda v: _number(of(v)).astype(np.float64), columns)

    def __call__(self, values: Mapping[str, Values]) -> NDArray[np.bool_]:
        """Return a bool array ``[rows]``: where the condition holds.

        Args:
            values: Arrays ``[rows, ...]``: figures of episodes, including the reductions by their text; or, over steps,
                the result of `step_values`.

        Raises:
            SettingsError: its result is not bool, or values can't be compared.
        """
        found = self._evaluated(self._evaluate, values)
        if found.dtype != np.bool_:
            raise self._error("gives numbers, so it is not a condition: compare them with something")
        return np.array(found)

    def _evaluated(self, evaluate: Evaluate, values: Mapping[str, Values]) -> Values:
        """Evaluate for each row: ``[rows]``. Errors become a SettingsError."""
        with np.errstate(all="ignore"):
            try:
                found = np.asarray(evaluate(values))
            except (TypeError, ValueError, IndexError, OverflowError) as error:
                raise self._error(f"can't be evaluated: {error}") from error
        if found.ndim > 1:
            raise self._error(f"looks at {list(found.shape[1:])} values of each row: name one of them, as in obs[0]")
        return np.broadcast_to(found, (len(next(iter(values.values()), ())),))


class RowFilter(Expression):
    """A condition on single steps, such as ``reward > 0 and t < 100``.

    Raises:
        SettingsError: the text is not such a condition, or names no column.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, of_steps=True)
        if not self.columns:
            raise self._error("names no column")

    def columns_in(self, there: Collection[str]) -> tuple[str, ...]:
        """The step columns among ``there`` that it uses; other names are facts of the segments."""
        return tuple(name for name in sorted(set(self.columns)) if name in there)

    def holds(self, exp: Experience) -> NDArray[np.bool_]:
        """Return a bool array ``[num_steps]``: the steps for which it holds.

        Raises:
            SettingsError: it names what does not exist, or values can't be compared.
        """
        self.check_names((), exp.steps)
        return self(step_values(exp, self.columns))

    def chosen(self, exp: Experience, *, looks_ahead: bool = True) -> Experience:
        """Keep the steps for which it holds, in segments with final observations.

        Without ``looks_ahead``, a segment that ends where a step was removed has no final observation.
        """
        kept = self.holds(exp)
        if kept.all():
            return exp
        pieces, start, stop, _ = cut_where(exp, kept)
        if not looks_ahead:
            pieces = with_known_finals(pieces, pieces.segments.has_final_obs & np.isin(stop, exp.offsets))
        return pieces.select(kept[start])

    def episodes(self) -> pc.Expression | None:
        """Return a condition on ``episode_id`` that holds wherever this one does; Parquet can skip row groups by it.

        None if the filter is not limited to certain episodes.
        """
        conditions = [self._root]
        if isinstance(self._root, ast.BoolOp) and isinstance(self._root.op, ast.And):
            conditions = self._root.values
        for condition in conditions:
            match condition:
                case ast.Compare(left=ast.Name(id=col.EPISODE_ID), ops=[ast.Eq()], comparators=[value]):
                    ids = [_literal(value)]
                case ast.Compare(left=ast.Name(id=col.EPISODE_ID), ops=[ast.In()], comparators=[among]):
                    ids = list(map(_literal, among.elts))  # type: ignore[attr-defined]
                case _:
                    continue
            if all(isinstance(one, str) for one in ids):
                return pc.field(col.EPISODE_ID).isin(pa.array(ids, pa.string()))
        return None


def step_values(exp: Experience, names: Collection[str]) -> dict[str, Values]:
    """Return ``[num_steps, ...]`` for those of ``names`` that ``exp`` has, among its columns and `STEP_FACTS`."""
    out: dict[str, Values] = {}
    for name in names:
        if name in exp.steps:
            out[name] = np.asarray(exp.steps[name])
        elif name == col.T_INDEX:
            out[name] = exp.t()
        elif name in (col.TERMINATED, col.TRUNCATED):
            out[name] = exp.at_ends(getattr(exp.segments, name))
        elif name in STEP_FACTS:
            out[name] = getattr(exp.segments, name).repeat(exp.lengths)
    return out


# -- grammar ------------------------------------------------------------------------------------------------------


def _is_comparison(node: ast.Compare) -> bool:
    """Whether it is in the language: ``in`` only at the end, and followed by numbers or strings."""
    *first, last = node.ops
    values = node.comparators[-1]
    if isinstance(last, ast.In | ast.NotIn):
        is_known = isinstance(values, ast.Tuple | ast.List) and None not in map(_literal, values.elts)
    else:
        is_known = type(last) in _COMPARE
    return is_known and all(type(op) in _COMPARE for op in first)


def _literal(node: ast.expr) -> bool | int | float | str | None:
    """The value of a number (possibly negative), a string, or True or False; None for anything else."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    return None


def _hint(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    return f"; nearest: `{near}`" if near else ""


# -- values -------------------------------------------------------------------------------------------------------


def _loaded(values: Values) -> Values:
    """Convert a column or constant to one of the kinds of `Values`."""
    values = np.asarray(values)
    if values.dtype.kind == "f":
        return values.astype(np.float64, copy=False)
    if values.dtype.kind in "iu" and values.min(initial=0) >= -_EXACT and values.max(initial=0) <= _EXACT:
        return values.astype(np.int64, copy=False)
    return values if values.dtype == np.bool_ else values.astype(object, copy=False)


def _truth(values: Values) -> Values:
    if values.dtype != np.bool_:
        raise TypeError("`and`, `or` and `not` take comparisons, not numbers")
    return values


def _number(values: Values) -> Values:
    """Check that values are numbers; True and False become the integers 1 and 0."""
    if _is_text(values) is not False:
        raise TypeError("text is not a number")
    return values.astype(np.int64) if values.dtype == np.bool_ else values


def _is_text(values: Values) -> bool | None:
    """Whether values are text rather than numbers; None if all are missing, so that it is unknown."""
    if values.dtype != object:
        return False
    first = next((one for one in values.flat if one is not None), None)
    return None if first is None else isinstance(first, str)


def _calculated(op: _Op, a: Values, b: Values) -> Values:
    """Apply ``op`` to numbers with Python's semantics."""
    if object not in (a.dtype, b.dtype):
        if op is operator.truediv or "f" in (a.dtype.kind, b.dtype.kind):
            return np.asarray(op(a, b))
        divides = op in (operator.floordiv, operator.mod)
        if np.all(b != 0 if divides else np.abs(op(a.astype(np.float64), b)) < _EXACT):
            return np.asarray(op(a, b))
    return _by_pairs(op, a, b)


def _compared(op: _Op, a: Values, b: Values) -> Values:
    """Apply the comparison ``op`` to values with Python's semantics.

    Raises:
        TypeError: text is compared with numbers.
    """
    if object not in (a.dtype, b.dtype):
        return np.asarray(op(a, b))
    if {_is_text(a), _is_text(b)} >= {True, False}:
        raise TypeError("text is compared with numbers; choices with names are numbers here, in the order of names")
    return _by_pairs(op, a, b).astype(bool)


def _by_pairs(op: _Op, a: Values, b: Values) -> Values:
    """Python's result for each pair; infinity or NaN for division by zero; order comparisons with None are False."""

    def of_pair(x: Any, y: Any) -> Any:
        try:
            return op(x, y) if x is not None and y is not None else False
        except ZeroDivisionError:
            return float(op(np.float64(x), np.float64(y)))

    function = op if op in (operator.eq, operator.ne) else of_pair
    return np.asarray(np.frompyfunc(function, 2, 1)(a.astype(object), b.astype(object)), object)
