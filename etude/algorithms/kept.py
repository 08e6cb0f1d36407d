# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: keeps the latest and the best checkpoints of a run."""

import dataclasses
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from etude.algorithms.results import Result
from etude.checkpoints import Where, copy_tree, folder_at, has_manifest, load_meta, remove_tree
from etude.display import short
from etude.errors import CheckpointError, SettingsError
from etude.files import names_in
from etude.settings import nearest
from etude.urls import inside, redacted

_log = logging.getLogger("etude.algorithms")


_NAME = re.compile(r"checkpoint-(\d{6,})")


class Saved(Protocol):
    """What can be saved, such as an `Algorithm`."""

    def save(self, path: Where, *, result: Result | None = None) -> None:
        """Write a checkpoint."""


class KeptCheckpoint(NamedTuple):
    """A checkpoint that is kept."""

    iteration: int
    """The iteration after which it was saved."""
    time: float
    """When it was saved, in seconds since 1970."""
    score: float
    """The metric's value in the result that was saved with it; NaN if there is none."""
    path: str
    """Its folder or URL, for ``etude.load``."""


class Checkpoints:
    """Keeps the latest and the best checkpoints of a run in ``folder``, as ``checkpoint-000123`` by iteration.

    The folders themselves are the only record of what is kept. A process that is killed between saving and removing
    leaves either one checkpoint too many, which the next save removes, or a partly removed one, which is ignored and
    removed at the next start. Only one process at a time may save to a folder.

    Args:
        folder: A path or URL.
        keep_last: Number of latest checkpoints to keep, at least 1; None keeps all.
        keep_best: Number of checkpoints with the best scores to keep beside them, at least 0.
        metric: The field of `Result` that is the score, such as ``return_mean``, or an entry of one, such as
            ``losses/policy``. A checkpoint whose result lacks it, or has NaN, is never among the best; of equal ones,
            the newer is better.
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
        self.folder, self.keep_last, self.keep_best = os.fspath(folder), keep_last, keep_best
        self.metric, self.best_is = metric, best_is
        self._has_warned = False
        self._kept = {kept.iteration: kept for kept in self._found()}

    def __repr__(self) -> str:
        rule = {"keep_last": self.keep_last, "keep_best": self.keep_best, "metric": self.metric}
        return short(self, redacted(self.folder), f"{len(self._kept)} kept", **rule)

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
                if not (isinstance(result, dict) and isinstance(saved, int | float)):
                    raise CheckpointError(
                        f"{redacted(path)} was saved without a result: take it out of {redacted(self.folder)}."
                    )
                found.append(KeptCheckpoint(int(match[1]), saved, score_of(result, self.metric), path))
        return found

    def save(self, algorithm: Saved, result: Result) -> str:
        """Save a checkpoint of ``algorithm``, remove those no longer kept, and return its path.

        Args:
            algorithm: Saved in its present state; a checkpoint of the same iteration is replaced.
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

    def _path(self, result: Result) -> str:
        return inside(self.folder, f"checkpoint-{result.iteration:06d}")

    def _keep(self, path: str, result: Result) -> str:
        """Register the checkpoint at ``path``, remove those no longer kept, and return ``path``."""
        score = score_of(result.to_dict(), self.metric)
        if self.keep_best and math.isnan(score) and "/" in self.metric and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the result has no `{self.metric}`, so {redacted(path)} can't be among the best. It has "
                f"{', '.join(f'losses/{name}' for name in result.losses)} and "
                f"{', '.join(f'metrics/{name}' for name in result.metrics)}.",
                stacklevel=3,
            )
        self._kept[result.iteration] = KeptCheckpoint(result.iteration, time.time(), score, path)
        newest = self.all()[0 if self.keep_last is None else -self.keep_last :]
        for kept in set(self._kept.values()) - {*newest, *self.ranked()[: self.keep_best]}:
            remove_tree(kept.path)
            del self._kept[kept.iteration]
        return path

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
        """The path of the one with the best score; None if none has a score."""
        ranked = self.ranked()
        return ranked[0].path if ranked else None

    def latest(self) -> str | None:
        """The path of the newest; None if there are none."""
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
