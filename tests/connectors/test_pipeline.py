# SPDX-License-Identifier: Apache-2.0
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from connector_cases import episodes
from gymnasium import spaces

import etude
from etude.connectors import (
    GAE,
    ClipAction,
    ClipReward,
    Connector,
    FrameStack,
    FunctionConnector,
    Inputs,
    NormalizeObs,
    Pipeline,
    PrevActionReward,
    ReturnToGo,
    RewardMap,
    connector_from,
)
from etude.connectors.connector import replace_obs
from etude.connectors.pipeline import BY_NAME
from etude.errors import CheckpointError, DataError, SettingsError, SpaceError
from etude.experience import Experience, Segments

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTION = spaces.Discrete(4)


class AddNoise(Connector):
    """A user's connector, with an argument of its own."""

    def __init__(self, scale: float = 0.5) -> None:
        self.scale = scale

    def act(self, action: dict[str, Any]) -> dict[str, Any]:
        return {"action": action["action"] + self.scale}


class Double(Connector):
    """Another."""

    def act(self, action: dict[str, Any]) -> dict[str, Any]:
        return {"action": action["action"] * 2}


def double(obs: Any) -> Any:
    return obs * 2


def names(pipeline: Pipeline) -> list[str]:
    return [connector.name for connector in pipeline.connectors]


def test_connectors_by_name_class_object_and_function() -> None:
    stack = connector_from("frame_stack:3")
    assert isinstance(stack, FrameStack)
    assert stack.k == 3
    clip = connector_from("clip_reward:-5,high=2,sign=True")
    assert isinstance(clip, ClipReward)
    assert (clip.low, clip.high, clip.sign) == (-5, 2, True)
    assert isinstance(connector_from("normalize_obs"), NormalizeObs)
    assert isinstance(connector_from(AddNoise), AddNoise)
    assert connector_from(stack) is stack
    assert isinstance(connector_from(double), FunctionConnector)


