"""Policies that were taken away act as in training, whatever is no longer there."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo import segments
from purejaxppo.agent import envs, networks, rollout
from purejaxppo.host import checkpoints
from purejaxppo.host.checkpoints import Checkpoint
from purejaxppo.host.experiment import Experiment
from purejaxppo.plan import make_plan
from purejaxppo.train import _parts
from tests.helpers import assert_equal, tiny

NUM_RUNS = 3
CONFIG = tiny(hidden_sizes=(8,))


@functools.cache
def programs(config):
    """`init` and `collect` of many runs, compiled once."""
    env, network = _parts(config)
    begin = jax.vmap(functools.partial(ppo.init, config, ppo.HParams()))
    return jax.jit(begin), jax.jit(jax.vmap(functools.partial(rollout.collect, config, env, network)))


def save(directory, config, update_index=1, returns=(1.0, 3.0, 2.0), seed=0):
    """A run directory of `NUM_RUNS` runs; their states, and a rollout [NUM_RUNS, T, N] that they collect next."""
    experiment = Experiment(NUM_RUNS, 0, config, ppo.HParams())
    chunk = make_plan(config, ppo.HParams(), NUM_RUNS, 0, chunk_size=NUM_RUNS).chunk(0)
    begin, collect = programs(config)
    state = begin(jax.random.split(jax.random.key(seed), NUM_RUNS))
    # Larger weights than at the start, so that the policies differ and are not uniform.
    state = state._replace(params=jax.tree.map(lambda leaf: 10 * leaf, state.params))
    metrics = {name: np.zeros((NUM_RUNS, update_index), np.float32) for name in ppo.Metrics._fields}
    metrics["num_episodes"] += 1
    metrics["episode_return"][:, -1] = returns
    spaces = envs.spaces_to_mapping(envs.spaces_of(config.env, config.env_params))
    taken = checkpoints.flatten(segments.take(chunk, segments.bare(state)))
    checkpoints.write(directory, Checkpoint(experiment, update_index, taken, metrics, chunk.shape, spaces, 0.0), 9)
    _, transition = collect(state, jax.random.split(jax.random.key(1), NUM_RUNS))
    return state, transition


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return directory, *save(directory, CONFIG)


@pytest.mark.parametrize("run", range(NUM_RUNS))
def test_a_policy_takes_the_actions_of_training_on_what_was_observed(trained, run):
    directory, _, transition = trained
    policy = ppo.Policy.load(directory, run)
    obs = transition.obs[run]
    np.testing.assert_array_equal(policy(obs), transition.dist_params[run].argmax(-1))
    # The very actions that were sampled, from the noise that they were sampled with.
    noise_key, _ = jax.random.split(jax.random.split(jax.random.key(1), NUM_RUNS)[run])
    network = networks.make(CONFIG, policy.spaces)
    noise = network.actions.draw_noise(noise_key, obs.shape[:2])
    _, action, _ = networks.act(network, *policy.trees, obs, noise)
    np.testing.assert_array_equal(action, transition.action[run])
    np.testing.assert_array_equal(policy.sample(obs, noise_key), transition.action[run])


KINDS = {
    "normalised, squashed": tiny(env="Pendulum-v1", normalize_observations=True, squash=True, num_steps=4),
    "clipped": tiny(env="Pendulum-v1", num_steps=4),
    "image": tiny(env="Catch-bsuite", network="cnn", num_steps=4),
    "recurrent": tiny(env="CartPole-v1", network="gru", num_steps=4, normalize_observations=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_policies_of_every_kind_act_on_raw_observations_as_in_training(kind, tmp_path):
    config = KINDS[kind]
    state, transition = save(tmp_path, config)
    network = _parts(config)[1]
    ppo.Policy.load(tmp_path, 1).save(tmp_path / "file")
    for path, run in ((tmp_path, 1), (tmp_path / "file", "best")):
        policy = ppo.Policy.load(path, run)
        obs, memory = state.obs[1], policy.first_memory(config.num_envs)
        actions, memory = policy.step(obs, memory)
        mode = network.actions.to_env(network.actions.sample(transition.dist_params[1, 0], jnp.zeros(())))
        np.testing.assert_allclose(actions, mode, rtol=1e-5, atol=1e-6)
        if config.network == "gru":
            assert (np.asarray(memory) != 0).any()
            with pytest.raises(ValueError, match=r"^this policy remembers: call policy\.step"):
                policy(obs)
            with pytest.raises(ValueError, match=r"^this policy remembers: call policy\.step"):
                policy.sample(obs, jax.random.key(0))
        else:
            assert memory == ()
            np.testing.assert_array_equal(policy(obs), actions)
    policy.export(tmp_path / "policy.jax")
    exported = jax.export.deserialize(bytearray((tmp_path / "policy.jax").read_bytes()))
    raw = np.asarray(obs).reshape(len(obs), *policy.spaces.obs_shape)
    if config.network == "gru":
        found, after = exported.call(raw, policy.first_memory(len(obs)))
        np.testing.assert_allclose(after, memory, rtol=1e-5, atol=1e-6)
    else:
        found = exported.call(raw)
    np.testing.assert_allclose(found, actions, rtol=1e-5, atol=1e-6)


def test_one_observation_and_any_batch_give_the_same_actions(trained):
    directory, _, transition = trained
    policy = ppo.Policy.load(directory)
    obs = np.asarray(transition.obs[0])
    batch = np.asarray(policy(obs))
    assert batch.shape == obs.shape[:2]
    assert batch.dtype == np.int32
    for index in np.ndindex(3, 2):
        assert policy(obs[index]).shape == ()
        assert policy(obs[index]) == batch[index]
    assert policy(obs[0, 0].tolist()) == batch[0, 0]


def test_samples_follow_the_policy(trained):
    directory, _, transition = trained
    policy = ppo.Policy.load(directory, 0)
    obs, logits = transition.obs[0, 3, 1], transition.dist_params[0, 3, 1]
    drawn = np.asarray(policy.sample(jnp.tile(obs, (20_000, 1)), jax.random.key(0)))
    probability = float(jax.nn.softmax(logits)[1])
    assert 0.02 < probability < 0.98
    assert abs(drawn.mean() - probability) < 4 * np.sqrt(probability * (1 - probability) / len(drawn))


def test_the_best_run_is_the_one_with_the_highest_final_return(trained):
    directory, state, _ = trained
    for run, expected in (("best", 1), (2, 2), ("0", 0)):
        params = jax.tree.map(lambda leaf, i=expected: leaf[i], state.params)
        assert_equal(ppo.Policy.load(directory, run).trees[0], params)


def test_the_last_or_the_best_checkpoint_is_read(tmp_path):
    first, _ = save(tmp_path, CONFIG, 1, (5.0, 6.0, 7.0), seed=1)
    second, _ = save(tmp_path, CONFIG, 2, (np.nan, 3.0, 2.0), seed=2)
    for checkpoint, state in (("last", second), ("best", first), (1, first)):
        params = jax.tree.map(lambda leaf: leaf[1], state.params)
        assert_equal(ppo.Policy.load(tmp_path, 1, checkpoint).trees[0], params)
    assert_equal(ppo.Policy.load(tmp_path).trees[0], jax.tree.map(lambda leaf: leaf[1], second.params))


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    first, _ = save(tmp_path, CONFIG, 1, seed=1)
    save(tmp_path, CONFIG, 2, seed=2)
    (tmp_path / "checkpoints" / "0000002" / "about.json").write_text("{}")
    with pytest.warns(UserWarning, match="0000002 is damaged"):
        policy = ppo.Policy.load(tmp_path, 0)
    assert_equal(policy.trees[0], jax.tree.map(lambda leaf: leaf[0], first.params))


def test_a_saved_policy_is_one_small_file_and_the_same_policy(trained, tmp_path):
    directory, _, transition = trained
    policy = ppo.Policy.load(directory)
    policy.save(tmp_path / "policy")
    assert (tmp_path / "policy").stat().st_size < 20_000
    loaded = ppo.Policy.load(tmp_path / "policy")
    assert (loaded.config, loaded.spaces) == (policy.config, policy.spaces)
    assert_equal(loaded.trees[0], policy.trees[0])
    np.testing.assert_array_equal(loaded(transition.obs), policy(transition.obs))


SHAPES = {
    "Breakout-MinAtar": ((10, 10, 4), 400),
    "FrozenLake-misc": (16, 16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_observations_are_taken_as_the_environment_shows_them_and_flattened(name, tmp_path):
    shape, num_features = SHAPES[name]
    save(tmp_path, tiny(env=name, num_steps=4, num_envs=2, num_minibatches=1, hidden_sizes=(4,)))
    policy = ppo.Policy.load(tmp_path)
    rng = np.random.default_rng(0)
    if isinstance(shape, int):
        raw = rng.integers(0, shape, (5, 3))
        flat = np.eye(shape, dtype=np.float32)[raw]
    else:
        raw = rng.integers(0, 2, (5, 3, *shape)).astype(bool if len(shape) > 1 else np.float64)
        flat = raw.reshape(5, 3, num_features).astype(np.float32)
    actions = np.asarray(policy(raw))
    np.testing.assert_array_equal(policy(flat), actions)
    assert policy(raw[2, 1]) == actions[2, 1]
    policy.export(tmp_path / "policy.jax")
    exported = jax.export.deserialize(bytearray((tmp_path / "policy.jax").read_bytes()))
    dtype = np.int32 if isinstance(shape, int) else np.float32
    for batch in (1, 5):
        np.testing.assert_array_equal(exported.call(raw[:batch, 1].astype(dtype)), actions[:batch, 1])


@pytest.mark.parametrize("obs", [np.zeros(5), np.zeros((4, 3)), np.zeros(()), np.zeros((4, 1))], ids=lambda x: x.shape)
def test_observations_of_another_shape_are_refused(obs, trained):
    policy = ppo.Policy.load(trained[0])
    with pytest.raises(ValueError, match=r"^obs of shape .*: those of CartPole-v1 are of shape \(4,\)"):
        policy(obs)
    with pytest.raises(ValueError, match=r"^obs of shape .*: those of CartPole-v1 are of shape \(4,\)"):
        policy.sample(obs, jax.random.key(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((99,), r"^run = 99: must be 'best' or one of the 3 runs, 0 to 2$"),
        ((-1,), r"^run = -1: must be"),
        (("worst",), r"^run = 'worst': must be"),
        (("best", 7), r"^checkpoint = 7: must be 'last', 'best' or one that .* holds: 1$"),
        (("best", "first"), r"^checkpoint = 'first': must be"),
    ],
)
def test_a_run_or_checkpoint_that_there_is_not_is_refused(arguments, message, trained):
    with pytest.raises(ValueError, match=message):
        ppo.Policy.load(trained[0], *arguments)


def test_what_holds_no_policy_is_refused(tmp_path, trained):
    with pytest.raises(ValueError, match="cannot be read"):
        ppo.Policy.load(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        ppo.Policy.load(tmp_path)
    for content in (b"", b"text", b"PK\x03\x04 and so on"):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match="neither a run directory nor a saved policy"):
            ppo.Policy.load(tmp_path / "file")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="neither a run directory nor a saved policy"):
        ppo.Policy.load(tmp_path / "other.npz")
    ppo.Policy.load(trained[0]).save(tmp_path / "policy")
    with pytest.raises(ValueError, match="is not a run directory"):
        ppo.Policy.load(tmp_path / "policy", 3)


def test_without_a_return_the_best_run_is_not_guessed(tmp_path):
    save(tmp_path, CONFIG, returns=(np.nan,) * 3)
    path = tmp_path / "checkpoints" / "0000001"
    with np.load(path / "metrics.npz") as arrays:
        metrics = dict(arrays) | {"num_episodes": np.zeros((NUM_RUNS, 1), np.int32)}
    np.savez(path / "metrics.npz", **metrics)
    (path / "SHA256SUMS").write_bytes(checkpoints._sums(path))
    with pytest.raises(ValueError, match="no run has a return yet"):
        ppo.Policy.load(tmp_path)


def python(code, path, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FORBIDDEN = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] in {names}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""

EXPORTED = """
import jax, jax.export, json, numpy as np, pathlib
try:
    import purejaxppo
    raise SystemExit("purejaxppo was imported")
