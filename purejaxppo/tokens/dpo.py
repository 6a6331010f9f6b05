"""DPO and IPO: the policy learns from pairs of responses directly, with neither sampling nor a reward model."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.improve import make_optimizer
from purejaxppo.tokens.model import token_log_prob
from purejaxppo.tokens.objectives import dpo_loss, ipo_loss
from purejaxppo.tokens.reward import both
from purejaxppo.tokens.types import Pairs, Shared, Task, TokenMetrics, TokenState


def update(
    config: TokenConfig, hparams: TokenHParams, task: Task, shared: Shared, state: TokenState, learning_rate: jax.Array
) -> tuple[Any, optax.OptState, jax.Array, TokenMetrics]:
    """One optimiser step on pairs drawn with replacement.

    Returns:
      Parameters, optimiser state, the coefficient (which stays), and the metrics.

    Raises:
      ValueError: for a task without pairs.
    """
    if not isinstance(shared.pairs, Pairs):
        raise ValueError(f"config.algorithm = {config.algorithm!r}: this task has no preference pairs to learn from")
    key = jax.random.fold_in(state.key, state.update_index)
    rows = jax.random.randint(key, (config.batch_size,), 0, shared.pairs.preference.shape[0])
    pairs = jax.tree.map(lambda leaf: leaf[rows], shared.pairs)
    grads, (loss, margins) = jax.grad(pair_loss, has_aux=True)(
        state.params, config, hparams, task, shared.reference, pairs, state.kl_coef
    )
    updates, opt_state = make_optimizer(hparams, learning_rate).update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    signed = jnp.where(pairs.preference >= 0.5, margins, -margins)
    different = jnp.any(pairs.first != pairs.second, axis=-1)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((params, loss, optax.tree.norm(grads)))]
    unknown = {name: jnp.full((), jnp.nan) for name in TokenMetrics._fields}
    known = {
        "policy_loss": loss,
        "value_loss": jnp.zeros(()),
        "grad_norm": optax.tree.norm(grads),
        "num_epochs": jnp.ones((), jnp.int32),
        "accuracy": jnp.mean(signed > 0, where=different),
        "margin": jnp.mean(signed),
        "kl_coef": state.kl_coef,
        "learning_rate": learning_rate,
        "all_finite": jnp.stack(finite).all(),
    }
    return params, opt_state, state.kl_coef, TokenMetrics(**(unknown | known))


def pair_loss(
    params: Any,
    config: TokenConfig,
    hparams: TokenHParams,
    task: Task,
    reference: Any,
    pairs: Pairs,
    kl_coef: jax.typing.ArrayLike,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The mean loss over pairs.

    Returns:
      () float32 to differentiate, and (it once more, margins [B] float32, nats).
    """
    responses = both(task.model, pairs)
    log_ratio = token_log_prob(task.model, params["policy"], responses)
    log_ratio -= token_log_prob(task.model, reference, responses)
    first, second = jnp.split(jnp.sum(log_ratio, axis=-1), 2)
    margins = first - second
    if config.algorithm == "ipo":
        losses = ipo_loss(margins, kl_coef, pairs.preference)
    else:
        losses = dpo_loss(margins, kl_coef, pairs.preference, hparams.label_smoothing)
    loss = jnp.mean(losses)
    return loss, (loss, margins)
