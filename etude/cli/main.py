# SPDX-License-Identifier: Apache-2.0
"""The entry point: finds the command and runs it. Imports nothing heavy, so that help is fast."""

import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from etude import __version__
from etude.cli import streams
from etude.errors import EtudeError, SettingsError
from etude.settings import choice

COMMANDS = {
    "train": ("train", "Train an algorithm: etude train ppo --env CartPole-v1 --stop.return-mean 450."),
    "presets": ("train", "List settings that are known to work for a task, with what they reached."),
    "tune": ("tune", "Train with many settings, and rank them (needs etude[ray])."),
    "sweep": ("tune", "Train with many settings on this machine: etude sweep ppo --space.lr loguniform:1e-4,1e-2."),
    "record": ("play", "Record episodes of a trained run as Parquet."),
    "watch": ("play", "Watch a trained run play: as a clip (mp4, webm, gif), or in the env's window."),
    "evaluate": ("play", "Play episodes with a trained run, and report its returns."),
    "export": ("play", "Write a trained policy as ONNX (needs etude[export]): etude export runs/ppo --to p.onnx."),
    "serve": ("play", "Serve a trained run over HTTP (needs etude[serve]): etude serve runs/ppo --port 8080."),
    "data": ("data", "Inspect, check and convert recordings: etude data info, etude data validate."),
    "show": ("data", "View recordings in the browser: figures, episodes, each step."),
    "plot": ("play", "Plot the learning curves of runs, singly or in groups with mean and interval."),
    "compare": ("play", "Compare results of groups of runs, with intervals: etude compare runs/a runs/b --by lr."),
    "demo": ("play", "A one-minute demo: train, record, clone, plot."),
}
"""The module of each command, and its help text."""

HELP = """Etude: reinforcement learning, online and offline, from one kind of data.

usage: etude COMMAND ...

commands:
{commands}

  --help    This help, or after a command its options; --help-all shows all of them.
  --version The version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after ``etude``; None: those of this process.

    Returns:
        The exit code: 0 success; 1 a check found problems, or an unexpected failure; 2 a user's error; 3 a budget ran
        out before the goal was met; 130 interrupted (SIGINT, SIGTERM, SIGHUP).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    streams.prepare()
    try:
        with _signals_interrupt(), streams.warnings_said():
            code = _dispatch(args)
            sys.stdout.flush()
            return code
    except EtudeError as error:
        streams.print_error(str(error))
        return 2
    except KeyboardInterrupt:
        streams.print_error("interrupted.")
        return 130
    except BrokenPipeError:
        if not streams.hush_unread():
            raise  # another pipe, such as one to an env in a process of its own
        return 1


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt a command as Ctrl-C does, so that its work is kept, unless they are handled or
    ignored already."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name) and is_main]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _as_ctrl_c)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # may be that of Ray Tune
    if not callable(handler):  # ignored, as in the background of a shell
        handler = signal.default_int_handler
    handler(signal.SIGINT, frame)


def _dispatch(args: list[str]) -> int:
    name, rest = (args[0], args[1:]) if args else ("--help", [])
    if name in ("-h", "--help", "--help-all", "help"):
        commands = "\n".join(f"  {command:<10}{about}" for command, (_, about) in COMMANDS.items())
        sys.stdout.write(HELP.format(commands=commands))
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"etude {__version__}\n")
        return 0
    if name not in COMMANDS:
        raise SettingsError(f"etude has no command `{name}`. {choice(name, COMMANDS)} All commands: etude --help")
    return int(importlib.import_module(f"etude.cli.{COMMANDS[name][0]}").main(name, rest))
