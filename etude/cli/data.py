# SPDX-License-Identifier: Apache-2.0
"""``etude data`` and ``etude show``: inspect, check, convert and edit recordings. Imports no torch."""

import contextlib
import dataclasses
import math
import shlex
import sys
import webbrowser
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from etude import columns as col
from etude.cli import flags
from etude.cli.streams import say, show, table, tell
from etude.display import rounded
from etude.errors import DataError, SettingsError, printable
from etude.settings import IntFrom0, IntFrom1, choice, settings

if TYPE_CHECKING:
    from etude.recordings import Guess, Recording
    from etude.recordings.editing import Edited
    from etude.spaces import Space

PROBLEMS = 1
_MOST_NAMES = 6
"""Number of the most frequent names whose counts `etude data describe` prints."""


@settings
class Validate(flags.TableOptions):
    """Check every row, and list all problems; the exit code is 1 if there is a problem or a warning."""

    path: tuple[str, ...]
    """The recording: a folder or a file; several are read as one."""

    env: str | None = None
    """Env that the data is from. Data that does not state its spaces is checked against the env's."""

    json: bool = False
    """Print one JSON object on standard output."""

    def execute(self) -> int:
        """Print every problem and every warning."""
        from etude.recordings.screening import report_on

        spaces = cache(partial(_spaces_of, self.env))
        report = report_on(self.described(_one_or_many(self.path)), spaces, env=self.env)
        tell(report.to_json(), str(report), as_json=self.json)
        return PROBLEMS if report.problems else 0


@settings
class DataCommand(flags.TableOptions):
    """Options of commands that read recordings."""

    json: bool = False
    """Print one JSON object on standard output."""

    on_bad: Literal["strict", "repair", "skip"] = "strict"
    """What to do with bad data, such as NaN or duplicate steps. strict: raise an error; repair: fix it if no values
    need to be invented, and otherwise leave it out; skip: leave it out with its segment."""

    def opened(self, path: str | Sequence[str], env: str | None = None) -> "Recording":
        """Open the recording at ``path``, or several as one. If it states no spaces, it gets those of ``env``."""
        from etude.recordings import Recording

        spaces = cache(partial(_spaces_of, env))
        recording = Recording.open_with(self.described(path), self.on_bad, spaces, of_env=True)
        if env is not None:
            recording.set_env(env, spaces)
        return recording

    def tell(self, recordings: Sequence["Recording"], found: Mapping[str, Any], words: str) -> int:
        """Print a command's results, and what was bad in the data it read; return the exit code."""
        if self.json:
            met, left_out = Counter[str](), Counter[str]()
            for recording in recordings:
                met.update(recording.met)
                left_out.update(recording.left_out)
            warnings = [warning for recording in recordings for warning in recording.warnings]
            found = {**found, "bad": {"met": met, "left_out_rows": left_out}, "warnings": warnings}
        reports = [recording.left_out_report() for recording in recordings]
        tell(found, "\n".join([words, *(str(report) for report in reports if report)]), as_json=self.json)
        return 0

    def edited(self, path: str, edit: Callable[..., "Edited"], *to: str, **how: Any) -> int:
        """Apply ``edit`` to the recording at ``path``, print what was written, and return the exit code."""
        recording = self.opened(path)
        done = edit(recording, *to, **how)
        return self.tell([recording], done.to_json(), str(done))


@settings
class ReadCommand(DataCommand):
    """Options of commands that only read a recording."""

    path: tuple[str, ...]
    """The recording: a folder or a file; several are read as one."""

    def recording(self) -> "Recording":
        """Open the recording."""
        return self.opened(_one_or_many(self.path))


@settings
class Info(ReadCommand):
    """Summarise a recording, counting every row. For a table: show its columns, and guess what they are."""

    def execute(self) -> int:
        """Print the summary."""
        from etude.recordings import TableError, guess_columns

        try:
            recording = self.recording()
            found = recording.info()
        except TableError as error:
            guess = error.guess
            with contextlib.suppress(DataError):  # the error's guess is from the first of several folders only
                guess = guess_columns(_one_or_many(self.path))
            tell({"path": error.path, "table": guess.to_json()}, _of_table(self.path, guess), as_json=self.json)
            return 0
        except DataError as error:
            if self.on_bad == "strict" and "--on-bad" not in str(error):
                with contextlib.suppress(DataError):  # it may be unreadable as a whole
                    dataclasses.replace(self, on_bad="skip").recording()
                    more = "`etude data validate` lists all problems; --on-bad=skip reads the rest."
                    error = DataError(f"{str(error).rstrip('.')}. {more}")
            raise error
        return self.tell([recording], found, _described(found, recording))


