"""A real server and real clients: what is served is what `Policy.act` chooses."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from gymnasium import spaces
from http_clients import JSON, MSGPACK, connected
from hypothesis import given, settings
from hypothesis import strategies as st

import etude
from etude.connectors import Connector, Pipeline
from etude.errors import SettingsError
from etude.modules import NetworkConfig, make_module
from etude.policies import Policy
from etude.serving import PolicyService, ServingConfig, WebServer, app
from etude.serving.protocol import RequestError
from etude.serving.web import ServingMetrics, Session, Sessions
from etude.spaces import NamedDiscrete

BOX = spaces.Box(-1, 1, (3,), np.float32)
NESTED = spaces.Dict({"camera": spaces.Box(0, 255, (4, 4, 1), np.uint8), "mode": spaces.Discrete(2)})


class Sum(Connector):
    """A connector of a user's own that remembers, without a `step`: its states can't be joined."""

    def start(self, num_slots):
        self.sums = np.zeros((num_slots, 3), np.float32)

    def online(self, inputs):
        sums = np.where(inputs.first[:, None], 0, self.sums[inputs.slots]) + inputs.obs["obs"]
        self.sums[inputs.slots] = sums
        return inputs.with_obs({"obs": sums.astype(np.float32)})

    def state_dict(self):
        return {"sums": [self.sums.copy()]}

    def load_state_dict(self, state):
        self.sums = state["sums"][0].copy()


KINDS = {
    "plain": (BOX, spaces.Discrete(5), [], {}),
    "box": (BOX, spaces.Box(-2, 2, (2,), np.float32), ["clip_action"], {}),
    "nested": (NESTED, spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))), [], {}),
    "recurrent": (BOX, spaces.Discrete(5), ["prev_action_reward", "frame_stack:2"], {"recurrent": "lstm"}),
    "own": (BOX, spaces.Discrete(5), [Sum()], {}),
    "named": (
        spaces.Dict({"device": NamedDiscrete(["desktop", "phone"]), "age": spaces.Box(0, 1, (1,), np.float32)}),
        NamedDiscrete(["banner", "coupon", "none"]),
        [],
        {},
    ),
}


def make_policy(kind, seed=0):
    obs_space, action_space, connectors, network = KINDS[kind]
    torch.manual_seed(seed)
    pipeline = Pipeline(connectors)
    module = make_module(None, *pipeline.spaces(obs_space, action_space), NetworkConfig(hidden=(16,), **network))
    for parameter in module.parameters():  # so that choices differ from one observation to the next
        torch.nn.init.normal_(parameter, std=0.7)
    return Policy(module.eval(), pipeline, obs_space=obs_space, action_space=action_space)


def service(policies, **config):
    return PolicyService(policies, ServingConfig(**config))


@pytest.fixture(scope="module")
def served():
    """All kinds, on one server with small limits."""
    policies = {kind: make_policy(kind) for kind in KINDS}
    with WebServer(service(policies, max_body=200_000, max_batch=64), "127.0.0.1", 0).running() as server:
        yield server.url, policies


def listed(value):
    if isinstance(value, dict):
        return {key: listed(part) for key, part in value.items()}
    return [listed(part) for part in value] if isinstance(value, tuple) else np.asarray(value).tolist()


@pytest.mark.parametrize("fmt", [JSON, MSGPACK])
@pytest.mark.parametrize("kind", ["plain", "box", "nested"])
def test_actions_are_those_of_act(served, kind, fmt):
    url, policies = served
    policy = policies[kind]
    policy.obs_space.seed(1)
    with connected(url, fmt) as client:
        for _ in range(5):
            obs = policy.obs_space.sample()
            found, wanted = client.act(listed(obs), policy=kind), listed(policy.act(obs))
            assert found == (wanted if kind == "nested" else pytest.approx(wanted, rel=1e-6))
        samples = [policy.obs_space.sample() for _ in range(6)]
        batch = (
            {key: np.stack([one[key] for one in samples]) for key in samples[0]}
            if kind == "nested"
            else np.stack(samples)
        )
        found = client.act(listed(batch), policy=kind)
        if kind == "nested":
            assert found == [part.tolist() for part in policy.act(batch)]
        else:
            np.testing.assert_allclose(found, policy.act(batch), rtol=1e-6)


def test_names_come_and_go_as_texts():
    policy = make_policy("named")
    with WebServer(service(policy), "127.0.0.1", 0).running() as server, connected(server.url) as client:
        seen = {"device": "phone", "age": [0.3]}
        assert client.act(seen) == policy.act(seen, names=True)
        assert client.act(seen) in ("banner", "coupon", "none")
        batch = {"device": ["phone", "desktop"], "age": [[0.3], [0.5]]}
        assert client.act(batch) == policy.act(batch, names=True).tolist()
        status, answer = client("/act", {"obs": {"device": "fridge", "age": [0.3]}})
        assert (status, answer["field"]) == (400, "obs/device")
        assert "'fridge' is none of the 2 known names" in answer["error"]


@pytest.mark.parametrize("kind", ["recurrent", "own", "plain"])
def test_sessions_of_clients_at_one_time_are_chains_of_states(served, kind):
    url, policies = served
    rng = np.random.default_rng(7)
    obs, rewards = rng.normal(size=(6, 2, 9, 3)).astype(np.float32).clip(-1, 1), rng.normal(size=(6, 2, 9))

    def play(number):
        acted = []
        with connected(url, [JSON, MSGPACK][number % 2]) as client:
            session = client.open(policy=kind)
            for episode in range(2):
                earned = {}
                for t in range(9):
                    acted.append(client.act(obs[number, episode, t].tolist(), session=session, **earned))
                    earned = {"reward": float(rewards[number, episode, t])}
                assert client.act(obs[number, episode, 0].tolist(), session=session, truncated=True, **earned) is None
        return acted

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(play, range(6)))
    policy = policies[kind]
    for number in range(6):
        wanted = []
        for episode in range(2):
            state, reward = policy.initial_state(), None
            for t in range(9):
                action, state = policy.act(obs[number, episode, t], state, reward=reward)
                wanted.append(int(action))
                reward = rewards[number, episode, t]
        assert found[number] == wanted
    assert len(set(map(tuple, found))) > 1


def test_what_waits_is_answered_by_one_call_and_only_who_is_wrong_is_refused():
    masked = spaces.Dict({"action_mask": spaces.MultiBinary(3), "x": BOX})
    policy = Policy(make_module(None, masked, spaces.Discrete(3), NetworkConfig(hidden=(8,))).eval())
    own = service(policy)
    asks = [{"obs": {"action_mask": [0, 1, 0], "x": [0.1 * i, 0, 0]}} for i in range(7)]

    async def together(requests):
        return await asyncio.gather(*map(own.act, requests), return_exceptions=True)

    assert asyncio.run(together(asks)) == [{"action": 1}] * 7
    assert "etude_batch_rows_count 1\n" in own.metrics.text({})
    asks[3] = {"obs": {"action_mask": [0, 0, 0], "x": [0, 0, 0]}}
    found = asyncio.run(together(asks))
    assert isinstance(found[3], RequestError)
    assert (found[3].field, found[3].status) == ("obs/action_mask", 400)
    assert [one for one in found if one is not found[3]] == [{"action": 1}] * 6


def test_rewards_too_large_for_the_policy_that_reads_them_are_refused():
    async def run(served):
        session = served.open({})["session"]
        await served.act({"session": session, "obs": [0, 0, 0]})
        with pytest.raises(RequestError, match="`reward` is outside the range of float32"):
            await served.act({"session": session, "obs": [0, 0, 0], "reward": -1e300})
        return await served.act({"session": session, "obs": [0, 0, 0], "reward": 1e30})

    assert asyncio.run(run(service(make_policy("recurrent"))))["action"] in range(5)


def test_two_requests_of_one_session_at_one_time():
    own = service(make_policy("recurrent"))
    ask = {"session": own.open({})["session"], "obs": [0, 0, 0]}

    async def both():
        return await asyncio.gather(own.act(ask), own.act(ask), return_exceptions=True)

    first, second = asyncio.run(both())
    assert isinstance(first["action"], int)
    assert (second.field, second.status) == ("session", 409)


@pytest.mark.parametrize(
    ("path", "fields", "status", "field"),
    [
        ("/act", {"obs": [0, 0, 0]}, 400, "policy"),
        ("/act", {"obs": [0, 0, 0], "policy": "none"}, 404, "policy"),
        ("/act", {"obs": [0, 0], "policy": "plain"}, 400, "obs"),
        ("/act", {"policy": "plain"}, 400, "obs"),
        ("/act", {"obs": {"camera": [[[0]] * 4] * 4}, "policy": "nested"}, 400, "obs/mode"),
        ("/act", {"obs": [0, 0, 0], "policy": "recurrent"}, 400, "session"),
        ("/act", {"obs": [0, 0, 0], "session": "none"}, 404, "session"),
        ("/act", {"obs": [0, 0, 0], "session": 3}, 400, "session"),
        ("/act", {"obs": [0, 0, 0], "policy": "plain", "explore": True}, 400, "explore"),
        ("/act", {"obs": [[0, 0, 0]] * 65, "policy": "plain"}, 400, "obs"),
        ("/act", {"obs": [[0, 0, 0]] * 30_000, "policy": "plain"}, 413, "body"),
        ("/sessions", {"policy": 1}, 404, "policy"),
        ("/sessions", {"policy": "plain", "size": 3}, 400, "size"),
    ],
)
def test_refusals_name_the_field(served, path, fields, status, field):
    with connected(served[0]) as client:
        found, answer = client(path, fields)
    assert (found, answer["field"]) == (status, field)
    assert answer["error"].startswith(f"`{field}`")


def test_other_refusals(served):
    with connected(served[0]) as client:
        assert client("/act", body=b"{", **{"Content-Type": JSON})[1]["field"] == "body"
        assert client("/act", {"obs": 1}, **{"Content-Type": "text/plain"})[0] == 415
        assert client("/health", method="GET", Host="evil.example:80") == (
            403,
            {
                "error": "`Host` is 'evil.example:80', but this server accepts requests of its own machine only.",
                "field": "Host",
            },
        )
        assert client("/metrics", method="GET", Host="evil.example:80")[0] == 403
        assert client("/act", {"obs": [0, 0, 0], "policy": "plain", "session": None})[0] == 200
        assert client("/sessions/none", method="DELETE")[0] == 404
        status, answer = client("/elsewhere", method="GET")
        assert (status, answer["field"]) == (404, "path")
        assert client("/health/", method="GET")[0] == 404
        assert "`path`: there is no GET /elsewhere; there are POST /act, POST /sessions, DELETE" in answer["error"]
        status, answer = client("/act", method="GET")
        assert (status, answer["field"]) == (405, "method")
        assert client("/health", method="GET") == (200, {"status": "ok"})


class Broken(torch.nn.Module):
    """A network of a user's own that fails once it is served."""

    def __init__(self, obs_space, action_space):
        super().__init__()
        self.linear = torch.nn.Linear(3, 5)

    def forward(self, obs):
        raise RuntimeError("a bug of its own")


