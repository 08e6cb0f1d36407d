# SPDX-License-Identifier: Apache-2.0
"""``python -m results`` makes the missing runs, resumes interrupted ones, and writes what was reached to a page."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

import etude
from results import page, runs
from results.plan import PLAN, Planned

PPO = Planned("ppo-CartPole-v1")


def line(preset="ppo-CartPole-v1", by="etude", seed=1, reached=480.0, size=100_000):
    curve = [[1000, 20.0], [50_000, 200.0], [size, reached]]
    stop = {"env_steps": size}
    about = {"preset": preset, "by": by, "seed": seed, "stop": stop, "return": reached}
    return about | {"cpu_seconds": 60 * seed, "machine": "x86_64", "curve": curve}


@pytest.mark.parametrize("planned", PLAN, ids=lambda one: f"{one.preset} by {one.by}")
def test_what_is_planned_is_a_preset_and_no_longer_than_it(planned):
    preset, stop = runs.preset_of(planned)
    ((unit, size),) = stop.items()
    assert size <= preset.stop[unit]
    assert planned.seeds > 1
    assert planned.by in {*page.NAMES, "defaults"}


def test_a_run_is_made_once():
    made = [line(seed=2), line(by="sb3"), line(preset="ppo-Acrobot-v1", seed=3), line(seed=4, size=5)]
    assert [seed for seed in range(1, 5) if runs.is_made(PPO, seed, made)] == [2]
    assert runs.is_made(PPO._replace(by="sb3"), 1, made)
    assert runs.is_made(PPO._replace(budget=5), 4, made)


@pytest.mark.parametrize("size", [0, 1, 3, 50, 51, 1000])
def test_a_curve_keeps_its_ends_and_at_most_fifty_points(size):
    curve = [(float(k), k / 3) for k in range(size)]
    kept = runs.thinned(curve)
    assert len(kept) == min(size, 50)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    if curve:
        assert [kept[0][0], kept[-1][0]] == [0.0, size - 1.0]
        assert all(y == round(x / 3, 2) for x, y in kept)


def test_a_run_that_is_made_again_trains_no_further(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = PPO._replace(budget=8192)
    first = runs.run(planned, 1)
    assert first["stop"] == {"env_steps": 8192}
    assert first["curve"][-1][0] == 8192
    again = runs.run(planned, 1)
    assert (again["return"], again["curve"]) == (first["return"], first["curve"])
    assert first["cpu_seconds"] is not None
    assert again["cpu_seconds"] is None  # it is the time of a part of the run only
    with closing(etude.load(runs.FOLDER / "etude" / PPO.preset / "seed-1")) as algorithm:
        assert algorithm.evaluate(runs.EPISODES, seed=1001).return_mean == pytest.approx(first["return"], abs=1e-3)


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A page, and where its pictures and figures go."""
    for name in ("PAGE", "PICTURES", "REACHED"):
        monkeypatch.setattr(page, name, tmp_path / name)
    page.PAGE.write_text("what was there")
    page.PICTURES.mkdir()
    return tmp_path


def test_the_page_has_means_beside_those_of_peers_and_says_what_was_run_for_less(there):
    made = [line(seed=1, reached=100.0), line(seed=2, reached=300.0), line(by="sb3", reached=150.0)]
    made += [line(preset="sac-Hopper-v5", reached=2000.0, size=200_000)]
    offline = line(preset="iql-Hopper-v5", reached=1000.0) | {"stop": {"updates": 50_000}, "data_return": 765.4}
    page.write([*made, *(offline | {"data": level} for level in ("medium", "expert"))])
    text = page.PAGE.read_text()
    assert "what was there" not in text
    assert text.startswith("# Results")
    hopper, expert, medium, own, peer = (row for row in text.splitlines() if re.match(r"\| [\w:-]+ \| `", row))
    assert "**200.0** (100.0 … 300.0), 2 | 1.5 | 500 ± 0 |" in own
    assert "`ppo`, Stable-Baselines3 | 100k steps | **150.0**" in peer
    assert "200k of 1M steps" in hopper
    assert "## MuJoCo, from recordings" in text
    assert "`iql`, medium |" in medium
    assert "| Hopper-v5 | `iql`, expert | 50k of 1M updates | 765.4 | **1,000.0**, 1 |" in expert
    not_run = text[text.index("## Presets without results") :]
    assert "`Hopper-v5`" in next(row for row in not_run.splitlines() if row.startswith("- `ppo`"))
    assert "`CartPole-v1`" not in not_run
    for picture in Path(page.PICTURES).iterdir():
        assert f"(assets/results/{picture.name})" in text
    reached = json.loads(page.REACHED.read_text())
    assert reached["ppo-CartPole-v1"] == {"returns": [100.0, 300.0], "env_steps": 100_000, "seconds": 90}
    assert set(reached) == {"ppo-CartPole-v1", "sac-Hopper-v5", "iql-Hopper-v5"}


def test_interrupted_runs_are_left_out_of_the_time(there):
    broken = line(seed=3, reached=200.0) | {"cpu_seconds": None}
    page.write([line(seed=1), broken, line(preset="ppo-Acrobot-v1") | {"cpu_seconds": None}])
    rows = [row for row in page.PAGE.read_text().splitlines() if row.startswith("| ") and "`ppo`" in row]
    assert ["| unknown |" in row for row in rows] == [True, False]
    assert "2 | 1.0 |" in rows[1]
    reached = json.loads(page.REACHED.read_text())
    assert [reached[f"ppo-{env}-v1"]["seconds"] for env in ("Acrobot", "CartPole")] == [None, 60]


def test_defaults_stand_beside_presets_in_a_table_of_their_own(there):
    made = [line(reached=400.0), line(by="defaults", reached=100.0), line(by="defaults", seed=2, reached=200.0)]
    page.write([*made, line(preset="ppo-Acrobot-v1", by="defaults")])  # without the preset there is nothing beside it
    text = page.PAGE.read_text()
    row = "| CartPole-v1 | `ppo` | 100k steps | **150.0** (100.0 … 200.0), 2 | **400.0**, 1 |"
    assert row in text[text.index("## Defaults and presets") :]
    assert text.count("150.0") == 1
    assert "| Acrobot-v1 |" not in text
