# SPDX-License-Identifier: Apache-2.0
"""A bandit's log: from a CSV file to a policy, and to what it would earn, estimated from visitors it has not seen.

The log is invented here, so that the truth is known: the best offer for each visitor can be computed.
"""

import csv
import random

import numpy as np
from matplotlib.figure import Figure

import etude
from etude.evaluation import FQEConfig, evaluate_on
from etude.recordings import guess_columns

OFFERS = ("banner", "coupon", "none")


def chance_of_a_click(age: int, device: str, offer: str) -> float:
    """The truth, which nobody knows outside of an example."""
    if offer == "banner":
        return 0.30 if device == "phone" else 0.10
    return 0.05 if offer == "none" else 0.25 if age >= 40 else 0.08


def write_log(path: str, visitors: int, seed: int) -> None:
    """A log as a shop has it: who came, which offer was drawn with which probability, and whether it was clicked."""
    draw = random.Random(seed)
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["time", "user_id", "age", "device", "offer", "clicked", "p"])
        for i in range(visitors):
            age, device = draw.randint(18, 80), draw.choice(["phone", "desktop"])
            chances = (0.5, 0.2, 0.3) if age < 40 else (0.3, 0.4, 0.3)
            offer = draw.choices(OFFERS, chances)[0]
            clicked = int(draw.random() < chance_of_a_click(age, device, offer))
            time = f"2026-03-01 {i // 3600 % 24:02}:{i // 60 % 60:02}:{i % 60:02}"
            out.writerow([time, f"u{seed}-{i}", age, device, offer, clicked, chances[OFFERS.index(offer)]])


write_log("train.csv", 20_000, seed=1)
write_log("test.csv", 10_000, seed=2)

print(guess_columns("train.csv").words)
COLUMNS = {
    "obs": ["age", "device"],
    "action": "offer",
    "reward": "clicked",
    "propensity": "p",
    "terminated": "every-row",
}

iql = etude.IQL(
    etude.IQLConfig(
        data=etude.Source("train.csv", COLUMNS),
        connectors=("normalize_obs",),
        network=etude.NetworkConfig(hidden=(64, 64)),
        beta=30.0,
        seed=1,
    )
)
iql.fit(etude.Stop(updates=1_500))

fqe = FQEConfig(members=3, steps=1_000)  # the defaults are surer, and take longer
how = {"methods": ("wis", "dm", "dr"), "fqe": fqe, "gamma": 1.0, "explore": False}
print(evaluate_on(iql, etude.Source("test.csv", COLUMNS), **how))

ages, devices = np.repeat(np.arange(18, 81), 2), np.tile(["phone", "desktop"], 63)
chosen = iql.policy.act({"numbers": ages[:, None], "device": devices}, names=True)
visitors = list(zip(ages.tolist(), devices, strict=True))
truth = np.mean([chance_of_a_click(*who, offer) for who, offer in zip(visitors, chosen, strict=True)])
best = np.mean([max(chance_of_a_click(*who, offer) for offer in OFFERS) for who in visitors])
print(f"clicks of a visitor: {truth:.3f} in truth, {best:.3f} at best")
print(iql.policy.act({"numbers": np.array([25]), "device": "phone"}, names=True))

figure = Figure((8, 3), layout="constrained")
for axes, device in zip(figure.subplots(1, 2, sharey=True), ("phone", "desktop"), strict=True):
    age, taken = ages[devices == device].tolist(), chosen[devices == device]
    for offer in OFFERS:
        axes.plot(age, [chance_of_a_click(a, device, offer) for a in age], label=offer, drawstyle="steps-mid")
    clicks = [chance_of_a_click(a, device, offer) for a, offer in zip(age, taken, strict=True)]
    axes.plot(age, clicks, "k.", markersize=4, label="chosen")
    axes.set(title=device, xlabel="age", ylabel="chance of a click")
axes.legend()
figure.savefig("bandit.png")
