# SPDX-License-Identifier: Apache-2.0
import json
import signal

import pytest
from cli_runs import SMALL

import etude
from etude.algorithms.search import Choice, Grid
from etude.cli import tune as command
from etude.cli.main import main
from etude.cli.options import ALGORITHMS

PPO = ["tune", "ppo", *SMALL[2:]]


def asked(*args, algorithm="ppo"):
    pytest.importorskip("ray")
    return command.asked(ALGORITHMS[algorithm], [algorithm, *args])


def test_words_of_the_search_space_become_spaces_of_settings():
    config, space, options = asked(
        "--space.lr", "loguniform:1e-4,1e-2", "--space.clip=choice:0.1,0.2", "--space.hidden", "grid:8+8,16",
        "--space.num-workers", "0", "--space.normalize-advantages", "yes,no", "--space.kl_target", "none,0.01",
        "--space.engine.num-runners", "randint:1,3", "--clip", "0.3", "--stop.updates", "3", "--samples", "2",
        "--resources", "CPU=2", "GPU=0.5",
    )  # fmt: skip
    assert (space["lr"].low, space["lr"].high) == (1e-4, 1e-2)
    assert space["clip"] == Choice([0.1, 0.2])
    assert space["network.hidden"] == Grid([(8, 8), (16,)])
    assert space["workers.num_workers"] == 0
    assert space["normalize_advantages"].values == [True, False]
    assert space["kl_target"].values == [None, 0.01]
    assert (space["engine.num_runners"].low, space["engine.num_runners"].high) == (1, 3)
    assert (config.clip, options.stop, options.samples) == (0.3, etude.Stop(updates=3), 2)
    assert options.resources == {"CPU": 2.0, "GPU": 0.5}


def test_a_search_space_from_a_file_which_flags_override(tmp_path):
    (tmp_path / "space.yaml").write_text(
        "lr: loguniform:1e-4,1e-2\nnetwork: {hidden: [[8], [16, 16]]}\nclip: [0.1, 0.2]\n"
        "connectors: normalize_obs,none\n"
    )
    (tmp_path / "ppo.yaml").write_text("clip: 0.3\nstop: {updates: 3}\nengine: {num_runners: 3}\n")
    args = ["--space", str(tmp_path / "space.yaml"), "--config", str(tmp_path / "ppo.yaml"), "--space.lr", "1e-3"]
    config, space, options = asked(*args, "--num-learners", "1")
    assert space["lr"] == 1e-3
    assert space["network.hidden"] == [[8], [16, 16]]
    assert space["clip"] == [0.1, 0.2]
    assert space["connectors"].values == [("normalize_obs",), ()]
    assert (config.clip, options.stop.updates) == (0.3, 3)
    assert (config.engine.num_runners, config.engine.num_learners) == (3, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ppo", "--space.lrr", "1,2"], "the search space of ppo has no setting `lrr`. Nearest: `lr`"),
        (["ppo", "--space.lr", "logunifrm:1,2"], "unknown keyword `logunifrm`. Nearest: `loguniform`"),
        (["ppo", "--space.lr", "1,fast"], "ppo.lr is 'fast', expected NUMBER"),
        (
            ["ppo", "--space.num-envs", "uniform:1,4", "--stop.updates", "1"],
            "expected int. The search space gave num_envs=",
        ),
        (["ppo", "--space.network.hidden", "8+x"], "ppo.network.hidden is '8 x', expected INT ..."),
        (["ppo", "--space.n="], "--space.n needs values to try"),
        (["ppo", "--space.lr"], "--space.lr needs values to try, such as"),
        (["ppo", "--space.lr", "--samples", "2"], "--space.lr needs values to try, such as"),
        (["ppo", "--space.lr", "1", "--space.lr", "2"], "--space.lr is given twice"),
        (["ppo", "--no-normalize-advantages=yes"], "--no-normalize-advantages takes no value: write --normalize-advan"),
        (["ppo", "--overrides", "a={}", "--overrides", "b={}"], "ppo has --overrides twice: put all its values behind"),
        (["ppo"], "the search space of ppo is empty: give --space.lr loguniform:1e-4,1e-2, or --space FILE."),
        (["ppo", "--space.lr", "1e-3,1e-4"], "`stop` is not set, but trials need to know when to end"),
        (["ppo", "--space.lr", "1e-3,1e-4", "--metric", "returns"], "`metric` is 'returns', but results have no such"),
        (["ppo", "--lrr", "1"], "ppo has no setting `lrr`. Nearest: `lr`"),
        (
            ["ppo", "--space.lr", "1e-3", "--num-runners", "2"],
            "ppo has `ray.num_runners`, but uses the local engine",
        ),
        (["poo"], "there is no algorithm `poo`. Nearest: `ppo`."),
        (["bc", "--space.lr", "1e-3"], "`data` is missing"),
        ([], "etude tune needs an algorithm: ppo,"),
        (["--resume", "nowhere"], "nowhere holds no tuning to resume"),
    ],
)
def test_errors_name_the_culprit(capsys, tmp_path, monkeypatch, args, message):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *args]) == 2
    text = capsys.readouterr()
    assert message in text.err
    assert text.out == ""
    assert list(tmp_path.iterdir()) == []


