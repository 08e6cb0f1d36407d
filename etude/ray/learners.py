# SPDX-License-Identifier: Apache-2.0
"""Learners: many learners of a cluster in place of one here."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
import ray
import torch

from etude.algorithms.config import OnPolicyConfig, RecordConfig
from etude.algorithms.ray_config import Ray
from etude.errors import EngineError
from etude.experience import Experience
from etude.experience.arrays import Index
from etude.learners import Update
from etude.learners.loss import Figures
from etude.ray.faults import first_line
from etude.ray.learner_actor import Standing, TrainedShare
from etude.ray.learner_group import LearnerGroup, LearnerLost
from etude.ray.policies import changes_of, from_arrays, learner_state, sent, set_learner_state
from etude.ray.start import check_connected, connection

if TYPE_CHECKING:
    from etude.algorithms.algorithm import Algorithm
    from etude.algorithms.offline import OfflineAlgorithm

T = TypeVar("T")

_log = logging.getLogger("etude.ray")
_NEXT: Final = "connect_and_update"


class Learners:
    """Lets learners on a cluster share each update of an algorithm's modules.

    Each has a replica of the algorithm and learns from its share of the rows; gradients are averaged in proportion to
    these, so that each step is that of one learner with all rows (see `ModuleLearner.team`). What comes of an update is
    brought here at once: the algorithm's own modules, optimizers and counts are always the newest there are, and what
    is changed here meanwhile, in ``after_update`` or by a callback, goes to the learners before the next update.

    A learner that dies ends its group, as the others wait for it: all are made anew, with what the algorithm here
    knows, and the update is made again from the same shares.

    Connectors work here, on everything. But those of the learner where an update goes on beside collecting, and offline
    those that see each batch just before it is learned from, work at the learners, on their shares; where they learn
    from them, what the first learner's have learned is kept.

    Args:
        algorithm: Whose modules learn.
        settings: Of the cluster.
    """

    def __init__(self, algorithm: "Algorithm[Any]", settings: Ray) -> None:
        self._algorithm, self._settings = algorithm, settings
        self._config = algorithm.config
        self._home = connection()
        self._group: LearnerGroup | None = None
        self._is_fed = False
        self._in_empty: dict[str, int] = {}  # see `count_without_blocks`
        self._begun: tuple[list[Any], Standing, list[Any]] | None = None  # an update's answers, and its arguments
        self._brought: dict[str, Update] | None = None  # by the latest of these, not told yet
        self._known: Any = None
        self._restarts = self._told_restarts = self._left_out = self._unshared = 0

    @property
    def pids(self) -> list[int]:
        """The processes of the learners; none before the first update."""
        return [] if self._group is None else self._group.pids

    # -- learning -----------------------------------------------------------------------------------------------

    def update(self, parts: Mapping[str, Experience], env_steps: int) -> dict[str, Update]:
        """Let each module learn from prepared experience, as `OnPolicyAlgorithm.learn` does.

        Args:
            parts: By module id; one without steps learns nothing.
            env_steps: Sampled over the lifetime.

        Raises:
            EngineError: learners were lost more often than they may be.
            Exception: what was raised at a learner, with a note of where.
        """
        some = {name: self._shares(name, exp.numpy()) for name, exp in parts.items() if exp.trained().any()}
        if not some:
            return {name: Update({}, {}) for name in parts}
        refs = [ray.put({name: own[i] for name, own in some.items()}) for i in range(self._settings.num_learners)]
        done = self._together(lambda group: group.begin("update", self._standing(env_steps), own=refs))
        return {name: done[0].get(name, Update({}, {})) for name in parts}

    def update_next(self, seen: Mapping[str, Experience], env_steps: int) -> dict[str, Update] | None:
        """Let each module learn from what it saw while more is collected; gives what the update before has brought.

        Learners let their connectors work, which ask the module as it is there, on shares of whole segments. What is
        changed in the modules here meanwhile is overwritten by what comes. None: there was none before.

        Args:
            seen: By module id: behind the connectors between env and module.
            env_steps: Sampled over the lifetime.

        Raises:
            EngineError: as `update`; so are others.
        """
        before, self._brought = self._ended(), None
        num = self._settings.num_learners
        some = {name: shares_of(exp.numpy(), num, max_seq_len=sys.maxsize) for name, exp in seen.items()}
        refs = [ray.put({name: own[i] for name, own in some.items()}) for i in range(num)]
        given = (self._standing(env_steps), refs)
        self._begun = (self._insist(lambda group: _begun(group, group.begin(_NEXT, given[0], own=refs))), *given)
        return before

    def _ended(self) -> dict[str, Update] | None:
        """What the update brought that is under way; waits for its end."""
        if self._begun is not None:
            (asked, standing, refs), self._begun = self._begun, None
            done = self._together(lambda group: group.begin(_NEXT, standing, own=refs), asked)
            self._brought = done[0]
        return self._brought

    def _shares(self, name: str, exp: Experience) -> list[Experience]:
        algorithm, num = self._algorithm, self._settings.num_learners
        if not algorithm.policies[name].module.recurrent:
            return shares_of(exp, num)
        with algorithm.settings_of(name):
            config = cast(OnPolicyConfig, algorithm.config)
            return shares_of(exp, num, max_seq_len=config.sequences.max_len, burn_in=config.sequences.burn_in)

    def update_from(self, module_id: str, batches: Iterable[Any], env_steps: int) -> tuple[Update, list[Figures]]:
        """As `ModuleLearner.update_from`, and what the loss kept of each batch, by row (`ModuleLearner.kept`).

        Args:
            module_id: Who learns.
            batches: Columns ``[B, ...]`` by name, or Experience; all are drawn before the first is learned from.
            env_steps: Sampled over the lifetime.

        Raises:
            EngineError: as `update`; so are others.
        """
        num, recurrent = self._settings.num_learners, self._algorithm.policies[module_id].module.recurrent
        shares = [shares_of_batch(batch, num, recurrent=recurrent) for batch in batches]
        refs = [ray.put([of_batch[i] for of_batch in shares]) for i in range(num)]
        standing = self._standing(env_steps)
        done = self._together(lambda group: group.begin("update_from", module_id, standing, own=refs))
        kept = [[own[1][i] for own in done] for i in range(len(shares))]
        return done[0][0], [_joined(of_batch) for of_batch in kept]

    def train(self, num_updates: int) -> tuple[dict[str, Update], dict[str, float], str]:
        """Gradient steps of each module that is trained from the recording, which learners read themselves.

        Gives what they brought, how the data flowed, over all learners, and the slowest layer of the first.

        Raises:
            EngineError: as `update`; so are others.
        """
        from etude.ray.data import open_shards  # Ray Data takes seconds to be imported

        algorithm = cast("OfflineAlgorithm[Any]", self._algorithm)

        def ask(group: LearnerGroup) -> list[Any]:
            if not self._is_fed:
                shards = open_shards(algorithm, self._settings, group.nodes)
                group.call("open", own=shards, timeout=self._settings.learner_timeout)
                self._is_fed = algorithm._has_seen_data = True
            names = list(algorithm.learner.chosen(algorithm.policies))
            return group.begin("train", num_updates, names, self._standing(algorithm.env_steps))

        done: list[TrainedShare] = self._together(ask)
        self._hear(algorithm, done)
        data = {name: sum(own.data.get(name, 0.0) for own in done) for name in done[0].data}
        for name in data.keys() & {"wait", "queue"}:
            data[name] /= len(done)  # they wait beside each other; the work of layers adds up
        return done[0].updates, data, done[0].bottleneck

    def _hear(self, algorithm: "OfflineAlgorithm[Any]", done: list[TrainedShare]) -> None:
        """Take what learners have found out about the recording."""
        from etude.ray.data import count_without_blocks, unshared

        tolds = [own.told for own in done]
        count_without_blocks(algorithm, tolds, self._in_empty)
        self._left_out = sum(own.left_out for own in tolds) + sum(self._in_empty.values())
        self._unshared = unshared(tolds)
        for own in done:
            for k, counts in own.told.bad.items():
                algorithm.recording.count(k, counts)
        for name in algorithm.policies:
            sizes = [own.told.epochs.get(name) for own in done]
            if None not in sizes:
                algorithm._epochs[name] = sum(size for size in sizes if size is not None)

    def _standing(self, env_steps: int) -> Standing:
        algorithm = self._algorithm
        rates = {name: dict(own.lr) for name, own in algorithm.learner.modules.items()}
        plain = {
            name: value
            for name, value in vars(algorithm).items()
            if not name.startswith("_") and isinstance(value, bool | int | float | str)
        }
        return Standing(env_steps, rates, plain)

    # -- what learners know -------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Wait for an update that is under way: each brings all that learners know."""
        self._ended()

    def push(self) -> None:
        """Let learners know what the algorithm here knows, before the next update; its modules may be others."""
        if self._is_fed or self._config is not self._algorithm.config:
            self._end()  # Ray Data goes on with an epoch only when all learners have ended the one before
        self._config = self._algorithm.config
        self._known, self._is_fed = None, False
        self._begun = self._brought = None

    def stats(self) -> dict[str, float]:
        """What was counted since this was last asked: ``learner_restarts``.

        And where learners read a recording, ``left_out/early_or_dropped``: the steps of an epoch that could not be
        learned from; and ``left_out/unshared``: those that no learner got, since all get equally many.
        """
        new, self._told_restarts = self._restarts - self._told_restarts, self._restarts
        left_out = {"early_or_dropped": self._left_out, "unshared": self._unshared}
        return {"learner_restarts": float(new)} | {f"left_out/{kind}": float(n) for kind, n in left_out.items() if n}

    def _marks(self) -> Any:
        """Changes when weights here are changed in place."""
        return {name: changes_of(policy.module) for name, policy in self._algorithm.policies.items()}

    def _together(self, begin: Callable[[LearnerGroup], list[Any]], begun: list[Any] | None = None) -> list[Any]:
        """Let a group learn, unless an update was ``begun`` already, and load what it has learned; gives the answers.

        Of the references that were begun, the last is to the state after it, see `_begun`.
        """

        def learned(group: LearnerGroup) -> list[Any]:
            nonlocal begun
            refs, begun = begun, None
            return group.wait(refs or _begun(group, begin(group)), self._settings.learner_timeout)

        *answers, state = self._insist(learned, is_ready=begun is not None)
        for name, learner in self._algorithm.learner.modules.items():
            set_learner_state(learner, state[name])
        self._known = self._marks()
        return answers

    def _insist(self, ask: Callable[[LearnerGroup], T], *, is_ready: bool = False) -> T:
        """Ask a group for something, as often as learners are lost."""
        while True:
            try:
                return ask(self._group if is_ready and self._group is not None else self._ready())
            except LearnerLost as error:
                is_ready = False
                self._lost(error)
            except BaseException:
                self._end()  # nobody knows how far the others are
                raise

    def _ready(self) -> LearnerGroup:
        """A group that knows what the algorithm here knows."""
        check_connected(self._home)
        algorithm, settings = self._algorithm, self._settings
        if self._group is None:
            device = "cuda" if settings.gpus_per_learner > 0 else self._config.compute.device
            config = sent(self._config, record=RecordConfig(), callbacks=(), device=device)
            self._group = LearnerGroup(settings, (type(algorithm), config, algorithm.spaces))
            self._known = None
        if self._known is None or self._known != self._marks():
            learners = algorithm.learner.modules
            state = {name: learner_state(own) for name, own in learners.items()}
            self._group.call("load", ray.put(state), timeout=settings.learner_timeout)
            self._known = self._marks()
        return self._group

    # -- what fails ---------------------------------------------------------------------------------------------

    def _lost(self, error: LearnerLost) -> None:
        self._end()
        most = self._settings.max_restarts
        if self._restarts >= most:
            raise EngineError(
                f"a learner was lost, and `ray.max_restarts` ({most}) are used up. The cause: {first_line(error)} See "
                "Ray's logs of that process and node."
            ) from error
        self._restarts += 1
        _log.warning("a learner was lost, and all are made anew as they were before this update: %s", first_line(error))

    def _end(self) -> None:
        group, self._group = self._group, None
        self._is_fed = False
        if group is not None:
            group.end()

    def close(self) -> None:
        """End the learners. Does nothing the second time."""
        if connection() == self._home:  # else they have ended with the cluster
            self._end()


