# SPDX-License-Identifier: Apache-2.0
"""From a CSV file to a policy: a log of 300 pumps, and a policy that knows when a pump needs a service.

The pumps are invented here, so that the policy can be tried on them. The policy itself learns from the file alone.
"""

import csv
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

import etude

NAMES = ("days", "vibration", "action", "profit", "broke")
COLUMNS = {
    "obs": ["days", "vibration"],
    "action": "action",
    "reward": "profit",
    "episode_id": "pump",
    "t": "day",
    "truncated": "last-row",
}


def operate(choose: Callable[[NDArray[Any]], NDArray[Any]], num_pumps: int, seed: int) -> dict[str, NDArray[Any]]:
    """Operate pumps for 200 days: columns ``[200, num_pumps]``. Profits are in hundreds of euros.

    Each pump wears at a rate of its own, and one that is worn breaks down sooner or later. ``choose`` is given days
    since the last service and vibration, ``[num_pumps, 2]``, and answers ``"run"`` or ``"service"``, ``[num_pumps]``.
    """
    rng = np.random.default_rng(seed)
    rate, wear, days = rng.uniform(0.15, 1.0, num_pumps), np.zeros(num_pumps), np.zeros(num_pumps)
    rows = []
    for _ in range(200):
        vibration = wear + rng.normal(0, 0.3, num_pumps)
        action = choose(np.column_stack([days, vibration]))
        runs = action == "run"
        broke = runs & (rng.random(num_pumps) < 0.3 / (1 + np.exp(10 - wear)))
        profit = np.where(runs, 1.0, -2.0) - 20.0 * broke
        rows.append((days, vibration, action, profit, broke))
        wear = np.where(runs & ~broke, wear + rate * rng.exponential(1, num_pumps), 0)
        days = np.where(runs & ~broke, days + 1, 0)
    return {name: np.stack(column) for name, column in zip(NAMES, zip(*rows, strict=True), strict=True)}


def by_the_calendar(obs: NDArray[Any], interval: Any = 20) -> NDArray[Any]:
    """A service every so many days, whatever the pump's state: the rule of today."""
    return np.where(obs[:, 0] >= interval, "service", "run")


def write_log(path: str, num_pumps: int, seed: int) -> None:
    """The log of pumps with intervals from 10 to 60 days, in which people do as they like in every fifth row."""
    rng = np.random.default_rng(seed)
    interval = rng.integers(10, 60, num_pumps)

    def people(obs: NDArray[Any]) -> NDArray[Any]:
        liked = rng.choice(["run", "service"], num_pumps)
        return np.where(rng.random(num_pumps) < 0.2, liked, by_the_calendar(obs, interval))

    log = operate(people, num_pumps, seed)
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["pump", "day", *NAMES])
        for pump, day in np.ndindex(num_pumps, 200):
            out.writerow([f"pump-{pump:03}", day, *(log[name][day, pump] for name in NAMES)])


write_log("pumps.csv", 300, seed=1)
source = etude.Source("pumps.csv", COLUMNS)
print(etude.Recording.open(source))
config = etude.IQLConfig(
    data=source,
    on_bad="repair",  # what followed the last row of each pump is not known: these rows are left out
    connectors=("normalize_obs",),
    network=etude.NetworkConfig(hidden=(64, 64), activation="relu"),
    expectile=0.8,
    gamma=0.97,
    lr=1e-3,
    seed=1,
)
iql = etude.IQL(config)
iql.fit(etude.Stop(updates=2_000))

figure = Figure((8, 4), layout="constrained")
rules = {"by the calendar": by_the_calendar, "learned": partial(iql.policy.act, names=True)}
for axes, (name, choose) in zip(figure.subplots(2, 1, sharex=True, sharey=True), rules.items(), strict=True):
    log = operate(choose, 200, seed=2)
    print(f"{name}: {100 * log['profit'].mean():.0f} euros a day, {log['broke'].sum(axis=0).mean():.1f} breakdowns")
    for pump in range(3):
        axes.plot(log["vibration"][:, pump], linewidth=1)
        axes.plot(np.flatnonzero(log["broke"][:, pump]), log["vibration"][log["broke"][:, pump], pump], "rx")
    axes.set(title=f"{name}: {100 * log['profit'].mean():.0f} euros a day", ylabel="vibration")
axes.set_xlabel("day; a cross is a breakdown")
figure.savefig("csv_log.png")
