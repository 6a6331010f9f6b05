"""Segments: where a run is cut, and what is looked at between, changes no bit of it."""

import functools

import jax
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo import devices, segments
from purejaxppo.plan import make_plan
from purejaxppo.sweep import train_chunk
from tests.helpers import assert_equal, differs, leaves, tiny

CONFIG = tiny(total_timesteps=6 * 16, kl_early_stopping=True)
HPARAMS = ppo.HParams(learning_rate=0.02, target_kl=0.003)
NUM_RUNS, NUM_EPISODES = 3, 4


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "compiler_options", lambda mesh: {"xla_backend_optimization_level": "0"})
        yield


@pytest.fixture(scope="module")
def chunk():
    return make_plan(CONFIG, HPARAMS, NUM_RUNS, 5, chunk_size=NUM_RUNS).chunk(0)


@pytest.fixture(scope="module")
def programs(chunk):
    return segments.compile_programs(CONFIG, chunk.shape, NUM_EPISODES)


def run(chunk, programs, lengths, between=lambda hparams, state, done: (hparams, state)):
    hparams, state = segments.begin(chunk, programs)
    parts, done = [], 0
    for length in lengths:
        state, metrics = segments.advance(chunk, programs, hparams, state, length)
        done += length
        parts.append(metrics)
        hparams, state = between(hparams, state, done)
    return segments.take(chunk, state), jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)


@pytest.fixture(scope="module")
def whole(chunk, programs):
    return run(chunk, programs, [6])


def test_a_segmented_run_is_the_run_of_a_sweep_bitwise(chunk, whole):
    state, metrics = train_chunk(segments.compile_programs(chunk.config, chunk.shape), chunk)
    assert_equal(whole[1], metrics)
    assert_equal(whole[0], segments.take(chunk, state))
    assert 1 < metrics.num_epochs.mean() < 2, "the early stop should stop some epochs and not others"


@pytest.mark.parametrize("lengths", [[1] * 6, [5, 1], [2, 3, 1]], ids=str)
def test_the_lengths_of_segments_change_nothing(chunk, programs, whole, lengths):
    assert_equal(run(chunk, programs, lengths), whole)


def test_a_state_that_was_on_the_host_goes_on_bitwise(chunk, programs, whole):
    def to_host_and_back(hparams, state, done):
        return segments.put(chunk, segments.take(chunk, state))

    assert_equal(run(chunk, programs, [2, 3, 1], to_host_and_back), whole)


def test_evaluations_change_nothing_and_their_episodes_are_those_of_evaluate(chunk, programs, whole):
    found = {}

    def look(hparams, state, done):
        found[done] = segments.evaluate_runs(chunk, programs, state, done), segments.take(chunk, state)
        return hparams, state

    assert_equal(run(chunk, programs, [4, 2], look), whole)
    keys = segments.evaluation_keys(chunk.seed, chunk.seeds, 6)
    one = jax.jit(lambda state, key: ppo.evaluate(CONFIG, state, key, NUM_EPISODES))
    for index in range(NUM_RUNS):
        state = jax.tree.map(lambda leaf, index=index: leaf[index], found[6][1])
        episodes = one(state._replace(key=jax.random.wrap_key_data(state.key)), keys[index])
        assert_equal(jax.tree.map(lambda leaf, index=index: leaf[index], found[6][0]), episodes)
    assert differs(found[4][0], found[6][0])


def test_evaluations_draw_from_keys_of_their_own(chunk):
    sweep_key = jax.random.key(chunk.seed)
    training = jax.vmap(functools.partial(jax.random.fold_in, sweep_key))(np.arange(NUM_RUNS))
    evaluation = [segments.evaluation_keys(chunk.seed, chunk.seeds, index) for index in (0, 1, 6)]
    data = np.concatenate([np.asarray(jax.random.key_data(keys))[:NUM_RUNS] for keys in (training, *evaluation)])
    assert len(np.unique(data, axis=0)) == 4 * NUM_RUNS


def test_the_seed_of_a_sweep_is_that_of_its_key_however_large(programs):
    for seed in (0, 5, 2**31, 2**32 - 1, 2**32 + 5):
        chunk = make_plan(CONFIG, HPARAMS, NUM_RUNS, seed, chunk_size=NUM_RUNS).chunk(0)
        begun = segments.begin(chunk, programs)[1].key
        for index in range(NUM_RUNS):
            key = jax.random.fold_in(jax.random.key(seed), index)
            expected = jax.random.split(key, 3)[2]  # what `init` leaves to the run
            np.testing.assert_array_equal(begun[index], jax.random.key_data(expected))


@pytest.mark.parametrize("deterministic", [True, False])
def test_finished_runs_are_evaluated_all_at_once_as_each_alone(chunk, whole, deterministic):
    state, _ = whole
    episodes = segments.evaluate_all(chunk, state, 7, NUM_EPISODES, deterministic)
    keys = segments.evaluation_keys(7, chunk.seeds, 0)
    one = jax.jit(lambda state, key: ppo.evaluate(CONFIG, state, key, NUM_EPISODES, deterministic))
    for index in range(NUM_RUNS):
        alone = jax.tree.map(lambda leaf, index=index: leaf[index], state)
        expected = one(alone._replace(key=jax.random.wrap_key_data(alone.key)), keys[index])
        assert_equal(jax.tree.map(lambda leaf, index=index: leaf[index], episodes), expected)


def test_the_shapes_of_a_state_are_known_before_it_is_there(chunk, whole):
    state, _ = whole
    shapes = segments.state_shapes(chunk)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)] == [
        (leaf.shape, leaf.dtype) for leaf in leaves(state)
    ]
