# SPDX-License-Identifier: Apache-2.0
"""Several workers or envs that fail together."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dying_envs import Breaks, Dies, FailsAfterAnEnd, TwoLives, made_in_the_first_worker_alone

from etude.envs import InlineArena, PoolArena, Workers
from etude.errors import EnvError


def test_a_worker_that_dies_while_another_still_makes_its_envs_is_named() -> None:
    with pytest.raises(EnvError, match="worker 1 exited with code 3 while it made its envs"):
        PoolArena(made_in_the_first_worker_alone, Workers(num_workers=2))


def test_an_arena_whose_workers_have_all_died_can_be_reset() -> None:
    arena = PoolArena(Dies, Workers(num_workers=2, restart_failed=False, min_batch=2, step_timeout=20.0))

    def play(seed: int) -> None:
        arena.reset(seed)  # may tell of a worker that died after what was told last
        (turn,) = arena.recv()
        arena.send(turn, {"action": np.zeros(2, np.int64)})
        arena.recv()

    try:
        for seed in range(4):
            with pytest.raises(EnvError, match=r"worker \d exited with code 7"):
                play(seed)
    finally:
        arena.close()


def test_all_envs_that_failed_together_are_made_again() -> None:
    arena = InlineArena(Breaks, 2, Workers(restart_failed=False))
    arena.reset(0)
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.zeros(2, np.int64)})
    with pytest.raises(EnvError, match="it breaks"):
        arena.recv()
    arena.reset(1)
    assert len(arena.recv()[0].slots) == 2


def test_the_main_file_of_a_package_may_define_envs(tmp_path: Path) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "envs.py").write_text("import gymnasium\ndef base():\n    return gymnasium.make('CartPole-v1')\n")
    (package / "__main__.py").write_text(
        "from etude.envs import PoolArena, Workers\n"
        "from .envs import base\n"
        "def make():\n    return base()\n"
        "if __name__ == '__main__':\n"
        "    arena = PoolArena(make, Workers(num_workers=1))\n"
        "    arena.reset(0)\n    print(len(arena.recv()[0].slots))\n    arena.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "some_package"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr


def rows_of(arena: Any, count: int) -> dict[tuple[int, str], list[tuple[float, float, bool]]]:
    """By episode and agent: (observation, reward, whether it terminated) of each row, of the first ``count`` turns."""
    arena.reset(0)
    found: dict[tuple[int, str], list[tuple[float, float, bool]]] = {}
    for _ in range(count):
        for turn in arena.recv():
            for i, slot in enumerate(turn.slots.tolist()):
                row = turn.obs["obs"][i, 0], turn.reward[i], turn.terminated is not None and bool(turn.terminated[i])
                found.setdefault((int(turn.episode[i]), arena.agents[slot]), []).append(row)
            if turn.waits:
                arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    arena.close()
    return found


def test_what_a_dead_worker_showed_last_is_not_shown_again(tmp_path: Path) -> None:
    make = functools.partial(TwoLives, tmp_path / "mark")
    found = rows_of(PoolArena(make, Workers(num_workers=1)), 8)
    assert found[0, "a"] == [(100.0, 0.0, False), (101.0, -5.0, True)]
    assert found[1, "b"] == [(200.0, 0.0, False), (201.0, 1.0, False), (202.0, 1.0, True)]
    assert found[1, "a"] == [(200.0, 0.0, False), *[(200.0 + t, 1.0, False) for t in (1, 2, 3)], (204.0, 1.0, True)]


@pytest.mark.parametrize("others", [False, True])
def test_an_end_is_kept_although_a_step_in_which_nobody_acts_fails(others: bool) -> None:
    make = functools.partial(FailsAfterAnEnd, others)
    found = rows_of(InlineArena(make, 1, Workers(max_failure_rate=1.0)), 6)
    for episode in range(2):
        assert found[episode, "a"] == [(0.0, 0.0, False), (1.0, 1.0, False), (2.0, 10.0, True)]