def test_names_and_texts_lead_back() -> None:
    for name, cls in BY_NAME.items():
        connector = connector_from(name)
        assert type(connector) is cls
        assert connector.name == name
        assert repr(connector_from(repr(connector))) == repr(connector)
    assert repr(connector_from("clip_reward:-5")) == "clip_reward:low=-5,high=1.0,sign=False"
    assert repr(AddNoise(2)) == "add_noise:scale=2"
    assert repr(Pipeline(["gae:0.9", double])) == "Pipeline([gae:gamma=0.9,lambda_=0.95, double])"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("frame-stak", r"there is no connector `frame-stak`\. Nearest: `frame_stack`"),
        ("zzzzzz", r"there is no connector `zzzzzz`\. There are clip_action, clip_reward, "),
        ("frame_stack:x", r"connector `frame_stack:x`: can't read 'x'\. Write plain values"),
        ("frame_stack:4)(", r"can't read '4\)\('"),
        (f"frame_stack:{'-' * 9000}1", r"connector `frame_stack:-{88}`: can't read '-{100}'"),
        (f"frame_stack:{'1+' * 5000}1", r"can't read '1\+"),
        ("frame_stack:k=2,k=3", r"connector `frame_stack:k=2,k=3` has an argument twice"),
        (
            "frame_stack:n=4",
            r"connector `frame_stack:n=4`: .*unexpected keyword argument 'n'.* It takes \(k: int = 4\)",
        ),
        ("frame_stack:0", r"FrameStack\.k must be at least 1, not 0"),
        ("own:Ema:0.5", r"`own:Ema:0\.5`: a connector of your own, `module:Class`, is made without arguments"),
        (3, r"3 is no connector: give a name, a Connector \(class or object\), or a function"),
        (int, r"<class 'int'> is no connector"),
    ],
)
def test_what_is_no_connector(spec: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        connector_from(spec)


def test_positions() -> None:
    pipeline = Pipeline(["normalize_obs"])
    pipeline.add("frame_stack:2")
    pipeline.add(double, at=0)
    pipeline.add("prev_action_reward", at=-1)
    assert names(pipeline) == ["double", "normalize_obs", "prev_action_reward", "frame_stack"]
    assert pipeline.context == 2
    assert len(pipeline) == 4


def test_actions_go_through_in_reverse() -> None:
    pipeline = Pipeline([AddNoise(1), Double()])
    np.testing.assert_array_equal(pipeline.act({"action": np.array([3.0])})["action"], [7])


def test_an_empty_pipeline_hands_everything_through() -> None:
    pipeline = Pipeline()
    assert pipeline.spaces(BOX, ACTION) == (BOX, ACTION)
    exp = episodes([2])
    inputs = Inputs(np.arange(1), {}, np.zeros(1, bool), {}, np.zeros(1))
    action = {"action": np.zeros(1)}
    assert pipeline.online(inputs) is inputs
    assert pipeline.act(action) is action
    assert pipeline.offline(exp) is exp
    pipeline.update(exp)
    pipeline.load_state_dict(pipeline.state_dict())
    assert pipeline.context == 0


def test_each_learns_from_what_those_before_it_made() -> None:
    first, stack, second = NormalizeObs(), FrameStack(2), NormalizeObs()
    pipeline = Pipeline([double, first, stack, second])
    pipeline.spaces(BOX, ACTION)
    exp = episodes([5, 3])
    pipeline.update(exp)
    np.testing.assert_allclose(first.state_dict()["obs"]["mean"], exp.steps["obs"].mean(axis=0) * 2)
    # the second saw what the first made before it had learned: the doubled observations, stacked
    stacked = stack.offline(exp).steps["obs"].mean(axis=0) * 2
    np.testing.assert_allclose(second.state_dict()["obs"]["mean"], np.minimum(stacked, 10), rtol=1e-6)


def test_a_copy_has_slots_of_its_own_and_the_same_statistics() -> None:
    pipeline = Pipeline(["normalize_obs", "frame_stack:2"])
    pipeline.spaces(BOX, ACTION)
    pipeline.update(episodes([5]))
    pipeline.start(2)
    both = Inputs(np.arange(2), {"obs": np.ones((2, 2), np.float32)}, np.ones(2, bool), {}, np.zeros(2))
    seen = pipeline.online(both)
    other = pipeline.copy()
    other.start(1)
    one = Inputs(np.arange(1), {"obs": np.ones((1, 2), np.float32)}, np.ones(1, bool), {}, np.zeros(1))
    np.testing.assert_array_equal(other.online(one).obs["obs"], seen.obs["obs"][:1])
    assert pipeline.state_dict()["connectors"][1]["state"]["frames"]["obs"].shape == (2, 4)


def test_a_state_loads_before_start_and_start_keeps_what_was_learned() -> None:
    pipeline = Pipeline(["normalize_obs", "frame_stack:2"])
    pipeline.spaces(BOX, ACTION)
    pipeline.update(episodes([5]))
    pipeline.start(8)
    other = Pipeline(["normalize_obs", "frame_stack:2"])
    other.spaces(BOX, ACTION)
    other.load_state_dict(pipeline.state_dict())
    other.start(3)
    state = other.state_dict()["connectors"]
    assert state[0]["state"]["obs"]["count"] == 5
    assert state[1]["state"]["frames"]["obs"].shape == (3, 4)


def test_a_state_of_other_connectors_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"of the connectors \['gae'\], but here are \['gae', 'frame_stack'\]"):
        Pipeline([GAE, FrameStack]).load_state_dict(Pipeline(["gae"]).state_dict())


def test_connectors_without_a_state_may_be_others_where_that_is_allowed() -> None:
    pipeline, other = Pipeline(["clip_reward", NormalizeObs]), Pipeline([NormalizeObs, GAE])
    for one in (pipeline, other):
        one.spaces(BOX, ACTION)
    pipeline.update(episodes([5]))
    saved = pipeline.state_dict()
    other.load_state_dict(saved, stateless_may_differ=True)
    assert other.metrics() == pipeline.metrics()
    with pytest.raises(CheckpointError, match=r"of the connectors \['normalize_obs'\], but here are \[\]"):
        Pipeline(["gae"]).load_state_dict(saved, stateless_may_differ=True)


def test_the_lookback_of_a_chain_is_the_sum() -> None:
    assert Pipeline([PrevActionReward, FrameStack(4), Pipeline([FrameStack(2)])]).context == 5


class Counts(Connector):
    """Keeps something from step to step, which is in no state."""

    def start(self, num_slots: int) -> None:
        self.steps = np.zeros(num_slots)

    def online(self, inputs: Inputs) -> Inputs:
        self.steps[inputs.slots] += 1
        return inputs


