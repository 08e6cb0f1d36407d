# SPDX-License-Identifier: Apache-2.0
"""``etude data merge|split|filter|sample``: new recordings out of others. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from etude.cli import bad_data, files
from etude.cli.bad_data import BadDataOptions
from etude.cli.streams import show
from etude.settings import settings

if TYPE_CHECKING:
    from etude.recordings import Recording
    from etude.recordings.edited import Edited


@settings
class MergeOptions(BadDataOptions):
    """What `merge` takes."""

    paths: tuple[str, ...]
    """The recordings, in order."""

    to: str
    """The folder of the new recording."""

    json: bool = False
    """Print one JSON object on standard output."""


@settings
class SplitOptions(BadDataOptions):
    """What `split` takes."""

    path: str
    """The recording: a folder, or one file."""

    to_train: str
    """The folder of the new recording to learn from."""

    to_validation: str
    """The folder of the new recording to measure on."""

    fraction: float = 0.9
    """How many of the episodes are to learn from, between 0 and 1."""

    seed: int = 0
    """Which episodes these are, at least 0."""

    json: bool = False
    """Print one JSON object on standard output."""


@settings
class FilterOptions(BadDataOptions):
    """What `filter` takes."""

    path: str
    """The recording: a folder, or one file."""

    to: str
    """The folder of the new recording."""

    min_return: float | None = None
    """Keep episodes whose rewards, over all agents, sum to at least this."""

    max_return: float | None = None
    """Keep episodes whose rewards sum to at most this."""

    min_length: int | None = None
    """Keep episodes of at least so many steps, of the agent that has most."""

    max_length: int | None = None
    """Keep episodes of at most so many steps."""

    where: str | None = None
    """Keep episodes for which an expression holds: `done and mean(reward) > 0.5 and max(abs(obs[0])) < 2`. Figures are
    return, length, steps, agents, terminated, truncated, done and episode_id; and sum, mean, min, max, any and all over
    columns."""

    json: bool = False
    """Print one JSON object on standard output."""


@settings
class SampleOptions(BadDataOptions):
    """What `sample` takes."""

    path: str
    """The recording: a folder, or one file."""

    to: str
    """The folder of the new recording."""

    episodes: int | None = None
    """How many whole episodes to draw."""

    steps: int | None = None
    """Draw whole episodes until they have so many steps together."""

    seed: int = 0
    """Which are drawn, at least 0."""

    json: bool = False
    """Print one JSON object on standard output."""


def merge(options: MergeOptions) -> int:
    """Make one recording of several."""
    from etude.recordings import merge_recordings

    recordings = [bad_data.opened(path, options.on_bad) for path in options.paths]
    return _told(merge_recordings(recordings, options.to), recordings, options)


def split(options: SplitOptions) -> int:
    """Make two recordings of one."""
    from etude.recordings import split_recording

    recording, own = bad_data.opened(options.path, options.on_bad), options
    done = split_recording(recording, own.to_train, own.to_validation, fraction=own.fraction, seed=own.seed)
    return _told(done, [recording], options)


def filter_episodes(options: FilterOptions) -> int:
    """Write some of the episodes anew, by what they are."""
    from etude.recordings import filter_recording

    recording = bad_data.opened(options.path, options.on_bad)
    done = filter_recording(
        recording,
        options.to,
        min_return=options.min_return,
        max_return=options.max_return,
        min_length=options.min_length,
        max_length=options.max_length,
        where=options.where,
    )
    return _told(done, [recording], options)


def sample(options: SampleOptions) -> int:
    """Write some of the episodes anew, drawn at random."""
    from etude.recordings import sample_recording

    recording, own = bad_data.opened(options.path, options.on_bad), options
    done = sample_recording(recording, own.to, episodes=own.episodes, steps=own.steps, seed=own.seed)
    return _told(done, [recording], options)


def _told(
    done: "Edited",
    recordings: list["Recording"],
    options: MergeOptions | SplitOptions | FilterOptions | SampleOptions,
) -> int:
    if options.json:
        files.print_json(done.to_json() | bad_data.as_json(recordings))
    else:
        show(f"{done}")
        bad_data.say(recordings)
    return 0


COMMANDS: Mapping[str, tuple[Callable[[Any], int], str]] = {
    "merge": (merge, "Make one recording of several, as A B ... --to C; episodes that share an id stay apart."),
    "split": (split, "Deal the episodes out, at random, to a recording to learn from and one to measure on."),
    "filter": (filter_episodes, "Write the episodes that are asked for, as A B: by return, length or an expression."),
    "sample": (sample, "Write some episodes, as A B, drawn at random."),
}

TAKES: Mapping[str, type] = {
    "merge": MergeOptions,
    "split": SplitOptions,
    "filter": FilterOptions,
    "sample": SampleOptions,
}
