# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of algorithms: the named components of the state, how they are written and read, and which are kept."""

import dataclasses
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from etude.algorithms.policies import WEIGHTS_OF_LOSSES
from etude.algorithms.results import Result
from etude.checkpoints import (
    Where,
    copy_tree,
    folder_at,
    has_manifest,
    load_meta,
    load_tree,
    remove_tree,
    replace_meta,
    save_tree,
)
from etude.checkpoints.codec import Encoder
from etude.display import short
from etude.errors import CheckpointError, EtudeError, SettingsError
from etude.files import absolute_path, names_in
from etude.learners import ModuleLearner
from etude.modules.module import load_weights
from etude.policies import Policy
from etude.settings import nearest
from etude.urls import inside, is_url, redacted

_log = logging.getLogger("etude.algorithms")

MODULES: Final = "modules/"
"""Prefix of components that hold weights."""

Names: TypeAlias = str | Collection[str] | None
"""A component such as ``modules/p1``, a prefix of several such as ``modules``, or a collection of these."""


class Component(NamedTuple):
    """A part of the state: ``get`` returns it as plain data, arrays and tensors that nothing else holds; ``set``
    restores it."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def components_of(name: str, policy: Policy, learner: ModuleLearner) -> dict[str, Component]:
    """The components of the module called ``name``.

    ``modules/NAME``: ``weights``, and their ``seq_no``, the number of gradient steps that this run had made (for
    `Runner.take_weights`; a run that loads only the weights keeps its own count). ``optimizers/NAME``: the state of
    each optimizer. ``learners/NAME``: counts of gradient steps, and the random stream. ``connectors/NAME``: what the
    connectors to the ``env`` and those of the ``learner`` have learned.
    """

    def connectors() -> dict[str, Any]:
        return {"env": policy.connectors.state_dict(), "learner": learner.connectors.state_dict()}

    def set_connectors(state: Mapping[str, Any]) -> None:
        policy.connectors.load_state_dict(state["env"])
        learner.connectors.load_state_dict(state["learner"], stateless_may_differ=True)

    return {
        f"{MODULES}{name}": Component(
            lambda: {"weights": learner.weights(), "seq_no": learner.updates},
            lambda state: load_weights(learner.module, state["weights"]),
        ),
        f"optimizers/{name}": Component(
            learner.optimizer_states,
            lambda states: learner.set_optimizer_states(states, optional=WEIGHTS_OF_LOSSES),
        ),
        f"learners/{name}": Component(learner.progress, learner.set_progress),
        f"connectors/{name}": Component(connectors, set_connectors),
    }


def chosen(there: Iterable[str], components: Names = None, not_components: Names = None) -> list[str]:
    """The components in ``there`` that ``components`` names (None: all) and ``not_components`` does not.

    Raises:
        CheckpointError: a name is neither a component nor a prefix of one.
    """
    names = list(there)

    def meant(given: Names) -> set[str]:
        found: set[str] = set()
        for wanted in [given] if isinstance(given, str) else given or ():
            some = {name for name in names if f"{name}/".startswith(f"{wanted.rstrip('/')}/")}
            if not some:
                raise CheckpointError(f"there is no component `{wanted}`: there are {', '.join(names)}.")
            found |= some
        return found

    kept = set(names) if components is None else meant(components)
    kept -= meant(not_components)
    return [name for name in names if name in kept]


@contextmanager
def what_fits(what: str, remedy: str = "") -> Iterator[None]:
    """Context that turns errors from checkpoint content that does not fit into CheckpointError.

    Args:
        what: What is restored, for the message.
        remedy: The end of the message.
    """
    try:
        yield
    except EtudeError:
        raise
    except Exception as error:
        wrong = (
            f"holds no {error}" if isinstance(error, KeyError) else f"does not fit ({type(error).__name__}: {error})"
        )
        raise CheckpointError(
            f"{what} {wrong}: it is broken, or was saved by another version of Etude or with other settings.{remedy}"
        ) from error


def put_back(parts: Mapping[str, Component], state: Mapping[str, Any]) -> None:
    """Restore the components in ``state``.

    Raises:
        CheckpointError: ``state`` has a component that does not exist here (raised before any change) or does not fit.
    """
    unknown = [name for name in state if name not in parts]
    if unknown:
        raise CheckpointError(
            f"the state has the components {', '.join(unknown)}, which are not here; here are {', '.join(parts)}. "
            "Choose with components=... or not_components=..., or use an algorithm with the same modules."
        )
    for name, component in parts.items():
        if name in state:
            with what_fits(f"the component `{name}` of the state"):
                component.set(state[name])


def write_components(
    path: Where, parts: Mapping[str, Component], meta: Mapping[str, Any], told: Mapping[str, str]
) -> dict[str, BaseException]:
    """Write a checkpoint of these components, and return the errors of those that can't be saved and are left out.

    Args:
        path: Its folder or URL.
        parts: The components.
        meta: Metadata to store with them. Its ``left_out`` is set to the components left out and why.
        told: Components left out of the previous checkpoint and why; these are not warned about again.

    Raises:
        Exception: weights can't be read.
        CheckpointError: the folder can't be written.
    """
    state, failures = _savable(parts)
    left_out = {name: reason_of(error) for name, error in failures.items()}
    save_tree(path, state, meta={**meta, "left_out": left_out})
    for name, reason in left_out.items():
        if told.get(name) != reason:
            _log.warning("The checkpoint %s was saved without `%s`: %s", redacted(os.fspath(path)), name, reason)
    return failures


def _savable(parts: Mapping[str, Component]) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """The components, and the errors of those that can't be saved; errors of weights are raised."""
    kept: dict[str, Any] = {}
    failures: dict[str, BaseException] = {}
    for name, component in parts.items():
        try:
            part = component.get()
            if name == "runner":
                failures |= _take_out_callbacks(part)
            if (error := _refusal(part)) and name == "runner" and part.get("arena") and _refusal(part["arena"]):
                part["arena"] = {"how": "new episodes", "why": reason_of(error)}
                error = _refusal(part)
            if error:
                raise error
            kept[name] = part
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a user's code, which may raise anything: everything else is still saved
            if name.startswith(MODULES):
                raise
            failures[name] = error
    return kept, failures


