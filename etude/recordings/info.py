# SPDX-License-Identifier: Apache-2.0
"""What a recording holds, counted over every row in bounded memory."""

from typing import TYPE_CHECKING, Any

import numpy as np

from etude import columns as col
from etude.experience import Experience

if TYPE_CHECKING:
    from etude.recordings.recording import Recording


class _Tally:
    """Running counts of one pass."""

    def __init__(self) -> None:
        self.episodes: dict[str, int] = {}
        self.agents: set[str | None] = set()
        self.returns: dict[tuple[str, str | None], float] = {}
        self.done: dict[tuple[str, str | None], tuple[bool, bool]] = {}
        self.agent_steps = 0
        self.sums = {col.OBS: 0.0, col.FINAL_OBS: 0.0, col.ACTION: 0.0}
        self._spans: list[np.ndarray] = []

    def add(self, exp: Experience) -> None:
        """Count one piece."""
        trained, segments = exp.trained(), exp.segments
        keys = list(zip(segments.episode_id.tolist(), segments.agent_id.tolist(), strict=True))
        codes = np.array([self.episodes.setdefault(episode, len(self.episodes)) for episode, _ in keys], np.int64)
        self.agents.update(agent for _, agent in keys)
        self.agent_steps += int(trained.sum())
        if col.REWARD in exp.steps:
            for key, value in zip(keys, exp.returns().tolist(), strict=True):
                self.returns[key] = self.returns.get(key, 0.0) + value
        for i in np.flatnonzero(segments.done):
            self.done[keys[i]] = (bool(segments.terminated[i]), bool(segments.truncated[i]))
        for root in (col.OBS, col.ACTION):
            for values in col.subtree(exp.steps, root).values():
                self.sums[root] += _sum(values if trained.all() else values[trained])
        ends = segments.done & segments.has_final_obs
        for values in exp.final_obs.values():
            self.sums[col.FINAL_OBS] += _sum(values[ends])
        self._add_spans(exp, codes, trained)

    def _add_spans(self, exp: Experience, codes: np.ndarray, trained: np.ndarray) -> None:
        """Spans of the env's clock: ``[episode, first, last + 1]``, one for each segment."""
        if col.ENV_T in exp.steps:
            clock = np.asarray(exp.steps[col.ENV_T])[trained]
            episode = codes[exp.segment_of_step()][trained]
            self._spans.append(np.stack([episode, clock, clock + 1], axis=1).astype(np.int64))
        else:
            first = exp.segments.t_start + exp.segments.lookback
            stop = exp.segments.t_start + exp.lengths
            self._spans.append(np.stack([codes, first, stop], axis=1)[stop > first])
        if len(self._spans) > 256:
            self._spans = [_united(np.concatenate(self._spans))]

    def env_steps(self) -> int:
        """The steps of the envs: several agents that act at one time are one step."""
        spans = _united(np.concatenate(self._spans)) if self._spans else np.zeros((0, 3), np.int64)
        return int((spans[:, 2] - spans[:, 1]).sum())


def _sum(values: Any) -> float:
    if values.dtype == object:
        return 0.0
    return float(np.asarray(values).sum(dtype=np.float64))


def _united(spans: np.ndarray) -> np.ndarray:
    """Spans of each episode with those that touch or overlap made one."""
    spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    if not len(spans):
        return spans
    # Episodes are put behind each other on one line, so that one running maximum serves all of them.
    width = int(spans[:, 2].max()) + 2
    starts, stops = spans[:, 0] * width + spans[:, 1], spans[:, 0] * width + spans[:, 2]
    reach = np.maximum.accumulate(stops)
    heads = np.flatnonzero(np.append(True, starts[1:] > reach[:-1]))
    tails = np.append(heads[1:], len(spans)) - 1
    episode = spans[heads, 0]
    return np.stack([episode, starts[heads] - episode * width, reach[tails] - episode * width], axis=1)


def info(recording: "Recording") -> dict[str, Any]:
    """What ``recording`` holds, as JSON data.

    Counts and sums are over steps that are not lookback. ``final_obs_sum`` is over the last observations of episodes
    that ended; ``return_*`` are of episodes (the sum over their agents), unfinished ones included; the sums of
    observations and actions are float64 over all numbers in them, as recorded.

    Raises:
        DataError: a file can't be decoded.
    """
    tally = _Tally()
    for exp in recording.stream():
        tally.add(exp)
    by_episode = dict.fromkeys(tally.episodes, 0.0)
    for (episode, _), value in tally.returns.items():
        by_episode[episode] += value
    returns = np.array(list(by_episode.values()) or [np.nan])
    terminated = {episode for (episode, _), (is_terminated, _) in tally.done.items() if is_terminated}
    truncated = {episode for (episode, _), (_, is_truncated) in tally.done.items() if is_truncated}
    header = recording.header.to_json()
    return {
        "path": str(recording.path),
        "format": recording.format,
        "version": header["version"] if recording.format == header["format"] else None,
        "env": recording.env,
        "episodes": len(tally.episodes),
        "agents": sorted(agent for agent in tally.agents if agent is not None),
        "env_steps": tally.env_steps(),
        "agent_steps": tally.agent_steps,
        "terminated": len(terminated),
        "truncated": len(truncated),
        "unfinished": len(tally.episodes) - len(terminated | truncated),
        "return_total": float(np.nansum(returns)),
        "return_mean": _or_none(returns.mean()),
        "return_min": _or_none(returns.min()),
        "return_max": _or_none(returns.max()),
        "obs_sum": tally.sums[col.OBS],
        "final_obs_sum": tally.sums[col.FINAL_OBS],
        "action_sum": tally.sums[col.ACTION],
        "columns": recording.columns,
        "spaces": header["spaces"],
        "meta": dict(recording.meta),
        "files": len(recording.files),
        "bytes": sum(path.stat().st_size for path in recording.files),
    }


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