except ImportError:
    pass
policy = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
obs = np.load(sys.argv[2])
print(json.dumps(np.asarray(policy.call(obs)).tolist()))
"""

LOADED = """
import json, jax, numpy as np, purejaxppo as ppo
obs = np.load(sys.argv[1])
print(json.dumps([np.asarray(ppo.Policy.load(path)(obs)).tolist() for path in sys.argv[2:]]))
"""


def test_the_exported_file_runs_where_this_package_cannot_be_imported(trained, tmp_path):
    directory, _, transition = trained
    policy = ppo.Policy.load(directory)
    obs = np.asarray(transition.obs).reshape(-1, 4)
    np.save(tmp_path / "obs.npy", obs)
    policy.export(tmp_path / "policy.jax")
    code = FORBIDDEN.format(names={"purejaxppo", "gymnax", "flax", "distrax"}) + EXPORTED
    assert python(code, "", tmp_path / "policy.jax", tmp_path / "obs.npy") == np.asarray(policy(obs)).tolist()


def test_loading_needs_no_environment(trained, tmp_path):
    directory, _, transition = trained
    policy = ppo.Policy.load(directory)
    obs = np.asarray(transition.obs).reshape(-1, 4)
    np.save(tmp_path / "obs.npy", obs)
    policy.save(tmp_path / "policy")
    package = str(Path(ppo.__file__).parents[1])
    found = python(
        FORBIDDEN.format(names={"gymnax"}) + LOADED, package, tmp_path / "obs.npy", directory, tmp_path / "policy"
    )
    assert found == [np.asarray(policy(obs)).tolist()] * 2


def test_a_policy_can_be_called_first_in_a_compiled_program(trained):
    policy, again = ppo.Policy.load(trained[0]), ppo.Policy.load(trained[0])
    obs = trained[2].obs
    np.testing.assert_array_equal(jax.jit(policy)(obs), again(obs))
    np.testing.assert_array_equal(policy(obs), again(obs))