@settings
class Head(ReadCommand):
    """Print the first steps, one per line."""

    rows: IntFrom1 = 10
    """Number of steps, at least 1."""

    only: tuple[str, ...] = ()
    """Columns to print; `obs` stands for all its parts. All if none are given."""

    def execute(self) -> int:
        """Print the steps."""
        from etude.viewer.views import first_rows

        recording = self.recording()
        rows = first_rows(recording, self.rows, self.only or None)
        cells = [[_cell(value) for value in row.values()] for row in rows]
        return self.tell([recording], {"rows": rows}, table([list(rows[0]), *cells] if rows else []))


@settings
class Describe(ReadCommand):
    """Print statistics of each column: count, missing and distinct values; mean, std, min and max of finite values; and
    counts of names."""

    def execute(self) -> int:
        """Print the statistics."""
        from etude.spaces import leaf_shape
        from etude.viewer import RecordingView
        from etude.viewer.figures import MAX_PARTS

        view = RecordingView(self.recording())
        found = view.describe()
        infinite = ("infinite",) if any(figures.get("infinite") for figures in found.values()) else ()
        names = ("steps", "missing", *infinite, "distinct", "mean", "std", "min", "max")
        rows = [["column", *names]]
        rows += [[name, *(_cell(figures.get(figure)) for figure in names)] for name, figures in found.items()]
        if any("counts" in figures for figures in found.values()):
            counts = [_counted(figures.get("counts", {})) for figures in found.values()]
            rows = [[*row, cell] for row, cell in zip(rows, ["counts", *counts], strict=True)]
        words, total = table(rows), view.episodes.num_steps
        if sampled := [name for name, figures in found.items() if figures.get("steps", total) < total]:
            words += f"\nof a sample of {total:,} steps: {', '.join(sampled)}"
        sizes = {n: math.prod(leaf_shape(leaf)) for n, leaf in view.recording.header.leaves().items()}
        for name, size in sizes.items():
            if size > MAX_PARTS and name not in view.images:
                words += f"\nonly the first {MAX_PARTS} of {size} numbers: {name}"
        return self.tell([view.recording], {"columns": found}, words)


@settings
class Writing(DataCommand):
    """Options of commands that make one recording from another."""

    path: str
    """The recording: a folder or a file."""

    to: str
    """The folder of the new recording; `--to` may be left out right after the path, as in A B."""


@settings
class Convert(Writing):
    """Convert any readable recording to Etude's format or another: `etude data convert A B`."""

    format: str = "etude"
    """Format to write: `etude`; `rllib-episodes` or `rllib-table`, which RLlib reads; `minari`; or `lerobot`."""

    fps: int | None = None
    """Steps per second, at least 1, for `lerobot` only. None: those of the source, if it is LeRobot's, or 30."""

    env: str | None = None
    """Env that the data is from. Data that does not state its spaces, such as a table, gets the env's."""

    def execute(self) -> int:
        """Write the new recording."""
        from etude.recordings import convert

        recording = self.opened(self.path, self.env)
        new = convert(recording, self.to, self.format, fps=self.fps)
        found = {"path": str(new.path), "steps": new.num_steps, "episodes": new.num_episodes, "format": new.format}
        words = [f"{new.path}: {new.num_steps:,} steps of {new.num_episodes:,} episodes."]
        words += [f"  {note}" for note in new.notes]
        return self.tell([recording], {**found, "notes": list(new.notes)}, "\n".join(words))


def _spaces_of(env: str | None) -> "tuple[Space | None, Space | None]":
    """The observation space and the action space of an env; None without an env."""
    if env is None:
        return None, None
    from etude.cli.options import import_from_here
    from etude.envs import make_arena

    import_from_here()
    arena = make_arena(env, 1)
    try:
        if len(arena.kinds) > 1:
            raise SettingsError(f"--env {env}: its agents have different spaces. Take each agent's data by itself.")
        return arena.kinds[0].obs_space, arena.kinds[0].action_space
    finally:
        arena.close()


@settings
class Merge(DataCommand):
    """Merge several recordings into one, as A B ... --to C; episodes that share an id are kept apart."""

    paths: tuple[str, ...]
    """The recordings, in order."""

    to: str
    """The folder of the new recording."""

    def execute(self) -> int:
        """Write the new recording."""
        from etude.recordings import merge_recordings

        recordings = [self.opened(path) for path in self.paths]
        done = merge_recordings(recordings, self.to)
        return self.tell(recordings, done.to_json(), str(done))


@settings
class Split(DataCommand):
    """Split the episodes at random into a recording for training and one for validation."""

    path: str
    """The recording: a folder or a file."""

    to_train: str
    """The folder of the new recording for training."""

    to_validation: str
    """The folder of the new recording for validation."""

    fraction: float = 0.9
    """Share of the episodes that go to training, between 0 and 1."""

    seed: int = 0
    """Seed of the random choice, at least 0."""

    def execute(self) -> int:
        """Write the two recordings."""
        from etude.recordings import split_recording

        how = {"fraction": self.fraction, "seed": self.seed}
        return self.edited(self.path, split_recording, self.to_train, self.to_validation, **how)


