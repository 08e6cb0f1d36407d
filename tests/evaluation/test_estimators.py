# SPDX-License-Identifier: Apache-2.0
"""Each estimator against its formula, written out for one episode and step at a time, and against exact values."""

import json
import math

import numpy as np
import pytest
from tabular import GAMMA, PLAYS, WANTS, Chain, exact, played, policy, probabilities

from etude.algorithms import BC, BCConfig, Stop
from etude.cli.main import main
from etude.connectors import Pipeline
from etude.evaluation import METHODS, FQEConfig, evaluate_on
from etude.evaluation.estimators import effective, student_t
from etude.evaluation.fqe import FQE
from etude.evaluation.policies import TargetPolicy
from etude.experience import Experience, Segments
from etude.recordings import RecordingWriter

SMALL = FQEConfig(members=4, steps=60, batch_size=64)


def episodes_of(exp):
    """For each episode: states, actions, rewards, ratios."""
    pi, mu = probabilities(WANTS), probabilities(PLAYS)
    for one in exp:
        s, a = one.steps["obs"].argmax(1), one.steps["action"]
        yield s, a, one.steps["reward"], [pi[x, y] / mu[x, y] for x, y in zip(s, a, strict=True)]


def by_hand(exp, base=None, extra=None):
    """The four weighing estimators; `extra` in the place of rewards, one list an episode, and `base` before them."""
    found = list(episodes_of(exp))
    n, longest = len(found), max(len(f[0]) for f in found)
    rewards = [f[2] for f in found] if extra is None else extra
    start = [0.0] * n if base is None else base
    weights = [[math.prod(f[3][: t + 1]) for t in range(len(f[3]))] for f in found]
    returns = [sum(GAMMA**t * r for t, r in enumerate(row)) for row in rewards]
    whole = [w[-1] for w in weights]
    by_step = 0.0
    for t in range(longest):
        at = [w[min(t, len(w) - 1)] for w in weights]
        top = sum(w * GAMMA**t * row[t] for w, row in zip(at, rewards, strict=True) if t < len(row))
        by_step += top / sum(at)
    decided = [sum(GAMMA**t * w[t] * row[t] for t in range(len(row))) for w, row in zip(weights, rewards, strict=True)]
    return {
        "is": sum(w * g for w, g in zip(whole, returns, strict=True)) / n,
        "wis": sum(w * g for w, g in zip(whole, returns, strict=True)) / sum(whole),
        "pdis": (sum(start) + sum(decided)) / n,
        "wpdis": sum(start) / n + by_step,
    }, whole


@pytest.mark.parametrize(("factor", "word"), [(0.5, "too small"), (1.5, "too large"), (1.0, None)])
def test_wrong_probabilities_are_noted(factor, word):
    exp = played(2000, seed=1)
    exp.steps["logp"][exp.offsets[:-1]] += math.log(factor)  # of the first step: the mean weight is 1 / factor
    found = evaluate_on(policy(WANTS), exp, methods=["is"], gamma=GAMMA)
    told = [note for note in found.notes if "which is more than chance" in note]
    assert found.mean_weight * factor == pytest.approx(1, abs=0.1)
    assert len(told) == (word is not None)
    assert all(f"probabilities are {word}" in note for note in told)


def test_weighing_estimators_are_their_formulas():
    exp = played(40, seed=1)
    found = evaluate_on(policy(WANTS), exp, methods=["is", "wis", "pdis", "wpdis"], gamma=GAMMA)
    wanted, whole = by_hand(exp)
    for name, value in wanted.items():
        assert found.estimates[name].mean == pytest.approx(value, rel=1e-5), name
        assert found.estimates[name].low < value < found.estimates[name].high
    size = sum(whole) ** 2 / sum(w * w for w in whole)
    assert found.estimates["is"].effective_sample_size == pytest.approx(size, rel=1e-4)
    assert found.mean_weight == pytest.approx(sum(whole) / 40, rel=1e-4)
    returns = [sum(GAMMA**t * r for t, r in enumerate(f[2])) for f in episodes_of(exp)]
    assert found.behaviour.mean == pytest.approx(np.mean(returns))
    assert (found.episodes, found.steps, found.left_out, found.behaviour_policy) == (40, exp.num_steps, {}, "recorded")


