"""Runs of RLHF: what holds at the first update, what must not matter, and that every number does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from purejaxppo.tokens import rlhf, tasks
from purejaxppo.tokens.config import TokenConfig, TokenHParams, as_float32
from purejaxppo.tokens.improve import diagnose, loss, values
from purejaxppo.tokens.reward import from_python
from purejaxppo.tokens.types import Task
from tests.helpers import assert_close, assert_equal, differs
from tests.tokens.helpers import (
    EOS,
    RESPONSE_LEN,
    SMALL,
    TASK,
    TINY,
    batched_train,
    compiled_train,
    floats,
    shared,
    tiny,
    weighted_count,
)

# Everything on: the numbers that are read at all.
FULL = tiny(kl_early_stopping=True, missing_eos="replace")
BASE = TokenHParams(learning_rate=1e-2, kl_target=0.5, target_kl=0.05, missing_eos_score=-1.0, length_penalty=0.3)


CHANGES = {
    "learning_rate": 3e-3,
    "final_lr_fraction": 1.0,
    "adam_eps": 1e-2,
    "max_grad_norm": 0.01,
    "kl_coef": 1.0,
    "kl_target": 1e-4,
    "kl_coef_factor": 2.0,
    "kl_gain": 0.1,
    "gamma": 0.5,
    "gae_lambda": 0.0,
    "clip_eps_low": 0.001,
    "clip_eps_high": 0.001,
    "dual_clip": 1.0001,
    "target_kl": 1e-6,
    "vf_coef": 0.0,
    "value_clip_eps": 0.001,
    "ent_coef": 0.5,
    "missing_eos_score": 3.0,
    "length_penalty": 0.0,
    "length_start": 0.0,
}
SETTINGS = {
    "base": BASE,
    "never_stops": BASE._replace(target_kl=np.inf),
    "stands_still": BASE._replace(learning_rate=0.0),
}
SETTINGS |= {name: BASE._replace(**{name: value}) for name, value in CHANGES.items()}
SETTINGS["kl_target"] = SETTINGS["kl_target"]._replace(kl_coef_factor=2.0)  # which nothing reads otherwise


def stack(settings):
    """Settings of many runs as leaves with a run axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(floats, settings))


@functools.cache
def all_runs():
    """Final states and metrics of all `SETTINGS` with one key, as one program: name -> (state, metrics)."""
    keys = jnp.broadcast_to(jax.random.key(0), (len(SETTINGS),))
    together = batched_train(FULL)(stack(SETTINGS.values()), keys, shared())
    return {name: jax.tree.map(lambda leaf, run=run: leaf[run], together) for run, name in enumerate(SETTINGS)}


@functools.cache
def first_batch():
    """The state before the first update, and the batch that it draws."""
    hparams = as_float32(TokenHParams())
    state = rlhf.init(TINY, hparams, jax.random.key(0), shared())

    @jax.jit
    def collect(state):
        quality, ref_log_prob = rlhf.draw(TASK, shared(), state.params["policy"], 12, 1, jax.random.key(1))
        return quality, ref_log_prob

    return state, *collect(state)


@jax.jit
def learn(params, quality, ref_log_prob):
    """Loss and gradient of a batch; and how far its policy is from the one that drew it."""
    hparams = as_float32(TokenHParams())
    batch = rlhf.estimate(TINY, hparams, TASK, params, quality, ref_log_prob, hparams.kl_coef)
    value, gradient = jax.value_and_grad(loss, has_aux=True)(params, TINY, hparams, TASK, batch, hparams.kl_coef)
    return value, gradient, diagnose(hparams, TASK, params, batch), batch.advantages


# The beginning


def test_at_the_beginning_the_policy_is_the_reference_and_every_ratio_is_1():
    state, quality, ref_log_prob = first_batch()
    np.testing.assert_allclose(quality.ref_kl, 0.0, atol=1e-6)
    np.testing.assert_allclose(quality.responses.log_prob, ref_log_prob, atol=1e-5)
    _, _, (approx_kl, clip_fraction), _ = learn(state.params, quality, ref_log_prob)
    assert approx_kl < 1e-9
    assert clip_fraction == 0


def test_the_first_metrics_are_those_of_the_reference():
    _, metrics = all_runs()["base"]
    assert metrics.ref_kl[0] < 1e-6
    assert abs(metrics.ref_kl_k1[0]) < 1e-5
    assert metrics.ref_kl[2] > 1e-4
    assert metrics.all_finite.all()
    assert metrics.score[0] == metrics.gold[0]


