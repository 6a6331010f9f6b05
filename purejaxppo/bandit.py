"""PPO on a bandit small enough to compute everything exactly: the ops that train networks, and no network.

Each iteration draws a batch of pulls from the current softmax policy and ascends one surrogate on that frozen batch.
How far a policy follows one noisy batch, and how often it ends on a wrong arm, are then exact numbers of a run:

    trace = jax.jit(simulate, static_argnums=0)(BanditConfig(), BanditHParams(clip_eps=math.inf), jax.random.key(0))

`simulate` is one run; `simulate_seeds` runs many, spread over all local devices in bounded memory. `sigmoid_*` are the
two-action policy on which plain and natural gradients can be compared by hand.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from purejaxppo import ops
from purejaxppo.config import Interval, check_size
from purejaxppo.devices import layout, mesh_of, shard

# Runs that a CPU device steps at once, so that they stay in the cache (a step of a run costs 40 to 50 ns from 64 to 192
# of them, and seven times that at 8192), and the most that a device is given in one call, which bounds the memory.
CPU_WIDTH = 128
CHUNK = 16_384


@dataclasses.dataclass(frozen=True)
class BanditConfig:
    """Static settings of a run: its shapes and loop lengths.

    Attributes:
      num_pulls: pulls in a batch, N.
      num_epochs: ascent steps on each batch, K.
      num_iterations: batches of a run, I.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    num_pulls: int = 12
    num_epochs: int = 40
    num_iterations: int = 20

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_size(f"config.{name}", value)


class BanditHParams(NamedTuple):
    """Traced settings of a run: every real number. Each field may carry a leading run axis.

    Attributes:
      means: [A] expected reward of each arm, two arms or more.
      reward_std: standard deviation of the Gaussian reward of every arm.
      learning_rate: step size of plain gradient ascent on the logits.
      clip_eps: clip range of the probability ratio; inf gives the unclipped surrogate.
    """

    means: Any = (1.0, 0.6, 0.0)
    reward_std: Any = 1.0
    learning_rate: Any = 1.0
    clip_eps: Any = 0.2


class BanditTrace(NamedTuple):
    """What a run did. Every number is exact, computed from the policy and not from samples.

    Attributes:
      policy: [I+1, A] float32, probability of each arm, from the uniform start to the end of the run.
      expected_reward: [I+1] float32, of those policies.
      entropy: [I+1] float32, of those policies, nats.
      kl: [I] float32, KL(policy of the batch || policy after its last step), nats.
      step_kl: [I, K] float32, KL(policy of the batch || policy after each step), nats.
      step_clip_fraction: [I, K] float32, share of the pulls whose ratio has left the clip band after each step.
    """

    policy: jax.Array
    expected_reward: jax.Array
    entropy: jax.Array
    kl: jax.Array
    step_kl: jax.Array
    step_clip_fraction: jax.Array


INTERVALS: dict[str, Interval] = {
    "means": Interval(-math.inf, math.inf, low_open=True, high_open=True),
    "reward_std": Interval(0, math.inf, low_open=True, high_open=True),
    "learning_rate": Interval(0, math.inf, low_open=True, high_open=True),
    "clip_eps": Interval(0, math.inf, low_open=True),
}


def check_hparams(hparams: BanditHParams) -> None:
    """Refuses hyperparameters outside their range. Traced values cannot be looked at and pass.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """
    num_arms = _num_arms(hparams.means)
    if num_arms < 2:
        raise ValueError(f"hparams.means = {hparams.means!r}: must be the means of two arms or more, not {num_arms}")
    for name, value in hparams._asdict().items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            continue
        try:
            values = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"hparams.{name} = {value!r}: must be a number") from None
        wrong = values[~INTERVALS[name].contains(values)]
        if wrong.size:
            raise ValueError(f"hparams.{name} = {wrong.flat[0]:g}: must be in {INTERVALS[name]}")


def as_float32(hparams: BanditHParams) -> BanditHParams:
    """The hyperparameters as float32 arrays, whatever numbers they were given as."""
    return BanditHParams(*(jnp.asarray(value, jnp.float32) for value in hparams))


