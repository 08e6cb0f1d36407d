# SPDX-License-Identifier: Apache-2.0
"""The way from a recording to the learners on a cluster, on Ray Data."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from etude.algorithms.feed import Feed, Plan
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.ray_config import Ray
from etude.connectors import Pipeline
from etude.experience import Experience
from etude.learners import ModuleLearner
from etude.learners.batch import as_tensors
from etude.ray.data_flow import Flowing, flowing
from etude.ray.data_modules import Publisher
from etude.ray.data_stream import Cuts, RayCrew
from etude.recordings.pipeline import DataPipeline, Preparation
from etude.recordings.screening import Findings


@dataclasses.dataclass
class RecordingElsewhere:
    """Stands for the recording at a learner elsewhere: takes the counts of what was found bad, until they are told."""

    num_parts: int
    columns: list[str]
    is_in_memory = False

    def __post_init__(self) -> None:
        self.found: dict[int, Findings] = {}
        self.crew: RayCrew | None = None

    def part(self, k: int, columns: Any = None, *, finals: bool = True) -> Experience:
        """None is loaded here."""
        raise NotImplementedError

    def counts(self, k: int) -> Any:
        """Of a part."""
        return self.found.get(k)

    def count(self, k: int, counts: Any) -> None:
        """Take them."""
        if counts is not None:
            self.found[k] = counts


@dataclasses.dataclass(frozen=True)
class Told:
    """What one learner has to tell of its share since it was last asked. Goes to the process that trains."""

    bad: Mapping[int, Findings]
    """By part: what was found bad, see `Recording.counts`."""
    left_out: int
    """Steps of an epoch that could not be learned from."""
    cuts: Mapping[str, Mapping[int, Cuts]]
    """Of the last whole epochs of each module, see `RayCrew.cuts`."""
    epochs: Mapping[str, int]
    """The size of this learner's share of an epoch of each module, as far as it is known."""
    parts: Mapping[str, set[int]]
    """See `RayCrew.parts`, of each module whose first epoch has ended."""


@dataclasses.dataclass
class Shard:
    """What one learner needs to be fed; goes to its process."""

    index: int
    flowing: dict[str, Flowing]

    def feeds(self, algorithm: OfflineAlgorithm[Any]) -> dict[str, Feed]:
        """What feeds each module of a replica of the algorithm with this learner's share, without end.

        They raise, when batches are taken: DataError as on the local engine; EngineError where Ray Data fails.
        """
        out = {}
        for name, flow in self.flowing.items():
            with algorithm.settings_of(name):
                learner, device = algorithm.learner.modules[name], algorithm.config.compute.device
                out[name] = _feed(flow, self.index, learner, device, RecordingElsewhere(flow.num_parts, []), None)
        return out


def open_feeds(algorithm: OfflineAlgorithm[Any], settings: Ray) -> dict[str, Feed]:
    """What feeds each module where this process learns itself. The batches are those of the local engine.

    Raises:
        SettingsError: the settings, the module and the connectors do not go together.
        DataError: the recording can't be read, or does not hold what is wanted.
    """
    out = {}
    for name, plan in _plans(algorithm).items():
        with algorithm.settings_of(name):
            learner, device = algorithm.learner.modules[name], algorithm.config.compute.device
            flow = flowing(plan, learner, settings.data, 0, None, len(algorithm.policies))
            out[name] = _feed(flow, 0, learner, device, algorithm.recording, plan)
    return out


def open_shards(algorithm: OfflineAlgorithm[Any], settings: Ray, nodes: list[str] | None = None) -> list[Shard]:
    """One for each of `settings.num_learners` learners: different, equal shares of each epoch of each module.

    Args:
        algorithm: Says where its learners stand; connectors learn from the recording here, if they have not.
        settings: Of the engine.
        nodes: The ids of the nodes that the learners are on: where these are several, blocks go to where they lie.

    Raises:
        SettingsError: the settings, the module and the connectors do not go together; or a batch can't be shared.
        DataError: the recording can't be read, or does not hold what is wanted.
    """
    num = settings.num_learners
    flows = {}
    for name, plan in _plans(algorithm).items():
        with algorithm.settings_of(name):
            learner = algorithm.learner.modules[name]
            flows[name] = flowing(plan, learner, settings.data, num, nodes, len(algorithm.policies))
    return [
        Shard(i, {name: dataclasses.replace(flow, blocks=[flow.blocks[i]]) for name, flow in flows.items()})
        for i in range(num)
    ]