def test_effective_sample_size_by_steps():
    exp = played(30, seed=2)
    found = evaluate_on(policy(WANTS), exp, methods=["pdis"], gamma=GAMMA).estimates["pdis"]
    weights = [[math.prod(f[3][: t + 1]) for t in range(len(f[3]))] for f in episodes_of(exp)]
    sizes = total = 0.0
    for t in range(max(map(len, weights))):
        at = [w[min(t, len(w) - 1)] for w in weights]
        share = GAMMA**t * sum(len(w) > t for w in weights)
        sizes += share * sum(at) ** 2 / sum(w * w for w in at)
        total += share
    assert found.effective_sample_size == pytest.approx(sizes / total, rel=1e-4)


def test_estimators_with_values_are_their_formulas():
    exp, algorithm = played(40, seed=3), policy(WANTS)
    found = evaluate_on(algorithm, exp, methods=["dm", "dr", "wdr", "fqe"], gamma=GAMMA, seed=5, fqe=SMALL)
    fqe = FQE(TargetPolicy(algorithm.module, Pipeline(), explore=True), GAMMA, SMALL, 5)
    fqe.fit(lambda: iter([exp]))
    values = fqe.values(exp)
    first, extra = exp.offsets[:-1], []
    for i, one in enumerate(exp):
        at = slice(first[i], first[i] + one.num_steps)
        extra.append(one.steps["reward"] + GAMMA * values.after[at] - values.taken[at])
        following = [*values.at[at][1:], 0.0]  # the same value, whether seen from before or when it is there
        assert values.after[at] == pytest.approx(following, abs=1e-4)
    wanted, _ = by_hand(exp, list(values.at[first]), extra)
    assert found.estimates["dr"].mean == pytest.approx(wanted["pdis"], rel=1e-4)
    assert found.estimates["wdr"].mean == pytest.approx(wanted["wpdis"], rel=1e-4)
    assert found.estimates["dm"].mean == pytest.approx(values.at[first].mean())
    assert found.estimates["fqe"].mean == pytest.approx(values.start.mean())
    members = [np.average(values.start[k], weights=values.times[:, k]) for k in range(4)]
    reach = student_t(0.95, 3) * np.std(members, ddof=1)
    assert found.estimates["fqe"].high == pytest.approx(values.start.mean() + reach)


def test_members_have_not_learned_from_the_episodes_that_they_are_asked_about():
    exp, algorithm = played(50, seed=4), policy(WANTS)
    fqe = FQE(TargetPolicy(algorithm.module, Pipeline(), explore=True), GAMMA, SMALL, 0)
    fqe.fit(lambda: iter([exp]))
    values = fqe.values(exp)
    assert (values.times == 0).any(1).all()
    assert 0.8 < values.times.mean() < 1.1
    for i in range(50):
        unseen = values.times[i] == 0
        assert values.at[exp.offsets[i]] == pytest.approx(values.start[unseen, i].mean(), rel=1e-5)


def test_exact_values_lie_in_the_intervals_and_fitted_ones_are_close():
    exp, wanted = played(4_000, seed=6), exact(WANTS)[0]
    config = FQEConfig(members=3, steps=500, batch_size=256)
    found = evaluate_on(policy(WANTS), exp, gamma=GAMMA, confidence=0.99, fqe=config)
    assert set(found.estimates) == set(METHODS)
    for name in ("is", "wis", "pdis", "wpdis", "dr", "wdr"):
        estimate = found.estimates[name]
        assert estimate.low < wanted < estimate.high, name
    assert found.estimates["dr"].high - found.estimates["dr"].low < 0.7 * (
        found.estimates["pdis"].high - found.estimates["pdis"].low
    )
    for name in ("dm", "fqe"):
        assert found.estimates[name].mean == pytest.approx(wanted, abs=0.06), name
    assert found.behaviour.low < exact(PLAYS)[0] < found.behaviour.high
    assert abs(exact(PLAYS)[0] - wanted) > 0.5  # so that none of this is by chance


def test_fitted_values_are_those_of_states_and_actions():
    exp, (_, values, of_actions) = played(2_000, seed=9), exact(WANTS)
    config = FQEConfig(members=2, steps=600, batch_size=256)
    fqe = FQE(TargetPolicy(policy(WANTS).module, Pipeline(), explore=True), GAMMA, config, 0)
    fqe.fit(lambda: iter([exp]))
    fitted, s, a = fqe.values(exp), exp.steps["obs"].argmax(1), exp.steps["action"]
    for state in range(3):
        assert fitted.at[s == state].mean() == pytest.approx(values[state], abs=0.12)
        for action in range(2):
            found = fitted.taken[(s == state) & (a == action)].mean()
            assert found == pytest.approx(of_actions[state, action], abs=0.15)


