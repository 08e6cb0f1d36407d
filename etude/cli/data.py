# SPDX-License-Identifier: Apache-2.0
"""``etude data``: look into recordings, and make others of them. Imports no torch."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from etude.cli import bad_data, data_cache, data_editing, files, flags
from etude.cli.streams import show
from etude.errors import SettingsError, printable
from etude.settings import choice, settings

PROBLEMS = 1


@settings
class DataOptions:
    """What `validate` takes."""

    path: tuple[str, ...]
    """The recording: a folder, or one file; several are read as one."""

    json: bool = False
    """Print one JSON object on standard output."""


@settings
class InfoOptions(DataOptions, bad_data.BadDataOptions):
    """What `info` takes."""


@settings
class ConvertOptions(bad_data.BadDataOptions):
    """What `convert` takes."""

    path: str
    """The recording: a folder, or one file."""

    json: bool = False
    """Print one JSON object on standard output."""

    to: str
    """The folder of the new recording."""

    format: str = "etude"
    """What to write: `etude`; `rllib-episodes` or `rllib-table`, which RLlib reads; `minari`; or `lerobot`."""

    fps: int | None = None
    """Steps a second, at least 1, for `lerobot` alone; left out, that of the LeRobot dataset converted, or 30."""


def main(args: list[str]) -> int:
    """Run ``etude data info|validate|convert|merge|...``."""
    if not args or args[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items())
        sys.stdout.write(f"usage: etude data COMMAND PATH [--json]\n\ncommands:\n{listed}\n")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        raise SettingsError(f"etude data has no command `{name}`. {choice(name, COMMANDS)}")
    command, about = COMMANDS[name]
    if name in ("convert", "filter", "sample") and len(rest) > 1 and not rest[1].startswith("-"):
        rest = [rest[0], "--to", *rest[1:]]
    takes = TAKES.get(name, DataOptions)
    positional = {"merge": "paths", "cache": None}.get(name, "path")
    return command(flags.options(takes, rest, prog=f"etude data {name}", about=about, positional=positional))


def info(options: InfoOptions) -> int:
    """Print what the recording holds."""
    with bad_data.remedied(options.path, options.on_bad):
        recording = bad_data.opened(options.path, options.on_bad)
        found = recording.info()
    if options.json:
        files.print_json(found | bad_data.as_json([recording]))
    else:
        show("\n".join(_described(found, recording.obs_space, recording.action_space)))
        bad_data.say([recording])
    return 0


def validate(options: DataOptions) -> int:
    """Print every problem of the recording, and every warning; the exit code says whether there was any."""
    from etude.recordings import validate as check

    report = check(options.path if len(options.path) > 1 else options.path[0])
    if options.json:
        files.print_json(report.to_json())
    else:
        show(str(report))
    return PROBLEMS if report.problems else 0


def convert(options: ConvertOptions) -> int:
    """Write the recording anew, in Etude's format or another tool's."""
    from etude.recordings import convert as write

    recording = bad_data.opened(options.path, options.on_bad)
    written = write(recording, options.to, options.format, fps=options.fps)
    found = {"path": str(written.path), "steps": written.num_steps, "episodes": written.num_episodes}
    if options.json:
        bad = bad_data.as_json([recording])
        files.print_json({**found, "format": written.format, "notes": list(written.notes), **bad})
    else:
        show(f"{found['path']}: {found['steps']:,} steps of {found['episodes']:,} episodes.")
        for note in written.notes:
            show(f"  {note}")
        bad_data.say([recording])
    return 0


COMMANDS: Mapping[str, tuple[Callable[[Any], int], str]] = {
    "info": (info, "What a recording holds, counted over every row."),
    "convert": (convert, "Write a recording of any kind that can be read, as A B, in Etude's format or another."),
    "validate": (validate, "Look at every row, and name every problem; exit code 1 if there is one, or a warning."),
    **data_editing.COMMANDS,
    "cache": (data_cache.show_cache, "What is kept of other tools' files that were converted; --clear removes it."),
}

TAKES: Mapping[str, type] = {
    "info": InfoOptions,
    "convert": ConvertOptions,
    **data_editing.TAKES,
    "cache": data_cache.CacheOptions,
}
"""What commands take that take more than `DataOptions`."""


def _version(found: Mapping[str, Any]) -> str:
    return "" if found["version"] is None else f", version {found['version']}"


def _shown(name: str, value: Any) -> str:
    """A line of the recording's meta; of what connectors have learned, that it is there."""
    return "learned statistics of the connectors" if name == "filter" else str(value)


def _described(found: Mapping[str, Any], obs_space: Any, action_space: Any) -> list[str]:
    steps = f"{found['env_steps']:,}"
    if found["agent_steps"] != found["env_steps"]:
        steps += f" of the env, {found['agent_steps']:,} of {len(found['agents'])} agents"
    ends = f"{found['terminated']:,} terminated, {found['truncated']:,} truncated, {found['unfinished']:,} unfinished"
    returns = "unknown"
    if found["return_mean"] is not None:
        returns = f"mean {found['return_mean']:,.1f} ({found['return_min']:,.5g} … {found['return_max']:,.5g})"
    rows = {
        "recording": f"{found['path']} ({found['format']}{_version(found)})",
        "env": found["env"] or "unknown",
        "episodes": f"{found['episodes']:,}: {ends}",
        "steps": steps,
        "return": returns,
        "columns": " ".join(found["columns"]),
        "obs": str(obs_space),
        "action": str(action_space),
        "files": f"{found['files']:,}, {found['bytes'] / 1e6:,.2f} MB",
        **{name: _shown(name, value) for name, value in found["meta"].items() if value not in (None, [], "")},
    }
    return [printable(f"{name:<11}{text}") for name, text in rows.items()]
