"""A whole run: resumable, the same alone and in a batch, one program for all hyperparameters, every setting read."""

import collections
import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.types import Improvement
from tests.helpers import (
    assert_close,
    assert_equal,
    compiled_train,
    differs,
    floats,
    leaves,
    run_python,
    tiny,
)

train_module = importlib.import_module("purejaxppo.train")

KEY = jax.random.key(0)
SHORT = tiny(total_timesteps=3 * 16, num_epochs=1)
PIECES = tiny(total_timesteps=3 * 16)
COUNTER = tiny(env="Counter-test", total_timesteps=4 * 16, num_epochs=1)
HPARAMS = floats(ppo.HParams(learning_rate=0.02, ent_coef=0.01))


@functools.cache
def initial(config):
    return jax.jit(functools.partial(ppo.init, config))(HPARAMS, KEY)


# Resuming


@functools.cache
def compiled_run(num_updates):
    return jax.jit(lambda state: ppo.run(PIECES, HPARAMS, state, num_updates))


@pytest.mark.parametrize("split", [(1, 2), (2, 1), (1, 1, 1)])
def test_a_run_in_pieces_is_the_same_run_bitwise(split):
    start = initial(PIECES)
    whole_state, whole_metrics = compiled_run(3)(start)
    state, parts = start, []
    for num_updates in split:
        state, metrics = compiled_run(num_updates)(state)
        parts.append(metrics)
    assert_equal(state, whole_state)
    assert_equal(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts), whole_metrics)


def test_train_is_init_and_run():
    assert_close(compiled_train(PIECES)(HPARAMS, KEY), compiled_run(3)(initial(PIECES)))


def test_the_state_counts_its_updates():
    assert initial(PIECES).update_index == 0
    assert compiled_run(2)(initial(PIECES))[0].update_index == 2


def test_the_optimiser_goes_on_from_update_to_update():
    """Adam has counted three updates of two epochs of two minibatches, over a resumption too."""
    state, _ = compiled_run(2)(compiled_run(1)(initial(PIECES))[0])
    counts = [leaf for leaf in leaves(state.opt_state) if leaf.dtype == np.int32]
    assert counts == [3 * 2 * 2]


# Batches


@pytest.fixture(scope="module")
def batch():
    """Four runs of SHORT in one program: (keys, states and metrics)."""
    keys = jax.random.split(jax.random.key(7), 4)
    return keys, jax.jit(jax.vmap(functools.partial(ppo.train, SHORT), (None, 0)))(HPARAMS, keys)


@pytest.mark.parametrize("index", range(4))
def test_a_run_of_a_batch_equals_the_same_run_alone(batch, index):
    keys, results = batch
    alone = compiled_train(SHORT)(HPARAMS, keys[index])
    assert_close(jax.tree.map(lambda x: x[index], results), alone, rtol=1e-3, atol=1e-4)


def test_a_run_of_a_batch_draws_the_same_random_numbers_as_alone():
    """Random starts bitwise, and every action."""

    def first_rollout(key):
        state = ppo.init(COUNTER, HPARAMS, key)
        return train_module.rollout.collect(COUNTER, *train_module._parts(COUNTER), state, key)[1]

    keys = jax.random.split(jax.random.key(7), 4)
    together, alone = jax.jit(jax.vmap(first_rollout))(keys), jax.jit(first_rollout)
    for index, key in enumerate(keys):
        single = alone(key)
        np.testing.assert_array_equal(together.obs[index], single.obs)
        np.testing.assert_array_equal(together.action[index], single.action)
    assert differs(together.action[0], together.action[1])
    assert differs(together.obs[0], together.obs[1])


def test_the_same_key_is_the_same_run_and_another_key_another():
    train = compiled_train(SHORT)
    assert_equal(train(HPARAMS, KEY), train(HPARAMS, KEY))
    assert differs(train(HPARAMS, KEY)[0].params, train(HPARAMS, jax.random.key(1))[0].params)