def test_without_ray_it_is_said_what_to_install(tmp_path, preloaded):
    code = (
        "import sys; sys.modules['ray'] = None\nimport importlib.util\nfound = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'ray' else found(name, *more)\n"
        "from etude.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    for args in (["tune", "ppo", "--env", "CartPole-v1", "--space.lr", "1e-3,1e-4"], ["tune", "--resume", "x"]):
        done = preloaded.run(code, *args, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(
            "error: etude tune needs Ray: pip install '.[ray]' in the clone of Etude, which is on "
        )


def test_help(capsys):
    assert main(["tune", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("loguniform:1e-4,1e-2", "grid:", "randint:1,10", "etude tune --resume OUT", "ppo, "):
        assert words in text
    with pytest.raises(SystemExit):
        main(["tune", "ppo", "--help-all"])
    text = capsys.readouterr().out
    for words in ("--samples", "--space", "--metric", "--network.hidden", "--ray.num-runners"):
        assert words in text


@pytest.fixture
def small_cluster():
    """One with room for a trial, where there is none."""
    ray = pytest.importorskip("ray")
    is_ours = not ray.is_initialized()
    if is_ours:
        handler = signal.getsignal(signal.SIGTERM)
        options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 100_000_000}
        ray.init(address="local", num_cpus=1, **options)
        signal.signal(signal.SIGTERM, handler)  # Ray takes it for itself
    yield
    if is_ours:
        ray.shutdown()


def test_trials_from_the_command_line_and_the_best_one_plays(small_cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = ["--stop.updates", "4", "--out", "out", "--max-concurrent", "1", "--quiet"]
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main([*PPO, "--space.lr", "grid:1e-3,1e-4", *more]) == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["lr", "return_mean", "iterations", "env_steps", "updates"]
    best = lines[-1].partition("at the end")[2].partition(": ")[2]
    assert best.startswith(str(tmp_path / "out"))
    algorithm = etude.load(best)
    assert algorithm.updates == 4
    assert algorithm.evaluate(1).episodes == 1
    assert main(["tune", "--resume", "out", "--json"]) == 2
    assert "Tune keeps pickles in out, and to load them runs code" in capsys.readouterr().err
    assert main(["tune", "--resume", "out", "--trust", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trial["settings"]["lr"] for trial in found["trials"]] == [1e-3, 1e-4]
    assert found["trials"][found["best"]]["checkpoint"] == best
    assert not found["interrupted"]
    assert main([*PPO, "--space.lr", "1e-3,1e-4", *more]) == 2
    assert "out already holds trials" in capsys.readouterr().err
