"""At the rollout policy every surrogate is the policy gradient: by finite differences, and as one A2C step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import purejaxppo as ppo
from purejaxppo import ops
from purejaxppo.agent import networks
from purejaxppo.agent import ppo as agent_ppo
from tests.agent.test_ppo import collected, improve
from tests.helpers import assert_close, assert_equal, differs, tiny

ONE_STEP = tiny(num_envs=4, total_timesteps=32, num_minibatches=1)
RAW = tiny(num_envs=4, total_timesteps=32, num_minibatches=1, normalize_advantages=False)
POLICY_ONLY = ppo.HParams(vf_coef=0.0)
SURROGATES = {
    "unclipped": ops.surrogate,
    "clipped": lambda log_ratio, advantages: ops.clipped_surrogate(log_ratio, advantages, 0.2),
    "clip switched off": lambda log_ratio, advantages: ops.clipped_surrogate(log_ratio, advantages, np.inf),
}


# On the samples of a rollout


def numpy_surrogate(flat, unravel, batch):
    """mean(ratio * A) of a network with one hidden layer, in float64."""
    modules = jax.tree.map(lambda x: np.asarray(x, np.float64), unravel(jnp.asarray(flat, jnp.float32)))["params"]
    hidden, head = modules["actor_trunk"]["Dense_0"], modules["actor_head"]
    logits = np.tanh(np.asarray(batch.obs, np.float64) @ hidden["kernel"] + hidden["bias"]) @ head["kernel"]
    logits = logits + head["bias"]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = log_probs[np.arange(len(logits)), np.asarray(batch.action)]
    return np.mean(np.exp(chosen - np.asarray(batch.log_prob)) * np.asarray(batch.advantages))


def test_the_gradient_of_the_loss_is_the_policy_gradient_and_the_finite_difference():
    network, params, _, batch, _ = collected()
    flat, unravel = ravel_pytree(params)

    @jax.jit
    def gradients(params):
        def score(params):  # the policy gradient: the mean of A grad log pi
            policy = network.actions.distribution(networks.policy(network, params, batch.obs))
            return jnp.mean(batch.advantages * policy.log_prob(batch.action))

        loss = lambda params: -agent_ppo.loss(params, RAW, POLICY_ONLY, network, batch)[0]  # noqa: E731
        return tuple(ravel_pytree(jax.grad(function)(params))[0] for function in (loss, score))

    of_the_loss, of_the_scores = gradients(params)
    np.testing.assert_allclose(of_the_loss, of_the_scores, rtol=1e-4, atol=1e-6)
    assert np.linalg.norm(of_the_loss) > 0.01
    for seed in range(4):
        direction = np.random.default_rng(seed).normal(size=len(flat))
        ends = [numpy_surrogate(flat + step * direction, unravel, batch) for step in (1e-2, -1e-2)]
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-2, of_the_loss @ direction, rtol=5e-3, atol=1e-4)


# On a decision process small enough to compute the return exactly

DISCOUNT = 0.9
NUM_STATES, NUM_ACTIONS = 3, 2


class MDP:
    """Random transitions [S, A, S], rewards [S, A] and first states [S]; everything in closed form, float64."""

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        self.transitions = generator.dirichlet(np.ones(NUM_STATES), (NUM_STATES, NUM_ACTIONS))
        self.rewards = generator.normal(size=(NUM_STATES, NUM_ACTIONS))
        self.first = generator.dirichlet(np.ones(NUM_STATES))

    def solve(self, logits):
        """(return J, discounted visits [S], advantages [S, A]) of the softmax policy."""
        policy = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        steps = np.eye(NUM_STATES) - DISCOUNT * np.einsum("sa,sat->st", policy, self.transitions)
        values = np.linalg.solve(steps, (policy * self.rewards).sum(-1))
        visits = np.linalg.solve(steps.T, self.first)
        advantages = self.rewards + DISCOUNT * self.transitions @ values - values[:, None]
        return self.first @ values, visits, advantages


def exact_surrogate(surrogate, mdp, old_logits):
    """theta -> the surrogate's expectation over the visits and the actions of the old policy."""
    _, visits, advantages = mdp.solve(old_logits)
    old_log_probs = jax.nn.log_softmax(jnp.asarray(old_logits, jnp.float32))
    weights = jnp.asarray(visits[:, None], jnp.float32) * jnp.exp(old_log_probs)

    def expectation(logits):
        log_ratio = jax.nn.log_softmax(logits) - old_log_probs
        return jnp.sum(weights * surrogate(log_ratio, jnp.asarray(advantages, jnp.float32)))

    return expectation


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_the_surrogate_is_that_of_the_exact_return(name, seed):
    mdp = MDP(seed)
    logits = np.random.default_rng(100 + seed).normal(size=(NUM_STATES, NUM_ACTIONS))
    gradient = jax.grad(exact_surrogate(SURROGATES[name], mdp, logits))(jnp.asarray(logits, jnp.float32))
    expected = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[index] = 1e-5
        expected[index] = (mdp.solve(logits + step)[0] - mdp.solve(logits - step)[0]) / 2e-5
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)
    assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("name", SURROGATES)
