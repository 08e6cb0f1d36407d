# SPDX-License-Identifier: Apache-2.0
"""What metrics cost: PPO iterations with all that is measured, logged and written, beside iterations without."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row
from etude import PPO, PPOConfig
from etude.experience import Experience
from etude.learners import ModuleLearner, Update
from etude.metrics import CSV, JSONLines, Metrics, TensorBoard
from etude.runners import Finished

OFF, REACH = "without", 1.02
VALUES = 1000
AT_ONCE = "one move a value"


def rows(options: Options) -> Iterator[Row]:
    """An iteration of PPO with metrics and without; logging a thousand tensors."""
    on, off = _on(options), _off()
    times = _in_turns({ETUDE: on, OFF: off}, 1 if options.quick else 4, options.rounds)
    yield Row(
        f"PPO iteration on {ENV} with metrics in three files, and without",
        "ms",
        [Figure(ETUDE, times[ETUDE], "etude"), Figure(OFF, times[OFF])],
        Reach(REACH, OFF),
        "episodes, phases, steps and parameters counted, KL and entropy measured; JSON lines, CSV and TensorBoard",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = list(torch.rand(VALUES, device=device))
    times = _in_turns({ETUDE: _logging(tensors), AT_ONCE: _floats(tensors)}, 20, options.rounds)
    yield Row(
        f"log and reduce {VALUES:,} tensors ({device})",
        "ms",
        [Figure(ETUDE, times[ETUDE], "etude"), Figure(AT_ONCE, times[AT_ONCE])],
    )


class _Silent(PPO):
    """Measures nothing and says nothing."""

    name = "silent"

    def timed(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext()

    def take_finished(self, finished: Finished) -> None:
        pass

    def update(self, learner: ModuleLearner, exp: Experience) -> Update:
        return self.go_over(learner, exp)  # and not how far the policy has moved

    def _result(self, update: Update, before: Any = None) -> Any:
        return None


def _on(options: Options) -> Callable[[], Any]:
    algorithm = PPO(PPOConfig(env=ENV, seed=0))
    lines, table = JSONLines(options.folder / "metrics.jsonl"), CSV(options.folder / "metrics.csv")
    board = TensorBoard(options.folder / "tensorboard")

    def work() -> None:
        row = algorithm.train().to_dict()
        lines.write(row)
        table.write(row)
        board.write(row, row["env_steps"])

    return work


def _off() -> Callable[[], Any]:
    return _Silent(PPOConfig(env=ENV, seed=0)).train


def _logging(tensors: list[torch.Tensor]) -> Callable[[], Any]:
    metrics = Metrics()

    def work() -> None:
        for tensor in tensors:
            metrics.log("x", tensor)
        metrics.reduce()

    return work


def _floats(tensors: list[torch.Tensor]) -> Callable[[], Any]:
    def work() -> None:
        total = 0.0
        for tensor in tensors:
            total += tensor.item()

    return work


def _in_turns(works: dict[str, Callable[[], Any]], times: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, a call of one after a call of the other, so that drift of the machine meets both."""
    for work in works.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        spent = dict.fromkeys(works, 0.0)
        for _ in range(times):
            for name, work in works.items():
                begin = time.perf_counter()
                work()
                spent[name] += time.perf_counter() - begin
        for name in works:
            found[name].append(1e3 * spent[name] / times)
    return found