class Steps(Counts):
    """Keeps it in a state that `step` passes on."""

    def new_state(self, num_rows: int) -> dict[str, Any]:
        return {"steps": np.zeros(num_rows)}

    def step(self, inputs: Inputs, state: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
        return inputs, {"steps": state["steps"] + 1}


class Learns(Connector):
    """Learns something, which is in no state."""

    def update(self, exp: Experience) -> None:
        self.seen = exp.num_steps


class Saves(Learns):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


class SavesAll(Saves):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_what_is_kept_but_in_no_state_is_told() -> None:
    with pytest.raises(SettingsError, match=r"`counts` has an `update` .* lacks `state_dict`"):
        Pipeline([Counts()])
    for connector in (Learns, Learns(), Saves()):
        with pytest.raises(SettingsError, match=r"has an `update` or .*, but lacks .* Write both"):
            Pipeline([connector])
        with pytest.raises(SettingsError, match="checkpoints and policies that act would lose it"):
            Pipeline().add(connector)
    Pipeline([Steps, SavesAll])


class Longer(Connector):
    """One number more when acting, none when learning."""

    def spaces(self, obs_space: Any, action_space: Any) -> Any:
        return spaces.Box(-np.inf, np.inf, (obs_space.shape[0] + 1,), np.float32), action_space

    def online(self, inputs: Inputs) -> Inputs:
        obs = inputs.obs["obs"]
        return inputs.with_obs({"obs": np.concatenate([obs, obs[:, :1]], axis=1)})


class Measures(Connector):
    def __init__(self, value: Any) -> None:
        self.value = value

    def metrics(self) -> Any:
        return {"scale": self.value}


def test_metrics_are_numbers() -> None:
    for value in (2.0, np.float32(2), np.array(2.0), torch.tensor(2.0)):
        found = Pipeline([Measures(value)]).metrics()["measures/scale"]
        assert type(found) is float
        assert found == 2
    for value in ("much", None, np.ones(2)):
        with pytest.raises(SettingsError, match="the metric `measures/scale` of a connector is .*, not a number"):
            Pipeline([Measures(value)]).metrics()


class Tenfold(Connector):
    """Observations in the same space, tenfold when acting, and raw when learning."""

    def online(self, inputs: Inputs) -> Inputs:
        return inputs.with_obs({"obs": inputs.obs["obs"] * 10})


class Looks(Connector):
    """Sees what the module acts on, and changes nothing."""

    def online(self, inputs: Inputs) -> Inputs:
        return inputs


@pytest.mark.parametrize("given", [Looks, Tenfold])
def test_observations_that_change_in_their_space_only_when_acting_are_told(given: Any) -> None:
    config = etude.PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, connectors=(given,), seed=0)
    algorithm = etude.PPO(config)
    if given is Looks:
        assert algorithm.train().updates
        return
    with pytest.raises(SettingsError, match=r"`tenfold` changes the observations .* write its method offline, too"):
        algorithm.train()


