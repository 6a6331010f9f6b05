"""`check_lm`: whether a model of one's own keeps the promises that sampling and learning rely on."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.tokens.model import forward, pick
from purejaxppo.tokens.sample import sample
from purejaxppo.tokens.types import LM, Responses, check_ids

PROMPT_LEN, RESPONSE_LEN, BATCH = 3, 4, 4
TOLERANCE = 1e-5


def check_lm(model: LM, params: Any) -> None:
    """Tests a model on a few random sequences; needs room for seven tokens.

    Args:
      model: of the protocol `types.LM`.
      params: of it.

    Raises:
      ValueError: naming the promise that is broken: the shapes, a cached pass that equals the uncached one, no look at
        padding, no look ahead, `jit` with `vmap` over parameters, or a finite gradient.
    """
    check_ids(model)
    hash(model)
    _check_shapes(model, params)
    prompt, prompt_mask = _prompts(model)
    draw = jax.jit(lambda params: sample(model, params, prompt, prompt_mask, RESPONSE_LEN, jax.random.key(0)))
    responses = draw(params)
    full = _full(model, params)
    running = responses._replace(mask=jnp.ones_like(responses.mask))
    log_probs, gradient = full(running)
    _same("cached pass", "the uncached one", responses.log_probs, log_probs, where=responses.mask)
    other = jnp.where(prompt_mask, prompt, (prompt + 1) % model.vocab_size)
    padded, _ = full(running._replace(prompt=other))
    _same("pass", "one with other tokens in the padding", log_probs, padded)
    changed = running._replace(tokens=running.tokens.at[:, 2].set((running.tokens[:, 2] + 1) % model.vocab_size))
    seen = jnp.broadcast_to(jnp.arange(RESPONSE_LEN) <= 2, responses.mask.shape)
    _same("pass", "one with another token later", log_probs, full(changed)[0], where=seen)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)):
        raise ValueError("model: the gradient of the log-probabilities is not finite")


def _full(model: LM, params: Any) -> Callable[[Responses], tuple[jax.Array, Any]]:
    """Responses -> their log-probabilities by the uncached pass, and the gradient of those of the drawn tokens; the
    first of two runs under `jit` and `vmap`, the other of which has parameters of its own."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), params)

    def summed(params: Any, responses: Responses) -> tuple[jax.Array, jax.Array]:
        log_probs = jax.nn.log_softmax(forward(model, params, responses)[0])
        return jnp.sum(pick(log_probs, responses.tokens)), log_probs

    both = jax.jit(jax.vmap(jax.value_and_grad(summed, has_aux=True), (0, None)))

    def first(responses: Responses) -> tuple[jax.Array, Any]:
        (_, log_probs), gradient = both(stacked, responses)
        return log_probs[0], jax.tree.map(lambda leaf: leaf[0], gradient)

    return first


def _check_shapes(model: LM, params: Any) -> None:
    tokens = jax.ShapeDtypeStruct((BATCH, RESPONSE_LEN), jnp.int32)
    kv_mask = jax.ShapeDtypeStruct(tokens.shape, bool)
    (logits, hidden), cache = jax.eval_shape(model.apply, params, tokens, tokens, kv_mask)
    if logits.shape != (*tokens.shape, model.vocab_size) or hidden.shape[:2] != tokens.shape or cache is not None:
        raise ValueError(
            f"model: apply without a cache gives logits {logits.shape}, hidden {hidden.shape} and cache {cache!r}: "
            f"must be {(*tokens.shape, model.vocab_size)}, {(*tokens.shape, 'D')} and None"
        )


def _prompts(model: LM) -> tuple[jax.Array, jax.Array]:
    """Prompts of one token, two, three and three."""
    usable = [token for token in range(model.vocab_size) if token not in (model.pad_id, model.eos_id)]
    choice = jax.random.randint(jax.random.key(1), (BATCH, PROMPT_LEN), 0, len(usable))
    mask = jnp.arange(PROMPT_LEN) >= jnp.array([2, 1, 0, 0])[:, None]
    return jnp.where(mask, jnp.array(usable, jnp.int32)[choice], model.pad_id), mask


def _same(what: str, other: str, actual: jax.Array, expected: jax.Array, where: Any = None) -> None:
    """Raises ValueError unless the probabilities are equal to rounding."""
    distance = np.abs(np.exp(np.asarray(actual)) - np.exp(np.asarray(expected))).max(axis=-1)
    distance = distance if where is None else distance[np.asarray(where)]
    if not distance.max() <= TOLERANCE:  # NaN is not
        raise ValueError(f"model: its {what} differs from {other} by {distance.max():.2g} in a probability")
