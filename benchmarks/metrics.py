# SPDX-License-Identifier: Apache-2.0
"""What metrics cost: PPO iterations with all that is measured, logged and written, beside iterations without."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row
from etude import PPO, PPOConfig
from etude.algorithms import Result
from etude.experience import Experience
from etude.learners import ModuleLearner, Update
from etude.metrics import JSONLines, Metrics, TensorBoard
from etude.runners import Finished

OFF, REACH = "without any", 1.02
MOVEMENT, REST = "KL and entropy, a pass over the steps", "all else"
VALUES, AT_ONCE = 1000, "one move a value"


def rows(options: Options) -> Iterator[Row]:
    """An iteration of PPO with metrics and without; where there is a GPU, a thousand of its tensors logged."""
    calls = 3 if options.quick else 6
    times = _in_turns({ETUDE: _on(options), OFF: _Silent(PPOConfig(env=ENV, seed=0)).train}, calls, options.rounds)
    yield Row(
        f"PPO iteration on {ENV} with metrics in two files, and without",
        "ms",
        [Figure(ETUDE, times[ETUDE], "etude"), Figure(OFF, times[OFF])],
        Reach(REACH, OFF),
        "episodes, phases, steps and parameters counted, KL and entropy measured; JSON lines and TensorBoard; "
        "time of the processor",
    )
    shares = _shares(options, calls)
    yield Row(
        "the share of metrics in these iterations, by the time spent in them",
        "%",
        [Figure(name, values, "etude" if name == ETUDE else "limit") for name, values in shares.items()],
        Reach(100 * (REACH - 1)),
    )
    if torch.cuda.is_available():
        tensors = list(torch.rand(VALUES, device="cuda"))
        times = _in_turns({ETUDE: _logging(tensors), AT_ONCE: _floats(tensors)}, 20, options.rounds)
        yield Row(
            f"log and reduce {VALUES:,} tensors of a GPU",
            "ms",
            [Figure(ETUDE, times[ETUDE], "etude"), Figure(AT_ONCE, times[AT_ONCE])],
            Reach(1.0, AT_ONCE),
        )


class _Silent(PPO):
    """Measures nothing and says nothing."""

    name = "silent"

    def timed(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext()

    def take_finished(self, finished: Finished) -> None:
        pass

    def update(self, learner: ModuleLearner, exp: Experience) -> Update:
        return self.update_epochs(learner, exp)  # and not how far the policy has moved

    def _result(self, *given: Any) -> Any:
        return None


def _shares(options: Options, calls: int) -> dict[str, list[float]]:
    """Percent of the iterations' time: all metrics, and the two parts."""
    spent: dict[str, float] = {}

    def charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            found = function(*args, **kwargs)
            spent[name] = spent.get(name, 0.0) + time.process_time() - begin
            return found

        return call

    algorithm = PPO(PPOConfig(env=ENV, seed=0))
    learner: Any = algorithm.learner.only
    learner.measure = charged(MOVEMENT, learner.measure)
    metered: Any = algorithm
    for name in ("take_finished", "_result"):
        setattr(metered, name, charged(REST, getattr(metered, name)))
    work = charged("in all", _iterating(algorithm, options, charged))
    work()
    found: dict[str, list[float]] = {ETUDE: [], MOVEMENT: [], REST: []}
    for _ in range(options.rounds):
        spent.clear()
        for _ in range(calls):
            work()
        shares = {name: 100 * spent[name] / spent["in all"] for name in (MOVEMENT, REST)}
        for name, share in ({ETUDE: sum(shares.values())} | shares).items():
            found[name].append(share)
    return found


def _on(options: Options) -> Callable[[], Any]:
    return _iterating(PPO(PPOConfig(env=ENV, seed=0)), options, lambda name, function: function)


def _iterating(algorithm: PPO, options: Options, charged: Callable[[str, Any], Any]) -> Callable[[], Any]:
    """Iterations whose results are written to two files."""
    lines = JSONLines(options.folder / "metrics.jsonl")
    board = TensorBoard(options.folder / "tensorboard")

    def write(result: Result) -> None:
        row = result.to_dict()
        lines.write(row)
        board.write(row, row["env_steps"])

    put = charged(REST, write)
    return lambda: put(algorithm.train())


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
    """Milliseconds of the processor, all threads, for each; a round is the median of calls that take turns at being
    first."""
    for work in works.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        spent: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(times):
            names = list(works)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                begin = time.process_time()
                works[name]()
                spent[name].append(1e3 * (time.process_time() - begin))
        for name, values in spent.items():
            found[name].append(statistics.median(values))
    return found