def test_a_diverged_run_is_reported_and_changes_no_other():
    keys = jax.random.split(KEY, 3)
    train = jax.jit(jax.vmap(functools.partial(ppo.train, SHORT)))
    hparams = jax.tree.map(lambda x: jnp.full(3, x), HPARAMS._replace(max_grad_norm=np.float32(np.inf)))
    healthy = train(hparams, keys)
    broken = train(hparams._replace(learning_rate=hparams.learning_rate.at[1].set(1e30)), keys)
    assert healthy[1].all_finite.all()
    np.testing.assert_array_equal(broken[1].all_finite[:, -1], [True, False, True])
    for index in (0, 2):
        assert_equal(*(jax.tree.map(lambda x, i=index: x[i], result) for result in (broken, healthy)))


# One program for every hyperparameter, and every setting is read

READING = tiny(total_timesteps=3 * 16, kl_early_stopping=True, kl_penalty=True)
TRUST = tiny(total_timesteps=3 * 16, algorithm="trpo")
CONTINUOUS = tiny(total_timesteps=3 * 16, env="Echo-test", kl_early_stopping=True, kl_penalty=True)
READING_HPARAMS = floats(
    ppo.HParams(
        learning_rate=0.02,
        ent_coef=0.01,
        clip_eps=0.01,
        value_clip_eps=0.1,
        max_grad_norm=0.1,
        adam_eps=1e-2,
        target_kl=1e6,
        kl_coef=0.5,
        kl_target=1e-9,  # so that the coefficient always grows
        max_kl=2.0,  # so far that the line search has to shorten the step
    )
)
OTHER_HPARAMS = {
    "learning_rate": 0.01,
    "final_lr_fraction": 0.5,
    "adam_eps": 1e-3,
    "max_grad_norm": 0.01,
    "gamma": 0.9,
    "gae_lambda": 0.5,
    "clip_eps": 0.001,
    "value_clip_eps": 0.001,
    "vf_coef": 0.1,
    "ent_coef": 0.1,
    "final_clip_fraction": 0.1,
    "final_ent_fraction": 10.0,
    "log_std_init": -1.0,
    "target_kl": 1e-9,
    "kl_coef": 5.0,
    "kl_target": 1e3,
    "kl_coef_factor": 5.0,
    "max_kl": 1e-3,
    "cg_damping": 1.0,
    "backtrack_coef": 0.3,
}
TRACES = collections.Counter()


@functools.cache
def counted_train(config=READING):
    def train(hparams, key):
        TRACES[config] += 1
        return ppo.train(config, hparams, key)

    return jax.jit(train)


@pytest.mark.parametrize("field", ppo.HParams._fields)
def test_every_hyperparameter_changes_the_result_and_none_the_program(field):
    config = TRUST if field in ("max_kl", "cg_damping", "backtrack_coef") else READING
    config = CONTINUOUS if field == "log_std_init" else config
    other = READING_HPARAMS._replace(**{field: np.float32(OTHER_HPARAMS[field])})
    before, after = (counted_train(config)(hparams, KEY) for hparams in (READING_HPARAMS, other))
    assert differs(before[0].params, after[0].params)
    assert TRACES[config] == 1


def test_plain_numbers_do_not_recompile_either():
    traces = []

    def start(hparams, key):
        traces.append(1)
        return ppo.init(SHORT, hparams, key)

    start = jax.jit(start)
    for scale in (1.0, 0.5):
        start(ppo.HParams(*(value * scale for value in ppo.HParams())), KEY)
    assert len(traces) == 1


@pytest.mark.parametrize("field", ["learning_rate", "gamma", "ent_coef"])
def test_integers_are_accepted_as_hyperparameters(field):
    hparams = ppo.HParams()._replace(**{field: 1})
    shapes = jax.eval_shape(functools.partial(ppo.train, SHORT), hparams, KEY)
    assert shapes == jax.eval_shape(functools.partial(ppo.train, SHORT), HPARAMS, KEY)


