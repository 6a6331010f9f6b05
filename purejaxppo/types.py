"""The data of a run: NamedTuples of arrays, a shape a field.

Axes: `T` time within a rollout, `N` environments of one run, `B = T * N` samples of one update, `O` the features of
an observation, `A` actions, `D` the dimensions of an action, `P` the parameters of an action distribution. A leading
run axis `R` comes from `jax.vmap` and stands in no shape here.
"""

from typing import Any, NamedTuple

import jax
import optax


class Memory(NamedTuple):
    """What a recurrent network carries from step to step, `H` numbers; () and () without one."""

    actor: Any = ()  # [N, H] float32, 0 at the start of an episode
    critic: Any = ()  # [N, H] float32, likewise


class Transition(NamedTuple):
    """One rollout, frozen at sampling time and never recomputed."""

    obs: jax.Array  # [T, N, O] float32, as the networks saw it: normalised where that is on
    action: jax.Array  # [T, N] int32, or [T, N, D] float32: as it was drawn, before any clipping or squashing
    dist_params: jax.Array  # [T, N, P] float32, the action distribution that was sampled from
    log_prob: jax.Array  # [T, N] float32, nats
    value: jax.Array  # [T, N] float32
    next_value: jax.Array  # [T, N] float32, of the true successor: a final observation if truncated; 0 if terminated
    reward: jax.Array  # [T, N] float32, of the environment
    terminated: jax.Array  # [T, N] bool, the environment ended the episode
    truncated: jax.Array  # [T, N] bool, the time limit was reached
    episode_return: jax.Array  # [T, N] float32, of the running episode up to and including this step, raw
    episode_length: jax.Array  # [T, N] int32, likewise


class Batch(NamedTuple):
    """What the policy and the critic learn from in one update.

    Its rows are what is shuffled: samples; or, for a recurrent network, the stretches of whole environments, and then
    every [B, ...] here is [N, T, ...].
    """

    obs: jax.Array  # [B, O] float32, as the networks saw it
    action: jax.Array  # [B] int32, or [B, D] float32
    dist_params: jax.Array  # [B, P] float32, of the rollout policy
    log_prob: jax.Array  # [B] float32, nats, under the rollout policy
    value: jax.Array  # [B] float32, at sampling time
    advantages: jax.Array  # [B] float32
    value_targets: jax.Array  # [B] float32
    memory: Memory = Memory()  # [N, H], before the first step of the rollout
    fresh: Any = ()  # [N, T] bool, the step is the first of an episode that began within the rollout


class TrainState(NamedTuple):
    """Everything that a run carries from one update to the next; its leaves are all a checkpoint needs."""

    params: Any  # network parameters
    opt_state: optax.OptState
    env_state: Any  # [N, ...] a leaf
    obs: jax.Array  # [N, O] float32, the next observation to act on, raw
    memory: Memory  # to act with next
    obs_stats: Any  # ops.Moments [O] of the observations of all rollouts so far; () without normalisation
    reward_stats: Any  # ops.Moments () of the discounted sums of rewards; () without normalisation
    discounted_sum: Any  # [N] float32, of the running episodes, likewise
    episode_return: jax.Array  # [N] float32, of the running episodes, raw
    episode_length: jax.Array  # [N] int32, of the running episodes
    kl_coef: jax.Array  # () float32, coefficient of the KL penalty in the next update
    key: jax.Array  # () typed key of the run; update i draws from fold_in(key, i)
    update_index: jax.Array  # () int32, updates done


class Improvement(NamedTuple):
    """What one `improve` did. Losses and gradient norm are means over the minibatches run; the rest is over the full
    batch, after the last epoch run. TRPO has one policy step, on the full batch: its policy loss is after the step."""

    policy_loss: jax.Array  # () float32
    value_loss: jax.Array  # () float32, half the mean squared error
    grad_norm: jax.Array  # () float32, global norm before clipping; of TRPO, of its policy gradient
    entropy: jax.Array  # () float32, nats
    approx_kl: jax.Array  # () float32, nats, k3 estimate of KL(old || new)
    exact_kl: jax.Array  # () float32, nats, mean KL(old || new)
    clip_fraction: jax.Array  # () float32, share of |ratio - 1| > clip_eps
    num_epochs: jax.Array  # () int32, epochs run; of TRPO, of its critic
    step_scale: jax.Array  # () float32, accepted fraction of the TRPO step, 0 if rejected; NaN for PPO


class Metrics(NamedTuple):
    """One value per update and run; `run` stacks them to `[num_updates]`.

    `episode_return` and `episode_length` are means over the episodes that *ended* in the update, NaN where none did.
    Within one update short episodes end more often, so while the policy changes these means lean towards them.
    """

    episode_return: jax.Array  # () float32
    episode_length: jax.Array  # () float32
    num_episodes: jax.Array  # () int32, episodes that ended
    policy_loss: jax.Array  # () float32
    value_loss: jax.Array  # () float32
    grad_norm: jax.Array  # () float32
    entropy: jax.Array  # () float32, nats
    approx_kl: jax.Array  # () float32, nats
    exact_kl: jax.Array  # () float32, nats
    clip_fraction: jax.Array  # () float32
    num_epochs: jax.Array  # () int32
    step_scale: jax.Array  # () float32
    kl_coef: jax.Array  # () float32, coefficient of the KL penalty in this update
    explained_variance: jax.Array  # () float32, of the value targets by the values at sampling time
    learning_rate: jax.Array  # () float32
    all_finite: jax.Array  # () bool, parameters and losses


class Episodes(NamedTuple):
    """Complete episodes of one policy; `E` of them."""

    episode_return: jax.Array  # [E] float32, raw rewards
    episode_length: jax.Array  # [E] int32