@settings
class Filter(Writing):
    """Write the episodes selected by return, length or an expression: `etude data filter A B ...`."""

    min_return: float | None = None
    """Keep episodes whose return, summed over all agents, is at least this."""

    max_return: float | None = None
    """Keep episodes whose return, summed over all agents, is at most this."""

    min_length: int | None = None
    """Keep episodes of at least this many steps, counted for the agent with the most steps."""

    max_length: int | None = None
    """Keep episodes of at most this many steps, counted for the agent with the most steps."""

    where: str | None = None
    """Keep episodes that satisfy an expression: `done and mean(reward) > 0.5 and max(abs(obs[0])) < 2`. It may use
    return, length, steps, agents, terminated, truncated, done and episode_id, and sum, mean, min, max, any and all over
    columns."""

    def execute(self) -> int:
        """Write the new recording."""
        from etude.recordings import filter_recording

        names = ("min_return", "max_return", "min_length", "max_length", "where")
        return self.edited(self.path, filter_recording, self.to, **{name: getattr(self, name) for name in names})


@settings
class Sample(Writing):
    """Write some episodes, chosen at random: `etude data sample A B --episodes 9`."""

    episodes: int | None = None
    """Number of whole episodes to draw."""

    steps: int | None = None
    """Draw whole episodes until they have this many steps in total."""

    seed: int = 0
    """Seed of the random choice, at least 0."""

    def execute(self) -> int:
        """Write the new recording."""
        from etude.recordings import sample_recording

        how = {"episodes": self.episodes, "steps": self.steps, "seed": self.seed}
        return self.edited(self.path, sample_recording, self.to, **how)


@settings
class Cache:
    """Show the cache of files converted from other tools' formats; --clear empties it."""

    clear: bool = False
    """Remove everything in the cache; it is converted again when needed."""

    json: bool = False
    """Print one JSON object on standard output."""

    def execute(self) -> int:
        """Print the cache's path and contents, or clear it."""
        from etude.recordings import cache

        found = cache.entries()
        size, folder, most = sum(size for _, size, _ in found), cache.folder(), cache.max_bytes()
        facts = {"path": str(folder), "entries": len(found), "bytes": size, "max_bytes": most}
        words = f"{folder}: {len(found):,} converted files, {size / 1e6:,.2f} MB of at most {most / 1e6:,.0f} MB."
        if self.clear:
            facts["removed_bytes"] = removed = cache.clear()
            words = f"{folder}: {removed / 1e6:,.2f} MB removed."
        tell(facts, words, as_json=self.json)
        return 0


@settings
class Show(DataCommand):
    """View one recording, or several side by side, in the browser: figures, episodes, and each step."""

    path: tuple[str, ...]
    """The recordings: folders or files."""

    to: str | None = None
    """Write a self-contained page to this file instead of serving it."""

    where: str = ""
    """With --to: include only episodes that satisfy an expression, such as `return > 100`, as in `etude data
    filter`."""

    episodes: IntFrom0 = 20
    """With --to: number of episodes of each recording that can be stepped through, at least 0."""

    port: int = 0
    """Port of the page, which is served on this machine only; 0 picks a free one."""

    browser: bool = True
    """Whether to open the page in the browser."""

    def execute(self) -> int:
        """Serve the page until Ctrl-C, or write it."""
        from etude.viewer import PageServer, RecordingView, save_page

        if self.to is None and self.where:
            raise SettingsError("--where is for a page that --to writes; a served page has a filter of its own.")
        views = [RecordingView(self.opened(path)) for path in self.path]
        if self.to is not None:
            notes = save_page(views, self.to, where=self.where, max_episodes=self.episodes)
            found = {"path": self.to, "recordings": list(self.path), "notes": notes}
            return self.tell([view.recording for view in views], found, "\n".join([f"{self.to}: written.", *notes]))
        server = PageServer(views, self.port)
        show(f"{server.url} shows {', '.join(self.path)}; Ctrl-C ends it.")
        if self.browser:
            webbrowser.open(server.url)
        try:
            server.serve()
        except KeyboardInterrupt:
            say("ended.")
        finally:
            server.close()
        return 0


COMMANDS: Mapping[str, type[flags.Command]] = {
    cls.__name__.lower(): cls for cls in (Info, Head, Describe, Convert, Validate, Merge, Split, Filter, Sample, Cache)
}


