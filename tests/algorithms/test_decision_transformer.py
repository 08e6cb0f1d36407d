# SPDX-License-Identifier: Apache-2.0
"""Decision Transformer against its formulas written out, and in an env where only return and memory say what to do."""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from over_seeds import median_over_seeds, mistaken
from torch.nn import functional as F

import etude
from etude import DecisionTransformer, DecisionTransformerConfig, Experience, Recording, RecordingWriter, Segments
from etude.algorithms.decision_transformer import ReturnTransformer
from etude.connectors import Connector, History, ReturnToGo
from etude.errors import CheckpointError, ModuleError, SettingsError
from etude.learners import Batch, Loss
from etude.modules import Module, Output

STEPS = 3
LINE = spaces.Box(-1.0, 1.0, (1,), np.float32)
BOX = spaces.Box(-2.0, 4.0, (2,), np.float32)
NUMBER = spaces.Box(-np.inf, np.inf, (1,), np.float32)
CHOICE = spaces.Discrete(2, start=3)
TINY: dict[str, Any] = {"embedding_size": 16, "num_layers": 1, "num_heads": 2, "context_length": 3, "dropout": 0.0}


class Alternates(gym.Env[Any, Any]):
    """Each action that is another than the one before earns 1. Nothing is seen."""

    observation_space, action_space = LINE, CHOICE

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.before, self.t = None, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        reward = float(self.before not in (None, action))
        self.before, self.t = action, self.t + 1
        return np.zeros(1, np.float32), reward, self.t == STEPS, False, {}


def alternating(num: int, seed: int) -> Experience:
    """Episodes of `Alternates`, in which an action is another than the one before with a chance of 0.35."""
    rng = np.random.default_rng(seed)
    other = rng.random((num, STEPS)) < 0.35
    action = (rng.integers(0, 2, (num, 1)) + np.cumsum(np.where(np.arange(STEPS) > 0, other, False), 1)) % 2 + 3
    reward = np.where(np.arange(STEPS) > 0, other, False).astype(np.float64)
    steps = {"obs": np.zeros((num * STEPS, 1), np.float32), "action": action.reshape(-1), "reward": reward.reshape(-1)}
    segments = Segments.of(num, episode_id=[str(i) for i in range(num)], terminated=True)
    return Experience(steps, np.arange(0, num * STEPS + 1, STEPS), segments, {"obs": np.zeros((num, 1), np.float32)})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("alternates") / "data"
    with RecordingWriter(path, obs_space=LINE, action_space=CHOICE) as writer:
        writer.write(alternating(600, 0))
    return str(path)


def made(action_space: Any = CHOICE, obs_space: Any = LINE, **given: Any) -> DecisionTransformer:
    config = DecisionTransformerConfig(**{"data": "none", "seed": 0, **TINY, **given})
    return DecisionTransformer(config, saved_spaces={"main": (obs_space, action_space)})


def windows(algorithm: DecisionTransformer, exp: Experience) -> dict[str, Any]:
    """What a batch of all steps has."""
    algorithm.connectors.update(exp)
    seen = algorithm.learner.only.connectors.offline(algorithm.connectors.offline(exp))
    return {name: torch.as_tensor(column) for name, column in seen.steps.items()}


def some(action_space: Any) -> Experience:
    """Three episodes with random numbers."""
    rng, lengths = np.random.default_rng(1), [4, 1, 6]
    num = sum(lengths)
    action_space.seed(1)
    steps = {
        "obs": rng.normal(size=(num, 1)).astype(np.float32),
        "action": np.stack([action_space.sample() for _ in range(num)]),
        "reward": rng.normal(size=num),
    }
    segments = Segments.of(3, episode_id=["a", "b", "c"], terminated=True)
    return Experience(steps, np.concatenate([[0], np.cumsum(lengths)]), segments, {"obs": np.zeros((3, 1), np.float32)})


# -- formulas ---------------------------------------------------------------------------------------------------------


