"""Improve: epochs of shuffled minibatches on one batch.

`improve` is a pure function of one run's parameters, optimiser state, batch and permutations: no random numbers, no
environment, fixed loop lengths. A fused kernel can replace it with this version as its oracle.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from purejaxppo import devices, ops
from purejaxppo.agent import networks
from purejaxppo.config import Config, HParams
from purejaxppo.types import Batch, Improvement


class Losses(NamedTuple):
    """Of one optimiser step."""

    policy_loss: jax.Array  # () float32
    value_loss: jax.Array  # () float32
    grad_norm: jax.Array  # () float32


class Diagnostics(NamedTuple):
    """Of a policy on the full batch; as in `Improvement`."""

    entropy: jax.Array
    approx_kl: jax.Array
    exact_kl: jax.Array
    clip_fraction: jax.Array


def make_optimizer(hparams: HParams, learning_rate: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Adam on gradients clipped by their global norm."""
    return ops.clipped_adam(learning_rate, hparams.max_grad_norm, hparams.adam_eps)


@jax.named_scope("improve")
def improve(
    config: Config,
    hparams: HParams,
    network: networks.ActorCritic,
    params: Any,
    opt_state: optax.OptState,
    batch: Batch,
    permutations: jax.Array,
    learning_rate: jax.Array,
    kl_coef: jax.Array,
) -> tuple[Any, optax.OptState, Improvement]:
    """Maximises the clipped surrogate, and fits the critic, by Adam on shuffled minibatches.

    With `kl_early_stopping`, once the k3 estimate on the full batch is above `target_kl` after an epoch, the remaining
    epochs leave every bit of parameters and optimiser as they are; the epoch that crossed the line is kept.

    Args:
      batch: [B, ...], in any order.
      permutations: [K, rows] int32, the order of the batch's rows in each epoch.
      learning_rate: () float32.
      kl_coef: () float32, coefficient of the KL penalty; read with `kl_penalty`.

    Returns:
      Parameters, optimiser state, and what was done.
    """
    optimizer = make_optimizer(hparams, learning_rate)

    def minibatch_gradients(params: Any, minibatch: Batch) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        return gradients(params, config, hparams, network, minibatch, kl_coef)

    def stoppable_epoch(
        carry: tuple[Any, ...], permutation: jax.Array
    ) -> tuple[tuple[Any, ...], tuple[jax.Array, Losses]]:
        old, running = carry
        (params, opt_state), losses = epoch(config, optimizer, minibatch_gradients, old[:2], batch, permutation)
        weights = jnp.broadcast_to(running, losses.policy_loss.shape)
        if not config.kl_early_stopping:
            return ((params, opt_state, old[2]), running), (weights, losses)
        new = (params, opt_state, diagnose(hparams, network, params, batch))
        kept = jax.tree.map(lambda new, old: jnp.where(running, new, old), new, old)
        return (kept, running & ~(kept[2].approx_kl > hparams.target_kl)), (weights, losses)

    zero = Diagnostics(*jnp.zeros(len(Diagnostics._fields)))
    carry = ((params, opt_state, zero), jnp.array(True))
    ((params, opt_state, diagnostics), _), (weights, losses) = jax.lax.scan(stoppable_epoch, carry, permutations)
    if not config.kl_early_stopping:
        diagnostics = diagnose(hparams, network, params, batch)
    losses = jax.tree.map(lambda x: jnp.mean(x, where=weights), losses)
    return (
        params,
        opt_state,
        Improvement(
            **losses._asdict(),
            **diagnostics._asdict(),
            num_epochs=jnp.sum(weights[:, 0], dtype=jnp.int32),
            step_scale=jnp.full((), jnp.nan),
        ),
    )


def epoch(
    config: Config,
    optimizer: optax.GradientTransformation,
    gradients: Callable[[Any, Batch], tuple[Any, tuple[jax.Array, jax.Array]]],
    carry: tuple[Any, optax.OptState],
    batch: Batch,
    permutation: jax.Array,
) -> tuple[tuple[Any, optax.OptState], Losses]:
    """One pass over the batch in the order of the permutation [rows], an optimiser step a minibatch.

    Args:
      gradients: (params, minibatch) -> gradients of the parameters, (policy loss, value loss), () each.
      carry: (params, optimiser state).

    Returns:
      The carry after it, and the losses [num_minibatches].
    """

    def step(carry: tuple[Any, optax.OptState], minibatch: Batch) -> tuple[tuple[Any, optax.OptState], Losses]:
        params, opt_state = carry
        grads, (policy_loss, value_loss) = gradients(params, minibatch)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), Losses(policy_loss, value_loss, optax.tree.norm(grads))

    return jax.lax.scan(step, carry, minibatches(config, batch, permutation))


