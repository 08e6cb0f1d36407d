# SPDX-License-Identifier: Apache-2.0
"""Returns to go, and the last steps with a padding mask, against loops that say what they are."""

from typing import Any

import numpy as np
import pytest
from connector_cases import ACTION_SPACES, OBS_SPACES, World
from gymnasium import spaces

from etude.connectors import History, Inputs, Pipeline, ReturnToGo
from etude.connectors.history import one_step, over_steps
from etude.errors import CheckpointError, DataError, SettingsError, SpaceError
from etude.experience import Experience, Segments
from etude.spaces import leaves

BOX = spaces.Box(-np.inf, np.inf, (1,), np.float32)
CHOICE = spaces.Discrete(3)


def episodes(*lengths: int, done: bool = True) -> Experience:
    """Episodes with random rewards; of each, the observation counts steps, and choices go round."""
    rng, num = np.random.default_rng(sum(lengths)), sum(lengths)
    t = np.concatenate([np.arange(n) for n in lengths])
    steps = {
        "obs": t[:, None].astype(np.float32),
        "action": (t % 3).astype(np.int64),
        "reward": rng.normal(size=num).round(3),
    }
    segments = Segments.of(
        len(lengths), episode_id=[f"e{i}" for i in range(len(lengths))], terminated=np.full(len(lengths), done)
    )
    final = {"obs": np.array(lengths, np.float32)[:, None]}
    return Experience(steps, np.concatenate([[0], np.cumsum(lengths)]), segments, final)


def naive_returns(exp: Experience) -> list[float]:
    """By a loop, of experience whose segments are whole episodes."""
    out = []
    for i in range(exp.num_segments):
        rewards = exp.steps["reward"][exp.offsets[i] : exp.offsets[i + 1]]
        out += [float(sum(rewards[t:])) for t in range(len(rewards))]
    return out


def made(**given: Any) -> ReturnToGo:
    connector = ReturnToGo(**given)
    connector.spaces(BOX, CHOICE)
    return connector


def pieces_of(exp: Experience, max_len: int, lookback: int = 0) -> list[Experience]:
    cut = exp.cut(max_len, lookback=lookback)
    return [cut[i : i + 1] for i in range(cut.num_segments)]


def trained_returns(exp: Experience) -> dict[tuple[str, int], float]:
    """What is left to earn at each step that is learned from, by episode and t."""
    ids = exp.segments.episode_id[exp.segment_of_step()]
    rows = zip(ids, exp.t().tolist(), exp.steps["obs/return_to_go"][:, 0], exp.trained(), strict=True)
    return {(name, t): float(left) for name, t, left, is_trained in rows if is_trained}


@pytest.mark.parametrize("lookback", [0, 2])
@pytest.mark.parametrize("max_len", [1, 2, 3, 100])
def test_returns_to_go_are_of_whole_episodes_however_they_are_cut(max_len: int, lookback: int) -> None:
    exp = episodes(5, 1, 7)
    expected = dict(
        zip([(f"e{i}", t) for i, n in enumerate((5, 1, 7)) for t in range(n)], naive_returns(exp), strict=True)
    )
    connector = made(scale=2.0)
    parts = pieces_of(exp, max_len, lookback)
    order = np.random.default_rng(0).permutation(len(parts))
    for i in order:
        connector.update(parts[i])
    found: dict[tuple[str, int], float] = {}
    for i in order[::-1]:
        found |= trained_returns(connector.offline(parts[i]))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value / 2.0, abs=1e-5)


def test_what_is_learned_of_pieces_is_what_is_learned_of_whole_episodes() -> None:
    exp = episodes(5, 1, 7)
    totals = [sum(exp.steps["reward"][a:b]) for a, b in zip(exp.offsets, exp.offsets[1:], strict=False)]
    for parts in ([exp], pieces_of(exp, 2), pieces_of(exp, 3, 1)):
        connector = made()
        for part in parts:
            connector.update(part)
        assert connector.metrics() == pytest.approx({"target": max(totals), "scale": max(map(abs, totals))})
    assert made(target=3.0, scale=5.0).metrics() == {"target": 3.0, "scale": 5.0}


