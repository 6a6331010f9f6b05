"""The KL penalty: off at coefficient 0 wherever the logits are, a hold on the policy above it, and adapted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.agent import networks
from purejaxppo.agent import ppo as agent_ppo
from tests.agent.test_ppo import collected, improve
from tests.helpers import assert_close, assert_equal, compiled_train, differs, floats, leaves, tiny

PENALISED = tiny(num_envs=4, total_timesteps=32, kl_penalty=True)
PLAIN = tiny(num_envs=4, total_timesteps=32)
LONG = tiny(total_timesteps=20 * 16, kl_penalty=True)
KEY = jax.random.key(3)


@functools.cache
def compiled_loss(config):
    network = collected()[0]

    def loss(params, hparams, batch):
        return agent_ppo.loss(params, config, hparams, network, batch, hparams.kl_coef)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def underflowing(flipped):
    """(params, batch) whose rollout policy is certain: logits 1e3 apart; the policy of the parameters too, or wrong."""
    network, params, _, batch, _ = collected()
    params = jax.tree.map(lambda x: x, params)
    bias = jnp.array([1000.0, 0.0])
    params["params"]["actor_head"]["bias"] = bias[::-1] if flipped else bias
    logits = networks.policy(network, collected()[1], batch.obs) + bias
    action = jnp.argmax(logits, -1)
    return params, batch._replace(
        dist_params=logits, action=action, log_prob=network.actions.distribution(logits).log_prob(action)
    )


# Coefficient 0 is the program without the penalty


@pytest.mark.slow
def test_coefficient_0_is_the_program_without_the_penalty():
    hparams = floats(ppo.HParams(learning_rate=0.02))
    with_penalty, without = (compiled_train(tiny(kl_penalty=on))(hparams, KEY) for on in (True, False))
    assert_close(with_penalty, without, rtol=1e-3, atol=1e-4)
    assert (with_penalty[1].kl_coef == 0).all()


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 1.0])
def test_certain_policies_give_a_finite_loss_and_gradient(flipped, kl_coef):
    params, batch = underflowing(flipped)
    hparams = floats(ppo.HParams(clip_eps=np.inf, kl_coef=kl_coef, ent_coef=0.01))
    (total, _), gradient = compiled_loss(PENALISED)(params, hparams, batch)
    (plain, _), plain_gradient = compiled_loss(PLAIN)(params, hparams, batch)
    assert np.isfinite(total)
    assert all(np.isfinite(leaf).all() for leaf in leaves(gradient))
    np.testing.assert_allclose(total - plain, 1000 * kl_coef * flipped, rtol=1e-2, atol=1e-4)
    if kl_coef == 0:
        assert_close(gradient, plain_gradient, rtol=1e-5, atol=1e-7)
    elif flipped:
        pull = gradient["params"]["actor_head"]["bias"] - plain_gradient["params"]["actor_head"]["bias"]
        np.testing.assert_allclose(pull, [-1.0, 1.0], rtol=1e-5)  # back towards the rollout policy


def test_coefficient_0_trains_a_certain_policy_as_without_the_penalty():
    params, batch = underflowing(flipped=False)
    network, _, opt_state, _, orders = collected()

    def train(config, hparams, params):
        for _ in range(3):
            params, state, improvement = agent_ppo.improve(
                config, hparams, network, params, opt_state, batch, orders[:2], 0.01, hparams.kl_coef
            )
        return params, state, improvement

    hparams = floats(ppo.HParams(clip_eps=np.inf))
    trained = [jax.jit(functools.partial(train, config))(hparams, params) for config in (PENALISED, PLAIN)]
    assert_close(*(result[0] for result in trained), rtol=1e-4, atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in leaves(trained[0][:2]))
    assert np.isfinite(trained[0][2].exact_kl)


# Above it


def test_the_penalty_in_the_loss_is_the_coefficient_times_the_mean_kl_from_old_to_new():
    network, params, _, batch, _ = collected()
    moved = jax.tree.map(lambda x: x + 0.1, params)
    logits = [np.asarray(x, np.float64) for x in (batch.dist_params, networks.policy(network, moved, batch.obs))]
    logits[0] = logits[0] + np.array([1.0, 0.0])  # as far from symmetric as can be told
    old, new = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logits)
    batch = batch._replace(dist_params=jnp.asarray(logits[0], jnp.float32))
    losses = [compiled_loss(PENALISED)(moved, floats(ppo.HParams(kl_coef=coef)), batch)[0] for coef in (0.0, 1.0, 10.0)]
    kl = (np.exp(old) * (old - new)).sum(-1).mean()
    assert abs(kl - (np.exp(new) * (new - old)).sum(-1).mean()) > 1e-3 * kl
    np.testing.assert_allclose([loss[0] - losses[0][0] for loss in losses], [0, kl, 10 * kl], rtol=3e-4, atol=1e-6)
    np.testing.assert_allclose(losses[2][1][0] - losses[0][1][0], 10 * kl, rtol=3e-4)  # it is in the policy loss
    np.testing.assert_allclose(losses[2][1][1], losses[0][1][1])  # and not in the value loss


def test_the_larger_the_coefficient_the_smaller_the_kl():
    hparams = ppo.HParams(learning_rate=0.02, clip_eps=np.inf, vf_coef=0.0)
    after = lambda coef: improve(PENALISED, hparams._replace(kl_coef=coef), num_epochs=4)[2]  # noqa: E731
    kl = [float(after(coef).exact_kl) for coef in (0, 3, 30)]
    assert (np.diff(kl) < 0).all(), kl
    assert kl[-1] < kl[0] / 20, kl


# From update to update


def adapted(kl_coef, kl, hparams):
    """The rule in Python."""
    if kl < hparams.kl_target / 1.5:
        return max(kl_coef / hparams.kl_coef_factor, 1e-6)
    if kl > 1.5 * hparams.kl_target:
        return min(kl_coef * hparams.kl_coef_factor, 1e6)
    return kl_coef


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0])
def test_the_coefficient_of_every_update_follows_the_kl_of_the_last(factor):
    hparams = ppo.HParams(learning_rate=0.03, clip_eps=np.inf, kl_coef=0.5, kl_target=0.003, kl_coef_factor=factor)
    state, metrics = compiled_train(LONG)(floats(hparams), KEY)
    expected = [hparams.kl_coef]
    for kl in metrics.exact_kl:
        expected.append(adapted(expected[-1], kl, hparams))
    np.testing.assert_allclose(metrics.kl_coef, expected[:-1], rtol=1e-5)
    np.testing.assert_allclose(state.kl_coef, expected[-1], rtol=1e-5)
    if factor > 1:
        assert {-1.0, 1.0} <= set(np.sign(np.diff(expected))), expected  # it grew and it shrank


def test_the_coefficient_that_is_used_is_the_one_of_the_state_and_the_one_that_is_reported():
    @jax.jit
    def update(hparams, kl_coef):
        state = ppo.init(LONG, hparams, KEY)
        for _ in range(2):  # the first update gives Adam a direction to be turned from
            state, metrics = ppo.update(LONG, hparams, state._replace(kl_coef=kl_coef))
        return state, metrics

    growing = floats(ppo.HParams(learning_rate=0.01, kl_coef=0.1, kl_target=1e-9, kl_coef_factor=2.0))
    fixed = growing._replace(kl_coef=np.float32(7.0), kl_coef_factor=np.float32(1.0))
    three, six = jnp.float32(3.0), jnp.float32(6.0)
    state, metrics = update(growing, three)
    assert_equal(state.params, update(fixed, three)[0].params)
    assert differs(state.params, update(fixed, six)[0].params)
    assert (metrics.kl_coef, state.kl_coef) == (3.0, 6.0)


def test_without_the_penalty_the_coefficient_is_0():
    state, metrics = compiled_train(tiny())(floats(ppo.HParams(learning_rate=0.02)), KEY)
    assert (metrics.kl_coef == 0).all()
    assert state.kl_coef == 0


@pytest.mark.slow
def test_the_kl_settles_at_its_target_from_any_start():
    """From the right coefficient, and from one a thousand times too small and too large."""
    config = ppo.Config(
        kl_penalty=True, total_timesteps=100_000, num_steps=256, num_epochs=10, num_minibatches=8, hidden_sizes=(32, 32)
    )
    hparams = ppo.HParams(learning_rate=1e-3, final_lr_fraction=1.0, clip_eps=np.inf, kl_target=0.01)
    result = ppo.sweep(config, ppo.grid(hparams, kl_coef=[1e-3, 1.0, 1e3]), num_seeds=4)
    kl, kl_coef = result.metrics.exact_kl, result.metrics.kl_coef
    late = kl[..., kl.shape[-1] // 2 :]
    print("median KL of the late updates, by start and seed:", np.median(late, axis=-1).round(4).tolist())
    print("coefficients at the end:", kl_coef[..., -1].tolist())
    assert result.metrics.all_finite.all()
    assert np.isfinite(kl_coef).all()
    assert (kl_coef > 0).all()
    assert (np.median(late, axis=-1) >= 0.01 / 1.5).all()
    assert (np.median(late, axis=-1) <= 0.01 * 1.5).all()
    assert kl[2, :, :3].max() < 0.005  # too large a coefficient held it back at first