def test_observations_that_change_only_when_acting_are_told() -> None:
    pipeline = Pipeline([Longer()])
    pipeline.spaces(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    with pytest.raises(SettingsError, match=r"`longer` changes the observations .* write its method offline, too"):
        pipeline.offline(episodes([3]))


def test_all_algorithms_tell_of_observations_that_change_only_when_acting(tmp_path: Path) -> None:
    given: Any = {"env": "CartPole-v1", "connectors": (Tenfold(),), "seed": 0}
    dqn = etude.DQN(etude.DQNConfig(**given, learning_starts=10, iteration_steps=20))
    with pytest.raises(SettingsError, match="write its method offline, too"):
        dqn.train()
    etude.PPO(etude.PPOConfig(env="CartPole-v1", seed=0)).record(tmp_path / "data", 2)
    bc = etude.BC(etude.BCConfig(data=str(tmp_path / "data"), **given, evaluation_interval=1, updates_per_iteration=2))
    with pytest.raises(SettingsError, match="write its method offline, too"):
        bc.train()


def test_a_policy_that_only_acts_may_see_what_nothing_learns_from() -> None:
    ppo = etude.PPO(etude.PPOConfig(env="CartPole-v1", seed=0))
    noisy = etude.Policy(
        ppo.policy.module, Pipeline([Tenfold()]), obs_space=ppo.policy.obs_space, action_space=ppo.policy.action_space
    )
    with closing(etude.Runner(etude.make_arena("CartPole-v1", 2), noisy, seed=0)) as runner:
        assert runner.collect(num_episodes=3, explore=False).num_segments == 3
        with pytest.raises(SettingsError, match="write its method offline, too"):
            noisy.connectors.offline(runner.collect(num_steps=8))


class Forgets(Tenfold):
    """Changes observations when learning, too, but not those after the last step."""

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(obs=exp.steps["obs"] * 10)


class Augments(Forgets):
    """Changes observations of all steps, only when learning."""

    online = Connector.online

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return replace_obs(exp, *({"obs": columns["obs"] * 10} for columns in (exp.steps, exp.final_obs)))


class HasAll(Augments):
    online = Tenfold.online


class Relabels(Forgets):
    hindsight = True


class Selects(Connector):
    """Leaves short segments out."""

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.select(exp.lengths > 1)


@pytest.mark.parametrize("lengths", [[3], [1, 3]])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Forgets, "but not `final_obs`"),
        (Augments, "write its method online"),
        (HasAll, None),
        (Relabels, None),
        (Selects, None),
    ],
)
def test_observations_that_change_only_when_learning_are_told(
    given: Any, told: str | None, lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = Pipeline([given])
    pipeline.spaces(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    for _ in range(3):
        pipeline.offline(episodes(lengths))
    assert len(caplog.messages) == (told is not None)
    assert told is None or told in caplog.text


class Shapes(Connector):
    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(reward=exp.steps["reward"] * 2)


class Doubles(RewardMap):
    def map_reward(self, reward: Any) -> Any:
        return reward * 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((Shapes, PrevActionReward), True),
        ((Shapes, ClipReward, PrevActionReward), True),
        ((Shapes, ReturnToGo(5.0)), True),
        ((PrevActionReward, Shapes), False),
        ((Shapes, ClipReward), False),
        ((Doubles, PrevActionReward), False),
    ],
)
def test_rewards_that_only_the_loss_gets_are_told(given: Any, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline(given)
    pipeline.spaces(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2))
    for _ in range(2):
        pipeline.offline(episodes([3]))
    assert len(caplog.messages) == told
    assert not told or "derive it from etude.connectors.RewardMap" in caplog.text


class Macros(Connector):
    """Offers four actions; the env gets whether each is above 1."""

    def spaces(self, obs_space: Any, action_space: Any) -> Any:
        return obs_space, ACTION

    def act(self, action: Any) -> Any:
        return {"action": action["action"] // 2}


@pytest.mark.parametrize("shows", ["prev_action_reward", "history:2"])
@pytest.mark.parametrize("of_env", [spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)])
def test_previous_actions_are_the_modules_wherever_they_are_shown(shows: str, of_env: Any) -> None:
    before, behind = Pipeline([shows, Macros]), Pipeline([Macros, shows])
    nested = Pipeline([Pipeline([shows]), Macros])
    for _ in range(2):  # a pipeline may be asked again
        assert before.spaces(BOX, of_env) == behind.spaces(BOX, of_env) == nested.spaces(BOX, of_env)
    exp = episodes([4, 2])
    for one, other in zip(*(p.offline(exp).steps.items() for p in (before, behind)), strict=True):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    before.spaces(BOX, spaces.Discrete(3))
    alone = Pipeline([shows])
    assert alone.spaces(BOX, spaces.Discrete(3)) != before.spaces(BOX, spaces.Discrete(3))


def test_connectors_may_have_any_attribute() -> None:
    class Keeps(Connector):
        def __init__(self, chosen: Any) -> None:
            self.chosen = chosen

        def spaces(self, obs_space: Any, action_space: Any) -> Any:
            assert self.chosen == [0]
            return obs_space, action_space

    pipeline = Pipeline(["prev_action_reward", Keeps([0])])
    pipeline.spaces(BOX, ACTION)
    assert pipeline.connectors[1].chosen == [0]  # type: ignore[attr-defined]