OTHER_CONFIGS = {
    "env": "Acrobot-v1",
    "env_params": {"gravity": 5.0},
    "algorithm": "trpo",
    "total_timesteps": 6 * 16,
    "num_envs": 4,
    "num_steps": 4,
    "num_epochs": 3,
    "num_minibatches": 4,
    "hidden_sizes": (8, 8),
    "activation": "relu",
    "shared_trunk": True,
    "compute_dtype": "bfloat16",
    "normalize_advantages": False,
    "network": "cnn",
    "normalize_observations": True,
    "normalize_rewards": True,
    "squash": True,
    "rescale_actions": True,
    "bootstrap_truncated": False,
    "kl_early_stopping": True,
    "kl_penalty": True,
    "cg_iters": 2,
    "backtrack_iters": 1,
}
TRPO_FIELDS = ("cg_iters", "backtrack_iters")
OTHER_ENVS = {"squash": "Echo-test", "rescale_actions": "Echo-test", "network": "Catch-bsuite"}


@functools.cache
def program(config):
    """The whole run as text, not compiled."""
    return jax.jit(functools.partial(ppo.train, config)).lower(HPARAMS, KEY).as_text()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ppo.Config)])
def test_every_config_field_changes_the_program(field):
    base = tiny(algorithm="trpo" if field in TRPO_FIELDS else "ppo", env=OTHER_ENVS.get(field, "CartPole-v1"))
    assert program(base) != program(dataclasses.replace(base, **{field: OTHER_CONFIGS[field]}))


@pytest.mark.slow
@pytest.mark.parametrize("field", OTHER_CONFIGS)
def test_every_config_field_changes_the_result(field):
    # Time limits inside the rollouts, and a target that stops after one epoch.
    base = {"env_params": {"max_steps_in_episode": 5}, "env": OTHER_ENVS.get(field, "CartPole-v1")}
    if field in TRPO_FIELDS:
        base["algorithm"] = "trpo"
    else:
        base["kl_early_stopping"] = field not in ("kl_early_stopping", "algorithm")
    stopping = HPARAMS._replace(target_kl=np.float32(1e-9 if field in ("kl_early_stopping",) else 1e6))
    stopping = floats(stopping._replace(kl_coef=1.0, max_kl=8.0))  # far enough to step back more than once
    config = tiny(**base)
    other = dataclasses.replace(config, **{field: OTHER_CONFIGS[field]})
    before, after = (jax.jit(functools.partial(ppo.train, c))(stopping, KEY) for c in (config, other))
    if jax.tree.structure(before) == jax.tree.structure(after):
        assert differs(before[0].params, after[0].params)


# On an accelerator, and in bfloat16


@pytest.mark.parametrize(
    ("tried", "changes"),
    [
        ("few_passes", {"activation": "tanh"}),
        ("few_passes", {"algorithm": "trpo", "hidden_sizes": (8, 8)}),
        ("reverse", {"activation": "tanh"}),
        ("reverse", {"network": "cnn", "env": "Catch-bsuite", "shared_trunk": True}),
        ("reverse", {"network": "gru", "hidden_sizes": (8, 8)}),
    ],
)
def test_improving_in_another_form_is_improving(tried, changes):
    config = tiny(**changes)
    env, network = train_module._parts(config)
    state = initial(config)
    algorithm = train_module.trpo if config.algorithm == "trpo" else train_module.ppo

    @jax.jit
    def improvements(state, key):
        _, transition = train_module.rollout.collect(config, env, network, state, key)
        batch = train_module.estimate(config, HPARAMS, transition, state.memory)
        orders = train_module.permutations(key, config.num_epochs, config.num_rows)
        return [
            algorithm.improve(
                config, HPARAMS, network.clone(form=form), state.params, state.opt_state, batch, orders, 1e-3, 0.0
            )
            for form in ("plain", tried)
        ]

    plain, other = improvements(state, KEY)
    assert differs(plain[0], state.params)
    assert_close(other, plain, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"network": "cnn", "env": "Catch-bsuite", "shared_trunk": True}])
def test_in_bfloat16_everything_that_is_carried_or_shown_has_the_types_of_float32(changes):
    shapes, expected = (
        jax.eval_shape(functools.partial(ppo.train, tiny(compute_dtype=dtype, **changes)), HPARAMS, KEY)
        for dtype in ("bfloat16", "float32")
    )
    assert shapes == expected


