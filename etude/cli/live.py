# SPDX-License-Identifier: Apache-2.0
"""What one sees while it trains: a live picture on a terminal, else a line about once a second. On standard error."""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from etude.cli.streams import say
from etude.errors import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from etude.algorithms import Evaluation, Result, Stop

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 48
_PARTS = 6


class View(Protocol):
    """Shows results while a ``with`` block lasts; the last one is always shown."""

    def show(self, result: "Result") -> None:
        """Take note of the newest result."""

    def __enter__(self) -> "View": ...

    def __exit__(self, *error: Any) -> None: ...


def view(title: str, stop: "Stop", *, quiet: bool) -> View:
    """The view that suits where standard error goes."""
    if quiet:
        return Silent()
    return Picture(title, stop) if sys.stderr.isatty() else Lines(title)


class Silent:
    """Shows nothing."""

    def show(self, result: "Result") -> None:
        """Show nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class Lines:
    """A line a result, about one a second."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._shown = -math.inf
        self._waiting: Result | None = None

    def show(self, result: "Result") -> None:
        """Write a line, unless there was one a moment ago."""
        self._waiting = result
        if time.monotonic() - self._shown >= 1:
            self._write()

    def _write(self) -> None:
        if self._waiting is not None:
            say(line(self._waiting))
            self._shown, self._waiting = time.monotonic(), None

    def __enter__(self) -> "Lines":
        say(f"training {self.title}")
        return self

    def __exit__(self, *error: Any) -> None:
        self._write()


class Picture:
    """The newest figures, redrawn in place."""

    def __init__(self, title: str, stop: "Stop") -> None:
        from rich.console import Console
        from rich.live import Live

        self.title, self.stop = printable(title), stop
        self.first: Result | None = None
        self.last: Result | None = None
        self.returns: deque[float] = deque(maxlen=4096)
        self._began = self._drawn = time.monotonic()
        self._live = Live(
            get_renderable=self.draw, console=Console(stderr=True), auto_refresh=True, refresh_per_second=1
        )

    def show(self, result: "Result") -> None:
        """Take note of a result, and redraw unless that was done a moment ago."""
        self.first = self.first or result
        self.last = result
        self.returns.append(result.return_mean)
        if time.monotonic() - self._drawn >= 0.2:
            self._drawn = time.monotonic()
            with contextlib.suppress(OSError):  # that the terminal is gone ends no run
                self._live.refresh()

    def draw(self) -> "RenderableType":
        """The picture as it is now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        seconds = time.monotonic() - self._began
        if self.first is None or self.last is None:
            return Text(f"{self.title}: getting ready, {seconds:.0f} s")
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan")
        table.add_column()
        for name, text in figures(self.last).items():
            table.add_row(Text(printable(name)), Text(printable(text)))  # and brackets are no markup
        curve = sparkline(self.returns)
        if curve:
            table.add_row("curve", curve)
        share = progress(self.stop, self.first, self.last)
        if share is None:
            return Group(Text(self.title, style="bold"), table, Text(f"{clock(seconds)} so far", style="dim"))
        left = f", about {clock(seconds * (1 - share) / share)} left" if 0.02 < share < 1 else ""
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(1.0, share, width=_WIDTH), f"{share:.0%}", f"{clock(seconds)}{left}")
        return Group(Text(self.title, style="bold"), table, bar)

    def __enter__(self) -> "Picture":
        self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()


def figures(result: "Result") -> Mapping[str, str]:
    """What is worth showing of a result, by name."""
    shown = {}
    if result.returns_counted:
        shown["return"] = f"{result.return_mean:,.1f} ({result.return_min:,.5g} … {result.return_max:,.5g})"
        shown |= parts(result)
    if result.env_steps:
        shown["steps"] = f"{result.env_steps:,}, {result.sample_steps_per_s:,.0f}/s sampled"
    shown["updates"] = f"{result.updates:,}"
    shown["losses"] = _few([f"{name} {value:.3g}" for name, value in result.losses.items()], " ")
    shown["seconds"] = f"{result.seconds:.1f}"
    if result.turn_ms:
        longest = sorted(result.turn_ms.items(), key=lambda item: -item[1])[:3]
        spent = ", ".join(f"{name} {ms:.2g}" for name, ms in longest)
        shown["turn"] = f"{sum(result.turn_ms.values()):.2g} ms ({spent})"
    if result.bottleneck:
        shown["data"] = _data(result)
    for name, spread in result.custom.items():
        shown[name] = f"{spread['mean']:,.5g} ({spread['min']:,.5g} … {spread['max']:,.5g})"
    if result.faulty_episodes:
        shown["faulty episodes"] = f"{result.faulty_episodes:,}"
    return shown


def parts(found: "Result | Evaluation") -> dict[str, str]:
    """The mean returns of each module, or of each agent, where there are several; the first few of very many."""
    for kind, returns in (("modules", found.module_returns), ("agents", found.agent_returns)):
        if len(returns) > 1:
            return {kind: _few([f"{name} {value:,.1f}" for name, value in returns.items()], ", ")}
    return {}


def _few(words: list[str], between: str) -> str:
    more = f" and {len(words) - _PARTS} more" if len(words) > _PARTS else ""
    return between.join(words[:_PARTS]) + more


def line(result: "Result") -> str:
    """A result on one line."""
    return "  ".join(f"{name} {text}" for name, text in figures(result).items())


def progress(stop: "Stop", first: "Result", last: "Result") -> float | None:
    """How near the end is, 0 to 1: what is nearest of the goal and the budgets; None where there is neither."""
    shares = [
        (used - begun) / (limit - begun) if limit > begun else 1.0
        for limit, begun, used in (
            (stop.env_steps, 0, last.env_steps),
            (stop.updates, 0, last.updates),
            (stop.seconds, 0.0, last.seconds),
            (stop.return_mean, first.return_mean, last.return_mean),
        )
        if limit is not None and not math.isnan(used - begun)
    ]
    return min(max(0.0, *shares), 1.0) if shares else None


def sparkline(values: "deque[float]") -> str:
    """A curve of one line of text, at most 48 characters wide."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    count = min(len(known), _WIDTH)
    points = [known[(i + 1) * len(known) // count - 1] for i in range(count)]
    low, high = min(points), max(points)
    return "".join(_BARS[int((value - low) / (high - low or 1) * (len(_BARS) - 1))] for value in points)


def clock(seconds: float) -> str:
    """A span of time as people say it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def _data(result: "Result") -> str:
    """How the data flows."""
    wait, update = result.times.get("wait", 0.0), result.times.get("update", 0.0)
    share = wait / (wait + update) if wait + update else 0.0
    rate = result.data.get("steps_per_s", 0.0)
    read = f"{rate:,.0f} steps/s read, " if rate else ""
    left_out = sum(count for name, count in result.metrics.items() if name.startswith("left_out/"))
    told = f", {left_out:,.0f} left out" if left_out else ""
    return f"{read}{share:.0%} waited for, slowest: {result.bottleneck}{told}"
