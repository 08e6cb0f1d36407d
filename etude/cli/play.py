# SPDX-License-Identifier: Apache-2.0
"""``etude evaluate`` and ``etude record``: let a trained run play whole episodes, or see what it would earn."""

from typing import TYPE_CHECKING, Any, Literal

from etude.cli import files, flags, live, words
from etude.cli.bad_data import OnBad
from etude.cli.streams import show
from etude.errors import SettingsError
from etude.settings import defaults, settings
from etude.urls import redacted

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

    max_steps: int | None = None
    """Steps after which an episode is truncated, at least 1; none: as in training."""

    trust: bool = False
    """Import and call whatever the checkpoint names: this runs code from the file."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise SettingsError(f"`episodes` is {self.episodes}, but must be at least 1.")
        if self.max_steps is not None and self.max_steps < 1:
            raise SettingsError(f"`max_steps` is {self.max_steps}, but must be at least 1, or none.")


@settings
class EvaluateOptions(PlayOptions):
    """What `etude evaluate` takes. What comes after `on` goes with it alone."""

    on: str | None = None
    """A recording of held-out episodes: estimate from them what the policy would earn, and play nothing."""

    methods: str | None = None
    """Estimators, with commas between: is, wis, pdis, wpdis, dm, dr, wdr and fqe; none is all of them. Those from dm on
    fit action values, which takes most of the time."""

    gamma: float = 0.99
    """Discount of rewards, 0 to 1."""

    confidence: float = 0.95
    """Of the intervals, between 0 and 1."""

    greedy: bool = False
    """Estimate what the most likely actions would earn; else what drawn ones would."""

    behaviour: Literal["recorded", "fit"] = "recorded"
    """Where the probabilities of the policy that played are from: what was recorded, or a fit to its actions."""

    on_bad: OnBad = "strict"
    """What happens to bad data, such as NaN or steps that are there twice: an error, or it is mended where that needs
    no invention, or left out; a note says what was."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("methods", "gamma", "confidence", "greedy", "behaviour", "on_bad") if self.on is None else ():
            if getattr(self, name) != defaults(EvaluateOptions)[name]:
                raise SettingsError(
                    f"`{name}` is for estimates from a recording, but without `on` the policy plays: give the "
                    f"recording with --on, or leave `{name}` out."
                )
        for name in ("env", "explore", "episodes", "max_steps") if self.on is not None else ():
            if getattr(self, name) != defaults(EvaluateOptions)[name]:
                raise SettingsError(
                    f"`{name}` is for playing, but with `on` nothing is played: leave one of them out. The policy "
                    "draws its actions there, unless it is `greedy`."
                )


@settings
class RecordOptions(PlayOptions):
    """What `etude record` takes."""

    to: str
    """The folder of the recording."""

    append: bool = False
    """Add to the recording that is there; else one that is there is an error."""

    compression: str | None = None
    """A codec for all columns, such as `zstd:3`, or codecs by column: `obs/camera=zstd:3,obs=lz4`. None: LZ4 for
    numbers, Zstandard for images."""

    max_rows_per_file: int = 1_048_576
    """A file holds at most this many steps, at least 1."""

    max_file_size: int = 268_435_456
    """A file is closed once it has this many bytes, at least 1."""

    quiet: bool = False
    """Print nothing but errors."""


def evaluate(args: list[str]) -> int:
    """Run ``etude evaluate RUN ...``."""
    about = (
        "Let a trained run play whole episodes, and report their returns; with --on, estimate these from episodes that "
        "another policy played."
    )
    options = flags.options(EvaluateOptions, args, prog="etude evaluate", about=about, positional="run")
    if options.on is not None:
        return evaluate_held_out(options, options.on)
    algorithm = loaded(options)
    try:
        found = algorithm.evaluate(
            options.episodes,
            env=options.env,
            seed=options.seed,
            explore=options.explore,
            max_steps=options.max_steps,
        )
    finally:
        algorithm.close()
    if options.json:
        files.print_json(found.to_dict() | {"run": redacted(options.run)})
    else:
        show(summary(found))
    return 0


def evaluate_held_out(options: EvaluateOptions, data: str) -> int:
    """Run ``etude evaluate RUN --on DATA ...``."""
    from etude.evaluation import METHODS, evaluate_each_on

    algorithm = loaded(options, plays=False)
    try:
        found = evaluate_each_on(
            algorithm,
            data,
            methods=METHODS if options.methods is None else options.methods.split(","),
            gamma=options.gamma,
            confidence=options.confidence,
            seed=options.seed or 0,
            explore=not options.greedy,
            behaviour=options.behaviour,
            on_bad=options.on_bad,
        )
    finally:
        algorithm.close()
    if options.json:
        modules = {name: result.to_dict() for name, result in found.items()}
        files.print_json({"run": redacted(options.run), "on": redacted(data), "modules": modules})
    else:
        show("\n\n".join(map(str, found.values())))
    return 0


def record(args: list[str]) -> int:
    """Run ``etude record RUN --to DIR ...``."""
    about = "Let a trained run play whole episodes, and record them as Parquet."
    options = flags.options(RecordOptions, args, prog="etude record", about=about, positional="run")
    algorithm = loaded(options)
    try:
        with flags.said_as("--append"):
            found = algorithm.record(
                options.to,
                options.episodes,
                env=options.env,
                seed=options.seed,
                explore=options.explore,
                max_steps=options.max_steps,
                append=options.append,
                compression=options.compression,
                max_rows_per_file=options.max_rows_per_file,
                max_file_size=options.max_file_size,
            )
    finally:
        algorithm.close()
    if options.json:
        files.print_json(found.to_dict() | {"run": redacted(options.run), "to": redacted(options.to)})
    elif not options.quiet:
        show(f"{summary(found)}\nrecorded to {redacted(options.to)}")
    return 0


def loaded(options: PlayOptions, *, plays: bool = True) -> "Algorithm[Any]":
    """The run, without what it needs to learn only; sure to have somewhere to play where it ``plays``."""
    from etude.algorithms import load
    from etude.checkpoints import load_meta

    if options.trust or ":" in (options.env or ""):
        words.import_from_here()
    meta = load_meta(options.run)
    saved = meta.get("config") if isinstance(meta, dict) else None
    # One process plays, wherever it was trained.
    given: dict[str, Any] = {"engine": "local", "callbacks": (), "modules_to_train": None}
    if isinstance(saved, dict) and "prelearner" in saved:
        given["prelearner"] = None
    if options.env is not None:
        given["env"] = options.env
    elif not plays and isinstance(saved, dict) and (saved.get("data") is not None or "data" not in saved):
        given["env"] = None
    algorithm = load(options.run, trust=options.trust, **given)
    if plays and algorithm.config.env is None:
        algorithm.close()
        raise SettingsError(f"{redacted(options.run)} was trained without an env: say where to play with --env.")
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
