# SPDX-License-Identifier: Apache-2.0
"""Break the package on purpose, one line at a time, and see that a test fails: `make mutations`.

Each mutation is a line that somebody could get wrong while moving code. It is made in a copy of the package, and the
tests that should notice are run against it. A mutation that no test notices survives: then a test is missing.
`test_mutations.py` sees that the lines of the table are still there.

    python tests/mutations.py [--only frozen_actor,lost_turn] [--jobs 2]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    name: str
    file: str
    """Below the package."""
    old: str
    """Must stand there exactly once."""
    new: str
    tests: str
    """Files and folders below tests/, one of whose tests must fail."""


RUNNER = "runners"
ACTING = "runners modules policies algorithms/test_ppo.py"
RESUME = "runners envs algorithms/test_saving.py"

MUTATIONS = (
    # what acts
    Mutation(
        "frozen_actor",
        "runners/rollout.py",
        "self.module.actor(explore=explore)",
        "__import__('copy').deepcopy(self.module).actor(explore=explore)",
        ACTING,
    ),
    Mutation(
        "greedy_explores",
        "runners/rollout.py",
        "self.module.actor(explore=explore)",
        "self.module.actor(explore=True)",
        ACTING,
    ),
    Mutation(
        "noise_of_the_step_before",
        "modules/acting.py",
        "start, stop = self._next, self._next + n",
        "start, stop = max(0, self._next - n), max(n, self._next)",
        ACTING,
    ),
    # what is kept of a turn
    Mutation(
        "lost_turn",
        "runners/runner.py",
        "for i, turn in enumerate(turns):\n            if turn.lost",
        "for i, turn in enumerate(turns[:1] if self.turns == 7 else turns):\n            if turn.lost",
        RUNNER,
    ),
    Mutation(
        "shifted_reward",
        "runners/rollout.py",
        "answers if name == col.REWARD else seen",
        "seen",
        RUNNER,
    ),
    Mutation(
        "live_buffer",
        "envs/vector.py",
        "turn = Turn(self._slots, columns, reward, None, None, infos=info)",
        "turn = Turn(self._slots, columns, reward, None, None, infos=info)\n"
        "        for name, column in self._turns[0].obs.items():\n"
        "            column.flags.writeable and np.copyto(column, turn.obs[name])",
        RUNNER,
    ),
    Mutation(
        "last_observation_of_the_next_episode",
        "runners/rollout.py",
        "rows.order[ends]",
        "rows.order[np.minimum(ends + 1, len(rows.order) - 1)]",
        RUNNER,
    ),
    Mutation(
        "ends_confused",
        "runners/rollout.py",
        "terminated=columns[col.TERMINATED][last]",
        "terminated=columns[col.TRUNCATED][last]",
        RUNNER,
    ),
    Mutation(
        "lookback_of_the_episode_before",
        "runners/rollout.py",
        "np.maximum(start, place - ",
        "np.maximum(np.searchsorted(slot, slot), place - ",
        "runners connectors",
    ),
    Mutation(
        "memory_goes_on_in_the_next_episode",
        "runners/rollout.py",
        "if turn.first is not None and turn.first.any():\n            for column",
        "if False:\n            for column",
        "runners modules algorithms/test_recurrent.py",
    ),
    Mutation(
        "late_results_are_given_twice",
        "runners/runner.py",
        "share.results = rows[limit.late(share.turn.slots[rows])]",
        "share.results = rows[limit.late(share.turn.slots[rows])][: 0 if len(rows) == 1 else None]",
        RUNNER,
    ),
    Mutation(
        "previous_action_outlives_its_episode",
        "runners/rollout.py",
        "                column[first] = 0\n        return self.connectors",
        "                column[first] += 0\n        return self.connectors",
        "runners connectors",
    ),
    # envs
    Mutation(
        "one_seed_for_all",
        "envs/copies.py",
        "self._of(env) for env in range",
        "self._of(0) for env in range",
        "envs runners",
    ),
    Mutation(
        "time_limit_terminates",
        "envs/worker.py",
        "cut = not terminated and t >= self._last_step",
        "cut = False; terminated = terminated or t >= self._last_step",
        "envs",
    ),
    Mutation(
        "time_limit_of_vector_envs_is_late",
        "envs/vector.py",
        "(self._t >= self._max_steps)",
        "(self._t > self._max_steps)",
        "envs",
    ),
    # resuming
    Mutation(
        "draws_are_not_resumed",
        "runners/runner.py",
        'self._rng.bit_generator.state = state["rng"]',
        "pass",
        RESUME,
    ),
    Mutation(
        "memory_is_not_resumed",
        "runners/rollout.py",
        "column[...] = state[name][key]",
        "column[...] = 0",
        RESUME,
    ),
    # what is learned from
    Mutation(
        "truncated_is_worth_nothing",
        "connectors/advantages.py",
        "bootstrap[known] = _final_values(module, exp, known, who)",
        "bootstrap[known] = 0",
        "connectors algorithms/test_ppo.py",
    ),
    Mutation(
        "advantages_of_lookback_count",
        "connectors/advantages.py",
        "trained = cast(advantage[exp.trained()], np.float64)",
        "trained = cast(advantage, np.float64)",
        "connectors",
    ),
    Mutation(
        "lookback_is_trained_on",
        "experience/experience.py",
        "rows = np.flatnonzero(self.trained())\n        rng",
        "rows = np.arange(self.num_steps)\n        rng",
        "experience learners",
    ),
    Mutation(
        "returns_flow_across_episodes",
        "experience/returns.py",
        "out[offsets[1:] - 1] = 0",
        "out[offsets[1:-1] - 1] = decay",
        "experience connectors",
    ),
)


@contextmanager
def mutated(mutation: Mutation) -> Iterator[Path]:
    """A folder with the package as the mutation leaves it."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "etude"
        shutil.copytree(HERE / "etude", package, ignore=shutil.ignore_patterns("__pycache__"))
        file = package / mutation.file
        text = file.read_text()
        file.write_text(text.replace(mutation.old, mutation.new))
        yield Path(folder)


def outcome(mutation: Mutation) -> tuple[bool, str]:
    """Whether a test noticed, and which, or what was said instead."""
    with mutated(mutation) as folder:
        tests = [str(HERE / "tests" / name) for name in mutation.tests.split()]
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "pytest",
                "-x",
                "-rfE",
                "-p",
                "no:cacheprovider",
                "-m",
                "not cluster and not learning and not slow",
                *tests,
            ],
            cwd=HERE,
            env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    said = failures[0].partition(" - ")[0] if failures else "\n".join(done.stdout.splitlines()[-3:])
    return done.returncode == 1 and bool(failures), said


def main() -> int:
    """Run all mutations; 1 where one survives."""
    parser = argparse.ArgumentParser(description="Break the package one line at a time, and see that a test fails.")
    parser.add_argument("--only", help="names of mutations, with commas between")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutations at a time")
    args = parser.parse_args()
    wanted = None if args.only is None else set(args.only.split(","))
    chosen = [mutation for mutation in MUTATIONS if wanted is None or mutation.name in wanted]
    survivors = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, (is_noticed, said) in zip(chosen, pool.map(outcome, chosen), strict=True):
            survivors += not is_noticed
            print(f"{'noticed by' if is_noticed else 'SURVIVES  '} {mutation.name:40} {said}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations were noticed.")
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