def test_what_fails_in_a_network_of_ones_own_is_an_error_of_the_server(caplog):
    policy = Policy(make_module(Broken, BOX, spaces.Discrete(5)).eval())
    with WebServer(service(policy), "127.0.0.1", 0).running() as server, connected(server.url) as client:
        assert client("/act", {"obs": [0, 0, 0]}) == (500, {"error": "the server failed; its log says how."})
        assert client("/health", method="GET")[0] == 200
        lines = client("/metrics", method="GET")[1].splitlines()
    assert 'etude_requests_total{path="act",status="500"} 1' in lines
    assert "RuntimeError: a bug of its own" in caplog.text


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def test_no_request_is_an_error_of_the_server(served):
    names = st.sampled_from(["obs", "policy", "session", "reward", "terminated", "truncated", "x"])
    values = JSONS | st.sampled_from([*KINDS, [0, 0, 0], {"camera": [[[0]] * 4] * 4, "mode": 0}])
    with connected(served[0]) as client:
        session = client.open(policy="recurrent")

        @settings(max_examples=80)
        @given(st.dictionaries(names, values | st.just(session), max_size=5), st.sampled_from(["/act", "/sessions"]))
        def asked(fields, path):
            status, answer = client(path, fields)
            if status != 200:
                assert 400 <= status < 500, answer
                assert isinstance(answer["field"], str)
            elif path == "/sessions":
                client(f"/sessions/{answer['session']}", method="DELETE")

        asked()