def test_in_bfloat16_policy_and_value_are_those_of_float32_to_its_rounding():
    config = ppo.Config(env="CartPole-v1")
    _, network = train_module._parts(config)
    _, rounded = train_module._parts(dataclasses.replace(config, compute_dtype="bfloat16"))
    obs = jax.random.normal(KEY, (50, 4))
    params = train_module.networks.init(network, KEY, obs, 0.0)
    for function in (train_module.networks.policy, train_module.networks.value):
        exact, close = (function(n, params, obs) for n in (network, rounded))
        assert close.dtype == jnp.float32
        # Three layers of roundings of 2**-9 each, of sums of many terms.
        np.testing.assert_allclose(close, exact, atol=0.03 * np.abs(exact).max())
        assert differs(close, exact)


@pytest.mark.slow
def test_in_bfloat16_cartpole_is_learned():
    config = ppo.Config(total_timesteps=100_000, compute_dtype="bfloat16")
    result = ppo.sweep(config, ppo.HParams(learning_rate=2.5e-3), 4)
    assert np.nanmedian(np.asarray(result.metrics.episode_return)[..., -20:]) > 300


# Schedule, random numbers, keys


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_the_learning_rate_falls_linearly_from_its_start(fraction):
    hparams = READING_HPARAMS._replace(learning_rate=np.float32(0.02), final_lr_fraction=np.float32(fraction))
    _, metrics = counted_train()(hparams, KEY)
    expected = [0.02, 0.02 * (1 - (1 - fraction) / 3), 0.02 * (1 - (1 - fraction) * 2 / 3)]
    np.testing.assert_allclose(metrics.learning_rate, expected, rtol=1e-6)


def test_clip_range_and_entropy_weight_follow_their_schedules(monkeypatch):
    """In update i of n the fraction (1 - (1 - f) i / n) of each; the clip fraction is measured with that range too."""

    def improve(config, hparams, network, params, opt_state, *_):
        shown = Improvement(*jnp.zeros(len(Improvement._fields)))
        return params, opt_state, shown._replace(policy_loss=hparams.clip_eps, value_loss=hparams.ent_coef)

    monkeypatch.setattr(train_module.ppo, "improve", improve)
    hparams = ppo.HParams(clip_eps=0.2, ent_coef=0.04, final_clip_fraction=0.1, final_ent_fraction=0.0)

    @jax.jit
    def values(state):
        seen = [ppo.update(SHORT, hparams, state._replace(update_index=jnp.asarray(i)))[1] for i in range(3)]
        return jnp.array([(metrics.policy_loss, metrics.value_loss) for metrics in seen])

    expected = [[0.2, 0.04], [0.2 * (1 - 0.9 / 3), 0.04 * 2 / 3], [0.2 * (1 - 1.8 / 3), 0.04 / 3]]
    np.testing.assert_allclose(values(initial(SHORT)), expected, rtol=1e-6)


def test_no_clip_stays_no_clip():
    start, fraction = jnp.float32(np.inf), jnp.float32(0.1)
    assert (train_module.anneal(start, fraction, jnp.linspace(0.0, 1.0, 5)) == np.inf).all()


def test_the_schedule_goes_on_where_a_resumed_run_stopped():
    state, first = compiled_run(1)(initial(PIECES))
    _, second = compiled_run(2)(state)
    rates = np.concatenate([first.learning_rate, second.learning_rate])
    np.testing.assert_allclose(rates, 0.02 * np.array([1, 2 / 3, 1 / 3]), rtol=1e-6)


def test_the_metric_is_the_rate_that_was_used():
    """A run whose rate is 0 learns nothing; one whose rate falls to a thousandth hardly moves in its later updates."""
    before = initial(READING)
    after, _ = counted_train()(READING_HPARAMS._replace(learning_rate=np.float32(0.0)), KEY)
    assert_close(after.params, before.params, rtol=0, atol=1e-6)


