"""Improve: one natural gradient step of the policy within a KL bound, then epochs of minibatches for the critic.

As `ppo.improve`, a pure function of one run's parameters, optimiser state, batch and permutations, with fixed loop
lengths. The step, the KL bound and the line search are all taken on the same full batch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from purejaxppo import ops
from purejaxppo.agent import networks, ppo
from purejaxppo.config import Config, HParams
from purejaxppo.types import Batch, Improvement


def improve(
    config: Config,
    hparams: HParams,
    network: networks.ActorCritic,
    params: Any,
    opt_state: optax.OptState,
    batch: Batch,
    permutations: jax.Array,
    learning_rate: jax.Array,
    kl_coef: jax.Array | None = None,
) -> tuple[Any, optax.OptState, Improvement]:
    """The natural gradient step within `max_kl`, by conjugate gradient and a line search; then the critic by Adam.

    With `backtrack_iters=0` the full natural step is taken, which keeps to the bound in the quadratic model only.

    Args and Returns: as `ppo.improve`; there is no KL penalty, and its coefficient is not read.

    Source: Schulman et al. 2015, "Trust region policy optimization", section 6 and appendix C.
    """
    del kl_coef
    params, grad_norm, policy_loss, step_scale = policy_step(config, hparams, network, params, batch)

    def critic_loss(params: Any, minibatch: Batch) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        value_loss = ppo.fit_loss(params, hparams, network, minibatch)
        return hparams.vf_coef * value_loss, (policy_loss, value_loss)

    gradients = jax.grad(critic_loss, has_aux=True)
    epoch = functools.partial(ppo.epoch, config, ppo.make_optimizer(hparams, learning_rate), gradients)
    (params, opt_state), losses = jax.lax.scan(
        lambda carry, permutation: epoch(carry, batch, permutation), (params, opt_state), permutations
    )
    return (
        params,
        opt_state,
        Improvement(
            policy_loss=policy_loss,
            value_loss=jnp.mean(losses.value_loss),
            grad_norm=grad_norm,
            **ppo.diagnose(hparams, network, params, batch)._asdict(),
            num_epochs=jnp.full((), config.num_epochs, jnp.int32),
            step_scale=step_scale,
        ),
    )


def policy_step(
    config: Config, hparams: HParams, network: networks.ActorCritic, params: Any, batch: Batch
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """Moves the actor of `params`; the critic stays.

    Returns:
      Parameters; the norm of the policy gradient, the policy loss after the step, and the accepted fraction of the
      step, () float32 each.
    """
    actor, critic = networks.split(params)
    advantages = ops.standardize(batch.advantages) if config.normalize_advantages else batch.advantages

    def evaluate(actor: Any) -> tuple[jax.Array, jax.Array]:
        dist_params = networks.batch_policy(network, networks.joined(actor, critic), batch)
        log_ratio = network.actions.distribution(dist_params).log_prob(batch.action) - batch.log_prob
        kl = network.actions.kl(batch.dist_params, dist_params)
        return jnp.mean(ops.surrogate(log_ratio, advantages)), jnp.mean(kl)

    gradient = jax.grad(lambda actor: evaluate(actor)[0])(actor)

    def product(vector: Any) -> Any:
        return ops.fisher_vector_product(lambda actor: evaluate(actor)[1], actor, vector, hparams.cg_damping)

    direction = ops.conjugate_gradient(product, gradient, config.cg_iters)
    step = ops.natural_step(direction, product, hparams.max_kl)
    if config.backtrack_iters:
        actor, step_scale = ops.backtracking_line_search(
            evaluate, actor, step, hparams.max_kl, hparams.backtrack_coef, config.backtrack_iters
        )
    else:
        actor, step_scale = jax.tree.map(jnp.add, actor, step), jnp.ones(())
    return networks.joined(actor, critic), optax.tree.norm(gradient), -evaluate(actor)[0], step_scale