def told(feeds: Mapping[str, Feed]) -> Told:
    """What a learner's feeds have to tell."""
    bad: dict[int, Findings] = {}
    pipelines = {name: feed.pipeline for name, feed in feeds.items() if feed.pipeline is not None}
    cuts, parts = {}, {}
    for name, pipeline in pipelines.items():
        if isinstance(pipeline.source, RecordingElsewhere):
            crew = pipeline.source.crew
            cuts[name] = {} if crew is None else dict(crew.cuts)
            if crew is not None and crew.parts is not None:
                parts[name] = crew.parts
            bad |= pipeline.source.found
            pipeline.source.found = {}
    sizes = {name: pipeline.epoch_size for name, pipeline in pipelines.items()}
    return Told(
        bad,
        sum(pipeline.left_out for pipeline in pipelines.values()),
        cuts,
        {name: size for name, size in sizes.items() if size is not None},
        parts,
    )


def count_without_blocks(algorithm: OfflineAlgorithm[Any], tolds: Sequence[Told], done: dict[str, int]) -> None:
    """Count what was found bad in parts of which nothing was left, so that no learner has heard of them.

    Args:
        algorithm: Whose recording it is.
        tolds: Of each learner.
        done: The modules of which this was done, with the steps in such parts that could not be learned from; others,
            whose first epoch all learners have ended, are added.
    """
    ended = set.intersection(*(set(own.parts) for own in tolds)) - set(done)
    for name, plan in _plans(algorithm).items() if ended else ():
        if name in ended:
            came, job = set.union(*(own.parts[name] for own in tolds)), plan.job
            empty = [job(k)[1] for k in range(plan.source.num_parts) if k not in came]
            done[name] = sum(spent.left_out for spent in empty)
            for spent in empty:
                if spent.part is not None:
                    algorithm.recording.count(spent.part, spent.bad)


def unshared(tolds: Sequence[Told]) -> int:
    """Steps of an epoch that no learner got, as there are fewer than learners, or they are segments that can't be cut.

    Of the last epoch that all learners have ended, over all modules. Counted in blocks of which a learner got some: one
    with fewer rows than there are learners may go unseen.
    """
    left = 0
    for name in tolds[0].cuts:
        ended = set.intersection(*(set(own.cuts[name]) for own in tolds))
        steps: dict[int, int] = {}
        for own in tolds if ended else ():
            for first, (total, got) in own.cuts[name][max(ended)].items():
                steps[first] = steps.get(first, total) - got
        left += sum(steps.values())
    return left


def _plans(algorithm: OfflineAlgorithm[Any]) -> dict[str, Plan]:
    opening = algorithm.opening()
    plans = {}
    for name, policy in algorithm.policies.items():
        with algorithm.settings_of(name):
            learner = algorithm.learner.modules[name]
            plans[name] = opening.plan(name, policy, learner, algorithm.config, loads_here=False)
    return plans


def _feed(flow: Flowing, index: int, learner: ModuleLearner, device: str, source: Any, plan: Plan | None) -> Feed:
    """A module's, in the process of who learns; with a plan, parts of which no block has come can be looked at."""
    crew = RayCrew(flow.blocks[0], None if plan is None else plan.job)
    if isinstance(source, RecordingElsewhere):
        source.crew = crew
    nothing = Preparation(Pipeline([]), Pipeline([]))
    pipeline = DataPipeline(
        source,
        None,
        nothing,
        flow.make,
        flow.size,
        flow.flow,
        by_segments=flow.by_segments,
        hold_prepared=flow.holds,
        epoch_size=flow.epoch_size,
        to_device=None if device == "cpu" else partial(as_tensors, device=device),
        crew=crew,
    )
    fresh = learner.connectors.connectors[flow.fresh_from :]
    elsewhere = None
    if flow.board is not None:
        elsewhere = Publisher(learner, flow.board, flow.period, publishes=index == 0)
    return Feed(pipeline.batches(flow.start), learner.module, fresh, pipeline, elsewhere)
