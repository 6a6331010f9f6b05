"""Improve: epochs of shuffled minibatches on one batch of responses. A pure function of one run's arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from purejaxppo import ops
from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.model import forward, pick
from purejaxppo.tokens.objectives import masked_mean, outside_band, policy_objective
from purejaxppo.tokens.types import Batch, Improvement, Responses, Task


class Losses(NamedTuple):
    """Of one optimiser step, () float32 each."""

    policy_loss: jax.Array
    value_loss: jax.Array
    grad_norm: jax.Array


def make_optimizer(hparams: TokenHParams, learning_rate: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Adam on gradients clipped by their global norm."""
    return ops.clipped_adam(learning_rate, hparams.max_grad_norm, hparams.adam_eps)


def improve(
    config: TokenConfig,
    hparams: TokenHParams,
    task: Task,
    params: Any,
    opt_state: optax.OptState,
    batch: Batch,
    permutations: jax.Array,
    learning_rate: jax.Array,
    kl_coef: jax.Array,
) -> tuple[Any, optax.OptState, Improvement]:
    """Maximises the clipped surrogate, and fits the critic if there is one, by Adam on shuffled minibatches.

    With `kl_early_stopping`, once the k3 estimate on the full batch is above `target_kl` after an epoch, the remaining
    epochs leave every bit of parameters and optimiser as they are; the epoch that crossed the line is kept.

    Args:
      batch: [B, ...].
      permutations: [K, B] int32, the order of the responses in each epoch.
      learning_rate: () float32.
      kl_coef: () float32, read where the KL to the reference stands in the loss.

    Returns:
      Parameters, optimiser state, and what was done.
    """
    optimizer = make_optimizer(hparams, learning_rate)

    def step(carry: tuple, minibatch: Batch) -> tuple[tuple, Losses]:
        params, opt_state = carry
        grads, (policy_loss, value_loss) = jax.grad(loss, has_aux=True)(
            params, config, hparams, task, minibatch, kl_coef
        )
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), Losses(
            policy_loss, value_loss, optax.tree.norm(grads)
        )

    def epoch(carry: tuple, permutation: jax.Array) -> tuple[tuple, tuple[jax.Array, Losses]]:
        old, running = carry
        shuffled = permutation.reshape(config.num_minibatches, -1)
        minibatches = jax.tree.map(lambda leaf: leaf[shuffled], batch)
        (params, opt_state), losses = jax.lax.scan(step, old[:2], minibatches)
        weights = jnp.broadcast_to(running, losses.policy_loss.shape)
        if not config.kl_early_stopping:
            return ((params, opt_state, old[2]), running), (weights, losses)
        new = (params, opt_state, diagnose(hparams, task, params, batch))
        kept = jax.tree.map(lambda new, old: jnp.where(running, new, old), new, old)
        return (kept, running & ~(kept[2][0] > hparams.target_kl)), (weights, losses)

    carry = ((params, opt_state, (jnp.zeros(()), jnp.zeros(()))), jnp.array(True))
    ((params, opt_state, diagnostics), _), (weights, losses) = jax.lax.scan(epoch, carry, permutations)
    if not config.kl_early_stopping:
        diagnostics = diagnose(hparams, task, params, batch)
    return (
        params,
        opt_state,
        Improvement(
            **jax.tree.map(lambda x: jnp.mean(x, where=weights), losses)._asdict(),
            approx_kl=diagnostics[0],
            clip_fraction=diagnostics[1],
            num_epochs=jnp.sum(weights[:, 0], dtype=jnp.int32),
        ),
    )


def loss(
    params: Any, config: TokenConfig, hparams: TokenHParams, task: Task, minibatch: Batch, kl_coef: jax.typing.ArrayLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """-surrogate + vf_coef * value loss - ent_coef * entropy (+ kl_coef * KL to the reference), means over the mask.

    The KL in the loss is ratio * k3. k3 alone, on tokens that the rollout policy drew, has the gradient of another
    divergence; with the ratio its expected gradient is that of KL(pi || reference) at the states that were visited.
    That the policy also chooses which states it visits is left out: only the KL in the reward knows of that.

    Returns:
      () float32, and (policy loss, value loss), both () float32.
    """
    responses, mask = minibatch.responses, minibatch.responses.mask
    logits, hidden = forward(task.model, params["policy"], responses)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = pick(log_probs, responses.tokens)
    log_ratio = jnp.where(mask, log_prob - responses.log_prob, 0.0)
    widths = (hparams.clip_eps_low, hparams.clip_eps_high, hparams.dual_clip)
    policy_loss = -masked_mean(policy_objective(log_ratio, minibatch.advantages, *widths), mask)
    if config.kl_in == "loss":
        k3 = ops.kl_k3(jnp.where(mask, minibatch.ref_log_prob - log_prob, 0.0))
        policy_loss += kl_coef * masked_mean(jnp.exp(log_ratio) * k3, mask)
    value_loss = jnp.zeros(())
    if config.algorithm == "ppo":
        value = values(config, task, params, responses, hidden)
        losses = ops.clipped_value_loss(value, minibatch.value, minibatch.value_targets, hparams.value_clip_eps)
        value_loss = masked_mean(losses, mask)
    total = policy_loss + hparams.vf_coef * value_loss - hparams.ent_coef * masked_mean(entropy(log_probs), mask)
    return total, (policy_loss, value_loss)


def values(config: TokenConfig, task: Task, params: Any, responses: Responses, policy_hidden: jax.Array) -> jax.Array:
    """Values [B, T] float32 of the states that the tokens were drawn in, from the hidden layer that predicts them."""
    critic = params["critic"]
    hidden = policy_hidden
    if config.critic == "separate":
        _, hidden = forward(task.model, critic["trunk"], responses)
    return hidden @ critic["head"] + critic["bias"]


def entropy(log_probs: jax.Array) -> jax.Array:
    """[...] float32, nats, of the distributions [..., V]."""
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def diagnose(hparams: TokenHParams, task: Task, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(approx_kl, clip_fraction): how far the policy of `params` has moved from the one that drew the batch."""
    responses = batch.responses
    log_prob = pick(jax.nn.log_softmax(forward(task.model, params["policy"], responses)[0]), responses.tokens)
    log_ratio = jnp.where(responses.mask, log_prob - responses.log_prob, 0.0)
    outside = outside_band(log_ratio, hparams.clip_eps_low, hparams.clip_eps_high)
    return masked_mean(ops.kl_k3(log_ratio), responses.mask), masked_mean(outside, responses.mask)