def test_the_reference_is_not_in_the_optimiser():
    state, *_ = first_batch()
    count = sum(leaf.size for leaf in jax.tree.leaves(SMALL.init(jax.random.key(0))))
    of_policy_and_critic = 2 * count + 8 + 1
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == of_policy_and_critic
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == 2 * of_policy_and_critic + 1


def test_a_critic_can_learn_where_the_hidden_layer_of_the_reference_is_zero():
    task, arrays = tasks.resolve(TokenConfig(task="token-count"), None)
    state = rlhf.init(TokenConfig(task="token-count"), TokenHParams(), jax.random.key(0))

    @jax.jit
    def gradient(params):
        quality, _ = rlhf.draw(task, arrays, params["policy"], 4, 1, jax.random.key(1))

        def total(critic):
            return values(TokenConfig(), task, params | {"critic": critic}, quality.responses, None).sum()

        return jax.grad(total)(params["critic"])

    assert np.abs(gradient(state.params)["trunk"]["norm"]["bias"]).max() > 1e-3


# What must not matter


@pytest.mark.parametrize("filler", [0, 1, EOS])
def test_what_stands_in_the_padding_changes_no_loss_and_no_gradient(filler):
    state, quality, ref_log_prob = first_batch()
    responses = quality.responses
    assert not responses.mask.all()
    changed = responses._replace(
        prompt=jnp.where(responses.prompt_mask, responses.prompt, filler),
        tokens=jnp.where(responses.mask, responses.tokens, filler),
    )
    expected = learn(state.params, quality, ref_log_prob)
    assert_equal(learn(state.params, quality._replace(responses=changed), ref_log_prob), expected)


def test_the_order_of_the_responses_changes_nothing():
    state, quality, ref_log_prob = first_batch()
    order = np.random.default_rng(0).permutation(12)
    shuffled = jax.tree.map(lambda leaf: leaf[order], (quality, ref_log_prob))
    value, gradient, far, advantages = learn(state.params, quality, ref_log_prob)
    assert_close(learn(state.params, *shuffled), (value, gradient, far, advantages[order]))


def test_two_updates_draw_different_responses():
    state, metrics = all_runs()["stands_still"]
    assert not differs(state.params["policy"], shared().reference)
    assert len(set(np.asarray(metrics.entropy).tolist())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "kl_coef"])
def test_a_run_among_others_is_the_run_alone(name):
    state, metrics = compiled_train(FULL)(floats(SETTINGS[name]), jax.random.key(0), shared())
    np.testing.assert_array_equal(metrics.length, all_runs()[name][1].length)  # the same tokens
    assert_close(metrics, all_runs()[name][1], rtol=1e-3, atol=1e-4)
    assert_close(state.params, all_runs()[name][0].params, rtol=1e-2, atol=1e-4)


# What must matter


def test_every_number_is_among_the_changes():
    assert {*CHANGES} == {*TokenHParams._fields} - {"label_smoothing"}


@pytest.mark.parametrize("name", CHANGES)
def test_each_number_changes_the_output(name):
    base = "kl_coef_factor" if name == "kl_target" else "base"
    assert differs(all_runs()[name][1], all_runs()[base][1])


def test_the_early_stop_freezes_a_run_while_the_others_go_on():
    epochs = {name: all_runs()[name][1].num_epochs for name in ("target_kl", "never_stops")}
    np.testing.assert_array_equal(epochs["target_kl"], [1, 1, 1])
    np.testing.assert_array_equal(epochs["never_stops"], [2, 2, 2])


def test_the_coefficient_moves_once_an_update_by_the_kl_of_the_policy_that_drew_the_batch():
    coefs = {name: np.asarray(all_runs()[name][1].kl_coef) for name in ("base", "kl_coef_factor", "kl_gain")}
    kl = np.asarray(all_runs()["kl_gain"][1].ref_kl)
    np.testing.assert_array_equal(coefs["base"], np.float32(0.1))
    np.testing.assert_allclose(coefs["kl_coef_factor"][:2], [0.1, 0.05])  # the first KL is 0
    second = 0.1 * 0.98
    third = second * (1 + 0.1 * np.clip(kl[1] / 0.5 - 1, -0.2, 0.2))
    np.testing.assert_allclose(coefs["kl_gain"], [0.1, second, third], rtol=1e-5)


# Rewards of one's own