def test_sessions_have_a_limit_and_a_time():
    now, dropped = [0.0], []
    sessions = Sessions(2, 10.0, dropped.append, lambda: now[0])
    first, second = sessions.add(Session()), sessions.add(Session())
    with pytest.raises(RequestError, match="2 sessions are open") as refused:
        sessions.add(Session())
    assert refused.value.status == 429
    now[0] = 8.0
    sessions.touch(second)
    now[0] = 11.0
    assert sessions.find(second.id) is second
    with pytest.raises(RequestError, match="not used for 10 seconds"):
        sessions.find(first.id)
    assert dropped == [first]
    second.is_busy, now[0] = True, 100.0
    sessions.expire()
    assert len(sessions) == 1  # who waits for us has not gone
    second.is_busy = False
    sessions.add(Session())
    assert dropped == [first, second]


def test_exploring_draws_by_the_seed():
    def drawn():
        own = service(make_policy("plain"), explore=True, seed=3)

        async def some():
            return [(await own.act({"obs": [0.0, 0.0, 0.0]}))["action"] for _ in range(30)]

        return asyncio.run(some())

    assert drawn() == drawn()
    assert len(set(drawn())) > 1


@pytest.mark.parametrize(
    ("config", "word"),
    [({"port": 70_000}, "port"), ({"max_batch": 0}, "max_batch"), ({"session_seconds": 0.0}, "session_seconds")],
)
def test_settings_are_checked(config, word):
    with pytest.raises(SettingsError, match=f"`{word}`"):
        app(make_policy("plain"), **config)


