# SPDX-License-Identifier: Apache-2.0
"""Progress displays of one run or several: live in a terminal or a notebook, else as lines."""

import contextlib
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from etude.algorithms.results import Evaluation, Result, Stop
from etude.display import counted, rounded
from etude.errors import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_PARTS = 6


def say(text: str) -> None:
    """Write a line to standard error; a closed stream is ignored, so that it ends no run."""
    with contextlib.suppress(OSError):
        sys.stderr.write(printable_lines(text) + "\n")


class Shows(Protocol):
    """Receives the results of a run: a `View`, or an object that sends them to another process."""

    def show(self, result: Result) -> None:
        """Take the newest result."""

    def close(self) -> None:
        """End the display: no more results follow."""


class _Notebook:
    """Shows a picture in a notebook cell; rich's own display needs ipywidgets, and shows nothing without it."""

    def __init__(self, picture: "Callable[[], RenderableType]") -> None:
        from IPython.display import display

        self._picture = picture
        self._cell = display(self, display_id=True)

    def _recorded(self) -> "Console":
        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, force_jupyter=False, width=120)
        console.print(self._picture())
        return console

    def _repr_html_(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def __repr__(self) -> str:
        return self._recorded().export_text()

    def refresh(self) -> None:
        """Redraw the picture."""
        self._cell.update(self)

    stop = refresh


def _live(picture: "Callable[[], RenderableType]") -> "Live | _Notebook | None":
    """A display that redraws a picture in a terminal or a notebook; None if there is neither."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        live = Live(get_renderable=picture, console=Console(stderr=True), refresh_per_second=2)
        live.start()
        return live
    return _Notebook(picture) if "ipykernel" in sys.modules else None


def _stop(live: "Live | _Notebook | None") -> None:
    if live is not None:
        with contextlib.suppress(OSError):  # a closed terminal must not end the run
            live.stop()


class _Display:
    """Base class of `View` and `Board`: a live picture in a terminal or a notebook, otherwise lines."""

    def __init__(self, title: str, stop: Stop, *, quiet: bool, say: Callable[[str], None] = say) -> None:
        self.title, self.stop, self.quiet, self._say = printable(title), stop, quiet, say
        self._start = time.monotonic()
        self._live: Live | _Notebook | None = None

    def open(self) -> None:
        """Start the display."""
        self._live = None if self.quiet else _live(self.picture)
        self._write(f"training {self.title}")

    def picture(self) -> "RenderableType":
        """The picture for a terminal or a notebook."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the display."""
        _stop(self._live)

    def _write(self, *words: str) -> None:
        """Redraw the picture in a notebook; write a line if there is no live display."""
        if isinstance(self._live, _Notebook):
            self._live.refresh()
        elif self._live is None and not self.quiet:
            self._say("  ".join(words))


class View(_Display):
    """Shows the results of one run until it is closed; the last one is always shown.

    Args:
        title: What is being trained.
        stop: When training ends, from which progress is computed.
        quiet: Show nothing.
        say: Receives the lines.
    """

    def __init__(self, title: str, stop: Stop, *, quiet: bool, say: Callable[[str], None] = say) -> None:
        super().__init__(title, stop, quiet=quiet, say=say)
        self._first: Result | None = None
        self._last: Result | None = None
        self._shown, self._waits = -math.inf, False
        self.open()

    def show(self, result: Result) -> None:
        """Take the newest result, and write a line at most once a second."""
        self._first, self._last, self._waits = self._first or result, result, True
        if time.monotonic() - self._shown >= 1:
            self._write_last()

    def close(self) -> None:
        """Show the last result."""
        super().close()
        if self._live is None:
            self._write_last()

    def _write_last(self) -> None:
        if self._last is not None and self._waits:
            self._write(*(f"{name} {text}" for name, text in figures(self._last).items()))
        self._shown, self._waits = time.monotonic(), False

    def picture(self) -> "RenderableType":
        """The newest figures, a progress bar and the time left."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        seconds = time.monotonic() - self._start
        if self._first is None or self._last is None:
            return Text(f"{self.title}: getting ready, {seconds:.0f} s")
        table = Table.grid(padding=(0, 2))
        for name, text in figures(self._last).items():
            table.add_row(Text(printable(name), "bold cyan"), Text(printable(text)))  # Text, or brackets are markup
        return Group(Text(self.title, "bold"), table, _bar(progress(self.stop, self._first, self._last), seconds))


def _bar(share: float | None, seconds: float) -> "RenderableType":
    """A progress bar with the time so far and the time left; only the time so far if ``share`` is None."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if share is None:
        return Text(f"{clock(seconds)} so far", "dim")
    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(1.0, share, width=48), f"{share:.0%}", f"{clock(seconds)}{_left(share, seconds)}")
    return bar


