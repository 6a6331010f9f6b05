"""The maths of RLHF on token sequences: rewards, advantages, objectives, and what steers the coefficient.

Axes: `B` responses, `T` tokens of a response, `G` responses to one prompt. A mask is true up to and including the end
of the sequence (EOS), or everywhere in a response without one. Values are per element; the caller takes `masked_mean`.
"""

import chex
import jax
import jax.numpy as jnp

from purejaxppo import ops
from purejaxppo.ops.kl import MAX_KL_COEF, MIN_KL_COEF


def response_mask(tokens: jax.Array, eos_id: int) -> tuple[jax.Array, jax.Array]:
    """Which tokens belong to a response: up to and including its first EOS; all of them when there is none.

    Args:
      tokens: [B, T] int32.
      eos_id: of the model.

    Returns:
      [B, T] bool, and [B] bool: the response has no EOS, so that it was cut off at T (`truncated`).
    """
    ends = tokens == eos_id
    before = jnp.cumsum(ends, axis=-1) - ends  # EOS tokens before this one
    return before == 0, ~ends.any(axis=-1)


def last_token(mask: jax.Array) -> jax.Array:
    """[B, T] bool, true at the last masked-in token alone: EOS, or token T of a response without one."""
    following = jnp.concatenate([mask[:, 1:], jnp.zeros_like(mask[:, :1])], axis=-1)
    return mask & ~following


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """() mean of the elements where the mask is true; what stands elsewhere is not looked at, NaN included."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.sum(mask)


def masked_whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean 0 and population variance 1 under the mask, (x - mean) / sqrt(variance + 1e-8); 0 elsewhere.

    Args:
      x: [B, T] float32.
      mask: [B, T] bool.
    """
    centred = jnp.where(mask, x - masked_mean(x, mask), 0.0)
    return centred / jnp.sqrt(masked_mean(centred**2, mask) + 1e-8)


def finished_score(
    score: jax.Array, truncated: jax.Array, missing_eos: str, missing_eos_score: jax.typing.ArrayLike
) -> jax.Array:
    """The score with what a response without EOS gets for it.

    Args:
      score: [B] float32.
      truncated: [B] bool, no EOS.
      missing_eos: "none"; "replace": their score becomes the constant; "subtract": the constant is taken from it.
      missing_eos_score: () the constant.

    Returns:
      [B] float32.
    """
    if missing_eos == "replace":
        return jnp.where(truncated, missing_eos_score, score)
    if missing_eos == "subtract":
        return jnp.where(truncated, score - missing_eos_score, score)
    return score


def length_excess(mask: jax.Array, length_start: jax.typing.ArrayLike) -> jax.Array:
    """How far a response is on the way from a length that costs nothing to the longest one: 0 to 1, linear between.

    Args:
      mask: [B, T] bool.
      length_start: () in [0, 1), share of T up to which it is 0.

    Returns:
      [B] float32, without unit.

    Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", eq. 13.
    """
    share = jnp.sum(mask, axis=-1) / mask.shape[-1]
    return jnp.clip((share - length_start) / (1.0 - length_start), 0.0, 1.0)


def token_rewards(
    score: jax.Array, log_prob: jax.Array, ref_log_prob: jax.Array, mask: jax.Array, kl_coef: jax.typing.ArrayLike
) -> jax.Array:
    """The reward of each token: minus the coefficient times its log ratio to the reference, plus the score at the last.

    r_t = -kl_coef * (log pi(y_t) - log pi_ref(y_t)) * mask_t + score * [t is the last masked token]

    Args:
      score: [B] float32, of the whole response.
      log_prob: [B, T] float32, nats, under the policy that drew the response.
      ref_log_prob: [B, T] float32, nats, under the reference.
      mask: [B, T] bool.
      kl_coef: ().

    Returns:
      [B, T] float32, 0 after the end.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback", eq. 2.
    """
    chex.assert_equal_shape([log_prob, ref_log_prob, mask])
    log_ratio = jnp.where(mask, ref_log_prob - log_prob, 0.0)
    return jnp.where(last_token(mask), score[:, None], 0.0) + jnp.asarray(kl_coef) * log_ratio