def naive_dist_inputs(net: Any, exp: Experience, start: int, begin: int, now: int, end: int) -> torch.Tensor:
    """What to do at step ``now`` where it and those from ``begin`` on are seen, by a transformer written out.

    Steps are rows of ``exp``, in an episode from ``start`` up to ``end``; returns are divided by 3.
    """
    tokens, heads = [], 2
    for t in range(begin, now + 1):
        before = torch.zeros(2)
        if t > start:
            taken = torch.as_tensor(exp.steps["action"][t - 1])
            before = F.one_hot(taken - 3, 2).float() if taken.dtype == torch.int64 else taken
        left = torch.tensor([sum(exp.steps["reward"][t:end]) / 3.0], dtype=torch.float32)
        obs = torch.as_tensor(exp.steps["obs"][t])
        parts = (net.action(before), net.return_to_go(left), net.observation(obs))
        tokens += [part + net.timestep.weight[t - start] for part in parts]
    x = net.norm(torch.stack(tokens))
    for layer in net.layers.layers:
        h = layer.norm1(x)
        q, k, v = (h @ layer.self_attn.in_proj_weight.T + layer.self_attn.in_proj_bias).chunk(3, -1)
        out = []
        for one in range(heads):
            own = slice(one * 8, one * 8 + 8)
            for i in range(len(x)):
                scores = torch.stack([q[i, own] @ k[j, own] / math.sqrt(8) for j in range(i + 1)])
                out.append(scores.softmax(0) @ v[: i + 1, own])
        mixed = torch.cat([torch.stack(out[one * len(x) : (one + 1) * len(x)]) for one in range(heads)], -1)
        x = x + layer.self_attn.out_proj(mixed)
        x = x + layer.linear2(torch.relu(layer.linear1(layer.norm2(x))))
    return net.head(net.layers.norm(x)[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("action_space", [CHOICE, BOX], ids=["discrete", "box"])
def test_the_loss_is_that_of_a_transformer_written_out(action_space: Any) -> None:
    algorithm, exp = made(action_space, num_layers=2, return_scale=3.0), some(action_space)
    net: Any = algorithm.module.net
    batch = Batch(windows(algorithm, exp), algorithm.module)
    logps = []
    for start, end in zip(exp.offsets.tolist(), exp.offsets[1:].tolist(), strict=False):
        for newest in range(start, end):
            begin = max(start, newest - 2)
            for now in range(begin, newest + 1):  # each step of the window that ends at the newest
                inputs, action = naive_dist_inputs(net, exp, start, begin, now, end), exp.steps["action"][now]
                if action_space is CHOICE:
                    logps.append(inputs.log_softmax(-1)[int(action) - 3])
                else:
                    mean, log_std = inputs.chunk(2)
                    dist: Any = torch.distributions.Normal(mean, log_std.exp())
                    logps.append(dist.log_prob(torch.as_tensor(action)).sum())
    loss = algorithm.loss(algorithm.module, batch)
    expected = -torch.stack(logps).mean()
    torch.testing.assert_close(loss.parts["policy"], expected, rtol=1e-4, atol=1e-5)
    parameters = list(algorithm.module.parameters())
    for grad, naive in zip(
        torch.autograd.grad(loss.total, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(grad, naive, rtol=1e-3, atol=1e-5)


class Told:
    """In place of a team of learners: all of them together sum up to this."""

    size = 2

    def __init__(self, sums: torch.Tensor) -> None:
        self.sums = sums

    def sum_(self, own: torch.Tensor) -> None:
        own.copy_(self.sums)


def test_losses_of_shares_average_to_that_of_all() -> None:
    algorithm = made()
    columns = windows(algorithm, some(CHOICE))
    num, half = len(columns["action"]), len(columns["action"]) // 3

    def loss(first: int, stop: int) -> float:
        batch = Batch({name: column[first:stop] for name, column in columns.items()}, algorithm.module)
        return algorithm.loss(algorithm.module, batch).total.item()

    whole = loss(0, num)
    there = torch.as_tensor(columns["obs/attention_mask"])
    algorithm.learner.only.team = Told(torch.tensor([there.sum(), there.numel()], dtype=torch.float64))  # type: ignore[assignment]
    shares = [loss(0, half), loss(half, num)]
    assert (half * shares[0] + (num - half) * shares[1]) / num == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("evaluates", [True, False])
def test_no_token_sees_a_later_one_or_padding(evaluates: bool) -> None:
    algorithm, exp = made(BOX, num_layers=2), some(BOX)
    net: Any = algorithm.module.train(not evaluates).net
    batch = Batch(windows(algorithm, exp), algorithm.module)
    with torch.no_grad():
        before = net.dist_inputs(batch.obs)
        for place in range(3):
            for name, part in batch.obs.items():
                if name in ("attention_mask", "t"):
                    continue
                changed = part.clone()
                changed[:, place] += 5.0
                after = net.dist_inputs({**batch.obs, name: changed})
                sees = torch.zeros(len(part), 3, dtype=torch.bool)  # by row and step, that of the change or a later one
                sees[:, place:] = batch.obs["attention_mask"][:, place : place + 1].bool()
                moved = (after - before).abs().amax(-1) > 1e-5
                there = batch.obs["attention_mask"].bool()
                assert (moved[there] == sees[there]).all(), (name, place)


def test_acting_and_learning_compute_the_same() -> None:
    algorithm, exp = made(BOX, num_layers=2), some(BOX)
    columns = windows(algorithm, exp)
    expected = algorithm.module.train()(Batch(columns, algorithm.module).obs).dist_inputs
    actor = algorithm.module.eval().actor(explore=False)
    actor.start(np.random.default_rng(0), 3)
    obs = {name: column.numpy() for name, column in columns.items() if name.startswith("obs")}
    _, extras = actor.step(obs)
    torch.testing.assert_close(torch.from_numpy(extras["dist_inputs"]), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch about itself, while it compiles
@pytest.mark.parametrize(
    ("action_space", "given"),
    [
        (BOX, {"squash": True}),
        (BOX, {"precision": "bfloat16"}),
        (spaces.Dict({"push": LINE, "which": spaces.MultiDiscrete([2, 3])}), {"dropout": 0.5}),
        pytest.param(BOX, {"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_step(action_space: Any, given: dict[str, Any]) -> None:
    algorithm, rng = made(action_space, **given), np.random.default_rng(0)
    exp = some(BOX)
    if isinstance(action_space, spaces.Dict):
        own = {
            "action/push": rng.uniform(-1, 1, (11, 1)).astype(np.float32),
            "action/which": rng.integers(0, 2, (11, 2)),
        }
        steps = {name: column for name, column in exp.steps.items() if name != "action"}
        exp = Experience({**steps, **own}, exp.offsets, exp.segments, exp.final_obs)
    exp = exp.with_steps(**({"action": np.clip(exp.steps["action"], -1.9, 3.9)} if "action" in exp.steps else {}))
    update = algorithm.learner.only.update_from([windows(algorithm, exp)] * 3)
    assert np.isfinite(update.losses["policy"])


def test_images_and_masks_are_seen() -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "action_mask": spaces.MultiBinary(2)})
    network = etude.NetworkConfig(conv=((4, 3, 1),), conv_width=8)
    algorithm, exp = made(CHOICE, space, network=network), some(CHOICE)
    rng = np.random.default_rng(0)
    mask = np.eye(2, dtype=np.int8)[exp.steps["action"] - 3]
    camera = rng.integers(0, 256, (11, 8, 8, 3)).astype(np.uint8)
    steps = {"obs/camera": camera, "obs/action_mask": mask, **{n: exp.steps[n] for n in ("action", "reward")}}
    final = {"obs/camera": camera[:3], "obs/action_mask": mask[:3]}
    columns = windows(algorithm, Experience(steps, exp.offsets, exp.segments, final))
    assert any("encoder" in name and p.dim() == 4 for name, p in algorithm.module.named_parameters())
    assert np.isfinite(algorithm.learner.only.update_from([columns]).losses["policy"])
    chosen = algorithm.module.eval()(Batch(columns, algorithm.module).obs).dist_inputs.argmax(-1)
    np.testing.assert_array_equal(chosen + 3, exp.steps["action"])


def test_each_step_of_a_window_has_its_own_mask() -> None:
    space = spaces.Dict({"x": spaces.Box(-1, 1, (1,), np.float32), "action_mask": spaces.MultiBinary(2)})
    algorithm, exp = made(CHOICE, space), some(CHOICE)
    rng = np.random.default_rng(0)
    mask = np.maximum(np.eye(2, dtype=np.int8)[exp.steps["action"] - 3], rng.integers(0, 2, (11, 2)).astype(np.int8))
    steps = {"obs/x": exp.steps["obs"], "obs/action_mask": mask, **{n: exp.steps[n] for n in ("action", "reward")}}
    exp = Experience(
        steps, exp.offsets, exp.segments, {"obs/x": np.zeros((3, 1), np.float32), "obs/action_mask": mask[:3]}
    )
    batch = Batch(windows(algorithm, exp), algorithm.module)
    inputs, there = algorithm.module.net.dist_inputs(batch.obs), batch.obs["attention_mask"].bool()
    total, count, k = 0.0, 0, there.shape[1]
    for start, stop in itertools.pairwise(exp.offsets.tolist()):
        for row in range(start, stop):
            for j in range(k):
                step = row - k + 1 + j
                assert bool(there[row, j]) == (step >= start)
                if step >= start:
                    allowed = torch.where(torch.as_tensor(mask[step] == 1), inputs[row, j], -torch.inf)
                    total -= allowed.log_softmax(-1)[exp.steps["action"][step] - 3].item()
                    count += 1
    assert algorithm.loss(algorithm.module, batch).total.item() == pytest.approx(total / count, rel=1e-5)
    assert (mask.sum(-1) == 2).any()
    assert (mask.sum(-1) == 1).any()


class Last(torch.nn.Module):
    """A network of one's own: sees what is left to earn, and what was done last."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, obs: Any) -> Output:
        return Output(self.layer(torch.cat([obs["prev_action"][:, -1], obs["return_to_go"][:, -1]], -1)))


def test_a_network_of_ones_own_learns_the_newest_step() -> None:
    algorithm, exp = made(module=Last), some(CHOICE)
    batch = Batch(windows(algorithm, exp), algorithm.module)
    logp = algorithm.module(batch.obs).dist_inputs.log_softmax(-1)
    expected = -logp[torch.arange(11), torch.as_tensor(exp.steps["action"] - 3)].mean()
    torch.testing.assert_close(algorithm.loss(algorithm.module, batch).parts["policy"], expected)


def test_other_algorithms_take_its_connectors(data: str) -> None:
    """BC, given the return."""
    algorithm = etude.BC(etude.BCConfig(data=data, connectors=("return_to_go",), updates_per_iteration=2, seed=0))
    algorithm.train()
    assert algorithm.connectors.metrics() == {"return_to_go/target": 2.0, "return_to_go/scale": 2.0}
    assert algorithm.evaluate(2, env=Alternates, seed=0).episodes == 2


# -- in an env --------------------------------------------------------------------------------------------------------


class Blind(DecisionTransformer):
    """Does not condition on returns."""

    def module_connectors(self) -> list[Any]:
        class Nothing(ReturnToGo):
            def _added(self, obs: Any, left: Any) -> Any:
                return super()._added(obs, 0.0 * left)

        return [Nothing(), History(self.config.context_length)]


class Leaks(DecisionTransformer):
    """Learns with actions shifted by a step: each is seen before it is chosen."""

    def module_connectors(self) -> list[Any]:
        class Shifted(History):
            def offline(self, exp: Experience, module: Module | None = None) -> Experience:
                later = np.roll(exp.steps["action"], -1, 0)
                seen = super().offline(exp.with_steps(action=later), module)
                return seen.with_steps(action=exp.steps["action"])

        return [super().module_connectors()[0], Shifted(self.config.context_length)]


class Unmasked(DecisionTransformer):
    """Tokens see later ones."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        net: Any = module.net
        there = batch.obs["attention_mask"].bool().repeat_interleave(3, 1)
        net._hidden = lambda _: (~there[:, None] & ~torch.eye(9, dtype=torch.bool)).repeat_interleave(2, 0)
        try:
            return super().loss(module, batch)
        finally:
            del net._hidden


@functools.cache
def trained(cls: type[DecisionTransformer], data: str, seed: int) -> tuple[DecisionTransformer, float]:
    """An algorithm that has learned, and its last loss."""
    how: dict[str, Any] = {"env": Alternates, "evaluation_interval": 0, "updates_per_iteration": 200}
    how |= {"embedding_size": 32, "num_layers": 2, "lr": ((0, 3e-3), (400, 5e-4))}
    algorithm = cls(DecisionTransformerConfig(data=data, seed=seed, **TINY | how))
    algorithm.train()
    return algorithm, algorithm.train().losses["policy"]


@pytest.mark.learning
@pytest.mark.parametrize(
    ("cls", "least", "most"), [(DecisionTransformer, 1.7, 2.0), mistaken(Blind, 0.0, 1.0), mistaken(Leaks, 0.0, 1.0)]
)
def test_it_earns_the_target(cls: Any, least: float, most: float, data: str) -> None:
    def score(seed: int) -> float:
        return trained(cls, data, seed)[0].evaluate(100, seed=0, explore=True).return_mean

    assert least <= median_over_seeds(score) <= most


@pytest.mark.learning
@pytest.mark.parametrize(("cls", "least", "most"), [(DecisionTransformer, 0.42, 0.5), mistaken(Unmasked, 0.0, 0.36)])
def test_the_future_says_nothing(cls: Any, least: float, most: float, data: str) -> None:
    """The loss can't be less than what is random in the data, 0.45, unless later actions are seen: then it is 0.17."""
    assert least <= median_over_seeds(lambda seed: trained(cls, data, seed)[1]) <= most


@pytest.mark.learning
def test_it_earns_what_it_is_told_to(data: str, tmp_path: Path) -> None:
    def score(seed: int) -> float:
        """How far the returns are from the targets."""
        trained(DecisionTransformer, data, seed)[0].save(tmp_path / str(seed))
        off = []
        for target in (0.0, 1.0, 2.0):
            loaded = etude.load(tmp_path / str(seed), env=Alternates, target_return=target)
            off.append(abs(loaded.evaluate(100, seed=0, explore=True).return_mean - target))
        return max(off)

    assert median_over_seeds(score) <= 0.3


def test_acting_sees_what_learning_saw(data: str, tmp_path: Path) -> None:
    """Episodes that were played, played back with the return that they had as the target."""
    algorithm = made(data=data, env=Alternates, target_return=2.0, return_scale=4.0)
    algorithm.record(tmp_path / "own", 3, seed=1, explore=True)
    exp = Recording.open(tmp_path / "own").read().join()
    learned = algorithm.connectors.copy()
    seen = learned.offline(exp)
    for i, total in enumerate(exp.returns().tolist()):
        shown: dict[str, list[Any]] = {}
        policy = made(data=data, target_return=total, return_scale=4.0).policy

        class Notes(Connector):
            def online(self, inputs: Any) -> Any:
                for name, column in inputs.obs.items():
                    shown.setdefault(name, []).append(column[0].copy())  # noqa: B023 - called within the turn
                return inputs

        policy.connectors.add(Notes())
        state, rows = policy.initial_state(), slice(int(exp.offsets[i]), int(exp.offsets[i + 1]))
        for t in range(rows.start, rows.stop):
            reward = None if t == rows.start else exp.steps["reward"][t - 1]
            _, state = policy.act(exp.steps["obs"][t], state, reward=reward)
            state["action"] = {"action": exp.steps["action"][t : t + 1]}
        for name in shown:
            np.testing.assert_allclose(np.stack(shown[name]), seen.steps[name][rows], atol=1e-6, err_msg=name)


def in_pieces(path: Path) -> tuple[str, Any]:
    """A recording of 12 episodes, the last of which has no end, in files that end within episodes; and its rewards."""
    exp = alternating(12, 1)
    rewards = np.random.default_rng(0).normal(size=exp.num_steps).round(3)
    exp = exp.with_steps(reward=rewards, obs=np.arange(exp.num_steps, dtype=np.float32)[:, None])
    terminated = np.append(np.ones(11, bool), False)
    exp = Experience(exp.steps, exp.offsets, exp.segments.replace(terminated=terminated), exp.final_obs)
    with RecordingWriter(path, obs_space=NUMBER, action_space=CHOICE, max_rows_per_file=7) as writer:
        writer.write(exp)
    return str(path), rewards


@pytest.mark.parametrize("mode", ["auto", "materialize_data", "stream"])
def test_pieces_of_episodes_are_learned_from_in_every_mode(mode: Any, tmp_path: Path) -> None:
    """Each step once an epoch, with the return of the whole episode; not so those of an episode without an end."""
    data, rewards = in_pieces(tmp_path / "data")
    seen: dict[float, float] = {}

    class Noting(DecisionTransformer):
        def loss(self, module: Module, batch: Batch) -> Loss:
            now = (batch.obs["obs"][:, -1, 0].tolist(), batch.obs["return_to_go"][:, -1, 0].tolist())
            seen.update(zip(*now, strict=True))
            return super().loss(module, batch)

    how: Any = {"data": data, "mode": mode, "batch_size": 11, "updates_per_iteration": 15}
    algorithm = Noting(DecisionTransformerConfig(seed=0, return_scale=1.0, **TINY | how))
    result = algorithm.train()
    whole = 11 * STEPS
    left = rewards[:whole].reshape(11, STEPS)[:, ::-1].cumsum(1)[:, ::-1].reshape(-1)
    assert len(seen) > 0
    assert set(seen) <= set(range(whole))
    if mode != "stream":  # there, the first steps of pieces can't be seen as while acting
        assert len(seen) == whole
    for row, value in seen.items():
        assert value == pytest.approx(left[int(row)], abs=1e-5)
    assert result.metrics["left_out/early_or_dropped"] >= STEPS
    best = rewards[:whole].reshape(11, STEPS).sum(1)
    assert result.metrics["return_to_go/target"] == pytest.approx(best.max())


@pytest.mark.parametrize("mode", ["auto", "stream"])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(mode: Any, tmp_path: Path) -> None:
    how: Any = {"data": in_pieces(tmp_path / "data")[0], "mode": mode, "updates_per_iteration": 4, "batch_size": 8}
    config = DecisionTransformerConfig(seed=0, **TINY | how | {"dropout": 0.1})
    algorithm = DecisionTransformer(config)
    algorithm.train()
    algorithm.save(tmp_path / "run")
    expected = [json.dumps(algorithm.train().losses) for _ in range(2)]
    resumed = etude.load(tmp_path / "run")
    assert [json.dumps(resumed.train().losses) for _ in range(2)] == expected
    assert resumed.connectors.metrics() == algorithm.connectors.metrics()


@pytest.mark.parametrize("given", [{"num_heads": 1}, {"embedding_size": 8}, {"num_layers": 2}, {"max_timestep": 9}])
def test_a_transformer_of_another_form_is_not_loaded(given: dict[str, int], data: str, tmp_path: Path) -> None:
    DecisionTransformer(DecisionTransformerConfig(data=data, seed=0, **TINY)).save(tmp_path)
    for load in (etude.load, etude.load_policy):
        with pytest.raises(CheckpointError, match=f"`{next(iter(given))}` can't be other than it was saved"):
            load(tmp_path, **given)
    assert etude.load(tmp_path, num_heads=TINY["num_heads"], dropout=0.5).config.dropout == 0.5


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("context_length", 0, "at least 1"),
        ("return_scale", 0.0, "above 0, or none"),
        ("embedding_size", 0, "at least 1"),
        ("num_layers", 0, "at least 1"),
        ("num_heads", 0, "at least 1"),
        ("dropout", 1.0, "at least 0 and below 1"),
        ("max_timestep", 0, "at least 1"),
    ],
)
def test_bad_settings(name: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"`{name}` is {value}, but must be {rule}"):
        DecisionTransformerConfig(data="data", **{name: value})


def test_what_can_not_be_is_refused(data: str) -> None:
    with pytest.raises(ModuleError, match="observations have no part `return_to_go`, which return_to_go and history"):
        ReturnTransformer(LINE, CHOICE, DecisionTransformerConfig(data="data"))
    with pytest.raises(SettingsError, match="return_to_go says of each step what is known only when"):
        etude.PPO(etude.PPOConfig(env=Alternates, connectors=("return_to_go",)))
    with pytest.raises(SettingsError, match=r"is not known for recorded episodes: .* \(return_to_go\) shows there"):
        etude.evaluate_on(made(), data, methods=("fqe",))
    with pytest.raises(SettingsError, match="no target return: set `target`"):
        made(env=Alternates).evaluate(1)
