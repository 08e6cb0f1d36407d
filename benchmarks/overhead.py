# SPDX-License-Identifier: Apache-2.0
"""What the runner itself costs for a vector step: beside an arena and a module that do nothing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from benchmarks.harness import ETUDE, Figure, Options, Reach, Row, Work, race
from etude import Runner
from etude.columns import Columns
from etude.envs import Kind, Turn
from etude.modules import Actor, Module, make_module

TURNS = 128
REACH = 20.0
WRITES = "7 columns written"


def rows(options: Options) -> Iterator[Row]:
    """Microseconds for each turn of 64 slots; one step in fifty ends an episode."""
    num_slots = 64
    rates = race({ETUDE: collecting(num_slots), WRITES: writing(num_slots)}, options)
    micros = {name: [1e6 / rate for rate in values] for name, values in rates.items()}
    yield Row(
        f"the runner's own cost for a vector step, {num_slots} slots",
        "us",
        [Figure(ETUDE, micros[ETUDE], "etude"), Figure(WRITES, micros[WRITES])],
        Reach(REACH),
        "with an arena and a module that do nothing; columns, episodes and segments included",
    )


class _Still:
    """An arena that always shows the same."""

    def __init__(self, num_slots: int) -> None:
        self.kinds = (Kind(Box(-1, 1, (4,), np.float32), Discrete(2), range(num_slots)),)
        self.num_slots = self.num_envs = num_slots
        self.device = None
        self.env_of = np.arange(num_slots)
        self.agents = [None] * num_slots
        obs, reward = {"obs": np.zeros((num_slots, 4), np.float32)}, np.ones(num_slots)
        draws = np.random.default_rng(0)
        ends = [draws.random(num_slots) < 0.02 for _ in range(TURNS)]
        firsts = [ends[i - 1] for i in range(TURNS)]
        none = np.zeros(num_slots, bool)
        self._turns = [
            [Turn(self.env_of, obs, reward, end, none, first)] for end, first in zip(ends, firsts, strict=True)
        ]
        self._begun = [Turn(self.env_of, obs, reward, None, None, np.ones(num_slots, bool))]
        self._next = self._begun
        self._i = 0

    def reset(self, seed: int | None = None) -> None:
        self._next = self._begun

    def recv(self) -> list[Turn]:
        return self._next

    def send(self, turn: Turn, action: Columns) -> None:
        self._i = (self._i + 1) % TURNS
        self._next = self._turns[self._i]

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class _Chosen:
    """An actor that always does the same."""

    def __init__(self, num_rows: int) -> None:
        self._action = {"action": np.zeros(num_rows, np.int64)}
        self._inputs = np.zeros((num_rows, 2), np.float32)

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        pass

    def step(self, obs: Columns, state: Any = None, *, ends: Any = None) -> tuple[Columns, Columns]:
        return self._action, {"dist_inputs": self._inputs}

    def logp(self, dist_inputs: Any, action: Columns) -> Any:
        return np.zeros(len(dist_inputs), np.float32)


def collecting(num_slots: int) -> Work:
    """Turns of a runner."""
    arena: Any = _Still(num_slots)
    module: Module = make_module(None, arena.kinds[0].obs_space, arena.kinds[0].action_space)
    actor: Actor = _Chosen(num_slots)
    module.actor = lambda *, explore: actor  # type: ignore[method-assign]
    runner = Runner(arena, module, seed=0)

    def work() -> int:
        before = runner.turns
        runner.collect(num_steps=num_slots * TURNS)
        return runner.turns - before

    return work


def writing(num_slots: int) -> Work:
    """Seven columns of as many bytes as the runner's, written row block by row block."""
    shapes: list[tuple[tuple[int, ...], type]] = [
        ((4,), np.float32),
        ((), np.int64),
        ((2,), np.float32),
        ((), np.float64),
        ((), bool),
        ((), bool),
        ((), np.int64),
    ]
    columns = [np.zeros((TURNS, num_slots, *shape), kind) for shape, kind in shapes]
    values = [column[0].copy() for column in columns]

    def work() -> int:
        for t in range(TURNS):
            for column, value in zip(columns, values, strict=True):
                column[t] = value
        return TURNS

    return work
