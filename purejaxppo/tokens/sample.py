"""Drawing responses: a prefill of the prompts, then one token a step, through the cache.

The scan has a fixed length: rows that have ended write PAD and are masked. The slot that is written is one number for
all rows and all runs, which is what left-padding is for: cache writes stay slices under `vmap`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from purejaxppo.tokens.model import pick, prompt_positions, without_pad
from purejaxppo.tokens.types import LM, Responses


def sample(
    model: LM, params: Any, prompt: jax.Array, prompt_mask: jax.Array, response_len: int, key: jax.Array
) -> Responses:
    """One response to each prompt, at temperature 1.

    Args:
      prompt: [B, P] int32, left-padded.
      prompt_mask: [B, P] bool, true in the last slot.
      response_len: T; static.
      key: () typed key.

    Returns:
      Responses, with the log-probabilities that they were drawn with.
    """
    batch, prompt_len = prompt.shape
    noise = jax.random.gumbel(key, (response_len, batch, model.vocab_size))  # one draw, outside the scan
    first = prompt_positions(prompt_mask)
    kv_mask = jnp.concatenate([prompt_mask, jnp.ones((batch, response_len), bool)], axis=1)
    cache = model.init_cache(batch, prompt_len + response_len)
    if prompt_len > 1:
        _, cache = model.apply(params, prompt[:, :-1], first[:, :-1], kv_mask, cache, 0)

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        cache, token, running = carry
        step_index, noise_t = inputs
        positions = first[:, -1:] + step_index
        slot = prompt_len - 1 + step_index
        (logits, _), cache = model.apply(params, token[:, None], positions, kv_mask, cache, slot)
        logits = without_pad(model, logits[:, 0])
        drawn = jnp.argmax(logits + noise_t, axis=-1).astype(jnp.int32)
        token = jnp.where(running, drawn, model.pad_id)
        return (cache, token, running & (token != model.eos_id)), (token, running, jax.nn.log_softmax(logits))

    carry = (cache, prompt[:, -1], jnp.ones(batch, bool))
    steps = jnp.arange(response_len, dtype=jnp.int32)
    (_, _, truncated), (tokens, mask, log_probs) = jax.lax.scan(step, carry, (steps, noise))
    tokens, mask, log_probs = (jnp.moveaxis(leaf, 0, 1) for leaf in (tokens, mask, log_probs))
    log_prob = jnp.where(mask, pick(log_probs, tokens), 0.0)
    return Responses(prompt, prompt_mask, tokens, mask, truncated, log_prob, log_probs)


def draw_prompts(
    prompts: jax.Array, prompt_mask: jax.Array, num: int, copies: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Prompts drawn with replacement, `copies` of each side by side.

    Args:
      prompts: [M, P] int32.
      prompt_mask: [M, P] bool.
      num: prompts to return, copies included.
      copies: divides `num`.
      key: () typed key.

    Returns:
      [num, P] int32 and bool.
    """
    uniforms = jax.random.uniform(key, (num // copies,))  # half the code of `randint`, and as good for few prompts
    drawn = jnp.minimum((uniforms * prompts.shape[0]).astype(jnp.int32), prompts.shape[0] - 1)
    rows = jnp.repeat(drawn, copies)
    return jnp.asarray(prompts)[rows], jnp.asarray(prompt_mask)[rows]
