"""The benchmarks' own arithmetic, arguments and processes; nothing is installed and nothing timed."""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from tests.helpers import floats, tiny

sys.path.append(
    str(pathlib.Path(__file__).parents[1] / "benchmarks")
)  # last, so that its profile.py does not stand for the standard library's

import learning
import peers
import peers_table
import side_by_side

BENCHMARKS = pathlib.Path(side_by_side.__file__).parent


@functools.cache
def profile():
    """benchmarks/profile.py, under a name that is free."""
    spec = importlib.util.spec_from_file_location("profile_benchmark", BENCHMARKS / "profile.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["profile_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def speed_row(trainer, steps, seconds, runs=64, **more):
    return {
        "part": "speed",
        "trainer": trainer,
        "runs": runs,
        "steps": steps,
        "seconds": seconds,
        "compile": 5.25,
        "memory": 1234.4,
    } | more


def document(*rows):
    return {"machine": "2 cores", "versions": {"ours": "jax 1", "rejax": "jax 2"}, "rows": list(rows)}


def test_ratios_are_taken_within_a_turn():
    # The machine is three times as slow in the middle turn. Medians alone would say 1000/1 to 1000/6.
    ours, peer = speed_row("ours", 1000, [1.0, 3.0, 1.0]), speed_row("rejax", 500, [1.0, 3.0, 2.0])
    assert peers_table.faster(ours, peer) == [2.0, 2.0, 4.0]
    assert peers_table.faster(ours, ours) == []
    text = peers_table.report(document(ours, peer))
    assert "| 64 | rejax | 250 (167 to 500) | 2.00 (2.00 to 4.00) | 5.2 | 1,234 |" in text
    assert "- 64 runs: ours is 2.00 (2.00 to 4.00) times the fastest single-jit peer (rejax)." in text


def test_the_fastest_peer_is_one_that_trains_many_runs_as_one_program():
    ours, slow = speed_row("ours", 100, [1.0], 1), speed_row("rejax", 50, [1.0], 1)
    faster, stepwise = speed_row("purejaxrl", 80, [1.0], 1), speed_row("sbx", 1000, [1.0], 1)
    lines = peers_table.speed_table([ours, slow, faster, stepwise])
    assert lines[-1] == "- 1 runs: ours is 1.25 (1.25 to 1.25) times the fastest single-jit peer (purejaxrl)."


def test_the_cost_of_a_run_among_many_is_that_of_a_step():
    few, many = speed_row("ours", 200, [1.0]), speed_row("ours", 1000, [10.0], 1024)
    assert peers_table.speed_table([few, many])[-1].endswith(
        "among 1024 costs 2.00 (2.00 to 2.00) times a run among 64."
    )


def test_what_failed_or_is_not_installed_is_a_row():
    install = {"part": "install", "trainer": "sb3", "runs": 0, "failed": "ERROR: no space"}
    failed = {"part": "speed", "trainer": "rejax", "runs": 64, "steps": 1, "failed": "no answer within 600 s"}
    text = peers_table.report(document(install, speed_row("ours", 1000, [1.0]), failed))
    assert "- sb3: not installed: ERROR: no space" in text
    assert "| 64 | rejax | failed: no answer within 600 s | | | |" in text
    assert "fastest" not in text


def test_starts_are_compared_by_their_seconds():
    ours = {"part": "start", "trainer": "ours", "runs": 16, "cold": [10.0, 12.0], "warm": [4.0, 4.0]}
    peer = {"part": "start", "trainer": "rejax", "runs": 16, "cold": [25.0, 24.0], "warm": [12.0, 20.0]}
    lines = peers_table.start_table([ours, peer])
    assert "| rejax | 24.5 (24.0 to 25.0) | 2.25 (2.00 to 2.50) | 16.0 (12.0 to 20.0) | 4.00 (3.00 to 5.00) |" in lines
    assert "- Warm: ours is 4.00 (3.00 to 5.00) times the fastest single-jit peer (rejax)." in lines


def test_the_fastest_start_is_the_shortest():
    rows = [
        {"part": "start", "trainer": name, "runs": 16, "cold": [seconds], "warm": [seconds]}
        for name, seconds in (("ours", 1.0), ("rejax", 2.0), ("purejaxrl", 3.0))
    ]
    assert "2.00 (2.00 to 2.00) times the fastest single-jit peer (rejax)" in peers_table.start_table(rows)[-1]


def test_memory_is_compared_with_ours():
    ours = {"part": "memory", "trainer": "ours", "runs": 256, "few": 900.0, "memory": 1000.0, "finished": True}
    peer = {"part": "memory", "trainer": "rejax", "runs": 256, "few": 800.0, "memory": 2500.0, "finished": False}
    text = "\n".join(peers_table.memory_table([ours, peer]))
    assert "| ours | 1,000 | 1.0 | 900 | 100 | 1.0 | metrics of every update |" in text
    assert "| rejax | at least 2,500 | 2.5 | 800 | 1,700 | 17.0 | final states |" in text
    assert "no checkout of PureJaxRL was given" in text


def test_growth_that_is_within_what_processes_differ_by_is_no_ratio():
    ours = {"part": "memory", "trainer": "ours", "runs": 256, "few": 900.0, "memory": 890.0, "finished": True}
    peer = {"part": "memory", "trainer": "purejaxrl", "runs": 256, "few": 800.0, "memory": 2500.0, "finished": True}
    text = "\n".join(peers_table.memory_table([ours, peer]))
    assert "| ours | 890 | 1.0 | 900 | -10 | - | metrics of every update |" in text
    assert "| purejaxrl | 2,500 | 2.8 | 800 | 1,700 | over 34 | metrics of every environment step |" in text


def test_parts_that_were_not_measured_again_stay():
    start = {"part": "start", "trainer": "ours", "runs": 16, "cold": [1.0], "warm": [1.0]}
    old = document(speed_row("ours", 1, [1.0]), start)
    new = document(speed_row("ours", 2, [1.0])) | {"versions": {"ours": "jax 3"}}
    merged = peers.merged(json.loads(json.dumps(old)), new)
    assert merged["rows"] == [start, *new["rows"]]
    assert merged["versions"] == {"ours": "jax 3", "rejax": "jax 2"}
    assert peers.merged(None, new) == new


def test_everybody_comes_first_in_turn():
    assert [peers.rotated(["a", "b", "c"], turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert sorted(peers.rotated(["a", "b", "c"], 2)) == ["a", "b", "c"]
    assert peers.rotated([], 3) == []


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (peers, ["--peers", "rejox"], "there is no peer 'rejox'; allowed: rejax"),
        (peers, ["--peers", "purejaxrl"], "purejaxrl needs --purejaxrl CHECKOUT"),
        (peers, ["--purejaxrl", "/nowhere"], "/nowhere holds no purejaxrl/ppo.py"),
        (peers, ["--repeats", "0"], "--repeats: 0 must be at least 1"),
        (learning, ["cartpool"], "there is no 'cartpool'; allowed: cartpole"),
        (
            learning,
            ["--against", "rejax", "catch"],
            "there is no 'catch'; allowed: cartpole, acrobot, breakout-minatar",
        ),
        (learning, ["--against", "sb3"], "invalid choice: 'sb3'"),
        (learning, ["--quick"], "--quick: is read only with --against"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(module, words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        module.parse(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_the_peers_are_all_that_there_are(tmp_path):
    assert peers.parse([]).peers == ["rejax", "sbx", "sb3"]
    (tmp_path / "purejaxrl").mkdir()
    (tmp_path / "purejaxrl" / "ppo.py").touch()
    assert peers.parse(["--purejaxrl", str(tmp_path)]).peers == ["rejax", "purejaxrl", "sbx", "sb3"]


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """A trainer that answers with its seed and its runs, prints what nobody asked for, and may fail or sleep."""
    body = f"""
        import sys, time
        sys.path.insert(0, {str(BENCHMARKS / "workers")!r})
        from answering import serve

        def prepare(work):
            def train(seed):
                print("something of its own")
                if seed == 7:
                    raise ValueError("seven is too many")
                if seed == 8:
                    time.sleep(60)
                return {{"returns": [seed, work["num_runs"]], "told": work["more"]}}
            return train

        serve(prepare)
    """
    (tmp_path / "stub.py").write_text(textwrap.dedent(body))
    monkeypatch.setattr(side_by_side, "WORKERS", tmp_path)
    monkeypatch.setitem(side_by_side.TRAINERS, "stub", side_by_side.Trainer("stub.py", (), (), {"more": "words"}))
    return functools.partial(side_by_side.Training, "stub", tmp_path)


def test_a_trainer_answers_each_seed(stub):
    with stub(num_runs=3) as training:
        answers = [training.train(seed) for seed in (0, 1)]
        training.end()
    assert [answer["returns"] for answer in answers] == [[0, 3], [1, 3]]
    assert answers[0]["told"] == "words"
    assert all(0 <= answer["seconds"] < 60 and answer["memory"] > 1 for answer in answers)
    assert training.process.returncode == 0


def test_a_trainer_that_fails_says_why(stub):
    with stub() as training, pytest.raises(side_by_side.TrainerError, match=r"^ValueError: seven is too many$"):
        training.train(7)


def test_a_trainer_that_does_not_answer_is_ended(stub):
    with stub(timeout=0.5) as training, pytest.raises(side_by_side.TrainerError, match=r"^no answer within 0\.5 s$"):
        training.train(8)
    assert training.process.returncode


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_memory_of_a_training_is_seen_though_it_does_not_end(stub):
    with stub() as training:
        memory, finished = training.peak(0, 60)
        assert memory > 1
        assert finished
        memory, finished = training.peak(8, 0.5)
        assert memory > 1
        assert not finished
    with stub() as training, pytest.raises(side_by_side.TrainerError, match="seven"):
        training.peak(7, 60)


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
def test_all_parts_end_in_a_table(stub, monkeypatch, tmp_path, capsys):
    for name in ("ours", "rejax"):
        monkeypatch.setitem(side_by_side.TRAINERS, name, side_by_side.TRAINERS["stub"])
    monkeypatch.setattr(peers, "machine", lambda: "2 cores")
    words = ["--quick", "--repeats", "2", "--peers", "rejax", "--parts", "speed", "start", "memory"]
    monkeypatch.setattr(
        sys, "argv", ["peers.py", *words, "--folder", str(tmp_path), "--out", str(tmp_path / "all.json")]
    )
    peers.main()
    text = (tmp_path / "all.md").read_text()
    assert text in capsys.readouterr().out
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    measured = {(row["part"], row["trainer"], row["runs"]) for row in rows if "failed" not in row}
    names = ("ours", "rejax")
    assert measured == {
        *(("speed", name, runs) for name in names for runs in (1, 64)),
        *(("start", name, 16) for name in names),
        *(("memory", name, 256) for name in names),
    }
    assert text.count("times the fastest single-jit peer (rejax)") == 4


def test_what_pip_says_is_the_reason(monkeypatch, tmp_path):
    def run(command, **_):
        assert command[-2:] == ["rejax==0.1.3", "gymnax==0.0.9"]
        raise subprocess.CalledProcessError(
            1, command, stderr="WARNING: x\nERROR: No matching distribution\nnotice: y\n"
        )

    monkeypatch.setattr(side_by_side.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(side_by_side.subprocess, "run", run)
    ready, rows = peers.installed(["rejax"], tmp_path)
    assert ready == ["ours"]
    assert rows == [{"part": "install", "trainer": "rejax", "runs": 0, "failed": "ERROR: No matching distribution"}]


def test_what_is_installed_is_not_installed_again(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(side_by_side.venv, "create", lambda path, **_: path.mkdir(exist_ok=True))
    monkeypatch.setattr(side_by_side.subprocess, "run", lambda *_, **__: calls.append(1))
    for _ in range(2):
        side_by_side.install("rejax", tmp_path)
        side_by_side.install("ours", tmp_path)
    assert len(calls) == 1
    monkeypatch.setitem(
        side_by_side.TRAINERS, "rejax", side_by_side.TRAINERS["rejax"]._replace(requirements=("rejax",))
    )
    side_by_side.install("rejax", tmp_path)
    assert len(calls) == 2


def test_intervals_overlap_where_they_have_a_point_in_common():
    assert learning.overlap((0.0, 1.0), (1.0, 2.0))
    assert learning.overlap((0.0, 3.0), (1.0, 2.0))
    assert not learning.overlap((0.0, 1.0), (1.1, 2.0))
    assert not learning.overlap((1.1, 2.0), (0.0, 1.0))


def test_learning_is_told_for_both_sides():
    answers = {
        "ours": {"returns": [10.0, 11.0, 12.0, 13.0], "seconds": 3.0},
        "rejax": {"returns": [1.0, 2.0, 3.0, 4.0], "seconds": 4.0},
    }
    ours, peer = learning.compared("cartpole", 2048, answers)
    assert ours.startswith("| cartpole | 2,048 | ours | 11.5 | ")
    assert peer.startswith("| cartpole | 2,048 | rejax | 2.5 | ")
    assert peer.endswith("| 2.5 | 1 | 4 | NO |")


@pytest.mark.parametrize("name", learning.COMPARED)
def test_compared_settings_are_ones_that_a_trainer_is_told(name):
    changes = learning.COMPARED[name]
    work = side_by_side.WORK | changes
    assert set(changes) <= set(side_by_side.WORK)
    assert work["total_timesteps"] % (work["num_envs"] * work["num_steps"]) == 0


def test_flops_are_those_of_the_matrix_products():
    config = ppo.Config()
    work = profile().work(config)
    actor, critic = 2 * (4 * 64 + 64 * 64 + 64 * 2), 2 * (4 * 64 + 64 * 64 + 64)
    assert work["forward"] == 4 * 512 * (actor + critic)
    # By the weights of every layer, and by the input of every layer but the first.
    assert work["backward"] == 4 * 512 * (2 * (actor + critic) - 2 * 2 * 4 * 64)
    assert work["rollout"] == 512 * (actor + 2 * critic)
    env, network = profile().parts(dataclasses.replace(config, activation="relu"))  # one operation, for 13 of tanh
    obs = jnp.zeros((512, *env.obs_shape))
    params = jax.eval_shape(network.init, jax.random.key(0), obs)
    counted = jax.jit(network.apply).lower(params, obs).cost_analysis()["flops"]
    assert work["forward"] <= 4 * counted <= 1.05 * work["forward"]  # the rest is biases and activations


def test_the_pieces_of_an_update_sum_up_with_the_rest():
    module, config = profile(), ppo.Config()
    times = dict.fromkeys(("rollout", "estimate", "shuffle", "forward", "optimiser", "diagnostics"), 1.0)
    text = module.report(
        config, 16, times | {"gradient": 4.0, "whole": 20.0}, dict.fromkeys(module.products(config), 50.0)
    )
    assert "| backward | 3.00 | 15% |" in text
    assert "| the rest | 11.00 | 55% | - | - | - |" in text
    assert f"{16 * 512 / 0.020:,.0f} environment steps/s" in text
    flops = module.work(config)["forward"]
    assert (
        f"| forward | 1.00 | 5% | {flops * 1e-6:.2f} | {16 * flops * 1e-6:.1f} | {16 * flops * 1e-6 / 50:.0%} |" in text
    )


def test_every_piece_takes_what_is_prepared():
    module, config = profile(), tiny()
    hparams, key = floats(ppo.HParams()), jax.random.key(0)
    inputs = jax.eval_shape(functools.partial(module.prepare, config), hparams, key)
    results = {
        name: jax.eval_shape(module.repeated(piece.function, 2), *(inputs[each] for each in piece.inputs))
        for name, piece in module.pieces(config).items()
    }
    state, metrics = results["whole"]
    assert jax.tree.structure(state) == jax.tree.structure(inputs["state"])
    assert metrics.episode_return.shape == ()
    assert results["forward"].shape == (config.num_epochs * config.num_minibatches,)
    assert results["estimate"].advantages.shape == (config.batch_size,)
    assert jax.tree.structure(results["gradient"]) == jax.tree.structure(inputs["state"].params)


def test_a_repeated_piece_gives_what_it_gives_once():
    matrix = jnp.arange(4.0).reshape(2, 2)
    np.testing.assert_array_equal(jax.jit(profile().repeated(jnp.matmul, 3))(matrix, matrix), matrix @ matrix)


def test_the_profile_starts_as_a_script():
    command = [sys.executable, str(BENCHMARKS / "profile.py"), "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent)
    assert finished.returncode == 0, finished.stderr
    assert "Where the time of one update goes" in finished.stdout


def test_a_first_training_is_not_timed_but_tells_what_compiling_took():
    class Fake:
        def __init__(self, *answers):
            self.answers = [answer if isinstance(answer, Exception) else {"memory": 1.0} | answer for answer in answers]

        def train(self, seed):
            answer = self.answers[seed]
            if isinstance(answer, Exception):
                raise answer
            return answer

    told = Fake({"seconds": 9.0, "compile": 4.0}, {"seconds": 1.0}, {"seconds": 3.0})
    untold = Fake({"seconds": 9.0}, {"seconds": 1.0}, {"seconds": 3.0})
    broken = Fake({"seconds": 9.0}, side_by_side.TrainerError("out of memory"))
    rows = {name: {"runs": 1} for name in ("told", "untold", "broken")}
    peers.take_turns({"told": told, "untold": untold, "broken": broken}, rows, repeats=2)
    assert rows["told"] == {"runs": 1, "compile": 4.0, "seconds": [1.0, 3.0], "memory": 1.0}
    assert rows["untold"]["compile"] == 9.0 - 2.0
    assert rows["broken"]["failed"] == "out of memory"