def _left(share: float, seconds: float) -> str:
    return f", about {clock(seconds * (1 - share) / share)} left" if 0.02 < share < 1 else ""


@contextlib.contextmanager
def gauge(title: str, *, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Show how much of a long computation is done: a bar in a terminal or a notebook, else a line every ten seconds.

    Args:
        title: What is being computed.
        quiet: Show nothing.

    Returns:
        A context. Its value is a function to call with the share that is done, from 0 to 1.
    """
    from rich.console import Group

    began = shown = time.monotonic()
    done: float | None = None

    def show(share: float) -> None:
        nonlocal done, shown
        done, now = share, time.monotonic()
        if isinstance(live, _Notebook) and (now - shown >= 1 or share == 1):
            live.refresh()
            shown = now
        elif live is None and not quiet and now - shown >= 10:
            say(f"{title}: {share:.0%}, {clock(now - began)}{_left(share, now - began)}")
            shown = now

    live = None if quiet else _live(lambda: Group(title, _bar(done, time.monotonic() - began)))
    if live is None and not quiet:
        say(title)
    try:
        yield show
    finally:
        _stop(live)


_ROWS = 24
"""Maximum number of rows; runs in progress are shown even beyond it. Runs without a row are only counted."""


class Board(_Display):
    """Shows several runs until it is closed: a live table with a row for each, or lines now and then and at the end of
    each.

    Args:
        title: What is being trained.
        names: The names of the runs.
        stop: When each run ends, from which progress is computed.
        quiet: Show nothing.
        say: Receives the lines.
    """

    def __init__(
        self, title: str, names: Sequence[str], stop: Stop, *, quiet: bool, say: Callable[[str], None] = say
    ) -> None:
        super().__init__(title, stop, quiet=quiet, say=say)
        self._state = dict.fromkeys(names, "waiting")
        self._first: dict[str, Result] = {}
        self._last: dict[str, Result] = {}
        self._began: dict[str, float] = {}
        self._shown: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """Mark a run as started."""
        self._state[name], self._began[name] = "starting", time.monotonic()

    def show(self, name: str, result: Result) -> None:
        """Take the newest result of a run. Without a live display, about one line per second is written, for the runs
        in turn."""
        self._state[name] = "training"
        self._last[name] = result
        self._first.setdefault(name, result)
        now, pause = time.monotonic(), max(1, [*self._state.values()].count("training"))
        if now - self._shown.get(name, -math.inf) >= pause:
            self._shown[name] = now
            self._write_run(name)

    def end(self, name: str, result: Result | None, how: str) -> None:
        """Mark a run as ended; ``how`` is done, failed or interrupted."""
        self._state[name] = how
        if result is not None:
            self._last[name] = result
        self._write_run(name, how)

    def _write_run(self, name: str, *how: str) -> None:
        found = _short(self._last[name]) if name in self._last else {}
        self._write(name, *how, *(f"{key} {text}" for key, text in found.items()))

    def picture(self) -> "RenderableType":
        """A table with a row for each run; if there are very many, those in progress and the first others."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        goes_on = [name for name, state in self._state.items() if state in ("starting", "training")]
        some = {*goes_on, *[name for name in self._state if name not in goes_on][: max(0, _ROWS - len(goes_on))]}
        for name in [name for name in self._state if name in some]:
            state, last = self._state[name], self._last.get(name)
            style = {"failed": "red", "done": "green", "waiting": "dim"}.get(state, "")
            cells: list[RenderableType] = [Text(printable(name), "bold cyan"), Text(state, style)]
            found = _short(last) if last is not None else {}
            cells += [Text(f"{key} {found[key]}" if key in found else "") for key in ("return", "steps", "updates")]
            share = progress(self.stop, self._first[name], last) if last is not None and name in self._first else None
            if state == "training" and share is not None:
                left = _left(share, time.monotonic() - self._began[name])
                cells += [ProgressBar(1.0, share, width=20), Text(f"{share:.0%}{left}")]
            table.add_row(*cells)
        counts = {state: [*self._state.values()].count(state) for state in dict.fromkeys(self._state.values())}
        summary = ", ".join(f"{count} {state}" for state, count in counts.items())
        return Group(
            Text(self.title, "bold"), table, Text(f"{summary}, {clock(time.monotonic() - self._start)}", "dim")
        )


def _short(result: Result) -> dict[str, str]:
    """The figures of a result for one row."""
    shown = {"return": rounded(result.return_mean)} if result.returns_counted else {}
    if result.env_steps:
        shown["steps"] = f"{result.env_steps:,}"
    return {**shown, "updates": f"{result.updates:,}"}


def figures(result: Result) -> Mapping[str, str]:
    """The figures of a result that are worth showing, by name."""
    shown = {}
    if result.returns_counted:
        shown["return"] = f"{rounded(result.return_mean)} ({result.return_min:,.5g} … {result.return_max:,.5g})"
        shown |= parts(result)
    if result.env_steps:
        shown["steps"] = f"{result.env_steps:,}, {result.sample_steps_per_s:,.0f}/s sampled"
    shown["updates"] = f"{result.updates:,}"
    if result.losses:
        shown["losses"] = _few([f"{name} {value:.3g}" for name, value in result.losses.items()], " ")
    shown["seconds"] = f"{result.seconds:.1f}"
    if result.bottleneck:
        shown["data"] = _data(result)
    for name, spread in result.custom.items():
        shown[name] = f"{spread['mean']:,.5g} ({spread['min']:,.5g} … {spread['max']:,.5g})"
    if result.faulty_episodes:
        shown["faulty episodes"] = f"{result.faulty_episodes:,}"
    return shown


def parts(found: Result | Evaluation) -> dict[str, str]:
    """The mean returns of each module, or of each agent, if there are several; the first few of very many."""
    for kind, returns in (("modules", found.module_returns), ("agents", found.agent_returns)):
        if len(returns) > 1:
            return {kind: _few([f"{name} {rounded(value)}" for name, value in returns.items()], ", ")}
    return {}


def _few(words: list[str], between: str) -> str:
    more = f" and {len(words) - _PARTS} more" if len(words) > _PARTS else ""
    return between.join(words[:_PARTS]) + more


def _data(result: Result) -> str:
    """A summary of the data flow."""
    wait, update = result.times.get("wait", 0.0), result.times.get("update", 0.0)
    share = wait / (wait + update) if wait + update else 0.0
    rate = result.data.get("steps_per_s", 0.0)
    read = f"{rate:,.0f} steps/s read, " if rate else ""
    counts = {name: count for name, count in result.metrics.items() if name.startswith("left_out/")}
    unread = counts.pop("left_out/unread_parts", 0.0)
    told = f", {left_out:,.0f} left out" if (left_out := sum(counts.values())) else ""
    told += f", {counted(int(unread), 'unreadable part')} left out" if unread else ""
    return f"{read}{share:.0%} waited for, slowest: {result.bottleneck}{told}"


def progress(stop: Stop, first: Result, last: Result) -> float | None:
    """Progress, 0 to 1: the largest share of the goal and the budgets; None if there are none."""
    budgets = [(stop.env_steps, last.env_steps), (stop.updates, last.updates), (stop.seconds, last.seconds)]
    shares = [used / limit if limit else 1.0 for limit, used in budgets if limit is not None]
    goal, begun, now = stop.return_mean, first.return_mean, last.return_mean
    if goal is not None and not math.isnan(now - begun):
        shares.append((now - begun) / (goal - begun) if goal > begun else 1.0)
    return min(max(0.0, *shares), 1.0) if shares else None


def clock(seconds: float) -> str:
    """A duration as text: ``59 s``, ``1:02``, ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
