# SPDX-License-Identifier: Apache-2.0
"""What feeds the learner of a module with batches, and how that goes."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.algorithms.given_batches import check_batch
from etude.connectors import Connector, overrides
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.modules import Module
from etude.recordings.layers import CONNECTORS, READ, SHUFFLE, Spent
from etude.recordings.pipeline import DataPipeline
from etude.runners import Episode, ModuleOf

_FEW = 0.1
"""A learner that waits for less of its time than this is itself the slowest."""


_END: Any = object()


@dataclasses.dataclass(frozen=True)
class SegmentsOf:
    """Gives the segments that one of several modules learns from: those that are its own by `modules_of`."""

    module_id: str
    module_ids: tuple[str, ...]
    module_of: ModuleOf | None

    def __call__(self, exp: Experience) -> Experience:
        """The segments of this module.

        Raises:
            DataError: a segment is of none of the modules.
        """
        of = modules_of(exp.segments, self.module_of)
        unknown = sorted({str(name) for name in of} - set(self.module_ids))
        if unknown:
            raise DataError(
                f"the recording has segments of {', '.join(unknown)}, but the `modules` are "
                f"{', '.join(self.module_ids)}: let `module_of` say which of these learns from each agent's."
            )
        return exp.select(of == self.module_id)


def modules_of(segments: Segments, module_of: ModuleOf | None) -> NDArray[np.object_]:
    """``[segments]``: the id of the module that each segment is of, perhaps of none that there is.

    Without ``module_of`` it is the module that acted; where the recording does not say, that of the agent's name.

    Raises:
        DataError: ``module_of`` fails.
    """
    if module_of is None:
        named = segments.module_id != None  # noqa: E711 - an array, element by element
        return np.where(named, segments.module_id, segments.agent_id)
    known: dict[tuple[Any, str], str] = {}
    of = np.empty(len(segments), object)
    for i, (agent, episode) in enumerate(zip(segments.agent_id.tolist(), segments.episode_id.tolist(), strict=True)):
        if (agent, episode) not in known:
            try:
                known[agent, episode] = module_of(agent, Episode(episode, 0, 0))
            except Exception as error:
                raise DataError(
                    f"module_of fails for agent {agent!r} of episode {episode!r}: {type(error).__name__}: {error}"
                ) from error
        of[i] = known[agent, episode]
    return of


class Elsewhere(Protocol):
    """Connectors that ask the module, but work elsewhere, with copies of it."""

    def arrived(self, batch: Any) -> Any:
        """A batch that they have seen, without what they noted in it."""

    def learned(self) -> None:
        """The module has learned from the batch."""

    def staleness(self) -> list[float]:
        """By how many gradient steps the copies were behind, batch by batch, since this was last asked."""


class Feed:
    """Batches for one module, and the last touch that they get by its connectors that ask the module.

    Args:
        batches: Columns, or Experience for a module with a memory or connectors that look along time.
        module: Learns.
        fresh: Connectors of its learner that see each batch just before it is learned from.
        pipeline: Where the batches come from, if there is one.
        elsewhere: Connectors that ask the module before batches come here.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        module: Module,
        fresh: Sequence[Connector] = (),
        pipeline: DataPipeline | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._batches = iter(batches)
        self._check = None if pipeline is not None else partial(check_batch, module=module)
        self._module, self._fresh, self.pipeline = module, fresh, pipeline
        self.elsewhere = elsewhere
        self.waited = 0.0
        """Seconds that the learner was not learning."""
        self._connecting = 0.0
        self._depths: list[int] = []
        self._told = Spent()

    def take(self, num: int) -> Iterator[Any]:
        """The next ``num`` batches.

        Raises:
            DataError: there are none left.
        """
        for i in range(num):
            if self.pipeline is not None and self.pipeline.depth is not None:
                self._depths.append(self.pipeline.depth)
            begin = time.perf_counter()
            batch: Any = next(self._batches, _END)
            if batch is _END:
                if not i:
                    raise DataError("the batches given have come to their end: give endless ones, or stop earlier.")
                return
            if self._check is not None:
                self._check(batch)
            if self._fresh:
                batch = self._seen(batch)
            if self.elsewhere is not None:
                batch = self.elsewhere.arrived(batch)
            self.waited += time.perf_counter() - begin
            yield batch
            if self.elsewhere is not None:
                self.elsewhere.learned()

    def _seen(self, exp: Experience) -> Any:
        begin = time.perf_counter()
        self._module.eval()
        for connector in self._fresh:
            if overrides(connector, "update"):
                connector.update(exp)
            exp = connector.offline(exp, self._module)
        self._module.train()
        self._connecting += time.perf_counter() - begin
        return exp if self._module.recurrent else exp.trained_steps()

    def told(self) -> tuple[Spent, float, list[int]]:
        """What was spent since this was last asked, the seconds waited, and how many blocks were ready each time."""
        spent, waited, depths = Spent(), self.waited, self._depths
        if self.pipeline is not None:
            spent.add(self.pipeline.spent)
        spent.seconds[CONNECTORS] += self._connecting
        new = dataclasses.replace(
            spent,
            seconds={layer: max(0.0, s - self._told.seconds[layer]) for layer, s in spent.seconds.items()},
            rows=spent.rows - self._told.rows,
            bytes=spent.bytes - self._told.bytes,
        )
        self._told, self.waited, self._depths = spent, 0.0, []
        return new, waited, depths

    def close(self) -> None:
        """End the workers."""
        if self.pipeline is not None:
            self.pipeline.close()


def report(feeds: Mapping[str, Feed], seconds: float, num_workers: int) -> tuple[dict[str, float], str]:
    """How the data flowed in an iteration, see `Result.data`, and the name of the slowest layer.

    Args:
        feeds: All that fed.
        seconds: What the updates took, waiting included.
        num_workers: Which the work of reading, decoding and connecting was shared by.
    """
    spent, waited, depths = Spent(), 0.0, list[int]()
    for feed in feeds.values():
        own = feed.told()
        spent.add(own[0])
        waited += own[1]
        depths += own[2]
    figures = dict(spent.seconds)
    figures["wait"] = waited
    figures["steps_per_s"] = spent.rows / seconds if seconds else 0.0
    if spent.bytes or spent.seconds[READ]:
        figures["mb_per_s"] = spent.bytes / 1e6 / seconds if seconds else 0.0
    if depths:
        figures["queue"] = sum(depths) / len(depths)
    behind = [steps for feed in feeds.values() if feed.elsewhere is not None for steps in feed.elsewhere.staleness()]
    if behind:
        figures["staleness"] = sum(behind) / len(behind)
    shared = {layer: took / (1 if layer == SHUFFLE else max(1, num_workers)) for layer, took in spent.seconds.items()}
    slowest = max(shared, key=lambda layer: shared[layer])
    return figures, "update" if waited <= _FEW * seconds else slowest