FAR, NEAR = np.array([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]), WANTS


def test_no_estimate_of_a_policy_far_from_the_data_is_trusted():
    """Here the intervals of wpdis, dr and wdr leave out the truth, though 18 episodes of 60 count at a step."""
    exp = played(60, 2)
    found = evaluate_on(policy(FAR), exp, gamma=GAMMA, fqe=SMALL)
    truth, _, _ = exact(FAR)
    assert found.estimates["wis"].effective_sample_size < 10 < found.estimates["wdr"].effective_sample_size
    for method in ("wpdis", "dr", "wdr"):
        assert found.estimates[method].high < truth
    assert found.trusted is False
    size = found.estimates["wis"].effective_sample_size
    assert found.distrust.startswith(f"the effective sample size is {size:.1f} of 60 episodes, but must be at least 10")
    assert f"\nno estimate can be trusted: {found.distrust}\n" in str(found)
    said = json.loads(found.to_json())
    assert (said["trusted"], said["distrust"]) == (False, found.distrust)


def test_estimates_of_a_policy_near_the_data_are_trusted():
    found = evaluate_on(policy(NEAR), played(60, 2), gamma=GAMMA, fqe=SMALL)
    assert (found.trusted, found.distrust) == (True, None)
    assert "trusted" not in str(found)
    assert json.loads(found.to_json())["trusted"] is True


@pytest.mark.parametrize("methods", [("fqe",), ("dm",), ("dr",), ("wpdis", "wdr"), ("pdis", "fqe")])
def test_no_method_is_trusted_by_itself_either(methods):
    """Values that are fitted, too: they are of actions that hardly anybody took."""
    exp = played(60, 2)
    assert evaluate_on(policy(FAR), exp, methods=methods, gamma=GAMMA, fqe=SMALL).trusted is False
    assert evaluate_on(policy(NEAR), exp, methods=methods, gamma=GAMMA, fqe=SMALL).trusted is True


def one_step_episodes(actions):
    """In state 0, where `PLAYS` takes either action half of the time."""
    n = len(actions)
    steps = {
        "obs": np.tile(np.eye(3, dtype=np.float32)[0], (n, 1)),
        "action": np.array(actions),
        "reward": np.ones(n, np.float32),
        "logp": np.full(n, np.log(0.5), np.float32),
    }
    segments = Segments.of(n, episode_id=[str(i) for i in range(n)], terminated=True)
    return Experience(steps, np.arange(n + 1), segments, {"obs": np.zeros((n, 3), np.float32)})


@pytest.mark.parametrize("methods", [METHODS, ("dr",), ("fqe",)])
def test_weights_that_are_all_0(methods):
    exp = one_step_episodes([1] * 30)  # the most likely action is 0
    found = evaluate_on(policy(NEAR), exp, methods=methods, explore=False, gamma=GAMMA, fqe=SMALL)
    assert found.mean_weight == 0
    assert found.trusted is False
    assert found.distrust.startswith("the weights of all 30 episodes are 0")


@pytest.mark.parametrize(("matching", "trusted"), [(9, False), (10, True), (15, True)])
@pytest.mark.parametrize("methods", [("wis",), ("dr",), ("fqe",)])
def test_the_bound_is_10_effective_episodes(matching, trusted, methods):
    """Greedy weights are 2 where the action is the most likely one, else 0: as many episodes count as match."""
    exp = one_step_episodes([0] * matching + [1] * (30 - matching))
    found = evaluate_on(policy(NEAR), exp, methods=methods, explore=False, gamma=GAMMA, fqe=SMALL)
    assert found.mean_weight == pytest.approx(2 * matching / 30)
    assert found.trusted is trusted


def test_fewer_than_10_episodes_are_never_trusted():
    for methods in (("wis",), ("fqe",)):
        found = evaluate_on(policy(PLAYS), played(9, 1), methods=methods, gamma=GAMMA, fqe=SMALL)
        assert found.trusted is False
        assert found.distrust == "there are 9 whole episodes, but at least 10 are needed."


def test_without_probabilities_nothing_says_how_far_fitted_values_are_from_the_data():
    exp = played(60, 2)
    for logp in (None, np.zeros(exp.num_steps, np.float32)):
        steps = {name: column for name, column in exp.steps.items() if name != "logp"}
        bare = Experience(steps if logp is None else {**steps, "logp": logp}, exp.offsets, exp.segments, exp.final_obs)
        found = evaluate_on(policy(FAR), bare, methods=["fqe"], gamma=GAMMA, fqe=SMALL)
        assert found.notes == ()
        assert found.mean_weight is None
        assert (found.trusted, found.distrust) == (None, None)
        assert found.behaviour_policy is None


