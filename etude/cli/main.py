# SPDX-License-Identifier: Apache-2.0
"""The entry point: finds the command and hands over. Imports nothing heavy, so that help is there at once."""

import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from etude import __version__
from etude.cli import streams
from etude.errors import EtudeError, SettingsError
from etude.settings import choice

COMMANDS = {
    "train": ("etude.cli.train:main", "Train an algorithm: etude train ppo --env CartPole-v1 --stop.return-mean 450."),
    "tune": ("etude.cli.tune:main", "Train with many settings at once, and see which are best (needs etude[ray])."),
    "record": ("etude.cli.play:record", "Let a trained run play, and record its episodes as Parquet."),
    "watch": ("etude.cli.watch:main", "See a trained run play: as a clip (mp4, webm, gif), or in the env's window."),
    "evaluate": ("etude.cli.play:evaluate", "Let a trained run play, and report its returns."),
    "data": ("etude.cli.data:main", "Look into recordings: etude data info, etude data validate."),
    "plot": ("etude.cli.plot:main", "Draw the learning curves of one or more runs."),
    "demo": ("etude.cli.demo:main", "See it all in a minute: train, record, clone, plot."),
}
"""Where each command is, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after ``etude``; those of the process where None.

    Returns:
        The exit code: 0 fine; 1 a check found problems, or something unexpected; 2 an error of the user's to mend;
        3 a budget ran out before the goal was met; 130 interrupted (SIGINT, SIGTERM, SIGHUP).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    streams.prepare()
    try:
        with _signals_interrupt(), streams.warnings_said():
            code = _dispatch(args)
            sys.stdout.flush()
            return code
    except EtudeError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        complain("interrupted.")
        return 130
    except BrokenPipeError:
        if not streams.hush_unread():
            raise  # another pipe than ours, such as one to an env in a process of its own
        return 1


def complain(message: str) -> None:
    """Write an error to standard error, its later lines under its first."""
    streams.say("error: " + message.replace("\n", "\n       "))


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that what it has done is kept, unless they are handled or
    ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if args[0] in ("-V", "--version"):
        sys.stdout.write(f"etude {__version__}\n")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        raise SettingsError(f"etude has no command `{name}`. {choice(name, COMMANDS)} All commands: etude --help")
    module, _, function = COMMANDS[name][0].partition(":")
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return command(rest)


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{about}" for name, (_, about) in COMMANDS.items())
    return (
        "Etude: reinforcement learning, online and offline, from one kind of data.\n\n"
        f"usage: etude COMMAND ...\n\ncommands:\n{commands}\n\n"
        "  --help    This, or after a command all that it takes.\n"
        "  --version The version.\n"
    )
