# SPDX-License-Identifier: Apache-2.0
"""How long it takes to start."""

from collections.abc import Callable, Iterator

from benchmarks.harness import ENV, ETUDE, Figure, Finished, Options, Reach, Row, etude, python, race_processes

TORCH = "import torch alone"
IMPORT = "import stable_baselines3"
FIRST = "SB3, first PPO iteration"


def rows(options: Options) -> Iterator[Row]:
    """Whole processes, from start to end, with warm caches."""
    runs: dict[str, Callable[[int], Finished]] = {
        "help": lambda _: etude("--help"),
        "import etude": lambda _: python("import etude"),
        "from etude import PPO": lambda _: python("from etude import PPO"),
        "first": lambda _: python(f"import etude; etude.PPO(etude.PPOConfig(env={ENV!r}, seed=0)).train()"),
        TORCH: lambda _: python("import torch"),
        IMPORT: lambda _: python("import stable_baselines3"),
        FIRST: lambda _: python(
            f"from stable_baselines3 import PPO; PPO('MlpPolicy', {ENV!r}, device='cpu', seed=0).learn(2048)"
        ),
    }
    for run in runs.values():
        run(0)  # compiles to bytecode, and brings files into the system's cache
    done = race_processes(runs, options)
    seconds = {name: [finished.seconds for finished in of] for name, of in done.items()}
    torch, imported = Figure(TORCH, seconds[TORCH]), Figure(IMPORT, seconds[IMPORT], "peer")
    first = Figure(FIRST, seconds[FIRST], "peer")
    for name, work, others, reach in (
        ("help", "start: etude --help", [torch], Reach(0.4 / 0.87, TORCH)),
        ("import etude", "start: import etude", [torch, imported], Reach(1.2 / 0.87, TORCH)),
        ("from etude import PPO", "start: from etude import PPO", [torch, imported], Reach(1.2 / 0.87, TORCH)),
        ("first", "start: process start to the first PPO result", [torch, first], Reach(3 / 0.87, TORCH)),
    ):
        yield Row(work, "s", [Figure(ETUDE, seconds[name], "etude"), *others], reach)
