"""A whole run as one pure function: `train` scans `update`, which is collect -> estimate -> improve."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from purejaxppo import devices, ops
from purejaxppo.agent import envs, networks, ppo, rollout, trpo
from purejaxppo.config import Config, HParams, as_float32, check_default, check_hparams
from purejaxppo.types import Batch, Episodes, Improvement, Memory, Metrics, TrainState, Transition

NO_MEMORY = Memory()


def train(config: Config, hparams: HParams, key: jax.Array) -> tuple[TrainState, Metrics]:
    """One complete run. Pure: works under `jit` (config static), `vmap` over hparams and key, and `shard_map`.

    Args:
      config: static settings.
      hparams: traced settings.
      key: () typed key, `jax.random.key(seed)`; the run draws everything from it.

    Returns:
      The final state, and metrics [num_updates].

    Raises:
      ValueError: for an unknown environment or an invalid concrete hyperparameter.
    """
    return run(config, hparams, init(config, hparams, key), config.num_updates)


def init(config: Config, hparams: HParams, key: jax.Array) -> TrainState:
    """Networks, optimiser and environments at the start of a run.

    Args and Raises: as `train`.
    """
    check(config, hparams)
    _check_key(key)
    env, network = _parts(config)
    network_key, reset_key, run_key = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(reset_key, config.num_envs))
    params = networks.init(network, network_key, obs, as_float32(hparams).log_std_init)
    return TrainState(
        params=params,
        opt_state=ppo.make_optimizer(hparams, hparams.learning_rate).init(params),
        env_state=env_state,
        obs=obs,
        memory=networks.first_memory(network, config.num_envs),
        obs_stats=first_stats(network.features(obs)) if config.normalize_observations else (),
        reward_stats=ops.Moments(*jnp.zeros(3)) if config.normalize_rewards else (),
        discounted_sum=jnp.zeros(config.num_envs, jnp.float32) if config.normalize_rewards else (),
        episode_return=jnp.zeros(config.num_envs, jnp.float32),
        episode_length=jnp.zeros(config.num_envs, jnp.int32),
        kl_coef=as_float32(hparams).kl_coef,
        key=run_key,
        update_index=jnp.zeros((), jnp.int32),
    )


def check(config: Config, hparams: HParams) -> None:
    """Refuses settings that are invalid by themselves, together, or for the environment.

    Args:
      config: static settings.
      hparams: concrete ones, of one run or with a run axis; traced values pass.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """
    check_hparams(config, hparams)
    env, _ = _parts(config)
    if not isinstance(env.actions, envs.Box):
        check_default("log_std_init", hparams, f"continuous actions, and those of {env.name} are discrete")


def run(config: Config, hparams: HParams, state: TrainState, num_updates: int) -> tuple[TrainState, Metrics]:
    """`num_updates` updates. `run(a + b)` equals `run(a)` and then `run(b)`, bitwise.

    Returns:
      The state after them, and metrics [num_updates].
    """
    check_hparams(config, hparams)
    return jax.lax.scan(lambda state, _: update(config, hparams, state), state, length=num_updates)


def update(config: Config, hparams: HParams, state: TrainState) -> tuple[TrainState, Metrics]:
    """One collect -> estimate -> improve.

    Returns:
      The state after it, and its metrics, () a leaf.
    """
    check_hparams(config, hparams)
    hparams = as_float32(hparams)
    env, network = _parts(config)
    collect_key, shuffle_key = jax.random.split(jax.random.fold_in(state.key, state.update_index))

    progress = state.update_index / config.num_updates
    learning_rate = anneal(hparams.learning_rate, hparams.final_lr_fraction, progress)
    hparams = hparams._replace(
        clip_eps=anneal(hparams.clip_eps, hparams.final_clip_fraction, progress),
        ent_coef=anneal(hparams.ent_coef, hparams.final_ent_fraction, progress),
    )

    memory = state.memory
    with jax.named_scope("rollout"):
        state, transition = rollout.collect(config, env, network, state, collect_key)
    if config.normalize_rewards:
        state, transition = normalize_rewards(state, transition, hparams.gamma)
    batch = estimate(config, hparams, transition, memory)
    orders = permutations(shuffle_key, config.num_epochs, config.num_rows)
    improve = trpo.improve if config.algorithm == "trpo" else ppo.improve
    learner = network.clone(form=_form(config))
    params, opt_state, improvement = improve(
        config, hparams, learner, state.params, state.opt_state, batch, orders, learning_rate, state.kl_coef
    )
    metrics = summarize(transition, batch, improvement, learning_rate, state.kl_coef, params)
    kl_coef = ops.adapt_kl_coef(state.kl_coef, improvement.exact_kl, hparams.kl_target, hparams.kl_coef_factor)
    return state._replace(
        params=params, opt_state=opt_state, kl_coef=kl_coef, update_index=state.update_index + 1
    ), metrics


def first_stats(obs: jax.Array) -> ops.Moments:
    """Statistics before the first rollout: one sample's worth of variance 1 around the first observations' mean.

    Args:
      obs: [N, O] float32, raw.
    """
    return ops.Moments(jnp.ones((), jnp.float32), obs.mean(0), jnp.ones(obs.shape[1:], jnp.float32))


@jax.named_scope("estimate")
def normalize_rewards(state: TrainState, transition: Transition, gamma: jax.Array) -> tuple[TrainState, Transition]:
    """Divides the rewards by the running standard deviation of their discounted sums, this rollout's included.

    Source: Engstrom et al. 2020, "Implementation matters in deep policy gradients", section 3 and appendix A.
    """
    done = transition.terminated | transition.truncated
    sums, discounted_sum = ops.discounted_sums(transition.reward, done, state.discounted_sum, gamma)
    stats = ops.merge_moments(state.reward_stats, ops.moments(sums.reshape(-1)))
    reward = ops.standard_score(stats._replace(mean=jnp.zeros(())), transition.reward)
    return state._replace(reward_stats=stats, discounted_sum=discounted_sum), transition._replace(reward=reward)


@jax.named_scope("estimate")
def estimate(config: Config, hparams: HParams, transition: Transition, memory: Memory = NO_MEMORY) -> Batch:
    """Advantages and value targets, computed once per update from the values at sampling time; [T, N] -> [B].

    For a recurrent network [T, N] -> [N, T], with the `memory` that it started with.
    """
    terminated = transition.terminated
    if not config.bootstrap_truncated:
        terminated = terminated | transition.truncated
    advantages = ops.gae(
        transition.reward,
        transition.value,
        transition.next_value,
        terminated,
        transition.truncated,
        hparams.gamma,
        hparams.gae_lambda,
        unroll=1 if devices.has_kernel_loops() else 16,  # one kernel already, which is compiled sooner
    )
    batch = Batch(
        obs=transition.obs,
        action=transition.action,
        dist_params=transition.dist_params,
        log_prob=transition.log_prob,
        value=transition.value,
        advantages=advantages,
        value_targets=advantages + transition.value,
    )
    if config.network == "gru":
        done = transition.terminated | transition.truncated
        batch = batch._replace(fresh=jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]]))
        return jax.tree.map(lambda x: x.swapaxes(0, 1), batch)._replace(memory=memory)
    return jax.tree.map(lambda x: x.reshape(config.batch_size, *x.shape[2:]), batch)


@jax.named_scope("improve")
def permutations(key: jax.Array, num: int, size: int) -> jax.Array:
    """`num` independent random orders of `size` samples, [num, size] int32, in one draw and one sort.

    What is sorted are single words, a number from 0 to `size` behind random bits: to sort pairs of words takes four
    times as long. Two samples with the same random bits, one pair in 2^16 or more, keep their order.
    """
    num_bits = (size - 1).bit_length()
    if num_bits > 16:
        return jnp.argsort(jax.random.bits(key, (num, size)), axis=-1)
    words = (jax.random.bits(key, (num, size)) << num_bits) | jnp.arange(size, dtype=jnp.uint32)
    return (jax.lax.sort(words, is_stable=False) & (2**num_bits - 1)).astype(jnp.int32)


def anneal(start: jax.Array, final_fraction: jax.Array, progress: jax.Array) -> jax.Array:
    """From `start` at progress 0 linearly towards `start * final_fraction` at progress 1."""
    return start * (1.0 - (1.0 - final_fraction) * progress)


@jax.named_scope("diagnostics")
def summarize(
    transition: Transition,
    batch: Batch,
    improvement: Improvement,
    learning_rate: jax.Array,
    kl_coef: jax.Array,
    params: Any,
) -> Metrics:
    """The metrics of one update."""
    ended = transition.terminated | transition.truncated
    num_episodes = jnp.sum(ended, dtype=jnp.int32)

    def mean_of_ended(x: jax.Array) -> jax.Array:
        return jnp.where(num_episodes > 0, jnp.sum(x, where=ended) / num_episodes, jnp.nan)

    checked = [params, improvement.policy_loss, improvement.value_loss, improvement.grad_norm]
    return Metrics(
        episode_return=mean_of_ended(transition.episode_return),
        episode_length=mean_of_ended(transition.episode_length),
        num_episodes=num_episodes,
        explained_variance=ops.explained_variance(batch.value, batch.value_targets),
        learning_rate=learning_rate,
        kl_coef=kl_coef,
        all_finite=jnp.isfinite(ravel_pytree(checked)[0]).all(),
        **improvement._asdict(),
    )


def evaluate(
    config: Config, state: TrainState, key: jax.Array, num_episodes: int, deterministic: bool = True
) -> Episodes:
    """Complete episodes of the policy in `state`, all in parallel, each from a fresh reset. Nothing is learned.

    Args:
      key: () typed key; the same key gives the same episodes whatever was trained.
      num_episodes: E; static.
      deterministic: take the most likely action instead of sampling; static.

    Returns:
      Raw returns and lengths, [E].
    """
    _check_key(key)
    env, network = _parts(config)
    reset_key, run_key = jax.random.split(key)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(reset_key, num_episodes))
    noise_scale = 0.0 if deterministic else 1.0

    def unfinished(carry: tuple) -> jax.Array:
        return carry[4].any()

    def step(carry: tuple) -> tuple:
        env_state, obs, memory, index, running, episodes = carry
        noise_key, step_key = jax.random.split(jax.random.fold_in(run_key, index))
        noise = noise_scale * network.actions.draw_noise(noise_key, (num_episodes,))
        _, action, memory = networks.act(network, state.params, state.obs_stats, obs, noise, memory)
        keys = jax.random.split(step_key, num_episodes)
        result = jax.vmap(env.step)(keys, env_state, network.actions.to_env(action))
        rewards = jnp.where(running, result.reward, 0.0)
        episodes = Episodes(episodes.episode_return + rewards, episodes.episode_length + running)
        running &= ~(result.terminated | result.truncated)
        return result.state, result.obs, memory, index + 1, running, episodes

    episodes = Episodes(jnp.zeros(num_episodes, jnp.float32), jnp.zeros(num_episodes, jnp.int32))
    memory = networks.first_memory(network, num_episodes).actor
    carry = (env_state, obs, memory, jnp.zeros((), jnp.int32), jnp.ones(num_episodes, bool), episodes)
    return jax.lax.while_loop(unfinished, step, carry)[5]


def _form(config: Config) -> str:
    """How the networks are computed while they learn."""
    if devices.on_accelerator():
        return "few_passes"
    return "plain" if config.algorithm == "trpo" else "reverse"


@functools.cache
def _parts(config: Config) -> tuple[envs.Env, networks.ActorCritic]:
    env = envs.make(config.env, config.env_params)
    return env, networks.make(config, env)


def _check_key(key: jax.Array) -> None:
    """One typed threefry key: `rbg` keys make a vmapped run draw other numbers than the same run alone."""
    kind = getattr(key, "dtype", type(key))
    if not jnp.issubdtype(kind, jax.dtypes.prng_key) or "rbg" in str(kind):
        raise ValueError(f"key of {kind}: must be a typed key such as jax.random.key(0), and not an rbg one")
    if key.ndim:
        raise ValueError(f"key of shape {key.shape}: a run takes one key; use jax.vmap for many")