def token_gae(
    reward: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    gamma: jax.typing.ArrayLike,
    gae_lambda: jax.typing.ArrayLike,
) -> jax.Array:
    """Generalised advantage estimates over the tokens of responses; the value after the last token is 0.

    Args:
      reward: [B, T] float32.
      value: [B, T] float32, of the state that each token was drawn in.
      mask: [B, T] bool.
      gamma: () discount factor.
      gae_lambda: () decay of the trace.

    Returns:
      [B, T] float32, 0 after the end.
    """
    chex.assert_equal_shape([reward, value, mask])
    reward, value = (jnp.where(mask, x, 0.0).T for x in (reward, value))
    next_value = jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])
    ended = last_token(mask).T
    return ops.gae(reward, value, next_value, ended, jnp.zeros_like(ended), gamma, gae_lambda).T


def group_advantages(reward: jax.Array, group_size: int, baseline: str = "mean", std: bool = True) -> jax.Array:
    """How much better a response is than the others to its prompt: (r - baseline) / (std + 1e-4). No critic.

    Args:
      reward: [B] float32, of whole responses; those to one prompt stand together.
      group_size: G, two or more; divides B.
      baseline: "mean" of the group, or "leave_one_out": the mean of the others.
      std: whether to divide by the group's population standard deviation.

    Returns:
      [B] float32; zeros, and not NaN, for a group of equal rewards.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1; without `std` Liu et al. 2025, "Understanding R1-Zero-like
      training"; "leave_one_out" Ahmadian et al. 2024, "Back to basics", eq. 6.
    """
    groups = reward.reshape(-1, group_size)
    shifted = groups - groups[:, :1]  # equal rewards become exact zeros, which rounding of their mean would not
    centred = shifted - shifted.mean(axis=-1, keepdims=True)
    scale = group_size / (group_size - 1) if baseline == "leave_one_out" else 1.0
    advantages = scale * centred
    if std:
        advantages = advantages / (jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True)) + 1e-4)
    return advantages.reshape(-1)


def policy_objective(
    log_ratio: jax.Array,
    advantages: jax.Array,
    clip_eps_low: jax.typing.ArrayLike,
    clip_eps_high: jax.typing.ArrayLike,
    dual_clip: jax.typing.ArrayLike,
) -> jax.Array:
    """The PPO-clip objective with a band of its own on each side, and a floor for bad tokens, to be maximised.

    min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and at least dual_clip * A where A < 0

    Args:
      log_ratio: [...] float32, log pi_new - log pi_old, nats.
      advantages: [...] float32.
      clip_eps_low, clip_eps_high: () how far the ratio may fall and rise; inf leaves it alone.
      dual_clip: () above 1; inf for none.

    Returns:
      [...] float32, in units of the advantages.

    Source: Schulman et al. 2017, eq. 7; two widths: Yu et al. 2025, eq. 10; the floor: Ye et al. 2020, "Mastering
      complex control in MOBA games with deep reinforcement learning", eq. 7.
    """
    chex.assert_equal_shape([log_ratio, advantages])
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - clip_eps_low, 1.0 + clip_eps_high)
    pessimistic = jnp.minimum(ratio * advantages, clipped * advantages)
    bad = advantages < 0
    floor = jnp.where(bad, dual_clip, 1.0) * jnp.where(bad, advantages, -1.0)  # no inf * 0
    return jnp.where(bad, jnp.maximum(pessimistic, floor), pessimistic)


def outside_band(
    log_ratio: jax.Array, clip_eps_low: jax.typing.ArrayLike, clip_eps_high: jax.typing.ArrayLike
) -> jax.Array:
    """[...] float32, 1 where the ratio is below 1 - clip_eps_low or above 1 + clip_eps_high, else 0."""
    change = jnp.expm1(log_ratio)
    return ((change > clip_eps_high) | (-change > clip_eps_low)).astype(jnp.float32)


