"""The model, the sampler, and `check_lm`, which finds models that break a promise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.tokens.checks import check_lm
from purejaxppo.tokens.model import Gpt, forward, token_log_prob, uniform
from purejaxppo.tokens.sample import draw_prompts, sample
from purejaxppo.tokens.types import Task
from tests.tokens.helpers import EOS, MODEL, PAD, PROMPT_MASK, PROMPTS, RESPONSE_LEN, SMALL, params, weighted_count

BATCH = 12
ROWS = np.arange(BATCH) % 3
PROMPT, MASK = jnp.asarray(PROMPTS[ROWS]), jnp.asarray(PROMPT_MASK[ROWS])


@jax.jit
def draw(key, params=None):
    return sample(MODEL, params, PROMPT, MASK, RESPONSE_LEN, key)


@functools.cache
def responses():
    return draw(jax.random.key(0), params())


@jax.jit
def log_probs(params, responses):
    return jax.nn.log_softmax(forward(MODEL, params, responses)[0])


def test_the_model_of_the_names_has_14_thousand_parameters():
    shapes = jax.eval_shape(Gpt(28, 26, 27, 13).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 14_080


def test_cached_sampling_equals_the_uncached_pass_under_left_padding():
    uncached = np.asarray(log_probs(params(), responses()))
    mask = np.asarray(responses().mask)
    np.testing.assert_allclose(np.asarray(responses().log_probs)[mask], uncached[mask], atol=1e-5)
    picked = np.take_along_axis(uncached, np.asarray(responses().tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(responses().log_prob, np.where(mask, picked, 0), atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(token_log_prob, static_argnums=0)(MODEL, params(), responses()), responses().log_prob, atol=1e-5
    )


def test_every_length_occurs_and_masks_end_at_the_end():
    tokens, mask = np.asarray(responses().tokens), np.asarray(responses().mask)
    assert set(mask.sum(1)) == {1, 2, 3, 4}, "draw other responses"
    for row, kept in zip(tokens, mask, strict=True):
        assert EOS not in row[: kept.sum() - 1]
        assert (row[kept.sum() :] == PAD).all()
        assert PAD not in row[: kept.sum()]
    np.testing.assert_array_equal(responses().truncated, ~(tokens == EOS).any(1))


def test_the_vmapped_sampler_draws_what_each_run_draws_alone():
    keys = jax.random.split(jax.random.key(3), 3)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf, 0 * leaf]), params())
    together = jax.jit(jax.vmap(draw))(keys, stacked)
    for run in range(3):
        alone = draw(keys[run], jax.tree.map(lambda leaf, run=run: leaf[run], stacked))
        np.testing.assert_array_equal(together.tokens[run], alone.tokens)
        np.testing.assert_allclose(together.log_probs[run], alone.log_probs, atol=1e-5)
    uncached = jax.jit(jax.vmap(log_probs))(stacked, together)
    np.testing.assert_allclose(np.where(together.mask[..., None], together.log_probs - uncached, 0), 0, atol=1e-5)


def test_tokens_are_drawn_with_their_probabilities():
    prompt, mask = jnp.tile(PROMPT[:1], (4000, 1)), jnp.tile(MASK[:1], (4000, 1))
    drawn = jax.jit(lambda key: sample(MODEL, params(), prompt, mask, 1, key))(jax.random.key(1))
    probs = np.exp(np.asarray(drawn.log_probs[0, 0]))
    counts = np.bincount(np.asarray(drawn.tokens[:, 0]), minlength=6)
    assert probs[PAD] == counts[PAD] == 0
    assert (np.abs(counts - 4000 * probs) <= 4.5 * np.sqrt(4000 * probs * (1 - probs)) + 1e-9).all()


@pytest.mark.parametrize("filler", [0, 1, EOS])
def test_what_stands_in_the_padding_is_not_looked_at(filler):
    changed = responses()._replace(
        prompt=jnp.where(MASK, PROMPT, filler), tokens=jnp.where(responses().mask, responses().tokens, filler)
    )
    mask = np.asarray(responses().mask)
    actual, expected = (np.asarray(log_probs(params(), each))[mask] for each in (changed, responses()))
    np.testing.assert_array_equal(actual, expected)


def test_a_prompt_means_the_same_wherever_its_padding_ends():
    wide = jnp.concatenate([jnp.full((BATCH, 1), 3, jnp.int32), PROMPT], axis=1)
    wide_mask = jnp.concatenate([jnp.zeros((BATCH, 1), bool), MASK], axis=1)
    moved = responses()._replace(prompt=wide, prompt_mask=wide_mask)
    np.testing.assert_allclose(log_probs(params(), moved), log_probs(params(), responses()), atol=1e-5)


def test_the_uniform_model_is_uniform_over_what_may_be_written():
    model = dataclasses.replace(MODEL, forbidden=(EOS,))
    drawn = jax.jit(lambda key: sample(model, uniform(params()), PROMPT, MASK, RESPONSE_LEN, key))(jax.random.key(0))
    np.testing.assert_allclose(
        jnp.exp(drawn.log_probs), jnp.broadcast_to(jnp.array([1, 1, 1, 1, 0, 0]) / 4, (12, 4, 6)), atol=1e-6
    )
    assert drawn.truncated.all()


def test_prompts_are_drawn_with_their_masks_and_copies_side_by_side():
    prompts, mask = draw_prompts(jnp.asarray(PROMPTS), jnp.asarray(PROMPT_MASK), 300, 3, jax.random.key(0))
    rows = np.array([np.flatnonzero((row == PROMPTS).all(1))[0] for row in np.asarray(prompts)])
    np.testing.assert_array_equal(mask, PROMPT_MASK[rows])
    assert (rows.reshape(-1, 3) == rows[::3, None]).all()
    assert (np.bincount(rows[::3], minlength=3) > 15).all()


# check_lm


def test_a_good_model_passes():
    check_lm(MODEL, params())


@dataclasses.dataclass(frozen=True)
class Broken:
    """`SMALL` with one fault."""

    fault: str
    vocab_size: int = 6
    eos_id: int = EOS
    pad_id: int = PAD

    def init(self, key):
        return SMALL.init(key)

    def init_cache(self, batch, max_len):
        return SMALL.init_cache(batch, max_len)

    def apply(self, params, tokens, positions, kv_mask, cache=None, index=None):
        if self.fault == "padding":
            kv_mask = jnp.ones_like(kv_mask)
        if self.fault == "positions" and cache is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if self.fault == "cache" and cache is not None:
            index = jnp.maximum(index - 1, 0)
        (logits, hidden), cache = SMALL.apply(params, tokens, positions, kv_mask, cache, index)
        if self.fault == "ahead" and cache is None:
            logits += hidden[..., 0].sum(1)[:, None, None] * jnp.arange(6)
        if self.fault == "gradient":
            logits += jnp.sqrt(jnp.maximum(0.0, 0.0 * hidden.sum()))
        if self.fault == "shape":
            logits = logits[..., :-1]
        return (logits, hidden), cache


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("padding", "other tokens in the padding"),
        pytest.param("positions", "uncached", marks=pytest.mark.slow),
        ("cache", "cached pass"),
        pytest.param("ahead", "cached pass differs", marks=pytest.mark.slow),
        pytest.param("gradient", "gradient", marks=pytest.mark.slow),
        ("shape", "logits"),
    ],
)
def test_a_broken_model_is_found(fault, says):
    with pytest.raises(ValueError, match=says):
        check_lm(Broken(fault), params(SMALL))


# Bad input


def test_pad_equal_to_eos_is_refused():
    with pytest.raises(ValueError, match=r"pad_id = 4: must differ from eos_id"):
        Gpt(6, 4, 4, 8)
    with pytest.raises(ValueError, match="pad_id = 4"):
        Task(Broken("", pad_id=4), 4, weighted_count)


def test_what_does_not_fit_the_context_is_refused():
    with pytest.raises(ValueError, match="9 tokens: longer than the context of 8"):
        sample(MODEL, params(), PROMPT, MASK, 6, jax.random.key(0))


def test_a_response_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match=r"response_len = 0: must be a positive integer"):
        Task(MODEL, 0, weighted_count)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match=r"num_heads = 3: must divide width = 32"):
        Gpt(6, 4, 5, 8, num_heads=3)
