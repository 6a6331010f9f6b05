"""A whole run of RLHF as one pure function: `train` scans `update`, which is sample -> score -> estimate -> improve."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from purejaxppo import ops
from purejaxppo.tokens import dpo, tasks
from purejaxppo.tokens.config import ONLINE, TokenConfig, TokenHParams, as_float32, check_hparams
from purejaxppo.tokens.improve import entropy, improve, make_optimizer, values
from purejaxppo.tokens.model import forward, pick
from purejaxppo.tokens.objectives import (
    finished_score,
    group_advantages,
    length_excess,
    masked_mean,
    masked_whiten,
    proportional_kl_coef,
    token_gae,
    token_rewards,
)
from purejaxppo.tokens.sample import draw_prompts, sample
from purejaxppo.tokens.types import Batch, Quality, Shared, Task, TokenMetrics, TokenState

CRITIC_KEY = 2**32 - 1  # no update's index


def train(
    config: TokenConfig, hparams: TokenHParams, key: jax.Array, shared: Shared | None = None
) -> tuple[TokenState, TokenMetrics]:
    """One complete run. Pure: works under `jit` (config static) and `vmap` over hparams, key, and what is shared.

    Args:
      config: static settings.
      hparams: traced settings.
      key: () typed key, `jax.random.key(seed)`; the run draws everything from it.
      shared: what all runs of the task share; None for a task that has it, as those by name do but "names".

    Returns:
      The final state, and metrics [num_updates].

    Raises:
      ValueError: for an invalid concrete setting.
    """
    return run(config, hparams, init(config, hparams, key, shared), config.num_updates, shared)


def init(config: TokenConfig, hparams: TokenHParams, key: jax.Array, shared: Shared | None = None) -> TokenState:
    """Policy, critic and optimiser at the start of a run: the policy is the reference.

    Args and Raises: as `train`.
    """
    check_hparams(config, hparams)
    _check_key(key)
    task, shared = tasks.resolve(config, shared)
    params = {"policy": shared.reference}
    if config.algorithm == "ppo":
        params["critic"] = _first_critic(config, task, shared, jax.random.fold_in(key, CRITIC_KEY))
    params = jax.tree.map(jnp.asarray, params)
    return TokenState(
        params=params,
        opt_state=make_optimizer(hparams, hparams.learning_rate).init(params),
        kl_coef=as_float32(hparams).kl_coef,
        key=key,
        update_index=jnp.zeros((), jnp.int32),
    )


def run(
    config: TokenConfig, hparams: TokenHParams, state: TokenState, num_updates: int, shared: Shared | None = None
) -> tuple[TokenState, TokenMetrics]:
    """`num_updates` updates. `run(a + b)` equals `run(a)` and then `run(b)`, bitwise.

    Returns:
      The state after them, and metrics [num_updates].
    """
    check_hparams(config, hparams)
    return jax.lax.scan(lambda state, _: update(config, hparams, state, shared), state, length=num_updates)


def update(
    config: TokenConfig, hparams: TokenHParams, state: TokenState, shared: Shared | None = None
) -> tuple[TokenState, TokenMetrics]:
    """One update of any algorithm.

    Returns:
      The state after it, and its metrics, () a leaf.
    """
    check_hparams(config, hparams)
    hparams = as_float32(hparams)
    task, shared = tasks.resolve(config, shared)
    fraction = state.update_index / config.num_updates
    learning_rate = hparams.learning_rate * (1.0 - (1.0 - hparams.final_lr_fraction) * fraction)
    step = _online_update if config.algorithm in ONLINE else dpo.update
    params, opt_state, kl_coef, metrics = step(config, hparams, task, shared, state, learning_rate)
    return state._replace(
        params=params, opt_state=opt_state, kl_coef=kl_coef, update_index=state.update_index + 1
    ), metrics


def _online_update(
    config: TokenConfig, hparams: TokenHParams, task: Task, shared: Shared, state: TokenState, learning_rate: jax.Array
) -> tuple[Any, Any, jax.Array, TokenMetrics]:
    sample_key, shuffle_key = jax.random.split(jax.random.fold_in(state.key, state.update_index))
    copies = config.group_size if config.algorithm == "grpo" else 1
    quality, ref_log_prob = draw(task, shared, state.params["policy"], config.batch_size, copies, sample_key)
    batch = estimate(config, hparams, task, state.params, quality, ref_log_prob, state.kl_coef)
    orders = jnp.argsort(jax.random.bits(shuffle_key, (config.num_epochs, config.batch_size)), axis=-1)
    params, opt_state, improvement = improve(
        config, hparams, task, state.params, state.opt_state, batch, orders, learning_rate, state.kl_coef
    )
    responses, mask = quality.responses, quality.responses.mask
    ref_kl = jnp.mean(quality.ref_kl)
    losses = (improvement.policy_loss, improvement.value_loss, improvement.grad_norm)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((params, losses, quality.score))]
    metrics = TokenMetrics(
        score=jnp.mean(quality.score),
        gold=jnp.mean(quality.gold),
        ref_kl=ref_kl,
        ref_kl_k1=jnp.mean(jnp.sum(jnp.where(mask, responses.log_prob - ref_log_prob, 0.0), axis=-1)),
        length=jnp.mean(jnp.sum(mask, axis=-1)),
        truncated=jnp.mean(responses.truncated),
        entropy=masked_mean(entropy(responses.log_probs), mask),
        explained_variance=_explained_variance(batch) if config.algorithm == "ppo" else jnp.full((), jnp.nan),
        accuracy=jnp.full((), jnp.nan),
        margin=jnp.full((), jnp.nan),
        kl_coef=state.kl_coef,
        learning_rate=learning_rate,
        all_finite=jnp.stack(finite).all(),
        **improvement._asdict(),
    )
    return params, opt_state, adapt(hparams, state.kl_coef, ref_kl), metrics


def draw(task: Task, shared: Shared, policy: Any, num: int, copies: int, key: jax.Array) -> tuple[Quality, jax.Array]:
    """Responses of a policy, their scores, and how far from the reference each is.

    Args:
      policy: parameters of the task's model.
      num: responses, B.
      copies: responses to each drawn prompt.
      key: () typed key.

    Returns:
      The responses and what they are worth, and their log-probabilities [B, T] under the reference.
    """
    prompt_key, token_key = jax.random.split(key)
    prompt, prompt_mask = draw_prompts(shared.prompts, shared.prompt_mask, num, copies, prompt_key)
    responses = sample(task.model, policy, prompt, prompt_mask, task.response_len, token_key)
    ref_log_probs = jax.nn.log_softmax(forward(task.model, shared.reference, responses)[0])
    kl = jnp.where(responses.mask, ops.kl_categorical(responses.log_probs, ref_log_probs), 0.0)
    score = task.score(shared.score, responses).astype(jnp.float32)
    gold = score if task.gold is None else task.gold(shared.gold, responses).astype(jnp.float32)
    ref_log_prob = jnp.where(responses.mask, pick(ref_log_probs, responses.tokens), 0.0)
    return Quality(responses, score, gold, jnp.sum(kl, axis=-1)), ref_log_prob


def with_gold(task: Task, shared: Shared) -> tuple[Task, Shared]:
    """The same task with the gold reward as its score; it needs no reward model."""
    if task.gold is None:
        return task, shared
    return dataclasses.replace(task, score=task.gold, gold=None), shared._replace(score=shared.gold)


def estimate(
    config: TokenConfig,
    hparams: TokenHParams,
    task: Task,
    params: Any,
    quality: Quality,
    ref_log_prob: jax.Array,
    kl_coef: jax.Array,
) -> Batch:
    """Advantages and value targets, computed once per update."""
    responses, mask = quality.responses, quality.responses.mask
    score = finished_score(quality.score, responses.truncated, config.missing_eos, hparams.missing_eos_score)
    score -= hparams.length_penalty * length_excess(mask, hparams.length_start)
    in_reward = kl_coef if config.kl_in == "reward" else 0.0
    reward = token_rewards(score, responses.log_prob, ref_log_prob, mask, in_reward)
    value = jnp.zeros(mask.shape)
    if config.algorithm == "grpo":
        whole = group_advantages(jnp.sum(reward, axis=-1), config.group_size, config.group_baseline, config.group_std)
        advantages = jnp.where(mask, whole[:, None], 0.0)
        targets = value
    else:
        _, hidden = forward(task.model, params["policy"], responses)
        value = jnp.where(mask, values(config, task, params, responses, hidden), 0.0)
        advantages = token_gae(reward, value, mask, hparams.gamma, hparams.gae_lambda)
        targets = advantages + value
        if config.normalize_advantages:
            advantages = masked_whiten(advantages, mask)
    kept = responses._replace(log_probs=jnp.zeros(mask.shape[:1]))
    return Batch(kept, ref_log_prob, value, advantages, targets)


def adapt(hparams: TokenHParams, kl_coef: jax.Array, ref_kl: jax.Array) -> jax.Array:
    """The coefficient of the next update, by the doubling rule, the proportional one, or neither."""
    doubled = ops.adapt_kl_coef(kl_coef, ref_kl, hparams.kl_target, hparams.kl_coef_factor)
    moved = proportional_kl_coef(kl_coef, ref_kl, hparams.kl_target, hparams.kl_gain)
    return jnp.where(hparams.kl_gain > 0, moved, doubled)


def evaluate(
    config: TokenConfig, state: TokenState, key: jax.Array, num_responses: int, shared: Shared | None = None
) -> Quality:
    """Responses of the policy in `state` to prompts of the task, sampled, and what they are worth. Nothing is learned.

    Args:
      key: () typed key.
      num_responses: B; static.
    """
    task, shared = tasks.resolve(config, shared)
    return draw(task, shared, state.params["policy"], num_responses, 1, key)[0]


def _first_critic(config: TokenConfig, task: Task, shared: Shared, key: jax.Array) -> Any:
    """A small random value head, and with a separate critic the model below it.

    Zeros would do for most models; on one whose hidden layer starts at zero no gradient would ever pass the head.
    """
    trunk = shared.critic if config.critic_from == "reward_model" else shared.reference
    if config.critic_from == "reward_model" and not jax.tree.leaves(trunk):
        raise ValueError("config.critic_from = 'reward_model': this task has no reward model to start from")
    slots = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    (_, hidden), _ = jax.eval_shape(
        task.model.apply, shared.reference, slots, slots, jax.ShapeDtypeStruct((1, 1), bool)
    )
    weights = jax.random.normal(key, hidden.shape[-1:]) / hidden.shape[-1]
    head = {"head": weights, "bias": jnp.zeros(())}
    return head | {"trunk": trunk} if config.critic == "separate" else head


def _explained_variance(batch: Batch) -> jax.Array:
    """1 - Var(targets - values) / Var(targets) over the mask; NaN where the targets are all equal."""
    mask = batch.responses.mask

    def variance(x: jax.Array) -> jax.Array:
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    total = variance(batch.value_targets)
    return jnp.where(total > 0, 1.0 - variance(batch.value_targets - batch.value) / total, jnp.nan)


def _check_key(key: jax.Array) -> None:
    """One typed threefry key: `rbg` keys make a vmapped run draw other numbers than the same run alone."""
    kind = getattr(key, "dtype", type(key))
    if not jnp.issubdtype(kind, jax.dtypes.prng_key) or "rbg" in str(kind) or key.ndim:
        raise ValueError(f"key of {kind}: must be one typed key such as jax.random.key(0), and not an rbg one")
