"""The names: what is written of them, and what the annotator likes."""

import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.tokens import names, reward

WORDS = ["ann", "anna", "lee", "z"]


def responses(words, response_len=6):
    prompt, tokens = names.encode(words, response_len)
    mask = jnp.ones(prompt.shape, bool)
    return reward.as_responses(names.task(response_len).model, jnp.asarray(prompt), mask, jnp.asarray(tokens))


def test_names_are_written_and_read():
    prompt, tokens = names.encode(WORDS, 4)
    np.testing.assert_array_equal(prompt, [[0], [0], [11], [25]])
    np.testing.assert_array_equal(tokens[0], [13, 13, names.EOS, names.PAD])
    np.testing.assert_array_equal(tokens[1], [13, 13, 0, names.EOS])
    assert names.decode(prompt, tokens) == WORDS
    assert names.decode(prompt[:1], np.array([[13, 13, 0, 0]])) == ["annaa..."]


@pytest.mark.parametrize(("word", "says"), [("Ann", "letters a to z"), ("", "letters a to z"), ("annae", "at most 4")])
def test_what_is_no_name_is_refused(word, says):
    with pytest.raises(ValueError, match=says):
        names.encode([word], 4)


def test_the_trigram_by_hand_and_as_a_distribution():
    prompt, tokens = names.encode(WORDS, 6)
    probs = np.exp(names.trigram_log_probs(prompt, tokens).astype(np.float64))
    np.testing.assert_allclose(probs[names.PAD, 0].sum(), 1.0, rtol=1e-5)  # a context that occurs, after all three
    assert probs[..., names.PAD].max() < 1e-9
    # after "an": n twice. After "n": n 2, end 1, a 1. Of all 11 letters and ends: n 4, end 4, e 2, a 1.
    unigram = 4 / 11
    expected = 0.6 * 1.0 + 0.25 * 0.5 + 0.1 * unigram + 0.05 / 27
    np.testing.assert_allclose(probs[0, 13, 13], expected, rtol=1e-5)


def test_the_annotator_by_hand():
    table = np.full((28, 28, 28), -2.0, np.float32)
    params = {"log_probs": table, "mean": np.float32(0.0), "std": np.float32(1.0)}
    gold = names.gold(params, responses(["ann", "lllll", "zaz"]))
    np.testing.assert_allclose(gold, [2.0 - 2.0, 3.0 - 2.0, 0.0 - 2.0], rtol=1e-6)  # two soft letters, three at most
    shifted = names.gold(params | {"mean": np.float32(1.0), "std": np.float32(2.0)}, responses(["ann"]))
    np.testing.assert_allclose(shifted, [-0.5], rtol=1e-6)


def test_the_annotator_dislikes_long_names_and_ones_without_an_end():
    table = np.full((28, 28, 28), -2.0, np.float32)
    params = {"log_probs": table, "mean": np.float32(0.0), "std": np.float32(1.0)}
    long = responses(["abcdefghijk"], 12)  # 10 letters and the end after the first
    np.testing.assert_allclose(names.gold(params, long), [-2.0 - 0.5 * 3], rtol=1e-6)
    unfinished = long._replace(
        tokens=jnp.zeros((1, 12), jnp.int32), mask=jnp.ones((1, 12), bool), truncated=jnp.array([True])
    )
    np.testing.assert_allclose(names.gold(params, unfinished), [-2.0 - 0.5 * 4 - 1.0], rtol=1e-6)


def test_what_stands_behind_the_end_is_not_looked_at():
    table = np.random.default_rng(0).normal(size=(28, 28, 28)).astype(np.float32)
    params = {"log_probs": table, "mean": np.float32(0.0), "std": np.float32(1.0)}
    given = responses(WORDS)
    other = given._replace(tokens=jnp.where(given.mask, given.tokens, names.SOFT[0]))
    np.testing.assert_array_equal(names.gold(params, given), names.gold(params, other))