def _begun(group: LearnerGroup, refs: list[Any]) -> list[Any]:
    """References to the answers of an update, and to the state of the learners after it."""
    return [*refs, group.state()]


def _joined(kept: list[Mapping[str, Any]]) -> Figures:
    """What a loss kept of a batch, by row, from what each learner kept of its share."""
    some = [from_arrays(own) for own in kept if own]
    return {name: torch.cat([own[name] for own in some]) for name in (some[0] if some else {})}


# -- shares of the learners ---------------------------------------------------------------------------------------


def shares_of(exp: Experience, num: int, *, max_seq_len: int | None = None, burn_in: int = 0) -> list[Experience]:
    """``num`` parts that are one after the other what ``exp`` is, with equally many steps to be trained on.

    Segments are cut where that makes parts equal, within one step, as what connectors add to steps is there already.

    Args:
        exp: Prepared for the loss.
        num: How many.
        max_seq_len: Of a recurrent module: segments are cut only where its sequences would be, at multiples of it, so
            that each part begins within half a sequence of where they would be equal.
        burn_in: Of a recurrent module: steps before a cut that the next part has, too, as lookback.
    """
    if num == 1:
        return [exp]
    trained = exp.trained()
    done = np.append(0, np.cumsum(trained))
    wanted = done[-1] * np.arange(1, num) // num
    starts, begins = exp.offsets[:-1], exp.offsets[:-1] + exp.segments.lookback
    if max_seq_len is None:
        at = np.searchsorted(done, wanted, side="right") - 1  # as many before it as are wanted
        segment = np.searchsorted(starts, at, side="right") - 1
        at = np.where(at <= begins[segment], starts[segment], at)  # lookback goes with what it is for
    else:
        allowed = _cuts(exp, begins, max_seq_len)
        after = np.searchsorted(done[allowed], wanted)
        before = np.maximum(after - 1, 0)
        is_nearer = wanted - done[allowed[before]] < done[allowed[after]] - wanted
        at = allowed[np.where(is_nearer, before, after)]
    return _cut(exp, at, burn_in)


