# SPDX-License-Identifier: Apache-2.0
"""Broken recordings by the thousand: opening, reading and validating them ends in success or in a DataError.

    python tests/fuzz/fuzz.py [--count 10000] [--formats rllib-json npz ...] [--first 0]

Each format is broken in a child process with a bound on memory, so that a crash of a C library, a hang or a blow-up is
found and the rest goes on. What is found is listed by its last lines of traceback; case n of a format is always the
same: ``--formats npz --first 1234 --count 1`` makes it again.
"""

import argparse
import collections
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SECONDS = 20.0
"""The time that one case may take; they take milliseconds."""
MEMORY = 1 << 30
"""The bytes that one case may ask for beyond what the process has."""


def exercise(given: Any) -> str:
    """Open, read and validate; ``good`` or ``refused``. Raises whatever is not a DataError."""
    from etude.errors import DataError
    from etude.recordings import Recording, validate

    outcome = "good"
    try:
        recording = Recording.open(given)
        for exp in recording.stream():
            exp.numpy()
            _check_whole(exp)
    except DataError:
        outcome = "refused"
    try:
        str(validate(given))
    except DataError:
        outcome = "refused"
    for on_bad in ("repair", "skip"):
        try:
            recording = Recording.open(given, on_bad=on_bad)
            exp = recording.read()
            recording.left_out_report()
        except DataError:
            continue
        _check_whole(exp, finite=("obs", "action", "reward"))
    return outcome


def _check_whole(exp: Any, **options: Any) -> None:
    from etude.errors import DataError

    try:
        exp.validate(**(options or {"finite": ()}))
    except DataError as error:
        raise AssertionError(f"what was read breaks the rules of Experience: {error}") from error


def broken(name: str, whole: Path, folder: Path, case: int) -> Any:
    """Case number ``case`` of a format, in ``folder``; gives what to open."""
    import formats
    import numpy as np

    kind = formats.FORMATS[name]
    rng = np.random.default_rng([case, len(name), *name.encode()])
    random.seed(case)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    files = sorted(p for p in folder.rglob(kind.files) if p.is_file())
    file = files[int(rng.integers(len(files)))]
    data = file.read_bytes()
    mutate = kind.mutations[int(rng.integers(len(kind.mutations)))]
    try:
        changed = mutate(data, rng)
    except Exception:  # noqa: BLE001 - the change itself may be impossible
        changed = formats.RAW(data, rng)
    file.write_bytes(changed)
    return kind.given(folder)


def cases(names: Sequence[str], first: int, count: int, begin: int) -> Iterator[str]:
    """The outcome of each case, or the traceback of what it should not have raised.

    Cases are ``count`` for each of the formats ``names``, from number ``first`` on; the first ``begin`` are left out.
    """
    import formats

    with tempfile.TemporaryDirectory() as scratch:
        for at in range(begin, len(names) * count):
            name, case = names[at // count], first + at % count
            whole = Path(scratch) / name
            if not whole.exists():
                whole.mkdir()
                formats.FORMATS[name].make(whole)
            given = broken(name, whole, Path(scratch) / "broken", case)
            try:
                yield exercise(given)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | GeneratorExit):
                    raise
                yield traceback.format_exc()


def child(names: Sequence[str], first: int, count: int, begin: int) -> None:
    """Prints a line for what each case ended in."""
    warnings.simplefilter("ignore")
    import formats

    formats.load()
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for outcome in cases(names, first, count, begin):
        print(json.dumps(outcome), flush=True)


def run(names: Sequence[str], first: int, count: int) -> Iterator[tuple[str, int, str]]:
    """Format, number and outcome of every case: ``good``, ``refused``, or what went wrong, in several lines."""
    at = 0
    while at < len(names) * count:
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", ",".join(names), str(first), str(count), str(at)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        began, ended = at, "crashed"
        while at < len(names) * count:
            # Unbuffered lines of one small pipe: what select tells is all there is.
            if not select.select([process.stdout.fileno()], [], [], SECONDS + (60 if at == began else 0))[0]:
                ended = "hung"
                process.kill()
                break
            line = _line(process.stdout.fileno())
            if not line:
                break
            yield names[at // count], first + at % count, json.loads(line)
            at += 1
        code = process.wait()
        process.stdout.close()
        if at < len(names) * count:
            yield names[at // count], first + at % count, f"{ended}\nwith exit code {code}"
            at += 1


def _line(pipe: int) -> bytes:
    out = b""
    while not out.endswith(b"\n"):
        more = os.read(pipe, 1)
        if not more:
            return b""
        out += more
    return out


def main() -> int:
    """Run the cases asked for, and print what was found."""
    import formats

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--formats", nargs="*", default=list(formats.FORMATS))
    options = parser.parse_args()
    bad = 0
    for name in options.formats:
        began = time.monotonic()
        outcomes: collections.Counter[str] = collections.Counter()
        alike: dict[str, list[int]] = collections.defaultdict(list)
        for _, case, outcome in run([name], options.first, options.count):
            outcomes[outcome if "\n" not in outcome else "bad"] += 1
            if "\n" in outcome:
                alike[_signature(outcome)].append(case)
        listed = ", ".join(f"{n:,} {what}" for what, n in sorted(outcomes.items()))
        print(f"{name}: {listed}; {time.monotonic() - began:.0f} s", flush=True)
        for signature, found in sorted(alike.items(), key=lambda item: -len(item[1])):
            print(f"  {len(found)} x {signature} (case {found[0]})", flush=True)
        bad += outcomes["bad"]
    return 1 if bad else 0


def _signature(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines()]
    own = [line.split("/etude/")[-1] for line in lines if line.startswith("File") and "/etude/" in line]
    return f"{lines[-1][:160]} at {own[-1] if own else '?'}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2].split(","), *map(int, sys.argv[3:6]))
    else:
        sys.exit(main())