def test_the_value_of_the_surrogate_is_the_mean_advantage_which_is_zero(name):
    mdp, logits = MDP(0), np.random.default_rng(0).normal(size=(NUM_STATES, NUM_ACTIONS))
    value = exact_surrogate(SURROGATES[name], mdp, logits)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(value, 0.0, atol=1e-5)
    log_ratio, advantages = jnp.zeros(4), jnp.array([1.0, -2.0, 0.5, 4.5])
    np.testing.assert_allclose(jnp.mean(SURROGATES[name](log_ratio, advantages)), 1.0)


def test_the_surrogate_predicts_the_change_of_the_return_to_first_order():
    """Half the step, a quarter of the error."""
    mdp, logits = MDP(1), np.random.default_rng(1).normal(size=(NUM_STATES, NUM_ACTIONS))
    direction = np.random.default_rng(2).normal(size=logits.shape)
    surrogate = exact_surrogate(ops.surrogate, mdp, logits)
    errors = []
    for size in (0.4, 0.2):
        moved = logits + size * direction
        change = mdp.solve(moved)[0] - mdp.solve(logits)[0]
        errors.append(abs(change - float(surrogate(jnp.asarray(moved, jnp.float32)))))
    assert 3 < errors[0] / errors[1] < 5.5, errors


# Advantage actor-critic: one epoch of one minibatch


@pytest.mark.parametrize("config", [ONE_STEP, RAW])
def test_one_step_on_the_whole_batch_is_the_same_bitwise_whatever_the_clip(config):
    clipped, free = (improve(config, ppo.HParams(clip_eps=eps), num_epochs=1) for eps in (0.2, np.inf))
    assert_equal(clipped[:2], free[:2])
    assert differs(clipped[0], collected()[1])


@pytest.mark.parametrize("config", [ONE_STEP, RAW])
def test_one_step_on_the_whole_batch_is_a2c(config):
    """The gradient of A log pi, half the squared error and the entropy, clipped by its norm; Adam's first step."""
    network, params, _, batch, _ = collected()
    hparams = ppo.HParams(learning_rate=0.05, adam_eps=0.1, ent_coef=0.02, max_grad_norm=0.3)
    advantages = np.asarray(batch.advantages)
    if config.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    @jax.jit
    @jax.grad
    def gradient(params):
        log_probs = jax.nn.log_softmax(networks.policy(network, params, batch.obs))
        gain = jnp.mean(advantages * log_probs[jnp.arange(32), batch.action])
        error = jnp.mean((networks.value(network, params, batch.obs) - batch.value_targets) ** 2)
        entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, -1))
        return -gain + hparams.vf_coef * 0.5 * error - hparams.ent_coef * entropy

    flat, unravel = ravel_pytree(gradient(params))
    assert np.linalg.norm(flat) > hparams.max_grad_norm
    flat = flat * hparams.max_grad_norm / np.linalg.norm(flat)
    step = unravel(hparams.learning_rate * flat / (np.abs(flat) + hparams.adam_eps))  # both moments are of one gradient
    expected = jax.tree.map(lambda x, s: x - s, params, step)
    assert_close(improve(config, hparams, num_epochs=1)[0], expected, rtol=1e-4, atol=1e-6)