@pytest.mark.parametrize("wrong", [None, 3, make_policy("plain").module, {"main": make_policy("plain").module}])
def test_what_is_no_policy_is_told(wrong):
    with pytest.raises(SettingsError, match=r"a \w+ can't be served: .*algorithm\.policy"):
        service(wrong)


def test_a_port_that_is_taken():
    own = service(make_policy("plain"))
    with WebServer(own, "127.0.0.1", 0).running() as server, pytest.raises(SettingsError, match="is taken"):
        WebServer(own, "127.0.0.1", int(server.url.rpartition(":")[2]))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def algorithm(env="CartPole-v1", **more):
    return etude.PPO(etude.PPOConfig(env=env, num_envs=2, num_steps=32, epochs=1, lr=0.05, seed=1, **more))


def test_a_new_checkpoint_is_taken_without_a_dropped_request(tmp_path):
    run, stop = tmp_path / "run", threading.Event()
    with closing(algorithm()) as ppo:
        ppo.train()
        ppo.save(run)
        with WebServer(service(str(run)), "127.0.0.1", 0).running() as server:

            def ask(number):
                with connected(server.url) as client:
                    session, count, earned = client.open(), 0, {}
                    while not stop.is_set():
                        client.act([0.01 * number, 0, 0.01, 0], session=session, **earned)
                        earned, count = {"reward": 1.0}, count + 1
                    return count

            def env_steps(client):
                return client("/policies", method="GET")[1]["checkpoint"]["env_steps"]

            with ThreadPoolExecutor(3) as threads, connected(server.url) as client:
                asking = [threads.submit(ask, number) for number in range(3)]
                try:
                    for _ in range(2):
                        ppo.train()
                        ppo.save(run)
                        deadline = time.monotonic() + 60
                        while env_steps(client) != ppo.env_steps:
                            assert time.monotonic() < deadline
                finally:
                    stop.set()
                assert min(one.result() for one in asking) > 0  # each request was answered by 200
                assert client.metric("etude_reloads_total") == 2
                obs = np.random.default_rng(2).normal(size=(50, 4)).astype(np.float32)
                np.testing.assert_array_equal(client.act(obs.tolist()), ppo.policy.act(obs))