def count(prompts, tokens, lengths):
    """How often token 0 was written, in Python."""
    assert all(isinstance(array, np.ndarray) for array in (prompts, tokens, lengths))
    return [(row[:length] == 0).sum() for row, length in zip(tokens, lengths, strict=True)]


def test_a_reward_in_python_is_called_once_for_all_runs():
    sizes = []

    def noted(prompts, tokens, lengths):
        sizes.append((prompts.shape, tokens.shape, lengths.shape))
        return count(prompts, tokens, lengths)

    responses = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), first_batch()[1].responses)
    scores = jax.jit(jax.vmap(functools.partial(from_python(noted), ())))(responses)
    np.testing.assert_array_equal(scores, jax.vmap(functools.partial(weighted_count, 1.0))(responses))
    assert sizes == [((24, 3), (24, 4), (24,))]


@pytest.mark.slow
def test_a_reward_in_python_gives_the_run_of_the_same_reward_in_jax():
    config = tiny(task=Task(SMALL, RESPONSE_LEN, from_python(count)))
    keys, hparams = jax.random.split(jax.random.key(0), 2), stack([TokenHParams()] * 2)
    _, metrics = batched_train(config)(hparams, keys, shared())
    assert_close(metrics, batched_train(TINY)(hparams, keys, shared())[1])


def test_a_python_reward_of_another_size_fails_with_a_reason():
    score = from_python(lambda prompts, tokens, lengths: [0.0])
    responses = first_batch()[1].responses
    with pytest.raises(Exception, match="must be one number for each of 12"):
        jax.block_until_ready(score((), responses))


# GRPO


@pytest.mark.slow
def test_grpo_has_no_critic_and_learns():
    config = tiny(algorithm="grpo", group_size=4)
    state, metrics = compiled_train(config)(floats(TokenHParams(learning_rate=1e-2)), jax.random.key(0), shared())
    assert set(state.params) == {"policy"}
    assert metrics.all_finite.all()
    assert np.isnan(metrics.explained_variance).all()
    assert (np.asarray(metrics.value_loss) == 0).all()


@pytest.mark.slow
def test_grpo_with_rewards_that_are_all_equal_learns_nothing():
    config = tiny(algorithm="grpo", group_size=4)
    hparams = floats(TokenHParams(learning_rate=1e-2, kl_coef=0.0))
    state, metrics = compiled_train(config)(hparams, jax.random.key(0), shared(score=np.float32(0.0)))
    assert metrics.all_finite.all()
    assert not differs(state.params["policy"], shared().reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"critic": "shared"},
        {"critic_from": "reward_model"},
        {"normalize_advantages": False},
        {"missing_eos": "replace"},
        {"missing_eos": "subtract"},
        {"num_epochs": 3},
        {"num_minibatches": 3},
        {"batch_size": 24},
        {"algorithm": "grpo", "group_size": 3},
        {"algorithm": "grpo", "group_size": 6},
        {"algorithm": "grpo", "group_baseline": "leave_one_out"},
        {"algorithm": "grpo", "group_std": False},
        {"algorithm": "grpo", "kl_in": "loss"},
    ],
    ids=str,
)
def test_each_static_setting_changes_the_output(changes):
    grpo = {"algorithm": "grpo", "group_size": 3}
    base = grpo if "algorithm" in changes and changes != grpo else {}
    config = tiny(**(base | changes))
    arrays = shared(critic=jax.tree.map(lambda leaf: leaf + 0.1, shared().reference))
    hparams = TokenHParams(missing_eos_score=1.0 if "missing_eos" in changes else 0.0)
    _, metrics = compiled_train(config)(floats(hparams), jax.random.key(0), arrays)
    _, expected = compiled_train(tiny(**base))(floats(hparams), jax.random.key(0), arrays)
    assert metrics.all_finite.all()
    assert differs(metrics, expected)


def test_the_settings_of_a_run_are_checked_where_they_are_known():
    for broken in (TokenHParams(gamma=2.0), TokenHParams(kl_gain=0.1, kl_coef=0.0)):
        with pytest.raises(ValueError, match=r"hparams\.(gamma|kl_coef)"):
            rlhf.train(TINY, broken, jax.random.key(0), shared())


def test_the_score_is_of_the_whole_response():
    _, quality, _ = first_batch()
    expected = [
        (row[mask] == 0).sum()
        for row, mask in zip(np.asarray(quality.responses.tokens), np.asarray(quality.responses.mask), strict=True)
    ]
    np.testing.assert_array_equal(quality.score, expected)
    np.testing.assert_array_equal(weighted_count(2.0, quality.responses), 2 * np.array(expected))