def test_an_episode_without_an_end_is_not_learned_from() -> None:
    exp = Experience.concat([episodes(4), episodes(3, done=False)])
    exp = Experience(exp.steps, exp.offsets, exp.segments.replace(episode_id=["whole", "open"]), exp.final_obs)
    connector = made()
    connector.update(exp)
    seen = connector.offline(exp)
    assert seen.segments.lookback.tolist() == [0, 3]
    assert {name for name, _ in trained_returns(seen)} == {"whole"}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_pieces_before_a_lost_one_are_not_learned_from(lost: int) -> None:
    parts = pieces_of(episodes(6), 2)
    connector = made()
    kept = [part for i, part in enumerate(parts) if i != lost]
    for part in kept:
        connector.update(part)
    trained = [t for part in kept for _, t in trained_returns(connector.offline(part))]
    assert trained == {0: [2, 3, 4, 5], 1: [4, 5], 2: []}[lost]


def test_while_acting_the_target_falls_by_what_is_earned() -> None:
    exp = episodes(6)
    connector, rewards = made(scale=4.0), exp.steps["reward"]
    connector.update(exp)
    connector.target = float(sum(rewards))
    recorded = connector.offline(exp)
    connector.start(3)
    for t in range(7):
        obs = {"obs": np.full((1, 1), t, np.float32)}
        earned = np.array([0.0 if t == 0 else rewards[t - 1]])
        seen = connector.online(Inputs(np.array([1]), obs, np.array([t == 0]), {}, earned)).obs["obs/return_to_go"]
        whole = np.concatenate([recorded.steps["obs/return_to_go"], recorded.final_obs["obs/return_to_go"]])
        np.testing.assert_allclose(seen[0], whole[t], atol=1e-6)


def test_a_state_goes_on_and_keeps_what_was_given() -> None:
    parts = pieces_of(episodes(5), 2)
    connector = made()
    for part in parts:
        connector.update(part)
    connector.start(2)
    connector.online(Inputs(np.arange(2), {"obs": np.zeros((2, 1))}, np.ones(2, bool), {}, np.zeros(2)))
    twin = made(target=7.0)
    twin.load_state_dict(connector.state_dict())
    assert twin.metrics() == {"target": 7.0, "scale": connector.metrics()["scale"]}
    for part in parts:
        assert trained_returns(twin.offline(part)) == trained_returns(connector.offline(part))
    inputs = Inputs(np.array([1]), {"obs": np.zeros((1, 1))}, np.zeros(1, bool), {}, np.ones(1))
    np.testing.assert_array_equal(
        twin.online(inputs).obs["obs/return_to_go"], connector.online(inputs).obs["obs/return_to_go"]
    )


def test_bad_returns_to_go() -> None:
    with pytest.raises(SettingsError, match="scale must be above 0, not 0"):
        ReturnToGo(scale=0.0)
    with pytest.raises(SpaceError, match="ReturnToGo adds the key 'return_to_go', but the observation has it"):
        ReturnToGo().spaces(spaces.Dict({"return_to_go": BOX}), CHOICE)
    connector = made()
    connector.start(1)
    with pytest.raises(SettingsError, match="no target return: set `target`, or train on a recording first"):
        connector.online(Inputs(np.zeros(1, np.int64), {"obs": np.zeros((1, 1))}, np.ones(1, bool), {}, np.zeros(1)))
    exp = episodes(3)
    del exp.steps["reward"]
    with pytest.raises(DataError, match="ReturnToGo needs the column `reward`"):
        connector.offline(exp)


# -- the last steps ---------------------------------------------------------------------------------------------------


