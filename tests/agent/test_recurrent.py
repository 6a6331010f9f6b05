"""A network with a memory: forgotten at the end of an episode, the same at learning as at sampling, and of use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.agent import envs, networks, rollout
from purejaxppo.agent import ppo as agent_ppo
from purejaxppo.train import estimate
from tests.helpers import assert_close, floats, tiny

# Episodes of five steps across rollouts of eight: some end within a rollout, and memory goes on from one to the next.
CONFIG = tiny(
    env="Counter-test",
    env_params={"max_steps_in_episode": 5},
    network="gru",
    num_envs=4,
    total_timesteps=5 * 32,
    hidden_sizes=(8, 6),
    normalize_observations=True,
)
HPARAMS = floats(ppo.HParams(learning_rate=0.02))


@functools.cache
def collected():
    """(config, env, network, states before each of three rollouts and after the last, transitions, batches)."""
    config = CONFIG
    env = envs.make(config.env, config.env_params)
    network = networks.make(config, env)

    @jax.jit
    def collect(state, key):
        after, transition = rollout.collect(config, env, network, state, key)
        return after, transition, estimate(config, HPARAMS, transition, state.memory)

    states = [jax.jit(functools.partial(ppo.init, config))(HPARAMS, jax.random.key(0))]
    # Heads of size 1, so that distributions tell memories apart.
    head = states[0].params["params"]["actor_head"]
    params = {"params": states[0].params["params"] | {"actor_head": head | {"kernel": head["kernel"] * 100}}}
    states[0] = states[0]._replace(params=params)
    transitions, batches = [], []
    for key in jax.random.split(jax.random.key(1), 3):
        state, transition, batch = collect(states[-1], key)
        states.append(state)
        transitions.append(transition)
        batches.append(batch)
    return config, env, network, states, transitions, batches


def replayed(network, params, part, transitions):
    """The outputs of `policy` or `value` step by step, from memory 0 at the start of each episode; and the memories."""
    apply = jax.jit(lambda obs, memory: network.apply(params, obs, memory, method=part))
    memory, outputs, memories = jnp.zeros((4, 6)), [], []
    for transition in transitions:
        done = np.asarray(transition.terminated | transition.truncated)
        for t in range(8):
            output, memory = apply(transition.obs[t], memory)
            memories.append(memory)
            outputs.append(output)
            memory = jnp.where(done[t][:, None], 0.0, memory)
    return np.stack(outputs), memories, memory


def test_acting_carries_the_memory_across_rollouts_and_drops_it_between_episodes():
    _, _, network, states, transitions, _ = collected()
    # The statistics differ from rollout to rollout, but what is stored is what was seen.
    expected, _, memory = replayed(network, states[0].params, "policy", transitions)
    actual = np.concatenate([transition.dist_params for transition in transitions])
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(states[-1].memory.actor, memory, atol=1e-5)
    assert np.ptp(expected) > 0.1
    assert np.abs(memory).max() > 0.01  # the last episode is under way


def test_values_are_those_of_the_critics_own_memory():
    _, _, network, states, transitions, _ = collected()
    expected, _, memory = replayed(network, states[0].params, "value", transitions)
    np.testing.assert_allclose(np.concatenate([x.value for x in transitions]), expected, atol=1e-5)
    np.testing.assert_allclose(states[-1].memory.critic, memory, atol=1e-5)


def test_the_value_of_the_true_successor_remembers_the_episode():
    """Within an episode it is the value of the next step; at its end, that of the final observation, not forgotten."""
    _, _, network, states, transitions, _ = collected()
    values = np.concatenate([x.value for x in transitions])
    next_values = np.concatenate([x.next_value for x in transitions])
    done = np.concatenate([x.terminated | x.truncated for x in transitions])
    inside = ~done[:7]  # within the first rollout, whose statistics both steps share
    np.testing.assert_allclose(next_values[:7][inside], values[1:8][inside], atol=1e-5)
    np.testing.assert_array_equal(np.flatnonzero(done[:, 0]), [4, 9, 14, 19])
    _, memories, _ = replayed(network, states[0].params, "value", transitions)
    counted = transitions[0].obs[4] + (transitions[0].obs[1] - transitions[0].obs[0])  # one step later
    expected, _ = network.apply(states[0].params, counted, memories[4], method="value")
    np.testing.assert_allclose(next_values[4], expected, atol=1e-4)
    assert np.abs(next_values[4] - values[5]).max() > 1e-3


def test_log_probabilities_at_learning_are_those_at_sampling_across_an_episodes_end():
    _, _, network, states, _, batches = collected()
    for state, batch in zip(states, batches, strict=False):
        assert batch.obs.shape == (4, 8, 2)
        assert batch.fresh.any()
        dist_params = networks.batch_policy(network, state.params, batch)
        log_prob = network.actions.distribution(dist_params).log_prob(batch.action)
        np.testing.assert_allclose(np.exp(log_prob - batch.log_prob), 1.0, atol=1e-5)
        np.testing.assert_allclose(networks.batch_value(network, state.params, batch), batch.value, atol=1e-5)


@pytest.mark.parametrize("broken", ["memory", "fresh", "late"])
def test_learning_notices_a_wrong_memory(broken):
    """The test above would fail without the stored memory, without the resets, or with them one step late."""
    _, _, network, states, _, batches = collected()
    batch = batches[1]
    wrong = {
        "memory": batch._replace(memory=jax.tree.map(jnp.zeros_like, batch.memory)),
        "fresh": batch._replace(fresh=jnp.zeros_like(batch.fresh)),
        "late": batch._replace(fresh=jnp.roll(batch.fresh, 1, axis=1)),
    }[broken]
    log_prob = lambda batch: network.actions.distribution(  # noqa: E731
        networks.batch_policy(network, states[1].params, batch)
    ).log_prob(batch.action)
    assert np.abs(log_prob(wrong) - log_prob(batch)).max() > 1e-3


def test_minibatches_are_of_whole_environments():
    """Shuffling rows keeps the stretch of an environment together with its memory."""
    config, _, network, states, _, batches = collected()
    rows = jnp.array([2, 0])
    minibatch = jax.tree.map(lambda x: x[rows], batches[1])
    whole = networks.batch_policy(network, states[1].params, batches[1])
    np.testing.assert_allclose(networks.batch_policy(network, states[1].params, minibatch), whole[rows], atol=1e-6)
    total, _ = agent_ppo.loss(states[1].params, config, HPARAMS, network, minibatch)
    assert np.isfinite(total)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"algorithm": "trpo"}, {"kl_penalty": True, "kl_early_stopping": True}])
def test_the_whole_family_learns_with_a_memory(changes):
    config = dataclasses.replace(CONFIG, total_timesteps=2 * 32, **changes)
    _, metrics = jax.jit(functools.partial(ppo.train, config))(HPARAMS, jax.random.key(0))
    assert metrics.all_finite.all()
    assert (metrics.exact_kl > 0).all()
    assert (metrics.exact_kl < (0.0101 if "algorithm" in changes else 1.0)).all()


@pytest.mark.slow
def test_a_run_of_a_batch_equals_the_same_run_alone():
    config = dataclasses.replace(CONFIG, total_timesteps=32)
    keys = jax.random.split(jax.random.key(3), 2)
    together = jax.jit(jax.vmap(functools.partial(ppo.train, config), (None, 0)))(HPARAMS, keys)
    alone = jax.jit(functools.partial(ppo.train, config))(HPARAMS, keys[1])
    assert_close(jax.tree.map(lambda x: x[1], together), alone, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_memory_solves_what_no_reaction_can():
    """The bit shown at the first step is asked for three steps later: half right without a memory, all right with."""
    sizes = {"num_envs": 16, "num_steps": 32, "num_epochs": 4, "num_minibatches": 4, "hidden_sizes": (32,)}
    returns = {}
    for network in ("mlp", "gru"):
        config = ppo.Config(
            env="MemoryChain-bsuite",
            env_params={"memory_length": 2},
            network=network,
            total_timesteps=60 * 512,
            **sizes,
        )
        hparams = ppo.HParams(learning_rate=5e-3, ent_coef=0.01)
        keys = jax.random.split(jax.random.key(0), 4)
        states, metrics = jax.jit(jax.vmap(functools.partial(ppo.train, config), (None, 0)))(hparams, keys)
        returns[network] = np.asarray(metrics.episode_return)[:, -10:].mean(-1)
    assert (np.abs(returns["mlp"]) < 0.3).all(), returns
    assert (returns["gru"] > 0.9).all(), returns
    evaluate = jax.jit(jax.vmap(lambda state: ppo.evaluate(config, state, jax.random.key(9), 64)))
    assert (np.asarray(evaluate(states).episode_return).mean(-1) > 0.9).all()