class Offline(Connector):
    """Returns from `offline` what it is told."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def offline(self, exp: Any, module: Any = None) -> Any:
        return self.returned(exp)


def test_what_offline_returns_is_checked() -> None:
    exp = episodes([3, 2])
    with pytest.raises(DataError, match=r"`offline\.offline` returned a NoneType: it must return an Experience"):
        Pipeline([Offline(lambda exp: None)]).offline(exp)
    with pytest.raises(DataError, match="gave a column `weight` of 4 rows for 5 steps"):
        Pipeline([Offline(lambda exp: exp.with_steps(weight=np.zeros(4)))]).offline(exp)
    for name in ("weight", "reward", "advantage"):
        with pytest.raises(DataError, match=rf"`{name}` of `offline\.offline` has rows of shape \(1,\), but"):
            Pipeline([Offline(lambda exp, name=name: exp.with_steps(**{name: np.zeros((5, 1))}))]).offline(exp)


def test_actions_of_envs_need_the_inverse_of_a_connector_that_changes_actions() -> None:
    class Half(Connector):
        def act(self, action: Any) -> Any:
            return {name: column * 0.5 for name, column in action.items()}

    class Undone(Half):
        def unact(self, action: Any) -> Any:
            return {name: column / 0.5 for name, column in action.items()}

    taken = {"action": np.array([1.0, 2.0])}
    assert Pipeline([ClipAction(), Undone()]).unact(taken)["action"].tolist() == [2.0, 4.0]
    with pytest.raises(SettingsError, match="the connector `half` has an `act` without an `unact`: write this method"):
        Pipeline([ClipAction(), Half()]).unact(taken)


class Odd(Connector):
    """Gives what it is made with, instead of what its spaces say."""

    def __init__(self, method: str, made: Any) -> None:
        self.method, self.made = method, made

    def online(self, inputs: Inputs) -> Any:
        return self.made(inputs) if self.method == "online" else inputs

    def act(self, action: Any) -> Any:
        return self.made(action) if self.method == "act" else action

    def offline(self, exp: Any, module: Any = None) -> Any:
        return self.made(exp) if self.method == "offline" else exp


@pytest.mark.parametrize(
    ("method", "made", "what"),
    [
        ("online", lambda inputs: None, "`odd.online` returned a NoneType: it must return Inputs"),
        ("online", lambda inputs: inputs.with_obs({"obs": inputs.obs["obs"][:1]}), r"`obs` has the shape \(1, 2\)"),
        ("online", lambda inputs: inputs.with_obs({"x": inputs.obs["obs"]}), "`obs` is None after `online`"),
        ("act", lambda action: action["action"], "`act` of a connector returned a ndarray: it must return columns"),
        ("act", lambda action: {"action": action["action"][:1]}, r"\(odd\), but must be an array of 3 rows of shape"),
        (
            "offline",
            lambda exp: etude.Experience(exp.steps, exp.offsets, exp.segments, {"obs": np.zeros((3, 2))}),
            "1 s",
        ),
        ("offline", lambda exp: exp.with_steps(obs=np.zeros((exp.num_steps, 5))), r"of all rows of shape \(2,\)"),
    ],
)
def test_what_a_connector_gives_fits_its_spaces(method: str, made: Any, what: str) -> None:
    pipeline = Pipeline([Odd(method, made)])
    pipeline.spaces(BOX, ACTION)
    inputs = Inputs(np.arange(3), {"obs": np.zeros((3, 2), np.float32)}, np.ones(3, bool), {}, np.zeros(3))
    obs, final_obs = ({"obs": np.zeros((rows, 2), np.float32)} for rows in (4, 1))
    exp = etude.Experience(obs, np.array([0, 4]), Segments.of(1, episode_id=["e"]), final_obs)
    calls = {"online": inputs, "act": {"action": np.zeros(3, np.int64)}, "offline": exp}
    with pytest.raises((SpaceError, DataError), match=what):
        getattr(pipeline, method)(calls[method])


@pytest.mark.parametrize("at", [0, 1])
def test_act_must_return_columns_wherever_the_connector_stands(at: int) -> None:
    pipeline = Pipeline([Double()])
    pipeline.add(Odd("act", lambda action: action["action"]), at=at)
    pipeline.spaces(BOX, ACTION)
    with pytest.raises(SpaceError, match="`act` of a connector returned a ndarray: it must return columns"):
        pipeline.act({"action": np.zeros(3, np.int64)})
