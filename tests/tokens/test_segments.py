"""Many runs over two devices: cut into segments, taken to the host and back, and one of them broken."""

import functools

import jax
import numpy as np
import pytest

from purejaxppo.tokens.config import TokenHParams
from purejaxppo.tokens.segments import Own, Runs
from tests.helpers import assert_close, assert_equal
from tests.tokens.helpers import compiled_train, floats, shared, tiny

CONFIG = tiny(algorithm="grpo", group_size=4)
KEYS = jax.random.split(jax.random.key(5), 3)
HPARAMS = TokenHParams(*(np.full(3, leaf, np.float32) for leaf in TokenHParams(learning_rate=1e-2)))
WEIGHTS = np.array([1.0, np.nan, 2.0], np.float32)


@functools.cache
def runs():
    """Three runs on two devices, each with a reward of its own, the second of which is NaN."""
    return Runs(CONFIG, shared(score=()), Own(HPARAMS, score=WEIGHTS))


@functools.cache
def at_once():
    return runs().advance(runs().start(KEYS), 3)


@pytest.mark.slow
def test_where_a_run_is_cut_changes_no_bit():
    state, first = runs().advance(runs().start(KEYS), 1)
    state, rest = runs().advance(runs().put(runs().take(state)), 2)
    assert_equal(jax.tree.map(lambda a, b: np.concatenate([a, b], axis=1), first, rest), at_once()[1])
    assert_equal(runs().take(state), runs().take(at_once()[0]))


def test_a_reward_of_nan_is_reported_and_the_other_runs_go_on():
    np.testing.assert_array_equal(at_once()[1].all_finite, [[True] * 3, [False] * 3, [True] * 3])


@pytest.mark.slow
def test_a_run_of_a_segment_is_the_run_alone():
    _, alone = compiled_train(CONFIG)(floats(TokenHParams(learning_rate=1e-2)), KEYS[2], shared(score=np.float32(2.0)))
    assert_close(jax.tree.map(lambda leaf: leaf[2], at_once()[1]), alone, rtol=1e-3, atol=1e-4)
    assert at_once()[1].score[2].max() > 0


def test_every_run_is_evaluated_by_its_own_reward():
    quality = runs().evaluate(at_once()[0], KEYS, 8)
    counts = ((quality.responses.tokens == 0) & quality.responses.mask).sum(-1)
    np.testing.assert_array_equal(quality.score[[0, 2]], counts[[0, 2]] * np.array([[1], [2]]))
    assert np.isnan(quality.score[1]).all()
