# SPDX-License-Identifier: Apache-2.0
"""``etude evaluate`` and ``etude record``: let a trained run play whole episodes."""

import sys
from typing import TYPE_CHECKING, Any

from etude.cli import files, flags, live
from etude.errors import SettingsError
from etude.settings import settings

if TYPE_CHECKING:
    from etude.algorithms import Algorithm, Evaluation


@settings
class PlayOptions:
    """What both commands take."""

    run: str
    """The folder of the run, with its checkpoint."""

    env: str | None = None
    """Where to play, a registered id or `module:factory`; where it was trained if none."""

    seed: int | None = None
    """Of envs and actions; none draws one from the system."""

    explore: bool = False
    """Draw actions from the policy; else take the most likely ones."""

    json: bool = False
    """Print one JSON object on standard output."""

    episodes: int = 20
    """How many whole episodes, at least 1."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise SettingsError(f"`episodes` is {self.episodes}, but must be at least 1.")


@settings
class RecordOptions(PlayOptions):
    """What `etude record` takes."""

    to: str
    """The folder of the recording."""

    append: bool = False
    """Add to the recording that is there; else one that is there is an error."""

    quiet: bool = False
    """Print nothing but errors."""


def evaluate(args: list[str]) -> int:
    """Run ``etude evaluate RUN ...``."""
    about = "Let a trained run play whole episodes, and report their returns."
    options = flags.options(PlayOptions, args, prog="etude evaluate", about=about, positional="run")
    algorithm = loaded(options)
    try:
        found = algorithm.evaluate(options.episodes, env=options.env, seed=options.seed, explore=options.explore)
    finally:
        algorithm.close()
    if options.json:
        files.print_json(found.to_dict() | {"run": options.run})
    else:
        sys.stdout.write(summary(found) + "\n")
    return 0


def record(args: list[str]) -> int:
    """Run ``etude record RUN --to DIR ...``."""
    about = "Let a trained run play whole episodes, and record them as Parquet."
    options = flags.options(RecordOptions, args, prog="etude record", about=about, positional="run")
    algorithm = loaded(options)
    try:
        found = algorithm.record(
            options.to,
            options.episodes,
            env=options.env,
            seed=options.seed,
            explore=options.explore,
            append=options.append,
        )
    finally:
        algorithm.close()
    if options.json:
        files.print_json(found.to_dict() | {"run": options.run, "to": options.to})
    elif not options.quiet:
        sys.stdout.write(f"{summary(found)}\nrecorded to {options.to}\n")
    return 0


def loaded(options: PlayOptions) -> "Algorithm[Any]":
    """The run, sure to have somewhere to play."""
    from etude.algorithms import load

    algorithm = load(options.run)
    if options.env is None and algorithm.config.env is None:
        algorithm.close()
        raise SettingsError(f"{options.run} was trained without an env: say where to play with --env.")
    return algorithm


def summary(found: "Evaluation") -> str:
    """An evaluation in words."""
    whole = (
        f"{found.episodes} episodes, {found.env_steps:,} steps: mean return {found.return_mean:,.1f} "
        f"(std {found.return_std:,.1f}, {found.return_min:,.5g} … {found.return_max:,.5g}), "
        f"mean length {found.length_mean:,.1f}"
    )
    lines = [whole, *(f"mean returns of {kind}: {returns}" for kind, returns in live.parts(found).items())]
    if found.faulty_episodes:
        lines.append(f"{found.faulty_episodes:,} more episodes broke off by an error of the env")
    return "\n".join(lines)