def test_windows_are_the_last_steps_with_a_mask() -> None:
    exp = episodes(4, 2)
    pipeline = Pipeline([History(3)])
    space, _ = pipeline.spaces(BOX, CHOICE)
    seen = pipeline.offline(exp)
    assert set(seen.steps) == {*leaves(space, "obs"), "action", "reward"}
    row = 0
    for length in (4, 2):
        for now in range(length):
            for place in range(3):
                t = now - 2 + place
                assert seen.steps["obs/attention_mask"][row, place] == (t >= 0)
                assert seen.steps["obs/t"][row, place] == max(t, 0)
                assert seen.steps["obs/obs"][row, place, 0] == max(t, 0)
                before = np.zeros(3) if t <= 0 else np.eye(3)[(t - 1) % 3]
                np.testing.assert_array_equal(seen.steps["obs/prev_action"][row, place], before)
            row += 1
    assert seen.final_obs["obs/t"].tolist() == [[2, 3, 4], [0, 1, 2]]
    assert seen.final_obs["obs/obs"][:, :, 0].tolist() == [[2, 3, 4], [0, 1, 2]]
    assert seen.final_obs["obs/attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_an_action_mask_stays_that_of_the_newest_step() -> None:
    space = spaces.Dict({"x": BOX, "action_mask": spaces.MultiBinary(3)})
    pipeline = Pipeline([History(2)])
    seen, _ = pipeline.spaces(space, CHOICE)
    assert seen["action_mask"] == spaces.MultiBinary(3)
    assert seen["x"].shape == (2, 1)
    pipeline.start(1)
    obs = {"obs/x": np.zeros((1, 1), np.float32), "obs/action_mask": np.array([[1, 0, 1]], np.int8)}
    inputs = Inputs(np.zeros(1, np.int64), obs, np.ones(1, bool), {"action": np.zeros(1, np.int64)}, np.zeros(1))
    np.testing.assert_array_equal(pipeline.online(inputs).obs["obs/action_mask"], [[1, 0, 1]])


@pytest.mark.parametrize("name", OBS_SPACES)
def test_one_step_is_the_inverse_of_several(name: str) -> None:
    for leaf in leaves(OBS_SPACES[name], "obs").values():
        several = over_steps(leaf, 4)
        assert one_step(several) == leaf
        assert several.shape is not None
        assert several.shape[0] == 4


def test_together_they_show_what_was_recorded() -> None:
    """Of each episode that ended, acted with the return that it had as the target."""
    pipeline = Pipeline([ReturnToGo(scale=1.0), History(4)])
    pipeline.spaces(OBS_SPACES["dict"], ACTION_SPACES["dict"])
    pipeline.connectors[0].target = 0.0  # type: ignore[attr-defined]
    pipeline.start(3)
    world = World(pipeline, OBS_SPACES["dict"], ACTION_SPACES["dict"], 3, 1, shy=True)
    for _ in range(40):
        world.turn()
    raw, shown = world.finish()
    pipeline.update(raw)
    seen = pipeline.offline(raw)
    ended = seen.segments.done
    assert ended.sum() > 5
    total = np.repeat(raw.returns(), raw.lengths)[:, None, None]
    rows = np.repeat(ended, raw.lengths)
    for column in leaves(pipeline.connectors[1].spaces(seen_space(), ACTION_SPACES["dict"])[0], "obs"):
        expected = shown.steps[column]
        if column == "obs/return_to_go":
            expected = expected + total
        np.testing.assert_allclose(seen.steps[column][rows], expected[rows], atol=1e-5)


def seen_space() -> Any:
    return ReturnToGo().spaces(OBS_SPACES["dict"], ACTION_SPACES["dict"])[0]


def test_bad_histories() -> None:
    with pytest.raises(SettingsError, match="k must be at least 1, not 0"):
        History(0)
    with pytest.raises(SpaceError, match="History adds the key 't', but the observation has it"):
        History().spaces(spaces.Dict({"t": BOX}), CHOICE)
    two, three = History(2), History(3)
    for connector in (two, three):
        connector.spaces(BOX, CHOICE)
        connector.start(1)
    with pytest.raises(CheckpointError, match="windows of history:k=3 have the shapes"):
        three.load_state_dict(two.state_dict())


@pytest.mark.parametrize("leaf", [spaces.Discrete(3), spaces.Box(0, 1, (), np.float32)])
def test_a_network_that_needs_history_says_so_where_there_is_none(leaf: spaces.Space[Any]) -> None:
    with pytest.raises(SpaceError, match="is of a single step: the network needs `history`"):
        one_step(leaf)