def main(command: str, args: list[str]) -> int:
    """Run ``etude data info|validate|convert|merge|...``, or ``etude show``."""
    if command == "show":
        return flags.run(Show, args, prog="etude show", positional="path")
    if not args or args[0] in (*flags.HELP, flags.HELP_ALL):
        listed = "\n".join(f"  {name:<10}{cls.__doc__}" for name, cls in COMMANDS.items())
        sys.stdout.write(f"usage: etude data COMMAND PATH [--json]\n\ncommands:\n{listed}\n")
        return 0
    name, *rest = args
    if name not in COMMANDS:
        raise SettingsError(f"etude data has no command `{name}`. {choice(name, COMMANDS)}")
    if issubclass(COMMANDS[name], Writing) and len(rest) > 1 and not rest[1].startswith("-"):
        rest = [rest[0], "--to", *rest[1:]]
    return flags.run(
        COMMANDS[name], rest, prog=f"etude data {name}", positional={"merge": "paths", "cache": None}.get(name, "path")
    )


def _cell(value: Any) -> str:
    """A value for a table cell, shortened."""
    if isinstance(value, list):
        shown = " ".join(_cell(one) for one in value[:4])
        return f"[{shown}{' …' if len(value) > 4 else ''}]"
    if isinstance(value, float):
        return f"{value:.5g}"
    return "-" if value is None else printable(str(value))


def _counted(counts: Mapping[str, int]) -> str:
    """The most frequent names and their counts, for a table cell."""
    shown = [f"{printable(text)} {count:,}" for text, count in list(counts.items())[:_MOST_NAMES]]
    return ", ".join([*shown, "…"] if len(counts) > _MOST_NAMES else shown)


def _one_or_many(paths: tuple[str, ...]) -> Any:
    return paths[0] if len(paths) == 1 else paths


def _of_table(path: tuple[str, ...], guess: "Guess") -> str:
    """Describe a table's columns, and a guess at what they are."""
    from etude.recordings.formats.guessing import MOST_ROWS

    rows = [["column", "type", "different", "missing", "for example"]]
    for name, facts in guess.found.items():
        distinct = "-" if facts.distinct is None else f"{facts.distinct:,}"
        rows.append([name, facts.type, distinct, f"{facts.missing:,}", ", ".join(facts.examples)])
    shown = f", of which the first {MOST_ROWS:,} were looked at" if guess.rows > MOST_ROWS else ""
    given = shlex.join(path) if len(path) <= _MOST_NAMES else f"{shlex.quote(path[0])} ... {shlex.quote(path[-1])}"
    lines = [f"{given if len(path) > 1 else path[0]}: a table of {guess.rows:,} rows{shown}.", "", table(rows), ""]
    lines += ["a guess at what they are, to check:", f"  {guess.words}"]
    lines += [f"  not sure: {reason}" for reason in guess.unsure]
    more = f"then: etude data info {given} --columns ..., etude train ALGORITHM --data {given} "
    return "\n".join(map(printable, [*"\n".join(lines).split("\n"), "", f"{more}--columns ..."]))


def _described(found: Mapping[str, Any], recording: "Recording") -> str:
    from etude.recordings.action_units import in_words

    steps = f"{found['env_steps']:,}"
    if found["agent_steps"] != found["env_steps"]:
        steps += f" of the env, {found['agent_steps']:,} of {len(found['agents'])} agents"
    returns = "unknown"
    if found["return_mean"] is not None:
        returns = f"mean {rounded(found['return_mean'])} ({found['return_min']:,.5g} … {found['return_max']:,.5g})"
        returns += f", with {found['unfinished']:,} unfinished" if found["unfinished"] else ""
    version = "" if found["version"] is None else f", version {found['version']}"
    ends = ", ".join(f"{found[end]:,} {end}" for end in ("terminated", "truncated", "unfinished"))
    if (both := found["terminated"] + found["truncated"] + found["unfinished"] - found["episodes"]) > 0:
        ends += f"; {both:,} both terminated and truncated"
    meta = {name: value for name, value in found["meta"].items() if value not in (None, [], "")}
    action, outside = " ".join(str(recording.action_space).split()), meta.pop(col.ENV_ACTION_SPACE, None)
    outside = None if outside is None else in_words(outside)
    rows = {
        "recording": f"{found['path']} ({found['format']}{version})",
        "env": found["env"] or "unknown",
        "episodes": f"{found['episodes']:,}: {ends}",
        "steps": steps,
        "return": returns,
        "columns": " ".join(found["columns"]),
        "obs": " ".join(str(recording.obs_space).split()),  # NumPy pads bounds
        "action": action,
        **({} if outside in (None, action) else {"env action": outside}),
        "files": f"{found['files']:,}, {found['bytes'] / 1e6:,.2f} MB",
        **meta,
        **({"filter": "learned statistics of the connectors"} if "filter" in meta else {}),
    }
    width = max(map(len, rows)) + 1
    return "\n".join(printable(f"{name:<{width}}{text}") for name, text in rows.items())
