# SPDX-License-Identifier: Apache-2.0
"""Connectors around a replay: which are applied to what is put in, and which to what is drawn."""

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Pipeline
from etude.connectors.pipeline import overrides
from etude.errors import SettingsError
from etude.experience import Experience, Segments, returns
from etude.experience.experience import offsets_of


def split(connectors: Pipeline) -> tuple[Pipeline, Pipeline]:
    """The connectors before the first that learns from experience, and that one with those behind it.

    Raises:
        SettingsError: one of the latter needs earlier steps, which a single one from a replay does not have.
    """
    every = connectors.connectors
    first = next((i for i, connector in enumerate(every) if overrides(connector, "update")), len(every))
    for connector in every[first:]:
        if connector.context:
            raise SettingsError(
                f"`connectors`: {connector.name} stands behind {every[first].name}, which changes while it learns: so "
                f"both are applied to single steps from the replay, but {connector.name} needs those before them. Put "
                "it in front."
            )
    return Pipeline(every[:first]), Pipeline(every[first:])


def looked_ahead(exp: Experience, n_step: int, gamma: float) -> Experience:
    """Sequences from a replay with what a loss needs of the ``n_step`` steps that follow each: see `Replay.sample`.

    ``reward``, ``terminated`` and ``discount`` are as there. In place of ``next_obs`` there is ``steps_ahead``, int64:
    so many steps later it is observed, at most after the sequence, as what a memory makes of it depends on those
    before it. A last step after which nothing was seen, though it did not terminate, is left out.
    """
    own = exp.segments
    blind = ~own.has_final_obs & ~own.terminated
    if blind.any():
        exp = _without_last(exp, blind)
    sums = returns.n_step(exp.steps[col.REWARD].astype(np.float32), exp.offsets, n_step, gamma)
    terminated = exp.at_ends(exp.segments.terminated)[sums.last]
    discount = np.where(terminated, 0.0, np.power(gamma, sums.steps)).astype(np.float32)
    ahead = {col.TERMINATED: terminated, "discount": discount, col.STEPS_AHEAD: sums.steps}
    return exp.with_steps(**{col.REWARD: sums.reward}, **ahead)


def _without_last(exp: Experience, which: NDArray[np.bool_]) -> Experience:
    """Without the last step of some segments: what was observed in it is what follows those before it."""
    last = exp.offsets[1:] - 1
    rows = np.ones(exp.num_steps, bool)
    rows[last[which]] = False
    final_obs = {}
    for name, final in exp.final_obs.items():
        final_obs[name] = np.where(which.reshape(-1, *[1] * (final.ndim - 1)), exp.steps[name][last], final)
    lengths = exp.lengths - which
    steps = {name: column[rows] for name, column in exp.steps.items()}
    segments = exp.segments.replace(
        has_final_obs=exp.segments.has_final_obs | which,
        truncated=exp.segments.truncated & ~which,
        lookback=np.minimum(exp.segments.lookback, lengths),
    )
    some = lengths > 0
    return Experience(steps, offsets_of(lengths[some]), segments[some], {n: f[some] for n, f in final_obs.items()})


def seen(connectors: Pipeline, batch: Columns, n_step: int) -> Columns:
    """A batch from a replay as the module sees it: each row is taken for a segment of one step.

    Raises:
        SettingsError: rewards are changed that are sums already.
    """
    size = len(batch[col.REWARD])
    following = col.renamed(batch, col.NEXT_OBS, col.OBS)
    steps = {name: column for name, column in batch.items() if not col.is_under(name, col.NEXT_OBS)}
    exp = Experience(steps, np.arange(size + 1), Segments.of(size, episode_id=[""] * size), following)
    exp = connectors.offline(exp)
    if n_step > 1 and exp.steps[col.REWARD] is not batch[col.REWARD]:
        names = [connector.name for connector in connectors.connectors]
        raise SettingsError(
            f"`connectors`: of {names} one changes rewards. {names[0]} changes while it learns, so that all "
            f"are applied to sums of {n_step} rewards: put what changes rewards in front."
        )
    return {**exp.numpy().steps, **col.renamed(exp.numpy().final_obs, col.OBS, col.NEXT_OBS)}