def test_no_key_is_used_twice(monkeypatch):
    """The rollout and the shuffle of three updates draw from six different keys."""
    seen = []

    def record(function, position):
        def wrapped(*args):
            seen.append(jax.random.key_data(args[position]))
            return function(*args)

        return wrapped

    monkeypatch.setattr(train_module.rollout, "collect", record(train_module.rollout.collect, 4))
    monkeypatch.setattr(train_module, "permutations", record(train_module.permutations, 0))

    state = initial(SHORT)

    @jax.jit
    def keys():
        for index in range(3):
            ppo.update(SHORT, HPARAMS, state._replace(update_index=jnp.asarray(index)))
        return jnp.stack(seen), jax.random.key_data(jnp.stack([KEY, state.key]))

    used, other = keys()
    everything = np.concatenate([used, other])
    assert used.shape[0] == 6
    assert len(np.unique(everything, axis=0)) == 8


@pytest.mark.parametrize("function", ["init", "update", "evaluate"])
def test_jax_finds_no_key_consumed_twice(function):
    state = initial(SHORT)
    call = {
        "init": lambda key: ppo.init(SHORT, HPARAMS, key),
        "update": lambda key: ppo.update(SHORT, HPARAMS, state._replace(key=key))[1],
        "evaluate": lambda key: ppo.evaluate(SHORT, state, key, 2, False),
    }[function]
    with jax.debug_key_reuse(True):
        jax.jit(call)(jax.random.key(0))


def test_updates_draw_different_actions_and_different_starts():
    """With rate 0 only the random numbers differ from update to update."""
    config = tiny(env="ActionReward-test", num_epochs=1, num_minibatches=1, num_steps=32, total_timesteps=6 * 64)
    _, metrics = compiled_train(config)(HPARAMS._replace(learning_rate=np.float32(0.0)), KEY)
    assert len(np.unique(metrics.episode_return)) >= 3


@pytest.mark.parametrize("function", [ppo.init, ppo.train])
@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (lambda: jax.random.PRNGKey(0), "uint32.*typed key"),
        (lambda: jax.random.key(0, impl="rbg"), "rbg"),
        (lambda: jax.random.key(0, impl="unsafe_rbg"), "rbg"),
        (lambda: jax.random.split(jax.random.key(0), 3), r"shape \(3,\).*vmap"),
        (lambda: 0, "int.*typed key"),
        (lambda: None, "typed key"),
    ],
)
def test_wrong_keys_are_refused(function, key, reason):
    with pytest.raises(ValueError, match=f"^key of .*{reason}"):
        function(SHORT, HPARAMS, key())


def test_evaluation_refuses_wrong_keys():
    with pytest.raises(ValueError, match=r"^key of uint32"):
        ppo.evaluate(COUNTER, initial(COUNTER), jax.random.PRNGKey(0), 2)


# Metrics


def test_metrics_have_one_value_per_update():
    _, metrics = counted_train()(READING_HPARAMS, KEY)
    for name, leaf in metrics._asdict().items():
        assert leaf.shape == (3,), name
        expected = {"num_episodes": jnp.int32, "num_epochs": jnp.int32, "all_finite": jnp.bool_}.get(name, jnp.float32)
        assert leaf.dtype == expected, name


def test_memory_does_not_grow_with_environment_steps():
    config = ppo.Config(total_timesteps=500_000)
    keys = jax.eval_shape(lambda: jax.random.split(KEY, 256))
    train = jax.vmap(functools.partial(ppo.train, config), (None, 0))
    state, metrics = jax.eval_shape(train, ppo.HParams(), keys)
    assert {leaf.shape for leaf in jax.tree.leaves(metrics)} == {(256, 976)}
    short = jax.eval_shape(
        jax.vmap(functools.partial(ppo.train, ppo.Config(total_timesteps=512)), (None, 0)), ppo.HParams(), keys
    )[0]
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(short)]
    steps = {config.num_steps, config.batch_size, config.num_updates, config.total_timesteps}
    assert not [leaf.shape for leaf in jax.tree.leaves(state) if steps & set(leaf.shape)]


