# SPDX-License-Identifier: Apache-2.0
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError
from etude.metrics import Metrics

KINDS = ("mean", "sum", "min", "max", "throughput", "lifetime", "window", "ema")
WINDOW = 5


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def naive(by, values, seconds):
    """What the words say, over plain lists."""
    if by == "mean":
        return sum(values) / len(values)
    if by in ("sum", "lifetime"):
        return sum(values)
    if by == "throughput":
        return sum(values) / seconds
    if by == "window":
        last = values[-WINDOW:]
        return sum(last) / len(last)
    if by == "ema":  # the weights written out: (1 - a)^age
        weights = [(1 - 2 / (WINDOW + 1)) ** age for age in range(len(values))][::-1]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return {"min": min, "max": max}[by](values)


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


numbers = st.floats(-1e6, 1e6)
parts_of_values = st.lists(st.lists(numbers, max_size=12), min_size=1, max_size=5).filter(any)
kinds = st.sampled_from(KINDS)
forms = st.sampled_from(("floats", "array", "tensor", "tensors"))


def log(metrics, name, values, by, form):
    if form == "array":
        metrics.log(name, np.array(values), by, window=WINDOW)
    elif form == "tensor":
        metrics.log(name, torch.tensor(values, dtype=torch.float64), by, window=WINDOW)
    else:
        for value in values:
            metrics.log(name, value if form == "floats" else torch.tensor(value).double(), by, window=WINDOW)


@given(kinds, parts_of_values, forms)
def test_each_kind_is_what_its_name_says(by, parts, form):
    clock = Clock()
    metrics = Metrics(clock)
    for part in parts:
        log(metrics, "x", part, by, form)
        clock.now += 0.5
    values = [v for part in parts for v in part]
    if form == "tensors":
        values = [float(np.float32(v)) for v in values]
    assert metrics.peek() == metrics.peek() == {"x": close(naive(by, values, 0.5 * len(parts)))}


@given(kinds, parts_of_values, st.integers(0, 5))
def test_after_reduce_some_begin_anew_and_some_go_on(by, parts, cut):
    clock = Clock()
    metrics = Metrics(clock)
    for part in parts[:cut]:
        log(metrics, "x", part, by, "array")
    metrics.reduce()
    clock.now += 4
    for part in parts[cut:]:
        log(metrics, "x", part, by, "array")
    since = parts if by in ("lifetime", "window", "ema") else parts[cut:]
    values = [v for part in since for v in part]
    if values:
        assert metrics.reduce() == {"x": close(naive(by, values, 4))}
    elif by in ("sum", "throughput"):
        assert metrics.reduce() == {"x": 0}
    else:
        assert metrics.reduce() == {}


@given(kinds, parts_of_values, st.integers(0, 5))
def test_state_goes_on_exactly(by, parts, cut):
    clock = Clock()
    one, other = Metrics(clock), Metrics(Clock(7.0))
    for part in parts[:cut]:
        log(one, "x", part, by, "floats")
    clock.now += 1
    other.log("gone", 1.0)
    other.load_state_dict(one.state_dict())
    for part in parts[cut:]:
        for metrics in (one, other):
            log(metrics, "x", part, by, "floats")
    assert one.peek() == other.peek()
    assert _same(one.state_dict(), other.state_dict())


def _same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return np.array_equal(a, b)


def test_a_state_is_plain_data():
    metrics = Metrics()
    for by in KINDS:
        metrics.log(by, [1, 2], by)
    state = json.loads(json.dumps(metrics.state_dict(), default=np.ndarray.tolist))
    other = Metrics(Clock())
    other.load_state_dict(state)
    assert (other.peek()["mean"], other.peek()["window"], other.peek()["max"]) == (1.5, 1.5, 2)


def test_a_state_of_the_format_before_goes_on():
    """It held what was new since a report, and which reports were merged, too."""
    seen = {"count": 2, "sum": 3.0, "min": 1.0, "max": 2.0}
    empty = {"count": 0, "sum": 0.0, "min": math.inf, "max": -math.inf}
    entries = {
        name: {"by": name, "window": 100, "seen": state, "new": empty}
        for name, state in (("mean", seen), ("max", empty), ("lifetime", seen))
    }
    metrics = Metrics(Clock())
    metrics.load_state_dict({"entries": entries, "merged": {"a": 1}, "seconds": 4.0})
    assert metrics.peek() == {"mean": 1.5, "lifetime": 3.0}
    metrics.log("max", -7.0, "max")
    metrics.log("mean", 6.0)
    assert metrics.peek() == {"mean": 3.0, "max": -7.0, "lifetime": 3.0}