def draw(config: BanditConfig, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The random numbers of a run, the same whatever its hyperparameters.

    Args:
      config: static settings.
      key: typed key.

    Returns:
      [I, N] float32 uniforms in (0, 1), one for each choice of an arm, and [I, N] float32 standard normals, one for
      each reward.
    """
    arm_key, reward_key = jax.random.split(key)
    shape = (config.num_iterations, config.num_pulls)
    # JAX draws multiples of 2^-23; between them neither 0 nor 1 is met, so that no arm of probability 0 can be either.
    uniforms = jax.random.uniform(arm_key, shape) + 2.0**-24
    return uniforms, jax.random.normal(reward_key, shape)


def choose(logits: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Arms drawn from the softmax policy by inverting its cumulative distribution at one uniform a pull.

    Learners with the same policy pull the same arms, and learners with nearly the same policy nearly the same ones.

    Args:
      logits: [A] float32.
      uniforms: [N] float32 in (0, 1).

    Returns:
      [N] int32.
    """
    cumulative = jnp.cumsum(jax.nn.softmax(logits))
    return jnp.sum(uniforms[:, None] * cumulative[-1] >= cumulative[:-1], axis=-1, dtype=jnp.int32)


def ascend(
    actions: jax.Array, advantages: jax.Array, logits: jax.Array, hparams: BanditHParams, num_steps: int
) -> jax.Array:
    """Plain gradient ascent on the logits of mean(clipped surrogate), the batch and its policy frozen.

    z <- z + learning_rate * grad_z mean_n min(ratio_n * A_n, clip(ratio_n, 1 - eps, 1 + eps) * A_n)

    The ratio of a pull depends on its arm alone, and the surrogate is proportional to the size of the advantage. So the
    positive and the negative advantages of each arm are summed once, and a step costs 2 * A terms whatever N is.

    Args:
      actions: [N] int, arm of each pull, drawn from the policy of `logits`.
      advantages: [N] float32, in units of reward.
      logits: [A] float32, of the policy that drew the batch.
      hparams: `learning_rate` and `clip_eps` are read.
      num_steps: K.

    Returns:
      [K+1, A] float32 logits, from the given ones to those after the last step.

    Raises:
      AssertionError: while tracing, when the shapes are not those above.
    """
    chex.assert_rank([actions, advantages, logits], 1)
    chex.assert_equal_shape([actions, advantages])
    arms = jax.nn.one_hot(actions, logits.shape[0])
    gain, loss = jnp.maximum(advantages, 0.0) @ arms, jnp.minimum(advantages, 0.0) @ arms
    pulled, old_log_probs = arms.any(axis=0), jax.nn.log_softmax(logits)

    def objective(logits: jax.Array) -> jax.Array:
        log_ratio = _log_ratio(logits, old_log_probs, pulled)
        good = ops.clipped_surrogate(log_ratio, gain, hparams.clip_eps)
        bad = ops.clipped_surrogate(log_ratio, loss, hparams.clip_eps)
        return jnp.sum(good + bad) / actions.shape[0]

    def step(logits: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        logits = logits + hparams.learning_rate * jax.grad(objective)(logits)
        return logits, logits

    _, path = jax.lax.scan(step, logits, None, num_steps)
    return jnp.concatenate([logits[None], path])


def simulate(config: BanditConfig, hparams: BanditHParams, key: jax.Array) -> BanditTrace:
    """One run from the uniform policy: `num_iterations` times a batch of pulls and `num_epochs` ascent steps on it.

    The advantage of a pull is its reward minus the mean reward of its batch. Works under jit and vmap.

    Args:
      config: static settings.
      hparams: one setting, no run axis.
      key: typed key; it fixes all random numbers, whatever the hyperparameters.

    Returns:
      The trace of the run.

    Raises:
      ValueError: for an invalid setting, where it is not traced.
    """
    check_hparams(hparams)
    hparams = as_float32(hparams)
    chex.assert_rank(list(hparams), [1, 0, 0, 0])
    start = jnp.zeros_like(hparams.means)

    def iterate(logits: jax.Array, draws: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        uniforms, normals = draws
        actions = choose(logits, uniforms)
        rewards = hparams.means[actions] + hparams.reward_std * normals
        path = ascend(actions, rewards - rewards.mean(), logits, hparams, config.num_epochs)
        share = jax.nn.one_hot(actions, logits.shape[0]).mean(axis=0)
        log_ratio = _log_ratio(path[1:], jax.nn.log_softmax(logits), share > 0)
        step_kl = ops.kl_categorical(jnp.broadcast_to(logits, path[1:].shape), path[1:])
        step_clip_fraction = ops.clip_fraction(log_ratio, hparams.clip_eps) @ share
        return path[-1], (path[-1], step_kl, step_clip_fraction)

    _, (logits, step_kl, step_clip_fraction) = jax.lax.scan(iterate, start, draw(config, key))
    log_probs = jax.nn.log_softmax(jnp.concatenate([start[None], logits]))
    policy = jnp.exp(log_probs)
    return BanditTrace(
        policy=policy,
        expected_reward=policy @ hparams.means,
        entropy=-jnp.sum(policy * log_probs, axis=-1),
        kl=step_kl[:, -1],
        step_kl=step_kl,
        step_clip_fraction=step_clip_fraction,
    )


def on_wrong_arm(policy: jax.Array, means: jax.typing.ArrayLike) -> jax.Array:
    """Whether the policy's most likely arm is not a best one: max p(worse arm) > max p(best arm).

    A tie, such as the uniform policy, is not yet wrong.

    Args:
      policy: [..., A] float32.
      means: [A] float32.

    Returns:
      [...] bool.
    """
    best = jnp.asarray(means) == jnp.max(jnp.asarray(means))
    return jnp.max(policy * ~best, axis=-1) > jnp.max(policy * best, axis=-1)


def simulate_seeds(
    config: BanditConfig,
    hparams: BanditHParams,
    num_seeds: int,
    seed: int = 0,
    summarize: Callable[[BanditTrace], Any] = lambda trace: trace,
) -> Any:
    """Runs every setting with every seed, spread over all local devices.

    Seed j draws the same random numbers in every setting, so settings can be compared seed by seed. They depend on
    nothing but `seed` and j.

    Args:
      config: static settings of all runs.
      hparams: scalars and means [A] for one setting; any field may have a leading axis [num_settings].
      num_seeds: runs of each setting.
      seed: of all of them.
      summarize: what to keep of a run: traces in, any arrays out. One function compiles once, so name it.

    Returns:
      What `summarize` returns, by default the whole traces, as NumPy leaves [num_settings, num_seeds, ...].

    Raises:
      ValueError: for an invalid setting, before anything is compiled.
    """
    chunks = list(stream_seeds(config, hparams, num_seeds, seed, summarize))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *chunks)


def stream_seeds(
    config: BanditConfig,
    hparams: BanditHParams,
    num_seeds: int,
    seed: int = 0,
    summarize: Callable[[BanditTrace], Any] = lambda trace: trace,
) -> Iterator[Any]:
    """`simulate_seeds` piece by piece, [num_settings, some seeds, ...] each: any number of seeds fits in memory."""
    check_size("num_seeds", num_seeds)
    check_hparams(hparams)
    hparams = _settings(hparams)
    num_settings = len(hparams.clip_eps)
    mesh = mesh_of(num_seeds)
    most = mesh.size * max(1, CHUNK // num_settings)
    width, size = layout(min(num_seeds, most), mesh, max(1, CPU_WIDTH // num_settings))
    program = _program(config, summarize, mesh, width)
    for first in range(0, num_seeds, size):
        seeds = np.minimum(first + np.arange(size, dtype=np.uint32), num_seeds - 1)  # the last, repeated, fills up
        piece = program(hparams, jax.random.key(seed), seeds)
        yield jax.tree.map(lambda x, first=first: np.swapaxes(np.asarray(x)[: num_seeds - first], 0, 1), piece)


@functools.cache
def _program(config: BanditConfig, summarize: Callable[[BanditTrace], Any], mesh: Mesh, width: int) -> Any:
    """Settings [S], key, seeds [n] -> leaves [n, S, ...]; jitted."""

    def run(hparams: BanditHParams, key: jax.Array, seed: jax.Array) -> Any:
        run_key = jax.random.fold_in(key, seed)
        return jax.vmap(lambda setting: summarize(simulate(config, setting, run_key)))(hparams)

    return shard(mesh, width, run, num_shared=2)


def _settings(hparams: BanditHParams) -> BanditHParams:
    """float32 leaves [S], and [S, A] means, whichever of them had no setting axis."""
    leaves = [np.asarray(leaf, np.float32) for leaf in hparams]
    axes = [leaf.shape[: leaf.ndim - (name == "means")] for name, leaf in zip(hparams._fields, leaves, strict=True)]
    if len(set(axes) - {()}) > 1 or any(len(axis) > 1 for axis in axes):
        raise ValueError(f"hparams: setting axes {sorted(set(axes))}: must be absent or of one length")
    axis = max(axes, key=len) or (1,)
    return BanditHParams(
        *(np.broadcast_to(leaf, axis + leaf.shape[len(own) :]) for leaf, own in zip(leaves, axes, strict=True))
    )


def sigmoid_fisher(theta: jax.typing.ArrayLike) -> jax.Array:
    """Fisher information sigma(1 - sigma) of the two-action policy pi(right) = sigma(theta).

    With reward 1 for right and 0 for left it is also the gradient of the expected reward sigma(theta).
    """
    theta = jnp.asarray(theta, jnp.float32)
    return jax.nn.sigmoid(theta) * jax.nn.sigmoid(-theta)


def sigmoid_kl(theta: jax.typing.ArrayLike, new_theta: jax.typing.ArrayLike) -> jax.Array:
    """KL(old || new) of two two-action policies, nats."""
    old, new = (jnp.asarray(x, jnp.float32) for x in (theta, new_theta))
    old, new = jnp.broadcast_arrays(old, new)
    return ops.kl_categorical(jnp.stack([old, 0.0 * old], axis=-1), jnp.stack([new, 0.0 * new], axis=-1))


def sigmoid_natural_step(theta: jax.typing.ArrayLike, max_kl: jax.typing.ArrayLike = 0.01) -> jax.Array:
    """The natural-gradient step of quadratic KL `max_kl`, sqrt(2 max_kl / g F^-1 g) F^-1 g = sqrt(2 max_kl / F).

    Source: Kakade 2001, "A natural policy gradient"; here g = F, so that F^-1 g = 1.
    """
    theta = jnp.asarray(theta, jnp.float32)
    log_fisher = jax.nn.log_sigmoid(theta) + jax.nn.log_sigmoid(-theta)
    return jnp.sqrt(2.0 * jnp.asarray(max_kl, jnp.float32)) * jnp.exp(-0.5 * log_fisher)


def sigmoid_ascend(theta: jax.typing.ArrayLike, step: Callable[[jax.Array], jax.Array], num_steps: int) -> jax.Array:
    """[num_steps+1] thetas of theta <- theta + step(theta): `sigmoid_fisher` is plain ascent at rate 1."""

    def move(theta: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        theta = theta + step(theta)
        return theta, theta

    start = jnp.asarray(theta, jnp.float32)
    _, path = jax.lax.scan(move, start, None, num_steps)
    return jnp.concatenate([start[None], path])


def _log_ratio(logits: jax.Array, old_log_probs: jax.Array, pulled: jax.Array) -> jax.Array:
    """[..., A] log ratio of each arm; 0 where the batch holds no pull of it and its old probability may be 0."""
    return jnp.where(pulled, jax.nn.log_softmax(logits) - old_log_probs, 0.0)


def _num_arms(means: Any) -> int:
    """Length of the last axis of `means`, which a tuple of traced numbers has too."""
    if isinstance(means, tuple | list):
        return len(means) if all(np.ndim(mean) == 0 for mean in means) else np.shape(means)[-1]
    return np.shape(means)[-1] if np.ndim(means) else 1