def proportional_kl_coef(
    kl_coef: jax.Array, kl: jax.Array, kl_target: jax.typing.ArrayLike, gain: jax.typing.ArrayLike
) -> jax.Array:
    """The coefficient for the next update, kl_coef * (1 + gain * clip(kl / kl_target - 1, -0.2, 0.2)).

    Args:
      kl_coef: () float32, of this update. 0 is a fixed point.
      kl: () float32, KL to the reference of the policy that drew the batch, nats per response. One that is not finite
        counts as too large.
      kl_target: () nats per response, above 0.
      gain: () per update; 0 keeps the coefficient.

    Returns:
      () float32; it moves no further than 1e-6 and 1e6.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2, whose K is
      batch size / horizon.
    """
    error = jnp.where(jnp.isfinite(kl), jnp.clip(kl / kl_target - 1.0, -0.2, 0.2), 0.2)
    moved = kl_coef * (1.0 + gain * error)
    return jnp.clip(moved, jnp.minimum(kl_coef, MIN_KL_COEF), jnp.maximum(kl_coef, MAX_KL_COEF))


def dpo_loss(
    margin: jax.Array, kl_coef: jax.typing.ArrayLike, preference: jax.Array, label_smoothing: jax.typing.ArrayLike
) -> jax.Array:
    """The loss of preferring the first response of a pair to the second with the given probability.

    With q = preference * (1 - label_smoothing) + (1 - preference) * label_smoothing:
    -q log sigmoid(kl_coef * margin) - (1 - q) log sigmoid(-kl_coef * margin)

    Args:
      margin: [B] float32, (log pi - log pi_ref)(first) - (log pi - log pi_ref)(second), sums over tokens, nats.
      kl_coef: () the coefficient of the KL to the reference, beta.
      preference: [B] float32 in [0, 1]; 1 for an annotator who chose the first.
      label_smoothing: () in [0, 0.5), how often the labels are taken to be wrong.

    Returns:
      [B] float32, nats.

    Source: Rafailov et al. 2023, "Direct preference optimization", eq. 7; the smoothing: Mitchell 2023, "A note on DPO
      with noisy preferences and relationship to IPO", eq. 3.
    """
    chex.assert_equal_shape([margin, preference])
    q = preference * (1.0 - label_smoothing) + (1.0 - preference) * label_smoothing
    logits = kl_coef * margin
    return -q * jax.nn.log_sigmoid(logits) - (1.0 - q) * jax.nn.log_sigmoid(-logits)


def ipo_loss(margin: jax.Array, kl_coef: jax.typing.ArrayLike, preference: jax.Array) -> jax.Array:
    """The squared distance of the margin from what the preference asks for, kl_coef^2 (margin - (p - 1/2) / kl_coef)^2.

    The mean over pairs in both orders, weighted by the preference, has its minimum where `kl_coef * margin` is the
    difference in the probability of winning. The factor kl_coef^2 keeps gradients comparable across coefficients. For
    p = 1 this is the loss of the paper with tau = kl_coef, times tau^2.

    Args:
      margin, kl_coef, preference: as in `dpo_loss`.

    Returns:
      [B] float32.

    Source: Azar et al. 2024, "A general theoretical paradigm to understand learning from human preferences", eq. 17.
    """
    chex.assert_equal_shape([margin, preference])
    return (jnp.asarray(kl_coef) * margin - (preference - 0.5)) ** 2


def best_of_n_kl(n: jax.typing.ArrayLike) -> jax.Array:
    """KL(best of n || reference) = log n - (n - 1) / n, nats per response, where no two responses have equal scores.

    Source: Stiennon et al. 2020, "Learning to summarize from human feedback", appendix G.3.
    """
    n = jnp.asarray(n, jnp.float32)
    return jnp.log(n) - (n - 1.0) / n
