# SPDX-License-Identifier: Apache-2.0
import argparse
import copy
import dataclasses
import enum
import functools
import io
import logging
import operator
import re
import string
import sys
import tempfile
import types
import weakref
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import PIL.Image
import PIL.ImageDraw
import pygame
import pytest
import some_envs
from gymnasium.vector import AutoresetMode
from some_envs import Growing, Juggler, LendingVectorEnv, Numbered, Simulated, Stateful, numbered

from etude.checkpoints import load_tree, save_tree
from etude.envs import Arena, VectorArena, env_classes, make_arena
from etude.envs.arena import Turn
from etude.envs.env_classes import checksums_of
from etude.envs.env_state import CannotRestoreError, capture_env, restore_env


def play(arena: Arena, steps: int, seed: int) -> list[Turn]:
    space = gym.vector.utils.batch_space(arena.kinds[0].action_space, arena.num_slots)
    space.seed(seed)
    turns = []
    for _ in range(steps):
        arena.send(arena.recv()[-1], {"action": space.sample()})
        turns += arena.recv()
    return turns


def assert_same(turns: list[Turn], others: list[Turn]) -> None:
    for turn, other in zip(turns, others, strict=True):
        assert turn.obs.keys() == other.obs.keys()
        for name in turn.obs:
            np.testing.assert_array_equal(turn.obs[name], other.obs[name])
        assert turn.waits == other.waits
        for name in ("slots", "reward", "terminated", "truncated", "first"):
            np.testing.assert_array_equal(getattr(turn, name), getattr(other, name))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save_tree(Path(folder), state)
        return load_tree(Path(folder))[0]