def test_names_are_nested_and_ordered():
    metrics = Metrics()
    red = metrics.under("red")
    red.log("kl", 1.0)
    metrics.log("kl", 3.0)
    red.under("critic").log("loss", 2.0, "max")
    red.log("kl", 2.0)
    assert list(metrics.peek().items()) == [("red/kl", 1.5), ("kl", 3.0), ("red/critic/loss", 2.0)]


def test_phases_are_timed_by_the_clock():
    clock = Clock()
    metrics = Metrics(clock)
    for seconds in (1.5, 2.0):
        with metrics.timed("times/sample"):
            clock.now += seconds
    with metrics.under("red").timed("update"):
        clock.now += 1
    with pytest.raises(KeyError), metrics.timed("times/sample"):
        clock.now += {}["breaks off"]
    assert metrics.reduce() == {"times/sample": 3.5, "red/update": 1}
    assert metrics.reduce() == {"times/sample": 0, "red/update": 0}


def test_throughput_needs_time_and_a_resumed_one_goes_on():
    clock = Clock()
    metrics = Metrics(clock)
    metrics.log("speed", 10, "throughput")
    assert math.isnan(metrics.peek()["speed"])
    clock.now += 2
    resumed = Metrics(later := Clock(5000.0))
    resumed.load_state_dict(metrics.state_dict())
    later.now += 3
    assert (metrics.peek(), resumed.peek()) == ({"speed": 5}, {"speed": 2})


def test_all_tensors_are_moved_at_once(monkeypatch):
    moves = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moves.append(self.numel()) or cpu(self))
    for value_by_value in ("item", "tolist", "__float__"):
        monkeypatch.setattr(torch.Tensor, value_by_value, None)
    metrics = Metrics()
    weight = torch.ones(3, requires_grad=True)
    for i in range(50):
        metrics.log("loss", (weight * i).sum())
        metrics.log("rows", torch.tensor([2**53 - 1, i]), "max")  # more digits than a float32 has
        metrics.log("half", torch.full((2, 2), 0.5, dtype=torch.bfloat16), "sum")
        metrics.log("met", torch.tensor(i % 2 == 0))
        metrics.log("host", i)
    assert moves == []
    assert metrics.reduce() == {"loss": 73.5, "rows": 2**53 - 1, "half": 100, "met": 0.5, "host": 24.5}
    assert moves == [50 * (1 + 2 + 4 + 1)]
    metrics.peek()
    assert len(moves) == 1


def test_what_is_logged_is_held_without_its_graph_and_arrays_are_copied():
    metrics = Metrics()
    values = np.ones(2)
    metrics.log("x", values)
    values[:] = 5
    loss = torch.ones(1, requires_grad=True) * 2
    metrics.log("loss", loss)
    metrics.log("none", np.zeros(0))
    metrics.log("none", torch.zeros(0))
    assert metrics.peek() == {"x": 1, "loss": 2}


def test_nan_is_handed_on():
    metrics = Metrics()
    for by in KINDS:
        metrics.log(by, [1.0, math.nan, 2.0], by)
        metrics.log(by, 3.0, by)
    assert all(math.isnan(value) for name, value in metrics.peek().items())


@pytest.mark.parametrize("value", ["high", None, [1, "2"], [[1], [1, 2]], {"a": 1}])
def test_what_is_no_number_is_refused(value):
    metrics = Metrics()
    with pytest.raises(EtudeError, match=r"`red/x` is logged as a \w+ \(.*\), but must be numeric"):
        metrics.under("red").log("x", value, "sum")
    assert metrics.peek() == {}


def test_one_name_means_one_thing():
    metrics = Metrics()
    metrics.log("x", 1)
    metrics.log("w", 1, "window", window=3)
    with pytest.raises(EtudeError, match="`x` was logged by 'mean' and now by 'sum': use another name"):
        metrics.log("x", 1, "sum")
    with pytest.raises(EtudeError, match="`w` was logged over 3 values and now over 100: use another name"):
        metrics.log("w", 1, "window")
    with pytest.raises(EtudeError, match="`y` can't be logged by 'median': there are only mean, sum, min, max"):
        metrics.log("y", 1, "median")
    with pytest.raises(EtudeError, match="`y` can't be logged over 0 values: it must be at least 1"):
        metrics.log("y", 1, "window", window=0)
    assert metrics.peek() == {"x": 1, "w": 1}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tensors_of_a_gpu_are_moved_once():
    metrics = Metrics()
    for i in range(10):
        metrics.log("gpu", torch.tensor(float(i), device="cuda"))
        metrics.log("cpu", torch.tensor(float(i)))
    with torch.profiler.profile() as profile:
        assert metrics.peek() == {"gpu": 4.5, "cpu": 4.5}
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1


def test_plain_numbers_do_not_need_torch():
    code = (
        "import sys\nfrom etude.metrics import Metrics\nm = Metrics()\nm.log('x', [1, 3])\n"
        "assert m.reduce() == {'x': 2}\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
