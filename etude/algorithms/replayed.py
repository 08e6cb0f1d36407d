# SPDX-License-Identifier: Apache-2.0
"""Connectors around a replay: which are applied to what is put in, and which to what is drawn."""

import numpy as np

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Pipeline
from etude.connectors.pipeline import overrides
from etude.errors import SettingsError
from etude.experience import Experience, Segments


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