def test_episode_statistics_are_nan_where_no_episode_ended():
    config = dataclasses.replace(COUNTER, env_params={"max_steps_in_episode": 12})
    _, metrics = compiled_train(config)(HPARAMS, KEY)
    # Eight steps an update: both environments end their first episode in the second, and the next one in the third.
    np.testing.assert_array_equal(metrics.num_episodes, [0, 2, 2, 0])
    np.testing.assert_array_equal(metrics.episode_return, [np.nan, 78, 78, np.nan])
    np.testing.assert_array_equal(metrics.episode_length, [np.nan, 12, 12, np.nan])


def test_episode_statistics_are_means_over_the_ended_episodes():
    config = dataclasses.replace(COUNTER, env_params={"max_steps_in_episode": 3})
    _, metrics = compiled_train(config)(HPARAMS, KEY)
    # 32 steps: ends after 3, 6 | 9, 12, 15 | 18, 21, 24 | 27, 30 in each of two environments.
    np.testing.assert_array_equal(metrics.num_episodes, [4, 6, 6, 4])
    np.testing.assert_array_equal(metrics.episode_return, [6, 6, 6, 6])
    np.testing.assert_array_equal(metrics.episode_length, [3, 3, 3, 3])


def test_metrics_of_a_healthy_run_are_finite():
    _, metrics = compiled_train(PIECES)(HPARAMS, KEY)
    assert metrics.all_finite.all()
    for name, leaf in metrics._asdict().items():
        assert name.startswith("episode_") or name == "step_scale" or np.isfinite(leaf).all(), name
    assert np.isnan(metrics.step_scale).all()  # there is no step to scale
    np.testing.assert_array_equal(metrics.num_epochs, [2, 2, 2])


@pytest.mark.parametrize("broken", [None, "params", "policy_loss", "value_loss", "grad_norm"])
def test_all_finite_looks_at_parameters_and_losses(broken):
    improvement = Improvement(*jnp.ones(len(Improvement._fields)))
    if broken not in (None, "params"):
        improvement = improvement._replace(**{broken: jnp.inf})
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.array([0.0, jnp.nan if broken == "params" else 0.0])}
    config = tiny(num_envs=1, num_steps=3, num_minibatches=1)
    steps = transition()
    batch = train_module.estimate(config, ppo.HParams(), steps)
    metrics = train_module.summarize(steps, batch, improvement, jnp.ones(()), jnp.zeros(()), params)
    assert metrics.all_finite == (broken is None)


# Estimates


def transition(**changes):
    """Three steps of one environment."""
    column = lambda *values: jnp.array(values, jnp.float32)[:, None]  # noqa: E731
    no = jnp.zeros((3, 1), bool)
    fields = {
        "obs": jnp.zeros((3, 1, 2)),
        "action": jnp.zeros((3, 1), jnp.int32),
        "dist_params": jnp.zeros((3, 1, 2)),
        "log_prob": column(0, 0, 0),
        "value": column(2, 3, 4),
        "next_value": column(3, 10, 5),
        "reward": column(1, 2, 3),
        "terminated": no,
        "truncated": no.at[1].set(True),
        "episode_return": column(1, 3, 3),
        "episode_length": jnp.ones((3, 1), jnp.int32),
    }
    return ppo.Transition(**(fields | changes))


@pytest.mark.parametrize(("bootstrap", "target"), [(True, 2 + 0.5 * 10), (False, 2.0)])
def test_the_value_target_at_a_time_limit(bootstrap, target):
    config = tiny(num_envs=1, num_steps=3, num_minibatches=1, bootstrap_truncated=bootstrap)
    hparams = ppo.HParams(gamma=0.5, gae_lambda=0.5)
    batch = train_module.estimate(config, hparams, transition())
    # The step before: delta = 1 + 0.5*3 - 2 = 0.5, plus 0.25 of the advantage at the limit, plus its value 2.
    expected = [0.5 + 0.25 * (target - 3) + 2, target, 3 + 0.5 * 5]
    np.testing.assert_allclose(batch.value_targets, expected)
    np.testing.assert_allclose(batch.advantages, np.array(expected) - [2, 3, 4])