def test_intervals_hold_the_exact_value_about_as_often_as_they_say():
    near = (PLAYS + WANTS) / 2  # farther off, weights are skewed, and intervals too narrow: 80 of 100
    wanted, algorithm = exact(near)[0], policy(near)
    methods = ("is", "wis", "pdis", "wpdis")
    hits = dict.fromkeys(methods, 0)
    for seed in range(100):
        found = evaluate_on(
            algorithm, played(150, seed=100 + seed), methods=methods, gamma=GAMMA, confidence=0.9, resamples=200
        )
        for name in methods:
            hits[name] += found.estimates[name].low < wanted < found.estimates[name].high
    assert all(82 <= hits[name] <= 98 for name in methods), hits


def test_the_policy_that_played_is_worth_what_was_played():
    found = evaluate_on(policy(PLAYS), played(60, seed=7), methods=["is", "wis", "pdis", "wpdis"], gamma=GAMMA)
    for estimate in found.estimates.values():
        assert estimate.mean == pytest.approx(found.behaviour.mean, rel=1e-4)
        assert estimate.effective_sample_size == pytest.approx(60, rel=1e-4)
    assert found.mean_weight == pytest.approx(1, rel=1e-4)


def test_equal_seeds_give_equal_results():
    def once(seed):
        return evaluate_on(policy(WANTS), played(30, seed=8), gamma=GAMMA, seed=seed, fqe=SMALL).to_dict()

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_student_t_and_effective_size():
    tables = {(0.95, 9): 2.262, (0.95, 5): 2.571, (0.9, 19): 1.729, (0.99, 9): 3.250, (0.95, 3): 3.182}
    for (confidence, freedom), wanted in tables.items():
        assert student_t(confidence, freedom) == pytest.approx(wanted, rel=0.02)
    assert effective(np.ones(7)) == pytest.approx(7)
    assert effective(np.array([1e300, 1.0])) == pytest.approx(1)
    assert effective(np.zeros(3)) == 0


def write(path, exp):
    with RecordingWriter(path, obs_space=Chain.observation_space, action_space=Chain.action_space) as writer:
        writer.write(exp)
    return str(path)


def test_the_command_line_says_when_no_estimate_can_be_trusted(tmp_path, capsys):
    config = BCConfig(data=write(tmp_path / "learned", one_step_episodes([0] * 30)), seed=0, lr=0.1, batch_size=30)
    clone = BC(config)
    clone.fit(Stop(updates=20))
    clone.save(tmp_path / "run")
    held_out = write(tmp_path / "held_out", one_step_episodes([1] * 30))
    line = ["evaluate", str(tmp_path / "run"), "--on", held_out, "--methods", "wis,pdis", "--greedy"]
    assert main(line) == 0
    assert "\nno estimate can be trusted: the weights of all 30 episodes are 0" in capsys.readouterr().out
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["modules"]["main"]
    assert found["trusted"] is False
    assert found["distrust"].startswith("the weights of all 30 episodes are 0")
    assert found["estimates"]["wis"]["mean"] is None


def test_nothing_is_trusted_where_the_mean_weight_is_far_from_1():
    exp = played(2000, seed=1)
    exp.steps["logp"][exp.offsets[:-1]] += math.log(0.2)
    found = evaluate_on(policy(WANTS), exp, methods=["is"], gamma=GAMMA)
    assert not found.trusted
    assert "is 5.0" in found.distrust
    assert "rather than 1, which is more than chance: the policy takes actions that were never" in found.distrust


def test_truncated_episodes_without_their_last_observation_are_noted():
    exp = played(40, seed=1)
    ends = {"terminated": False, "truncated": True, "has_final_obs": np.arange(exp.num_segments) >= 7}
    cut = Experience(exp.steps, exp.offsets, exp.segments.replace(**ends), exp.final_obs)
    found = evaluate_on(policy(WANTS), cut, methods=["wis", "fqe"], gamma=GAMMA, fqe=SMALL)
    assert any(note.startswith("the observation after the last step of 7 truncated episodes") for note in found.notes)
    found = evaluate_on(policy(WANTS), cut, methods=["wis"], gamma=GAMMA)
    assert not any("after the last step" in note for note in found.notes)