def test_a_checkpoint_of_other_spaces_is_not_taken(tmp_path, caplog):
    run = str(tmp_path / "run")
    with closing(algorithm()) as ppo, closing(algorithm("Acrobot-v1")) as other:
        ppo.save(run)
        own = service(run)
        before = own.policies
        other.save(run)
        for _ in range(2):
            asyncio.run(own.housekeeping())
        assert own.policies is before
        assert sum("other spaces" in record.message for record in caplog.records) == 1
        ppo.train()
        ppo.save(run)
        asyncio.run(own.housekeeping())
        assert own.policies is not before


def test_the_policies_of_a_run_are_served_by_their_names(tmp_path):
    duel = {"modules": ["left", "right"], "module_of": lambda agent, episode: "left"}
    with closing(algorithm(**duel)) as both:
        both.save(tmp_path / "duel")
        own = service(str(tmp_path / "duel"))
        assert [*own.about()["policies"]] == ["left", "right"]
        obs = np.random.default_rng(2).normal(size=(20, 4)).astype(np.float32)
        for name in ("left", "right"):
            found = asyncio.run(own.act({"obs": obs.tolist(), "policy": name}))
            np.testing.assert_array_equal(found["action"], both.policies[name].act(obs))


def test_a_client_of_the_asgi_app_alone():
    """The app is any ASGI server's."""

    async def asked():
        sent = []
        scope = {"type": "http", "method": "POST", "path": "/act", "query_string": b"", "headers": []}
        scope["headers"] = [(b"content-type", JSON.encode()), (b"host", b"localhost")]
        body = json.dumps({"obs": [0, 0, 0]}).encode()
        parts = [
            {"type": "http.request", "body": body[:5], "more_body": True},
            {"type": "http.request", "body": body[5:]},
        ]

        async def receive():
            return parts.pop(0)

        async def send(message):
            sent.append(message)

        await app(make_policy("plain"))(scope, receive, send)
        return sent

    start, body = asyncio.run(asked())
    assert start["status"] == 200
    assert json.loads(body["body"]) == {"action": int(make_policy("plain").act(np.zeros(3, np.float32)))}


def test_metrics_are_prometheus_text():
    metrics = ServingMetrics()
    for value in (0.0001, 0.001, 0.003, 9.0):
        metrics.observe("etude_act_seconds", value)
    metrics.count("etude_requests_total", path="act", status="200")
    lines = metrics.text({"etude_sessions": 3}).splitlines()
    assert 'etude_requests_total{path="act",status="200"} 1' in lines
    assert "etude_sessions 3" in lines
    buckets = [line for line in lines if line.startswith("etude_act_seconds_bucket")]
    assert [int(line.split()[-1]) for line in buckets][:5] == [1, 2, 2, 3, 3]
    assert buckets[-1] == 'etude_act_seconds_bucket{le="+Inf"} 4'
    assert "etude_act_seconds_count 4" in lines
    assert "# TYPE etude_act_seconds histogram" in lines