MAKERS = {
    "CartPole": lambda: VectorArena("CartPole-v1", 3),
    "CartPole in turn, TimeLimit": lambda: make_arena(lambda: gym.make("CartPole-v1", max_episode_steps=12), 3),
    "wrapped": lambda: make_arena(
        lambda: gym.wrappers.RecordEpisodeStatistics(gym.wrappers.TimeAwareObservation(gym.make("CartPole-v1"))), 2
    ),
    "Pendulum": lambda: make_arena("Pendulum-v1", 2),
    "Acrobot": lambda: make_arena("Acrobot-v1", 2),
    "Taxi": lambda: make_arena("Taxi-v4", 2),
    "FrozenLake": lambda: make_arena("FrozenLake-v1", 2),
    "CliffWalking": lambda: make_arena("CliffWalking-v1", 2),
    "Blackjack": lambda: make_arena("Blackjack-v1", 2),
    "same step": lambda: VectorArena(numbered(3, AutoresetMode.SAME_STEP), 3),
    "disabled": lambda: VectorArena(numbered(3, AutoresetMode.DISABLED), 3),
    "lending": lambda: VectorArena(LendingVectorEnv(3, AutoresetMode.SAME_STEP), 3),
    "juggler": lambda: make_arena(Juggler, 2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_fresh_arena_goes_on_bit_for_bit(name: str) -> None:
    make = MAKERS[name]
    arena = make()
    arena.reset(seed=5)
    play(arena, 17, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 60, seed=1)
    other = make()
    assert other.load_state_dict(state) == "snapshot"
    assert_same(expected, play(other, 60, seed=1))


def test_an_arena_that_has_played_goes_back() -> None:
    arena = make_arena("FrozenLake-v1", 2)
    arena.reset(seed=5)
    play(arena, 5, seed=0)
    state = arena.state_dict()
    expected = play(arena, 30, seed=1)
    arena.load_state_dict(state)
    assert_same(expected, play(arena, 30, seed=1))


def test_an_envs_own_state_is_used_and_its_random_stream_goes_on() -> None:
    arena = make_arena(Stateful, 2)
    arena.reset(seed=5)
    play(arena, 5, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 30, seed=1)
    other = make_arena(Stateful, 2)
    assert other.load_state_dict(state) == "get_state"
    assert_same(expected, play(other, 30, seed=1))


def test_what_is_no_plain_data_is_named() -> None:
    arena = make_arena(Simulated, 1)
    arena.reset(seed=5)
    state = through_a_file(arena.state_dict())
    assert state["how"] == "new episodes"
    how = make_arena(Simulated, 1).load_state_dict(state)
    assert how.startswith("new episodes: list[0].env.simulator is a builtins:range_iterator")


def goes_on(make: Any, how: str = "snapshot") -> None:
    arena = make_arena(make, 2)
    arena.reset(seed=5)
    play(arena, 7, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 40, seed=1)
    other = make_arena(make, 2)
    assert other.load_state_dict(state) == how
    assert_same(expected, play(other, 40, seed=1))


def test_objects_that_come_during_an_episode_are_made_again() -> None:
    """As in MiniGrid, where another layout has other things in other places."""
    goes_on(Growing)


class Keeping(Numbered):
    """Keeps what `kept` gives in each step, but not at first."""

    kept: ClassVar[Any] = argparse.Namespace

    def step(self, action: Any) -> Any:
        self.things = [*getattr(self, "things", []), type(self).kept()]
        return super().step(action)


def test_objects_of_classes_from_elsewhere_are_not_made_up() -> None:
    arena = make_arena(Keeping, 1)
    arena.reset()
    play(arena, 2, seed=0)
    how = make_arena(Keeping, 1).load_state_dict(arena.state_dict())
    assert "things[0] was a argparse:Namespace, but a new env has none" in how


class Trail(Numbered):
    """Its steps are in a list of the class, which `self.trail` reads and changes."""

    trail: ClassVar[list[int]] = []
    names: ClassVar[dict[str, Any]] = {"up": 0, "down": [1, np.arange(3)]}

    def step(self, action: Any) -> Any:
        self.trail.append(1)
        obs, _, *rest = super().step(action)
        return obs, float(len(self.trail)), *rest


def test_checksums_of_what_a_class_holds() -> None:
    class One:
        table: ClassVar[dict[str, Any]] = {"a": {1, 2}, "b": [np.arange(3), (1.5, None)]}
        tile_cache: ClassVar[dict[str, int]] = {"a": 1}
        functions: ClassVar[list[Any]] = [len]

    class Two(One):
        table: ClassVar[dict[str, Any]] = {"b": [np.arange(3), (1.5, None)], "a": {2, 1}}

    first, second = checksums_of(One), checksums_of(Two)
    assert set(first) == set(second) == {"table"}
    assert first == second
    One.table["b"][0][1] = 7
    assert checksums_of(One) != first
    deep: Any = [0]
    for _ in range(60):
        deep = [deep, deep]
    One.functions = deep
    with pytest.raises(ValueError, match="too large to compare"):
        checksums_of(One)


def test_many_numbers_in_a_class_are_compared_as_one() -> None:
    class Market:
        prices: ClassVar[list[float]] = [k / 7 for k in range(300_000)]
        steps: ClassVar[list[Any]] = [(k, -k) for k in range(100_000)]

    before = checksums_of(Market)
    assert set(before) == {"prices", "steps"}
    assert checksums_of(Market) == before
    Market.prices[70] = 10  # was 10.0
    Market.steps[9] = (9, 0)
    assert all(before[name] != now for name, now in checksums_of(Market).items())


def test_what_python_writes_into_a_class_is_not_compared() -> None:
    env, other = Later(int), Later(int)
    env.thing = copy.deepcopy(Mood("calm"))
    assert "__slotnames__" in vars(Mood)
    state = capture_env(env)
    del Mood.__slotnames__  # type: ignore[attr-defined]
    restore_env(other, state)
    assert vars(other.thing) == vars(Mood("calm"))


def test_what_changes_in_a_class_is_named() -> None:
    arena = make_arena(Trail, 1)
    arena.reset()
    play(arena, 3, seed=0)
    state = through_a_file(arena.state_dict())
    Trail.trail.append(1)  # as in another process, where it is empty
    how = make_arena(Trail, 1).load_state_dict(state)
    assert how.startswith("new episodes: list[0].env has `trail` from its class, test_snapshot:Trail, where it")


class Ways(enum.Flag):
    NORTH = 1
    EAST = 2
    SOUTH = 4


BITS, FILE = np.random.PCG64(1), io.BytesIO()
PIL.Image.new("L", (2, 2)).save(FILE, "png")


class Oddments(Numbered):
    """Holds plain data of all other kinds, and shows a checksum of it as the reward."""

    def __init__(self) -> None:
        super().__init__()
        self.things: dict[Any, Any] = {("sapling", (1, 2)): [2], "kind": np.dtype(np.float32)}
        self.seen: Counter[int] = Counter()
        self.rows, self.part = range(3), slice(None, 2)
        self.levels = [Path("levels/0")]
        self.ways = Ways.NORTH | Ways.EAST
        self.box, self.speed, self.drawn = pygame.Rect(0, 0, 5, 5), None, pygame.Surface((2, 2))
        self.canvas, self.cells = PIL.Image.new("L", (3, 3)), frozenset((i, j) for i in range(9) for j in range(9))
        self.inside, self.end = Holding(), weakref.finalize(self, len, ())
        self.inside.parent = weakref.ref(self)

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        self.things["sapling", (1, 2)].append(len(self.seen) % 7)
        self.seen.update([int(action), 3])
        self.levels.append(self.levels[-1].with_name(str(len(self.seen))))
        self.things["kind"] = np.dtype(np.int16 if self.seen[3] % 2 else np.float64)
        self.rows, self.part = range(self.rows.stop, self.rows.stop + 2, 2), slice(1, self.rows.stop)
        self.ways ^= Ways.SOUTH
        self.box.x, self.speed = self.box.x + 2, pygame.Vector2(self.box.x, 0.5)
        drawn = self.np_random.spawn(1)[0].random()
        self.canvas.putpixel((self.t % 3, 1), int(9 * drawn))
        canvas, cells = self.canvas.tobytes(), list(self.cells)
        assert self.inside.parent() is self
        shown = (self.things, self.seen, self.rows, self.part, self.levels, self.ways, self.box, self.speed, drawn)
        shown = (*shown, canvas, cells)
        return obs, float(zlib.crc32(repr(shown).encode())), *rest


def test_plain_data_of_all_kinds_is_kept() -> None:
    goes_on(Oddments)
    assert repr(Ways.NORTH | Ways.EAST) == "<Ways.NORTH|EAST: 3>"  # as in the whole program


class Later(Numbered):
    """Has something in an attribute that is made again in each step, by the number of the step."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made, self.thing, self.free = made, made(0), {(i, j) for i in range(9) for j in range(9)}

    def step(self, action: Any) -> Any:
        self.thing = self.made(self.t + 1)
        return super().step(action)


class Pieces(Later):
    """A game whose pieces, of which one falls, may be in its class."""

    PIECES: ClassVar[Any] = ()


class Mixed:
    """Has a slot and attributes; it is no larger than an object that has attributes and weak references."""

    __slots__ = ("__dict__", "held")


class Slotted:
    __slots__ = ("t",)

    def __call__(self) -> int:
        return int(self.t)


def slotted(t: int) -> Any:
    one = Slotted()
    one.t = t
    return one


def kind_of(t: int) -> Any:
    class Red:
        pass

    class Blue:
        pass

    return Blue if t else Red


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda t: weakref.ref(Ways, print), "thing is a weakref:ReferenceType"),
        (slotted, "thing is a test_snapshot:Slotted"),
        (lambda t: Mixed(), "thing is a test_snapshot:Mixed, not plain data"),
        (lambda t: PIL.Image.new("P", (2, 2)), "thing._im is a builtins:ImagingCore, not plain data"),
        (kind_of, "thing was test_snapshot:kind_of.<locals>.Blue, but is something else"),
        (operator.itemgetter, "thing was operator.itemgetter(3), but is something else"),
        (lambda t: np.cos if t else np.sin, "thing was numpy:cos, but is something else"),
        (
            lambda t: PIL.ImageDraw.Draw(PIL.Image.new("L", (2, 2))),
            "thing.im is a builtins:ImagingCore, not plain data",
        ),
        (lambda t: PIL.Image.open(FILE), "thing.fp is a _io:BytesIO, not plain data"),
        (lambda t: pygame.mask.Mask((2, 2)), "thing is a pygame.mask:Mask, not plain data"),
        (lambda t: np.random.Generator(BITS), "held has the bit generator of another generator"),
    ],
)
def test_what_can_not_be_kept_is_told(made: Any, why: str) -> None:
    env, other = Later(made), Later(made)
    for one in (env, other):
        one.reset(seed=1)
        one.held = np.random.Generator(BITS)  # type: ignore[attr-defined]
    for _ in range(3):
        env.step(0)
    state = capture_env(env)
    if state["how"] == "new episodes":
        assert why in state["why"]
        return
    with pytest.raises(CannotRestoreError, match=re.escape(why)):
        restore_env(other, state)


def kept_in(where: str, pieces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program hold these pieces somewhere."""
    if where in ("nested", "imported"):
        home = sys.modules[__name__] if where == "nested" else some_envs
        monkeypatch.setattr(home, "GAMES", {"none": Absent(), "all": [Absent(), {"pieces": pieces}]}, raising=False)
        return
    cache = functools.lru_cache(5 if where == "cache with a limit" else None)(lambda k: pieces[k])
    homes = {
        "class": [*pieces],
        "set": {*pieces},
        "closure": property(lambda self: pieces),
        "default": lambda self, known=pieces: known,
        "keyword": lambda self, *, known=pieces: known,
    }
    monkeypatch.setattr(Pieces, "PIECES", homes.get(where, cache))
    cache(0), cache(1)


class Absent:
    """A stand-in for what is not there."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(name)


FUNCTIONS = ["closure", "default", "keyword", "cache", "cache with a limit"]


@pytest.mark.parametrize("where", ["class", "nested", "imported", *FUNCTIONS])
def test_an_env_has_the_same_one_again_of_what_all_envs_share(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Holding(name="I", at=[0]), Holding(name="O", at=[0])
    kept_in(where, pieces, monkeypatch)
    env, other = Pieces(int), Pieces(int)
    env.thing, other.thing = pieces[1], pieces[0]
    restore_env(other, capture_env(env))
    assert other.thing is pieces[1]
    state = capture_env(env)
    pieces[1].at[0] = 7
    with pytest.raises(CannotRestoreError, match="which all envs share: it has changed, or is not there"):
        restore_env(other, state)
    assert [vars(piece) for piece in pieces] == [{"name": "I", "at": [0]}, {"name": "O", "at": [7]}]


def test_what_all_envs_share_but_has_no_fixed_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Holding(name="I"), Holding(name="O")
    kept_in("set", pieces, monkeypatch)
    env, other = Pieces(int), Pieces(int)
    env.thing, other.thing = pieces
    with pytest.raises(CannotRestoreError, match="thing was something, which all envs share"):
        restore_env(other, capture_env(env))
    assert [vars(piece) for piece in pieces] == [{"name": "I"}, {"name": "O"}]


@pytest.mark.parametrize("limit", [None, 5])
def test_plain_data_that_a_cache_keeps_is_an_envs_own(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    features = functools.lru_cache(limit)(lambda k: {"all": [np.array([k, k * k])]})
    monkeypatch.setattr(Pieces, "PIECES", features)
    env, other = Pieces(int), Pieces(int)
    env.thing = features(3)
    state = capture_env(env)
    features.cache_clear()  # as in another process
    restore_env(other, state)
    np.testing.assert_array_equal(other.thing["all"], [[3, 9]])
    assert other.thing["all"][0] is not features(3)["all"][0]


def test_an_object_that_a_cache_keeps_for_ever_stays_the_same() -> None:
    env, other = Later(int), Later(int)
    env.thing = mood_of("sad")
    state = capture_env(env)
    restore_env(other, state)
    assert other.thing is mood_of("sad")
    mood_of.cache_clear()
    with pytest.raises(CannotRestoreError, match="thing was test_snapshot.*mood_of.*'sad'.*, which all envs share"):
        restore_env(other, state)


def function_of(home: types.ModuleType, part: str, held: Any) -> Any:
    """A function in a variable of a module which holds something in a part of its own."""
    code = (lambda: held).__code__
    cell = types.CellType(held if part == "__closure__" else 0)
    function = types.FunctionType(code, vars(home), "COUNT", (held,) if part == "__defaults__" else None, (cell,))
    if part in ("__kwdefaults__", "__dict__"):
        setattr(function, part, {"held": held})
    function.__module__ = home.__name__
    return function


PARTS = ["__closure__", "__defaults__", "__kwdefaults__", "__dict__"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [__name__, "a_package"])
def test_what_a_function_of_the_program_holds_is_compared(
    name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, counts = sys.modules.get(name) or types.ModuleType(name), [0]
    count = function_of(home, part, counts)
    monkeypatch.setitem(sys.modules, name, home)
    monkeypatch.setattr(home, "COUNT", count, raising=False)
    env, other = Later(lambda t: count), Later(lambda t: count)
    state = capture_env(env)
    restore_env(other, state)
    assert other.thing is count
    counts[0] = 1
    with pytest.raises(CannotRestoreError, match="was (test_snapshot|a_package).*, which all envs share: it has"):
        restore_env(other, state)
    assert counts == [1]


@pytest.mark.parametrize("part", PARTS)
def test_a_function_of_the_program_that_holds_what_never_changes_is_known_by_its_name(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = sys.modules[__name__]
    for held in (3, (1, "a"), kept_in, Path("a"), Ways.NORTH, object(), Later, re, function_of(home, part, len)):
        count = function_of(home, part, held)
        if part == "__closure__" and held == 3:
            count.__closure__[0].cell_contents = count
        monkeypatch.setattr(home, "COUNT", count, raising=False)
        assert "static" in capture_env(Later(lambda t, count=count: count))["env"]["object"]["thing"]


def test_big_tables_of_the_program_are_passed_over_where_the_env_has_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[Any] = [[k] for k in range(5_000)]
    rows[9].append(rows)
    tables: dict[str, Any] = {"rows": rows, "sets": [{k} for k in range(9)]}
    tables |= {"deep": [{"at": [k, [k]], "name": str(k)} for k in range(5_000)]}
    monkeypatch.setattr(some_envs, "GAMES", tables, raising=False)
    monkeypatch.setattr(env_classes, "_MOST_VALUES", 5_000)
    assert capture_env(Later(int))["how"] == "snapshot"
    monkeypatch.setattr(env_classes, "_MOST_VALUES", 200_000)
    deep = tables["deep"]
    env, other = Later(int), Later(int)
    for thing in (tables["sets"], tables["sets"][1], rows[5], deep[7], deep[7]["at"], deep[7]["at"][1]):
        env.thing, other.thing = thing, None
        restore_env(other, capture_env(env))
        assert other.thing is thing
    env.thing, other.thing = rows[5].append, [0].append
    restore_env(other, capture_env(env))
    assert other.thing.__self__ is rows[5]
    env.thing, other.thing = weakref.ref(tables["sets"][5]), None
    restore_env(other, capture_env(env))
    assert other.thing() is tables["sets"][5]
    env.thing = deep[7]["at"]
    state = capture_env(env)
    deep[7]["at"][1].append(1)
    with pytest.raises(CannotRestoreError, match="which all envs share: it has changed, or is not there"):
        restore_env(Later(int), state)


def test_more_variables_than_can_be_looked_at_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(some_envs, "GAMES", [Holding(at=k) for k in range(300)], raising=False)
    monkeypatch.setattr(env_classes, "_MOST_VALUES", 200)
    assert "Pieces can't be captured (ValueError: its file" in capture_env(Pieces(int))["why"]


class Sizes:
    size = 5


@dataclasses.dataclass
class Point:
    x: int


@dataclasses.dataclass
class Start:
    at: Point


SIZES, RNG, START = Sizes(), np.random.default_rng(1), Start(Point(1))


class Configured(Numbered):
    """Holds what the program has: neither of these changes, and the generator may not."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.start, self.trail = SIZES, START, list[Any]()
        self.table, self.inner = TABLE, TABLE[1:]

    def step(self, action: Any) -> Any:
        self.trail.append(Point(len(self.trail)))
        return super().step(action)


TABLE = np.arange(9)
TABLES: dict[str, Any] = {"easy": np.zeros(3), "hard": np.zeros(3), "list": [[1], [1]]}
DEMO = Configured()  # an env whose objects are its own, though a variable refers to it


def test_an_env_may_hold_what_the_program_has_and_does_not_change() -> None:
    goes_on(Configured)
    env, other = Configured(), Configured()
    env.step(0)
    state = capture_env(env)
    restore_env(other, state)
    assert (other.sizes, other.start) == (SIZES, START)
    assert other.table is TABLE
    assert np.shares_memory(other.inner, TABLE)
    assert (other.inner.shape, other.inner[0]) == ((8,), 1)
    for name in ("table", "inner"):
        TABLE[3] = 7
        with pytest.raises(CannotRestoreError, match="which all envs share: it has changed, or is not there"):
            restore_env(other, state)
        TABLE[3] = 3
        delattr(env, name)
        state = capture_env(env)


def test_what_was_a_constant_of_the_program_at_first_may_become_another_or_the_envs_own() -> None:
    for later, is_own in ((TABLES["hard"], False), (TABLES["list"][1], False), (np.ones(3), True), ([[2]], True)):
        env, other = (Later(lambda t, later=later: later if t else TABLES["easy"]) for _ in range(2))
        env.step(0)
        restore_env(other, capture_env(env))
        assert (other.thing is later) != is_own
        np.testing.assert_array_equal(other.thing, later)
        np.testing.assert_array_equal(TABLES["easy"], np.zeros(3))


SPRITES = [PIL.Image.new("L", (2, 2), color) for color in (10, 20)]


def test_images_that_all_envs_share_are_not_drawn_on() -> None:
    env, other = Later(lambda t: SPRITES[min(t, 1)]), Later(lambda t: SPRITES[min(t, 1)])
    env.step(0)
    restore_env(other, capture_env(env))
    assert other.thing is SPRITES[1]
    env.thing = PIL.Image.new("L", (2, 2), 30)
    restore_env(other, capture_env(env))
    assert other.thing.getpixel((0, 0)) == 30
    assert [sprite.getpixel((0, 0)) for sprite in SPRITES] == [10, 20]


def test_two_images_that_were_equal_stay_two() -> None:
    env, other = Later(int), Later(int)
    env.canvas, env.thing = (PIL.Image.new("L", (2, 2)) for _ in range(2))  # type: ignore[attr-defined]
    other.canvas = other.thing = PIL.Image.new("L", (2, 2))  # type: ignore[attr-defined]
    env.thing.info["score"] = 3
    restore_env(other, capture_env(env))
    assert other.canvas is not other.thing  # type: ignore[attr-defined]
    assert other.thing.info == {"score": 3}


def test_a_weak_reference_to_what_is_gone_stays_dead() -> None:
    env, other = Later(int), Later(int)
    env.thing, other.thing = weakref.ref(Holding()), weakref.ref(other)
    restore_env(other, capture_env(env))
    assert other.thing() is None


def test_one_image_of_a_new_env_may_have_been_two() -> None:
    env, other = Later(int), Later(int)
    for one in (env, other):
        one.canvas = one.thing = PIL.Image.new("L", (2, 2))  # type: ignore[attr-defined]
    env.thing = PIL.Image.new("L", (2, 2), 9)
    for color in (0, 5):
        env.canvas.putpixel((0, 0), color)  # type: ignore[attr-defined]
        restore_env(other, capture_env(env))
        assert [other.thing.getpixel((0, 0)), other.canvas.getpixel((0, 0))] == [9, color]  # type: ignore[attr-defined]
        other.canvas = other.thing = PIL.Image.new("L", (2, 2))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("made", "name", "value"),
    [
        (lambda: np.random.RandomState(1), "pos", 10**6),
        (lambda: np.random.RandomState(1), "pos", -1),
        (lambda: np.random.Generator(np.random.MT19937(1)), "pos", 625),
        (lambda: np.random.Generator(np.random.Philox(1)), "buffer_pos", 5),
        (lambda: np.random.Generator(np.random.PCG64(1)), "pool_size", 10**9),
    ],
)
def test_a_random_generator_never_reads_outside_of_its_memory(made: Any, name: str, value: int) -> None:
    """NumPy itself takes such a state, and may then end the process."""
    env, other = Later(lambda t: made()), Later(lambda t: made())
    env.step(0)
    other.step(0)
    state = capture_env(env)

    def changed(node: Any) -> int:
        if isinstance(node, dict):
            own = name in node
            node |= {name: value} if own else {}
            return own + sum(map(changed, node.values()))
        return sum(map(changed, node)) if isinstance(node, list) else 0

    restore_env(other, state)
    assert changed(state) == 1
    with pytest.raises(CannotRestoreError, match="random generator"):
        restore_env(other, state)


def test_a_generator_that_all_envs_share_is_not_made_twice() -> None:
    env, other = Configured(), Configured()
    for one in (env, other):
        one.rng = RNG  # type: ignore[attr-defined]
    restore_env(other, capture_env(env))
    assert other.rng is RNG  # type: ignore[attr-defined]
    state = capture_env(env)
    RNG.random()
    with pytest.raises(CannotRestoreError, match="rng was test_snapshot..RNG.., which all envs share"):
        restore_env(other, state)


def test_sets_that_would_come_in_another_order_are_told() -> None:
    env, other = Later(int), Later(int)
    for k in range(60):
        env.free.discard(sorted(env.free)[k % len(env.free)])
    with pytest.raises(CannotRestoreError, match="free has its items in another order than they had"):
        restore_env(other, capture_env(env))


@dataclasses.dataclass
class Inside:
    count: int


WORLD, STEPS = argparse.Namespace(count=0), list[int]()


class Dataclassed(Numbered):
    """Its state is in variables of this file, and in an object of its own in `get_state`."""

    def step(self, action: Any) -> Any:
        WORLD.count += 1
        STEPS.append(int(action))
        obs, _, *rest = super().step(action)
        return obs, float(WORLD.count + sum(STEPS)), *rest

    def get_state(self) -> dict[str, Any]:
        return {"world": Inside(WORLD.count), "steps": STEPS, "t": self.t, "episode": self.episode}

    def set_state(self, state: dict[str, Any]) -> None:
        WORLD.count, self.t, self.episode = state["world"].count, state["t"], state["episode"]
        STEPS[:] = state["steps"]


def test_get_state_may_return_dataclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena(Dataclassed, 1)
    arena.reset(seed=5)
    play(arena, 7, seed=0)
    state = through_a_file(arena.state_dict())
    expected = play(arena, 40, seed=1)
    WORLD.count = 0
    STEPS.clear()
    other = make_arena(Dataclassed, 1)
    assert other.load_state_dict(state) == "get_state"
    assert_same(expected, play(other, 40, seed=1))


class Mood:
    def __init__(self, name: str) -> None:
        self.name, self.words = name, [name]


CALM, ANGRY = Mood("calm"), Mood("angry")
mood_of = functools.cache(Mood)


class Moody(Numbered):
    """Its mood is one of two objects of this file; other things come during an episode."""

    def __init__(self, later: Any = None) -> None:
        super().__init__()
        self.mood, self.later, self.thing = CALM, later, None

    def step(self, action: Any) -> Any:
        self.thing = self.later and self.later()
        return super().step(action)


class Holding:
    """A class of this file, so that new ones may be made."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Deleting:
    def __del__(self) -> None:
        DELETED.append(self)


DELETED: list[Any] = []


def two_of_one_name(number: int) -> type:
    class Twin:
        value = number

    return Twin


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Deleting, "thing was a test_snapshot:Deleting, of which no other can be made"),
        (lambda: gym.spaces.Box(0, 1), "thing was a gymnasium.spaces.box:Box, of which no other can be made"),
        (lambda: Holding(log=logging.getLogger("x")), "thing.log was no plain data, but is something else"),
    ],
)
def test_what_can_not_be_made_again_is_never_made_up(make: Any, why: str) -> None:
    arena = make_arena(lambda: Moody(make), 1)
    arena.reset()
    play(arena, 2, seed=0)
    how = make_arena(lambda: Moody(make), 1).load_state_dict(arena.state_dict())
    assert why in how


def test_objects_of_the_program_are_neither_copied_nor_changed() -> None:
    def angry() -> Moody:
        env = Moody()
        env.mood = ANGRY
        return env

    def restored(captured: Any) -> Any:
        env = Moody()
        env.reset()
        restore_env(env, capture_env(captured))
        return env

    calm = Moody()
    calm.reset()
    assert restored(calm).mood is CALM
    assert restored(angry()).mood is ANGRY
    calm.mood = Mood("sad")
    assert vars(restored(calm).mood) == vars(Mood("sad"))
    assert (CALM.name, CALM.words) == ("calm", ["calm"])


def test_which_of_two_classes_of_one_name_it_was_is_not_guessed() -> None:
    first, second = two_of_one_name(1), two_of_one_name(2)
    env, other = (Juggler() for _ in range(2))
    for one in (env, other):
        one.reset()
        one.kinds, one.cur = [first(), second()], None  # type: ignore[attr-defined]
    env.cur = second()  # type: ignore[attr-defined]
    with pytest.raises(CannotRestoreError, match="cur was a .*Twin, but a new env has none"):
        restore_env(other, capture_env(env))


def test_a_state_that_an_older_version_saved_is_told() -> None:
    state = capture_env(Numbered())
    del state["sums"]
    with pytest.raises(CannotRestoreError, match="an older version of Etude saved the state"):
        restore_env(Numbered(), state)


def test_the_state_of_another_env_is_refused() -> None:
    arena = make_arena("Acrobot-v1", 1)
    arena.reset()
    how = make_arena(Numbered, 1).load_state_dict(arena.state_dict())
    assert how.startswith("new episodes: ")
    assert "list[0].env was a gymnasium.wrappers.common:TimeLimit" in how


def nodes_in(state: Any) -> list[dict[str, Any]]:
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [state] * isinstance(state, dict) + [found for item in inner for found in nodes_in(item)]


class Tool:
    made = 0

    def __init__(self, *_: Any) -> None:
        Tool.made += 1


class Equipped(Numbered):
    def __init__(self) -> None:
        super().__init__()
        self.module = string
        self.marked = Tool()


def test_a_made_up_state_neither_changes_modules_nor_makes_objects() -> None:
    arena = make_arena(Equipped, 1)
    arena.reset()
    saved, names = arena.state_dict(), dict(vars(string))
    tool = f"{__name__}:Tool"
    for key, value, made_up in (
        ("static", "string", {"id": 901, "object": {"digits": {"value": "x"}}, "class": "builtins:module"}),
        ("class", tool, {"id": 902, "named": [{"value": "x"}], "class": tool}),
    ):
        state = through_a_file(saved)
        node = next(node for node in nodes_in(state) if node.get(key) == value)
        node.clear()
        node.update(made_up)
        other, made = make_arena(Equipped, 1), Tool.made
        assert other.load_state_dict(state).startswith("new episodes: ")
        assert Tool.made == made
        assert vars(string) == names


def test_state_hidden_in_c_is_not_passed_over() -> None:
    class Hidden(np.random.RandomState):
        """Has a __dict__, but what counts is elsewhere."""

    class Holder(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.thing = Hidden(3)

    arena = make_arena(Holder, 1)
    arena.reset()
    assert "Hidden" in arena.state_dict()["why"]


def test_many_references_to_one_thing_take_one_place() -> None:
    class Grid(Numbered):
        def __init__(self) -> None:
            super().__init__()
            cells: list[list[Any]] = [[]]
            for _ in range(60):  # without memory of what was met: 2 ** 60 paths
                cells.append([cells[-1], cells[-1]])
            self.cells = cells

    arena = make_arena(Grid, 1)
    arena.reset()
    state = through_a_file(arena.state_dict())
    other = make_arena(Grid, 1)
    assert other.load_state_dict(state) == "snapshot"
    cells = other.env_at(0).cells
    assert cells[5][0] is cells[5][1]
    assert cells[5][0] is cells[4]


def test_before_the_first_reset_there_is_nothing_to_keep() -> None:
    state = VectorArena("CartPole-v1").state_dict()
    assert VectorArena("CartPole-v1").load_state_dict(state) == "new episodes: the arena was not reset"


def test_how_arrays_lie_in_memory_is_kept() -> None:
    # products of matrices round differently by it, and a resumed run would drift from the uninterrupted one
    arena = VectorArena("CartPole-v1", 3)
    arena.reset(seed=1)
    play(arena, 2, seed=0)
    other = VectorArena("CartPole-v1", 3)
    other.load_state_dict(through_a_file(arena.state_dict()))
    now, then = (each.recv()[-1].obs["obs"] for each in (arena, other))
    assert now.flags.fnc
    assert then.flags.fnc