def _take_out_callbacks(runner: dict[str, Any]) -> dict[str, BaseException]:
    """Remove callbacks whose state can't be saved from the runner's state; return the errors by callback."""
    called = runner.get("callbacks")
    if not called:
        return {}
    failures: dict[str, BaseException] = {name: CheckpointError(why) for name, why in called.pop("left_out").items()}
    failures |= {name: error for name, state in called["callbacks"] if (error := _refusal(state))}
    called["callbacks"] = [pair for pair in called["callbacks"] if pair[0] not in failures]
    return {f"callbacks/{name}": error for name, error in failures.items()}


def _refusal(part: Any) -> BaseException | None:
    """Why a part can't be saved; None if it can."""
    try:
        Encoder().encode(part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  a CheckpointError, or one of the part's own
        return error
    return None


def reason_of(error: BaseException) -> str:
    """The reason why something can't be saved, as text."""
    return str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"


def read_components(path: Where, components: Names, not_components: Names) -> tuple[dict[str, Any], dict[str, Any]]:
    """Components of a checkpoint, and the settings that it was saved with, as plain data.

    Raises:
        CheckpointError: the folder is not an algorithm's checkpoint, is broken, or has no such components.
    """
    meta, state = load_meta(path), None
    if isinstance(meta, dict) and "algorithm" in meta and isinstance(meta.get("config"), dict):
        state, _ = load_tree(path, lambda there: chosen(there, components, not_components))
    if not isinstance(state, dict):
        raise CheckpointError(f"{redacted(os.fspath(path))} is a checkpoint, but not of an algorithm.")
    return state, meta["config"]


# -- which are kept ---------------------------------------------------------------------------------------------------

_NAME = re.compile(r"checkpoint-(\d{6,})")
_EVALUATED: Final = "evaluated"
"""Key in the metadata of a checkpoint: the later result that has the figures of its evaluation."""
_OF_EPISODES = ("return", "length_", "duration_", "custom/", "agent_returns", "module_returns")
"""Prefixes of the names of episode figures; offline, these come from evaluations."""


class KeptCheckpoint(NamedTuple):
    """A checkpoint that is kept."""

    iteration: int
    """The iteration after which it was saved."""
    time: float
    """When it was saved, in seconds since 1970."""
    score: float
    """The metric's value for its weights; NaN if there is none."""
    path: str
    """Its folder or URL, for ``etude.load``."""
    updates: int = 0
    """Gradient steps over the lifetime when it was saved."""


class Checkpoints:
    """Keeps the latest and the best checkpoints of a run in ``folder``, as ``checkpoint-000123`` by iteration.

    The folders themselves are the only record of what is kept. A process that is killed between saving and removing
    leaves either one checkpoint too many, which the next save removes, or a partly removed one, which is ignored and
    removed at the next start. Only one process at a time may save to a folder.

    Args:
        folder: A path or URL.
        keep_last: Number of latest checkpoints to keep, at least 1; None keeps all.
        keep_best: Number of checkpoints with the best scores to keep in addition, at least 0.
        metric: The score: a field of `Result`, such as ``return_mean``, or an entry of a field, such as
            ``losses/policy``. A checkpoint whose result lacks it, or has NaN, is never among the best. If scores are
            equal, the newer checkpoint ranks higher. If evaluations give the score (``evaluation/return_mean``;
            offline, all figures of episodes), only checkpoints of evaluated weights have one. If evaluations run in
            parallel with training, the score comes later, and the checkpoint is kept until then.
        best_is: Whether large or small scores are good.

    Raises:
        SettingsError: a setting is out of range, or `Result` has no such field.
        CheckpointError: a checkpoint in ``folder`` is broken.
    """

    def __init__(
        self,
        folder: Where,
        *,
        keep_last: int | None = 3,
        keep_best: int = 1,
        metric: str = "return_mean",
        best_is: Literal["max", "min"] = "max",
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise SettingsError(f"`keep_last` is {keep_last}, but must be at least 1, or None to keep all.")
        if keep_best < 0:
            raise SettingsError(f"`keep_best` is {keep_best}, but must be at least 0.")
        if best_is not in ("max", "min"):
            raise SettingsError(f"`best_is` is {best_is!r}, but must be 'max' or 'min'.")
        check_metric(metric)
        self.keep_last, self.keep_best = keep_last, keep_best
        self.folder = str(absolute_path(folder_at(folder))) if not is_url(os.fspath(folder)) else os.fspath(folder)
        self.metric, self.best_is = metric, best_is
        self._has_warned = False
        self._kept = {kept.iteration: kept for kept in self._found()}

    def __repr__(self) -> str:
        return short(self, redacted(self.folder), f"{len(self._kept)} kept", **self.rule())

    def _found(self) -> list[KeptCheckpoint]:
        """Read the checkpoints in ``folder``; those without a manifest were left by a killed process, and are
        removed."""
        found = []
        for name in names_in(folder_at(self.folder)):
            if match := _NAME.fullmatch(name):
                path = inside(self.folder, name)
                if not has_manifest(path):
                    remove_tree(path)
                    continue
                meta = load_meta(path)
                meta = meta if isinstance(meta, dict) else {}
                result, saved = meta.get("result"), meta.get("time")
                evaluated = meta.get(_EVALUATED, result)  # a later result, if it ran in parallel
                if not (isinstance(result, dict) and isinstance(saved, int | float)):
                    raise CheckpointError(
                        f"{redacted(path)} was saved without a result: take it out of {redacted(self.folder)}."
                    )
                updates = int(result.get("updates", 0))
                score = self._score(evaluated if isinstance(evaluated, dict) else result, updates)
                found.append(KeptCheckpoint(int(match[1]), saved, score, path, updates))
        return found

    def save(self, algorithm: Any, result: Result) -> str:
        """Save a checkpoint of ``algorithm``, remove those no longer kept, and return its path.

        Args:
            algorithm: An `Algorithm`, saved in its current state; a checkpoint of the same iteration is replaced.
            result: The result of its newest iteration.

        Raises:
            CheckpointError: the checkpoint can't be written, or another can't be removed.
        """
        path = self._path(result)
        algorithm.save(path, result=result)
        return self._keep(path, result)

    def add(self, checkpoint: Where, result: Result) -> str:
        """Keep a copy of a checkpoint that was saved elsewhere, as `save` does, and return its path.

        On the same local disk its data is hard-linked, not copied, and is freed when both are removed.

        Args:
            checkpoint: Its folder or URL.
            result: The result that it was saved with.

        Raises:
            CheckpointError: there is no checkpoint, the copy can't be written, or another can't be removed.
        """
        path = self._path(result)
        copy_tree(checkpoint, path)
        return self._keep(path, result)

    def would_be_best(self, result: Result) -> bool:
        """Whether a checkpoint with this result would be among the best, or might be, because an evaluation of its
        weights is running."""
        self.add_late_evaluation(result)
        if self.keep_best and self._will_be_scored(result, result.updates):
            return True
        score = self._score(vars(result), result.updates)
        if not self.keep_best or math.isnan(score):
            return False
        best = self.ranked()[: self.keep_best]
        sign = 1 if self.best_is == "max" else -1
        return len(best) < self.keep_best or sign * score > sign * best[-1].score

    def rule(self) -> dict[str, Any]:
        """Which checkpoints are kept, as plain data."""
        return {name: getattr(self, name) for name in ("keep_last", "keep_best", "metric", "best_is")}

    def _path(self, result: Result) -> str:
        return inside(self.folder, f"checkpoint-{result.iteration:06d}")

    def _keep(self, path: str, result: Result) -> str:
        """Register the checkpoint at ``path``, remove those no longer kept, and return ``path``."""
        score, is_evaluated = self._score(vars(result), result.updates), self._is_evaluated(vars(result))
        if self.keep_best and math.isnan(score) and "/" in self.metric and not (is_evaluated or self._has_warned):
            self._has_warned = True
            warnings.warn(
                f"the result has no `{self.metric}`, so {redacted(path)} can't be among the best. It has "
                f"{', '.join(f'losses/{name}' for name in result.losses)} and "
                f"{', '.join(f'metrics/{name}' for name in result.metrics)}.",
                stacklevel=3,
            )
        self._kept[result.iteration] = KeptCheckpoint(result.iteration, time.time(), score, path, result.updates)
        self.add_late_evaluation(result)
        newest = self.all()[0 if self.keep_last is None else -self.keep_last :]
        stays = {*newest, *self.ranked()[: self.keep_best]}
        for kept in set(self._kept.values()) - stays:
            if not (self.keep_best and self._will_be_scored(result, kept.updates)):
                remove_tree(kept.path)
                del self._kept[kept.iteration]
        return path

    def _score(self, result: Mapping[str, Any], updates: int) -> float:
        """The score of the weights after ``updates`` gradient steps; NaN if the metric comes from an evaluation of
        other weights."""
        if self._is_evaluated(result) and result["evaluation"].get("updates", updates) != updates:
            return math.nan
        return score_of(result, self.metric)

    def _is_evaluated(self, result: Mapping[str, Any]) -> bool:
        """Whether the metric is a figure of evaluations."""
        is_offline = not result.get("env_steps")
        return isinstance(result.get("evaluation"), dict) and (
            self.metric.startswith("evaluation/") or (is_offline and self.metric.startswith(_OF_EPISODES))
        )

    def _will_be_scored(self, result: Result, updates: int) -> bool:
        """Whether an evaluation of the weights after ``updates`` gradient steps is running."""
        return result.evaluating == updates and self._is_evaluated(vars(result))

    def add_late_evaluation(self, result: Result) -> None:
        """Give a checkpoint the score of an evaluation that ran in parallel with training and has ended."""
        updates = int(result.evaluation.get("updates", result.updates))
        score = self._score(vars(result), updates)
        if updates == result.updates or not self._is_evaluated(vars(result)) or math.isnan(score):
            return
        of_these = [kept for kept in self.all() if kept.updates == updates]
        if of_these and math.isnan((kept := of_these[-1]).score):
            meta = load_meta(kept.path)
            assert isinstance(meta, dict)
            replace_meta(kept.path, {**meta, _EVALUATED: result.to_dict()})
            self._kept[kept.iteration] = kept._replace(score=score)

    def all(self) -> list[KeptCheckpoint]:
        """All checkpoints in the order of saving, which need not be that of iterations: a run may resume from an older
        one."""
        return sorted(self._kept.values(), key=lambda kept: (kept.time, kept.iteration))

    def ranked(self) -> list[KeptCheckpoint]:
        """The checkpoints with a score, the best first."""
        sign = 1 if self.best_is == "max" else -1
        scored = [kept for kept in self._kept.values() if not math.isnan(kept.score)]
        return sorted(scored, key=lambda kept: (sign * kept.score, kept.time), reverse=True)

    def best(self) -> str | None:
        """The path of the checkpoint with the best score; None if none has a score."""
        ranked = self.ranked()
        return ranked[0].path if ranked else None

    def latest(self) -> str | None:
        """The path of the newest checkpoint; None if there are none."""
        return self.all()[-1].path if self._kept else None


def check_metric(metric: str) -> None:
    """Raise a SettingsError if `Result` has no such field."""
    fields = [field.name for field in dataclasses.fields(Result)]
    if metric.partition("/")[0] not in fields:
        near = nearest(metric, fields)
        hint = f"Nearest: `{near}`." if near else f"There are {', '.join(fields)}."
        raise SettingsError(f"`metric` is {metric!r}, but results have no such field. {hint}")


def score_of(result: Mapping[str, Any], metric: str) -> float:
    """The score in a result, given as a dict: a field, or an entry of one; NaN if there is none."""
    if isinstance(found := result.get(metric), int | float):
        return float(found)
    for name, entries in result.items():
        if isinstance(entries, Mapping) and metric.startswith(f"{name}/"):
            return score_of(entries, metric.removeprefix(f"{name}/"))
    return math.nan