def minibatches(config: Config, batch: Batch, permutation: jax.Array) -> Batch:
    """The rows of the batch in the order of the permutation [rows], leaves [num_minibatches, rows, ...].

    Advantages are standardised within each minibatch: here and not in the loss, since they depend on no parameters.
    """
    shuffled = permutation.reshape(config.num_minibatches, -1)
    cut = jax.tree.map(lambda x: x[shuffled], batch)
    if config.normalize_advantages:
        cut = cut._replace(advantages=jax.vmap(ops.standardize)(cut.advantages))
    return cut


def gradients(
    params: Any,
    config: Config,
    hparams: HParams,
    network: networks.ActorCritic,
    minibatch: Batch,
    kl_coef: jax.typing.ArrayLike = 0.0,
) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """The gradients of `loss`, and (policy loss, value loss).

    On a CPU, where actor and critic share nothing, the critic's are finished before the actor's are begun: the
    activations of one network stay in its cache where those of both do not.
    """
    if config.shared_trunk or devices.on_accelerator():
        return jax.grad(loss, has_aux=True)(params, config, hparams, network, minibatch, kl_coef)
    actor, critic = networks.split(params)

    def of_critic(critic: Any) -> tuple[jax.Array, jax.Array]:
        value_loss = fit_loss(networks.joined(actor, critic), hparams, network, minibatch)
        return hparams.vf_coef * value_loss, value_loss

    def of_actor(actor: Any, minibatch: Batch) -> tuple[jax.Array, jax.Array]:
        return actor_loss(networks.joined(actor, critic), config, hparams, network, minibatch, kl_coef)

    critic_grads, value_loss = jax.grad(of_critic, has_aux=True)(critic)
    critic_grads, after = jax.lax.optimization_barrier((critic_grads, minibatch))
    actor_grads, policy_loss = jax.grad(of_actor, has_aux=True)(actor, after)
    return networks.joined(actor_grads, critic_grads), (policy_loss, value_loss)


def loss(
    params: Any,
    config: Config,
    hparams: HParams,
    network: networks.ActorCritic,
    minibatch: Batch,
    kl_coef: jax.typing.ArrayLike = 0.0,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """-surrogate + vf_coef * value loss - ent_coef * entropy (+ kl_coef * KL), each a mean over the minibatch.

    Args:
      minibatch: as `minibatches` gives it: its advantages are used as they are.

    Returns:
      () float32, and (policy loss, value loss), both () float32.
    """
    total, policy_loss = actor_loss(params, config, hparams, network, minibatch, kl_coef)
    value_loss = fit_loss(params, hparams, network, minibatch)
    return total + hparams.vf_coef * value_loss, (policy_loss, value_loss)


def actor_loss(
    params: Any,
    config: Config,
    hparams: HParams,
    network: networks.ActorCritic,
    minibatch: Batch,
    kl_coef: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """What `loss` is without the critic's part, () float32; and the policy loss, which leaves out the entropy too."""
    dist_params = networks.batch_policy(network, params, minibatch)
    policy = network.actions.distribution(dist_params)
    log_ratio = policy.log_prob(minibatch.action) - minibatch.log_prob
    policy_loss = -jnp.mean(ops.clipped_surrogate(log_ratio, minibatch.advantages, hparams.clip_eps))
    if config.kl_penalty:
        policy_loss += kl_coef * jnp.mean(network.actions.kl(minibatch.dist_params, dist_params))
    return policy_loss - hparams.ent_coef * jnp.mean(policy.entropy()), policy_loss


def fit_loss(params: Any, hparams: HParams, network: networks.ActorCritic, minibatch: Batch) -> jax.Array:
    """How far the critic is from the value targets, () float32: the clipped value loss, a mean over the minibatch."""
    value = networks.batch_value(network, params, minibatch)
    return jnp.mean(ops.clipped_value_loss(value, minibatch.value, minibatch.value_targets, hparams.value_clip_eps))


@jax.named_scope("diagnostics")
def diagnose(hparams: HParams, network: networks.ActorCritic, params: Any, batch: Batch) -> Diagnostics:
    """How far the policy of `params` has moved from the one that collected the batch."""
    dist_params = networks.batch_policy(network, params, batch)
    policy = network.actions.distribution(dist_params)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob
    return Diagnostics(
        entropy=jnp.mean(policy.entropy()),
        approx_kl=jnp.mean(ops.kl_k3(log_ratio)),
        exact_kl=jnp.mean(network.actions.kl(batch.dist_params, dist_params)),
        clip_fraction=jnp.mean(ops.clip_fraction(log_ratio, hparams.clip_eps)),
    )