def test_samples_of_a_batch_keep_their_step_and_environment():
    config = tiny(num_envs=2, num_steps=3, num_minibatches=1)
    wide = jax.tree.map(lambda x: jnp.concatenate([x, x], axis=1), transition())
    marks = jnp.arange(6.0).reshape(3, 2)
    wide = wide._replace(obs=jnp.stack([marks, -marks], -1), log_prob=marks, action=jnp.arange(6).reshape(3, 2))
    batch = train_module.estimate(config, ppo.HParams(), wide)
    np.testing.assert_array_equal(batch.log_prob, np.arange(6))
    np.testing.assert_array_equal(batch.action, np.arange(6))
    np.testing.assert_array_equal(batch.obs, np.stack([np.arange(6), -np.arange(6)], -1))
    np.testing.assert_array_equal(batch.value, [2, 2, 3, 3, 4, 4])


# Evaluation


@functools.cache
def evaluation(config, num_episodes=8, deterministic=True):
    return jax.jit(lambda state, key: ppo.evaluate(config, state, key, num_episodes, deterministic))


def test_evaluation_returns_raw_rewards_and_lengths_of_complete_episodes():
    config = dataclasses.replace(COUNTER, env_params={"max_steps_in_episode": 4})
    episodes = evaluation(config)(initial(config), KEY)
    np.testing.assert_array_equal(episodes.episode_return, np.full(8, 1 + 2 + 3 + 4))
    np.testing.assert_array_equal(episodes.episode_length, np.full(8, 4))


def test_episodes_of_different_lengths_each_count_to_their_own_end():
    """CartPole earns 1 a step."""
    episodes = evaluation(SHORT, 8, False)(initial(SHORT), KEY)
    np.testing.assert_array_equal(episodes.episode_return, episodes.episode_length)
    assert len(np.unique(episodes.episode_length)) > 1
    assert (episodes.episode_length >= 8).all()  # no policy makes it fall sooner


def test_evaluation_repeats_and_changes_nothing():
    state = initial(SHORT)
    before = leaves(state)
    assert_equal(evaluation(SHORT, 8, False)(state, KEY), evaluation(SHORT, 8, False)(state, KEY))
    assert differs(evaluation(SHORT, 8, False)(state, KEY), evaluation(SHORT, 8, False)(state, jax.random.key(1)))
    jax.tree.map(np.testing.assert_array_equal, before, leaves(state))


def test_a_deterministic_evaluation_takes_the_mode_and_a_sampled_one_does_not():
    config = tiny(env="ActionReward-test")
    state = initial(config)
    mode = np.asarray(evaluation(config, 32, True)(state, KEY).episode_return)
    sampled = np.asarray(evaluation(config, 32, False)(state, KEY).episode_return)
    assert len(set(mode)) == 1
    assert set(sampled) == {-1.0, 1.0}


def test_evaluation_of_a_batch_of_runs_equals_each_alone(batch):
    _, (states, _) = batch
    together = jax.jit(jax.vmap(lambda state: ppo.evaluate(SHORT, state, KEY, 8, False)))(states)
    for index in range(2):
        alone = evaluation(SHORT, 8, False)(jax.tree.map(lambda x, i=index: x[i], states), KEY)
        np.testing.assert_array_equal(together.episode_length[index], alone.episode_length)


def test_evaluation_of_a_diverged_policy_ends():
    state = initial(SHORT)
    state = state._replace(params=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params))
    assert (evaluation(SHORT, 8, False)(state, KEY).episode_length < 500).all()


# The batched initialiser must not hang

BATCH_PROGRAM = """
import functools, jax, purejaxppo as ppo
config = ppo.Config(total_timesteps=1024)
keys = jax.random.split(jax.random.key(0), {num_runs})
train = jax.jit(jax.vmap(functools.partial(ppo.train, config), (None, 0)))
print(train(ppo.HParams(), keys)[1].all_finite.sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [64, 256])
def test_many_runs_at_once_finish_on_one_device(num_runs):
    assert run_python(BATCH_PROGRAM.format(num_runs=num_runs), timeout=240).split() == [str(2 * num_runs)]
