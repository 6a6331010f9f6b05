"""Before RLHF: the reference is fitted to sequences, and pairs of its responses are labelled by an annotator."""

from typing import Any

import jax
import jax.numpy as jnp

from purejaxppo.tokens import reward, rlhf
from purejaxppo.tokens.fitting import Fit, descend
from purejaxppo.tokens.model import token_log_prob
from purejaxppo.tokens.objectives import masked_mean
from purejaxppo.tokens.types import LM, Pairs, Responses, Shared, Task


def nll(model: LM, params: Any, responses: Responses) -> jax.Array:
    """() float32, nats per token: how badly a model predicts given responses, EOS included."""
    return -masked_mean(token_log_prob(model, params, responses), responses.mask)


def fit_reference(
    model: LM, prompt: jax.Array, tokens: jax.Array, key: jax.Array, settings: Fit
) -> tuple[Any, jax.Array]:
    """Supervised fine-tuning of a new model on given responses.

    Args:
      prompt: [n, P] int32, without padding.
      tokens: [n, T] int32, EOS and then PAD behind each.
      key: () typed key.
      settings: static.

    Returns:
      Parameters, and the loss at each step [num_steps] float32, nats per token.
    """
    init_key, fit_key = jax.random.split(key)

    def loss(params: Any, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        prompt, tokens = rows
        return nll(model, params, reward.as_responses(model, prompt, jnp.ones(prompt.shape, bool), tokens))

    return descend(loss, model.init(init_key), (prompt, tokens), prompt.shape[0], fit_key, settings)


def draw_pairs(task: Task, shared: Shared, num: int, sharpness: jax.typing.ArrayLike, key: jax.Array) -> Pairs:
    """Pairs of responses of the reference to one prompt each, labelled by a noisy annotator.

    The label is drawn from Bernoulli(sigmoid(sharpness * (gold of the first - gold of the second))).

    Args:
      num: pairs, N; static.
      sharpness: () per unit of gold reward; inf for an annotator without noise.
      key: () typed key.
    """
    response_key, label_key = jax.random.split(key)
    task, shared = rlhf.with_gold(task, shared)
    quality, _ = rlhf.draw(task, shared, shared.reference, 2 * num, 2, response_key)
    difference = quality.gold[0::2] - quality.gold[1::2]
    chance = jnp.where(difference == 0, 0.5, jax.nn.sigmoid(sharpness * difference))  # and not inf * 0
    label = (jax.random.uniform(label_key, (num,)) < chance).astype(jnp.float32)
    responses = quality.responses
    return Pairs(
        responses.prompt[0::2], responses.prompt_mask[0::2], responses.tokens[0::2], responses.tokens[1::2], label
    )


def agreement(task: Task, gold: Any, pairs: Pairs) -> jax.Array:
    """() float32, share of labels that agree with the gold reward, among pairs that it tells apart."""
    assert task.gold is not None
    first, second = jnp.split(task.gold(gold, reward.both(task.model, pairs)), 2)
    return jnp.sum(((first > second) == (pairs.preference > 0.5)) & (first != second)) / jnp.sum(first != second)
