"""Improve against a loop written out with NumPy's Adam, and the early stop against runs of fewer epochs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.agent import envs, networks
from purejaxppo.agent import ppo as agent_ppo
from purejaxppo.agent import rollout as agent_rollout
from purejaxppo.train import estimate, permutations
from tests.helpers import assert_close, assert_equal, differs, floats, tiny

CONFIG = tiny(num_envs=4, total_timesteps=32)  # 32 samples, two minibatches of 16
STOPPING = tiny(num_envs=4, total_timesteps=32, kl_early_stopping=True)
FAST = ppo.HParams(learning_rate=0.02, target_kl=np.inf)


@functools.cache
def collected():
    """(network, params, optimiser state, batch, four permutations)."""
    config = CONFIG
    env = envs.make(config.env, config.env_params)
    network = networks.make(config, env)

    def collect(key):
        state = ppo.init(config, ppo.HParams(), key)
        _, transition = agent_rollout.collect(config, env, network, state, jax.random.key(1))
        return state, estimate(config, ppo.HParams(), transition)

    state, batch = jax.jit(collect)(jax.random.key(0))
    return network, state.params, state.opt_state, batch, permutations(jax.random.key(2), 4, config.batch_size)


@functools.cache
def compiled(config, vmapped=False):
    network, *_ = collected()

    def improve(hparams, params, opt_state, batch, orders):
        inputs = (config, hparams, network, params, opt_state, batch, orders)
        return agent_ppo.improve(*inputs, hparams.learning_rate, hparams.kl_coef)

    return jax.jit(jax.vmap(improve, in_axes=(0, None, None, None, None)) if vmapped else improve)


def improve(config, hparams, num_epochs=2, **changes):
    """`improve` on the collected batch (fields of it replaced) with the first permutations."""
    _, params, opt_state, batch, orders = collected()
    batch = batch._replace(**changes)
    return compiled(config)(floats(hparams), params, opt_state, batch, orders[:num_epochs])


def stopping_at(targets, num_epochs=4):
    """The early-stopping program over a batch of runs that differ in `target_kl` alone."""
    _, params, opt_state, batch, orders = collected()
    hparams = jax.tree.map(lambda x: jnp.full(len(targets), x, jnp.float32), FAST)
    hparams = hparams._replace(target_kl=jnp.asarray(targets, jnp.float32))
    return compiled(STOPPING, vmapped=True)(hparams, params, opt_state, batch, orders[:num_epochs])


def lane(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def slow_loss(params, config, hparams, network, minibatch):
    """The loss of the paper written out, element by element where it matters."""
    logits = networks.policy(network, params, minibatch.obs)
    log_probs = logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    log_prob = jnp.take_along_axis(log_probs, minibatch.action[:, None], 1)[:, 0]
    ratio = jnp.exp(log_prob - minibatch.log_prob)
    advantages = minibatch.advantages
    if config.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    low, high = 1 - hparams.clip_eps, 1 + hparams.clip_eps
    surrogate = jnp.where(
        advantages > 0,
        jnp.where(ratio > high, high, ratio) * advantages,
        jnp.where(ratio < low, low, ratio) * advantages,
    )
    value = networks.value(network, params, minibatch.obs)
    near = minibatch.value + jnp.clip(value - minibatch.value, -hparams.value_clip_eps, hparams.value_clip_eps)
    plain, clipped = (value - minibatch.value_targets) ** 2, (near - minibatch.value_targets) ** 2
    value_loss = 0.5 * jnp.where(plain > clipped, plain, clipped).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    policy_loss = -surrogate.mean()
    if config.kl_penalty:
        old_log_probs = minibatch.dist_params - jax.scipy.special.logsumexp(minibatch.dist_params, -1, keepdims=True)
        policy_loss += hparams.kl_coef * (jnp.exp(old_log_probs) * (old_log_probs - log_probs)).sum(-1).mean()
    total = policy_loss + hparams.vf_coef * value_loss - hparams.ent_coef * entropy
    return total, (policy_loss, value_loss)


def slow_improve(config, hparams, num_epochs):
    """Epochs and minibatches in Python, Adam in float64 NumPy after clipping the global norm of the gradient."""
    network, params, _, batch, orders = collected()
    gradient = jax.jit(
        lambda params, minibatch: jax.grad(slow_loss, has_aux=True)(params, config, hparams, network, minibatch)
    )
    theta, structure = jax.tree.flatten(params)
    theta = [np.asarray(leaf, np.float64) for leaf in theta]
    first = [np.zeros_like(leaf) for leaf in theta]
    second = [np.zeros_like(leaf) for leaf in theta]
    seen = []
    count = 0
    for order in np.asarray(orders[:num_epochs]):
        for indices in np.split(order, config.num_minibatches):
            minibatch = jax.tree.map(lambda x, indices=indices: x[indices], batch)
            params = structure.unflatten([jnp.asarray(leaf, jnp.float32) for leaf in theta])
            grads, (policy_loss, value_loss) = gradient(params, minibatch)
            grads = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]
            norm = np.sqrt(sum((leaf**2).sum() for leaf in grads))
            seen.append((policy_loss, value_loss, norm))
            grads = [leaf * min(1.0, hparams.max_grad_norm / norm) for leaf in grads]
            count += 1
            first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
            second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, grads, strict=True)]
            theta = [
                x
                - hparams.learning_rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + hparams.adam_eps)
                for x, m, v in zip(theta, first, second, strict=True)
            ]
    return structure.unflatten(theta), np.mean(seen, axis=0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared_trunk": True}, {"network": "gru"}, {"kl_penalty": True}],
    ids=lambda x: "".join(x) or "apart",
)
def test_gradients_one_network_after_the_other_are_those_of_the_loss(changes):
    config = tiny(num_envs=4, total_timesteps=32, **changes)
    env = envs.make(config.env)
    network = networks.make(config, env)
    hparams = ppo.HParams(ent_coef=0.3, vf_coef=0.7)

    def both(key):
        state = ppo.init(config, hparams, key)
        _, transition = agent_rollout.collect(config, env, network, state, jax.random.key(1))
        batch = estimate(config, hparams, transition, state.memory)
        params = jax.tree.map(lambda x: x * 1.1 + 0.01, state.params)
        inputs = (params, config, hparams, network, batch, 0.5)
        return agent_ppo.gradients(*inputs), jax.grad(agent_ppo.loss, has_aux=True)(*inputs)

    (actual, losses), (expected, all_losses) = jax.jit(both)(jax.random.key(0))
    assert_close(actual, expected)
    assert_close(losses, all_losses)
    assert all((np.abs(leaf) > 0).any() for leaf in jax.tree.leaves(actual))


TWINS = {
    # A large adam_eps keeps the first step from being the same whatever the scale of the gradient.
    "global norm clipped": (CONFIG, ppo.HParams(learning_rate=0.05, max_grad_norm=0.1, adam_eps=0.1)),
    "unclipped": (CONFIG, ppo.HParams(learning_rate=0.05, max_grad_norm=np.inf, adam_eps=0.1, clip_eps=0.05)),
    "entropy and value weights": (CONFIG, ppo.HParams(learning_rate=0.02, ent_coef=0.7, vf_coef=1.3)),
    "value clip": (CONFIG, ppo.HParams(learning_rate=0.02, value_clip_eps=0.05)),
    "KL penalty": (
        tiny(num_envs=4, total_timesteps=32, kl_penalty=True),
        ppo.HParams(learning_rate=0.05, clip_eps=np.inf, kl_coef=3.0, adam_eps=0.1),
    ),
    "raw advantages": (
        tiny(num_envs=4, total_timesteps=32, normalize_advantages=False),
        ppo.HParams(learning_rate=0.02, max_grad_norm=0.5, adam_eps=0.01),
    ),
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_equals_the_loop_written_out(name, num_epochs):
    config, hparams = TWINS[name]
    params, _, improvement = improve(config, hparams, num_epochs)
    expected, (policy_loss, value_loss, grad_norm) = slow_improve(config, hparams, num_epochs)
    assert_close(params, expected, rtol=1e-3, atol=2e-5)
    actual = [improvement.policy_loss, improvement.value_loss, improvement.grad_norm]
    np.testing.assert_allclose(actual, [policy_loss, value_loss, grad_norm], rtol=1e-3, atol=1e-5)


def test_one_epoch_of_one_minibatch_is_one_step_on_the_whole_batch():
    """Vanilla policy gradient: every ratio is 1, so the clip range does not matter."""
    config = tiny(num_envs=4, total_timesteps=32, num_minibatches=1)
    narrow = improve(config, ppo.HParams(clip_eps=1e-3), num_epochs=1)[0]
    wide = improve(config, ppo.HParams(clip_eps=np.inf), num_epochs=1)[0]
    assert_close(narrow, wide, rtol=1e-5, atol=1e-7)
    assert differs(narrow, collected()[1])


def test_every_ratio_is_1_before_the_first_step():
    network, params, _, batch, _ = collected()
    logits = networks.policy(network, params, batch.obs)
    log_ratio = network.actions.distribution(logits).log_prob(batch.action) - batch.log_prob
    np.testing.assert_allclose(np.exp(log_ratio), 1.0, atol=1e-5)


def test_the_surrogate_of_the_rollout_policy_is_the_mean_advantage():
    network, params, _, batch, _ = collected()
    config = tiny(num_envs=4, total_timesteps=32)
    _, (policy_loss, _) = agent_ppo.loss(params, config, ppo.HParams(), network, batch)
    np.testing.assert_allclose(policy_loss, -np.mean(batch.advantages), rtol=1e-4)


def test_equal_advantages_leave_the_actor_alone():
    """Standardised they are zero, so only the critic learns."""
    _, before, *_ = collected()
    after = improve(CONFIG, ppo.HParams(), advantages=jnp.full(32, 100.1))[0]
    for name, moves in {"actor_trunk": False, "actor_head": False, "critic_trunk": True, "critic_head": True}.items():
        assert differs(after["params"][name], before["params"][name]) == moves, name


def test_diagnostics_are_of_the_new_policy_on_the_full_batch():
    network, _, _, batch, _ = collected()
    params, _, improvement = improve(CONFIG, ppo.HParams(learning_rate=0.05), num_epochs=3)

    def log_softmax(logits):
        logits = np.asarray(logits, np.float64)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    old, new = log_softmax(batch.dist_params), log_softmax(networks.policy(network, params, batch.obs))
    chosen = np.asarray(batch.action)[:, None]
    log_ratio = (np.take_along_axis(new, chosen, 1) - np.take_along_axis(old, chosen, 1))[:, 0]
    expected = {
        "entropy": -(np.exp(new) * new).sum(-1).mean(),
        "exact_kl": (np.exp(old) * (old - new)).sum(-1).mean(),
        "approx_kl": (np.exp(log_ratio) - 1 - log_ratio).mean(),
        "clip_fraction": (np.abs(np.exp(log_ratio) - 1) > 0.2).mean(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(improvement, name), value, rtol=1e-3, atol=1e-6, err_msg=name)
    assert 0 < expected["clip_fraction"] < 1
    assert improvement.num_epochs == 3


def test_the_batch_is_used_in_the_given_order():
    """Other permutations give other minibatches; the order within a minibatch does not matter."""
    _, params, opt_state, batch, orders = collected()
    run = compiled(CONFIG)
    hparams = floats(ppo.HParams(learning_rate=0.02))
    order = orders[:1]
    within = order.reshape(2, 16)[:, ::-1].reshape(1, 32)
    across = jnp.roll(order, 8, axis=1)
    reference, reordered, other = (run(hparams, params, opt_state, batch, o)[0] for o in (order, within, across))
    assert_close(reference, reordered, rtol=1e-4, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (reference, other)), strict=True)) > 1e-4


def test_permutations_hold_every_sample_once_and_differ():
    orders = np.asarray(permutations(jax.random.key(0), 5, 64))
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.broadcast_to(np.arange(64), (5, 64)))
    other = np.asarray(permutations(jax.random.key(1), 5, 64))
    assert len({tuple(order) for order in (*orders, *other)}) == 10


def test_permutations_put_every_sample_everywhere():
    orders = np.asarray(permutations(jax.random.key(0), 4000, 4))
    for position in range(4):
        np.testing.assert_allclose(np.bincount(orders[:, position], minlength=4) / 4000, 0.25, atol=0.035)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 2**16, 2**16 + 1])
def test_permutations_of_any_size_are_permutations(size):
    (order,) = np.asarray(permutations(jax.random.key(0), 1, size))
    np.testing.assert_array_equal(np.sort(order), np.arange(size))
    if size > 3:
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 4 / size**0.5


@pytest.fixture(scope="module")
def kl_after():
    """The KL estimate after 1, 2, 3, 4 epochs, nothing stopping them; it grows."""
    kl = [float(lane(stopping_at([np.inf] * 3, k)[2], 0).approx_kl) for k in range(1, 5)]
    assert all(np.diff(kl) > 0), kl
    return kl


@pytest.mark.parametrize("crossing", [1, 2, 3])
def test_the_epoch_that_crosses_is_kept_and_everything_after_it_frozen(kl_after, crossing):
    target = kl_after[crossing - 1] * 0.999
    stopped = stopping_at([target] * 3)
    shorter = stopping_at([np.inf] * 3, num_epochs=crossing)
    assert_equal(stopped, shorter)
    assert (np.asarray(stopped[2].num_epochs) == crossing).all()
    assert (np.asarray(stopped[2].approx_kl) > target).all()


def test_a_target_just_above_the_estimate_does_not_stop(kl_after):
    assert (np.asarray(stopping_at([kl_after[1] * 1.001] * 3)[2].num_epochs) == 3).all()


def test_the_estimate_is_of_the_last_epoch_run(kl_after):
    approx_kl = stopping_at([kl_after[2] * 0.999] * 3)[2].approx_kl
    np.testing.assert_allclose(approx_kl, kl_after[2], rtol=1e-6)


def test_each_run_of_a_batch_stops_on_its_own(kl_after):
    targets = [kl_after[0] * 0.5, kl_after[2] * 0.999, np.inf]
    mixed = stopping_at(targets)
    np.testing.assert_array_equal(mixed[2].num_epochs, [1, 3, 4])
    for index, target in enumerate(targets):
        assert_equal(lane(mixed, index), lane(stopping_at([target] * 3), index))
        assert_close(lane(mixed, index), improve(STOPPING, FAST._replace(target_kl=target), 4), rtol=1e-3, atol=1e-5)


def test_a_target_that_is_never_reached_changes_nothing():
    never = improve(STOPPING, FAST._replace(target_kl=1e6), 4)
    assert_close(never, improve(CONFIG, FAST, 4), rtol=1e-4, atol=1e-6)
    assert never[2].num_epochs == 4


def test_an_estimate_that_is_nan_does_not_poison_the_metrics_of_others():
    mixed = stopping_at([0.01, np.inf, np.inf])
    _, params, opt_state, batch, orders = collected()
    hparams = jax.tree.map(lambda x: jnp.full(3, x, jnp.float32), FAST)
    hparams = hparams._replace(
        target_kl=jnp.array([0.01, 0.01, np.inf]), learning_rate=jnp.array([FAST.learning_rate, 1e30, 0.02])
    )
    broken = compiled(STOPPING, vmapped=True)(hparams, params, opt_state, batch, orders)
    assert_equal(lane(broken, 0), lane(mixed, 0))
    assert_equal(lane(broken, 2), lane(mixed, 2))


def test_a_perfect_batch_teaches_nothing():
    """A critic that is right already, and actions all as good as expected: nothing to learn."""
    _, before, _, batch, _ = collected()
    hparams = ppo.HParams(adam_eps=1.0)  # so large that rounding in the gradient stays rounding in the parameters
    params, _, improvement = improve(CONFIG, hparams, advantages=jnp.zeros(32), value_targets=batch.value)
    assert_close(params, before, rtol=0, atol=1e-6)
    np.testing.assert_allclose(improvement.value_loss, 0.0, atol=1e-9)