def _cuts(exp: Experience, begins: Index, max_seq_len: int) -> Index:
    """The rows that a recurrent module's sequences begin with, where no lookback is before them, and the end."""
    rows = np.arange(exp.num_steps)
    since = rows - np.repeat(begins, exp.lengths)
    is_inside = (since > 0) & (since % max_seq_len == 0)
    return np.unique(np.concatenate([exp.offsets, rows[is_inside]]))


def _cut(exp: Experience, at: Index, lookback: int) -> list[Experience]:
    bounds = np.unique(np.concatenate([exp.offsets, at]))
    parent = np.searchsorted(exp.offsets, bounds[:-1], side="right") - 1
    pieces = exp.pieces(parent, bounds[:-1], bounds[1:], lookback)
    borders = np.searchsorted(bounds, [0, *at.tolist(), exp.num_steps]).tolist()
    return [pieces[first:last] for first, last in pairwise(borders)]


def shares_of_batch(batch: Mapping[str, Any] | Experience, num: int, *, recurrent: bool) -> list[Any]:
    """``num`` parts of a batch, of equally many rows within one; for a recurrent module, of whole segments."""
    if isinstance(batch, Experience):
        if recurrent:
            return [batch[first:last] for first, last in pairwise(_evenly(len(batch), num))]
        batch = batch.steps
    borders = _evenly(len(next(iter(batch.values()))), num)
    return [{name: column[first:last] for name, column in batch.items()} for first, last in pairwise(borders)]


def _evenly(size: int, num: int) -> list[int]:
    return [size * i // num for i in range(num + 1)]
