"""Settings: every bad input is one line that names the field, its value, and what is allowed."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purejaxppo as ppo
from purejaxppo.config import INTERVALS, check_hparams, config_from_mapping, hparams_from_mapping

NAN, INF = float("nan"), float("inf")
SIZES = ["total_timesteps", "num_envs", "num_steps", "num_epochs", "num_minibatches", "cg_iters"]
BOOLEANS = [field.name for field in dataclasses.fields(ppo.Config) if field.type is bool]
STRINGS = [field.name for field in dataclasses.fields(ppo.Config) if field.type is str]


def assert_refused(call, *parts):
    """The call raises one line that has all the parts."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked here)
        call()
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("value", [0, -1, 1.5, 4.0, "4", True, None, NAN])
@pytest.mark.parametrize("field", SIZES)
def test_sizes_are_positive_integers(field, value):
    assert_refused(lambda: ppo.Config(**{field: value}), f"config.{field}", repr(value), "positive integer")


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_the_line_search_may_have_no_candidates_but_not_fewer(value):
    assert_refused(lambda: ppo.Config(backtrack_iters=value), f"config.backtrack_iters = {value!r}", "at least 0")
    assert ppo.Config(backtrack_iters=0).backtrack_iters == 0


@pytest.mark.parametrize("value", [0, 1, "true", None])
@pytest.mark.parametrize("field", BOOLEANS)
def test_switches_are_booleans(field, value):
    assert_refused(lambda: ppo.Config(**{field: value}), f"config.{field}", repr(value), "boolean")


@pytest.mark.parametrize("value", [3, None, True])
@pytest.mark.parametrize("field", STRINGS)
def test_names_are_strings(field, value):
    assert_refused(lambda: ppo.Config(**{field: value}), f"config.{field}", repr(value), "string")


@pytest.mark.parametrize("value", [64, "64", None, 6.5])
def test_hidden_sizes_is_a_list(value):
    assert_refused(lambda: ppo.Config(hidden_sizes=value), "config.hidden_sizes", repr(value), "list")


@pytest.mark.parametrize("value", [0, -8, 8.0, "8", True])
def test_hidden_sizes_are_positive_integers(value):
    assert_refused(lambda: ppo.Config(hidden_sizes=(8, value)), "config.hidden_sizes", repr(value), "positive integer")


@pytest.mark.parametrize("value", [3, "gravity", [("gravity",)], [("gravity", 1, 2)], [(1, 2)], ["ab"]])
def test_env_params_are_pairs(value):
    assert_refused(lambda: ppo.Config(env_params=value), "config.env_params", repr(value))


def test_minibatches_divide_the_batch():
    call = lambda: ppo.Config(num_envs=4, num_steps=10, num_minibatches=3)  # noqa: E731
    assert_refused(call, "config.num_minibatches = 3", "num_envs * num_steps", "40")


def test_a_run_has_at_least_one_update():
    call = lambda: ppo.Config(num_envs=4, num_steps=128, total_timesteps=511)  # noqa: E731
    assert_refused(call, "config.total_timesteps = 511", "512")
    assert ppo.Config(num_envs=4, num_steps=128, total_timesteps=512).num_updates == 1


def test_optimiser_steps_fit_in_int32():
    call = lambda: ppo.Config(total_timesteps=2**40, num_envs=1, num_steps=1, num_minibatches=1)  # noqa: E731
    assert_refused(call, "config.total_timesteps", str(2**40), "2**31")


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("activation", "thanh", "did you mean 'tanh'"),
        ("activation", "sigmoid", "relu"),
        ("algorithm", "ppo2", "did you mean 'ppo'"),
        ("algorithm", "tropo", "did you mean 'trpo'"),
        ("algorithm", "TRPO", "'trpo'"),
        ("network", "ccn", "did you mean 'cnn'"),
    ],
)
def test_unknown_choices_list_what_is_allowed(field, value, hint):
    assert_refused(lambda: ppo.Config(**{field: value}), f"config.{field} = {value!r}", "allowed", hint)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("num_env", "num_envs"), ("total_timestep", "total_timesteps"), ("hidden_size", "hidden_sizes")],
)
def test_an_unknown_config_name_gets_the_nearest_one(name, nearest):
    assert_refused(lambda: config_from_mapping({name: 4}), f"config.{name}", f"did you mean '{nearest}")


@pytest.mark.parametrize(("name", "nearest"), [("learningrate", "learning_rate"), ("clip_epsilon", "clip_eps")])
def test_an_unknown_hyperparameter_gets_the_nearest_one(name, nearest):
    assert_refused(lambda: hparams_from_mapping({name: 0.1}), f"hparams.{name}", f"did you mean '{nearest}'")


def test_a_name_like_no_other_gets_the_list():
    assert_refused(lambda: hparams_from_mapping({"zzz": 0.1}), "hparams.zzz", "allowed", "learning_rate", "target_kl")


@pytest.mark.parametrize("value", ["0.1", True, None, [0.1]])
def test_hyperparameters_of_a_file_are_numbers(value):
    assert_refused(lambda: hparams_from_mapping({"gamma": value}), "hparams.gamma", repr(value), "number")


def test_mappings_keep_every_value():
    assert config_from_mapping({"env": "Acrobot-v1", "num_envs": 8}) == ppo.Config(env="Acrobot-v1", num_envs=8)
    assert hparams_from_mapping({"gamma": 1, "clip_eps": INF}) == ppo.HParams(gamma=1.0, clip_eps=INF)


BAD_HPARAMS = [
    *((name, NAN) for name in ppo.HParams._fields),
    *((name, -0.1) for name in ppo.HParams._fields if name != "log_std_init"),
    *((name, INF) for name in ("learning_rate", "final_lr_fraction", "adam_eps", "vf_coef", "ent_coef")),
    *((name, INF) for name in ("final_clip_fraction", "final_ent_fraction", "log_std_init")),
    *((name, INF) for name in ("kl_coef", "kl_target", "kl_coef_factor", "max_kl", "cg_damping", "backtrack_coef")),
    *((name, 0.0) for name in ("adam_eps", "max_grad_norm", "clip_eps", "value_clip_eps", "target_kl")),
    *((name, 0.0) for name in ("kl_target", "max_kl", "kl_coef_factor", "backtrack_coef")),
    ("final_clip_fraction", 0.0),
    ("log_std_init", -10.1),
    ("log_std_init", 20.0),
    ("kl_coef_factor", 0.99),
    ("backtrack_coef", 1.0),
    ("gamma", 1.01),
    ("gae_lambda", 1.01),
    ("gamma", INF),
]


@pytest.mark.parametrize(("field", "value"), BAD_HPARAMS)
@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32, "one of several"])
def test_hyperparameters_outside_their_range(field, value, kind):
    config = ppo.Config(kl_early_stopping=True)
    good = getattr(ppo.HParams(), field)
    hparams = ppo.HParams()._replace(**{field: kind(value) if callable(kind) else jnp.array([good, value])})
    assert_refused(lambda: check_hparams(config, hparams), f"hparams.{field} = {value:g}", str(INTERVALS[field]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 0.0),
        ("gamma", 1.0),
        ("gae_lambda", 0.0),
        ("gae_lambda", 1.0),
        ("learning_rate", 0.0),
        ("clip_eps", INF),
        ("value_clip_eps", INF),
        ("max_grad_norm", INF),
        ("target_kl", INF),
        ("ent_coef", 0),
        ("final_ent_fraction", 0),
        ("log_std_init", -10),
        ("vf_coef", jnp.array([0.0, 3.0])),
    ],
)
def test_the_ends_of_a_range_are_allowed(field, value):
    check_hparams(ppo.Config(), ppo.HParams()._replace(**{field: value}))


@pytest.mark.parametrize("value", ["0.1", None, object()])
def test_hyperparameters_are_numbers(value):
    hparams = ppo.HParams(gamma=value)
    assert_refused(lambda: check_hparams(ppo.Config(), hparams), "hparams.gamma", "must be a number")


@pytest.mark.parametrize("value", [0.01, jnp.array([float("inf"), 0.01])])
def test_a_target_that_nothing_reads_is_refused(value):
    hparams = ppo.HParams(target_kl=value)
    assert_refused(lambda: check_hparams(ppo.Config(), hparams), "hparams.target_kl = 0.01", "kl_early_stopping")
    check_hparams(ppo.Config(kl_early_stopping=True), hparams)


PENALTY = {"kl_coef": 0.1, "kl_target": 0.02, "kl_coef_factor": 1.0}
TRUST = {"max_kl": 0.02, "cg_damping": 0.0, "backtrack_coef": 0.8}


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *((field, value, "config.kl_penalty = true") for field, value in PENALTY.items()),
        *((field, value, "config.algorithm = 'trpo'") for field, value in TRUST.items() if field != "backtrack_coef"),
        ("backtrack_coef", TRUST["backtrack_coef"], "algorithm = 'trpo'"),
    ],
)
def test_hyperparameters_that_plain_ppo_does_not_read_are_refused(field, value, reason, shape):
    hparams = ppo.HParams()._replace(**{field: jnp.full(shape, value)})
    assert_refused(lambda: check_hparams(ppo.Config(), hparams), f"hparams.{field} = {value:g}", "read only", reason)


def test_the_penalty_and_trpo_read_their_own_hyperparameters_and_not_the_others():
    penalised, trusted = ppo.Config(kl_penalty=True), ppo.Config(algorithm="trpo")
    check_hparams(penalised, ppo.HParams(**PENALTY))
    check_hparams(trusted, ppo.HParams(**TRUST))
    for field, value in TRUST.items():
        assert_refused(lambda f=field, v=value: check_hparams(penalised, ppo.HParams(**{f: v})), f"hparams.{field}")
    for field, value in PENALTY.items():
        assert_refused(lambda f=field, v=value: check_hparams(trusted, ppo.HParams(**{f: v})), f"hparams.{field}")


def test_the_natural_gradient_without_line_search_reads_no_backtrack_coef():
    natural = ppo.Config(algorithm="trpo", backtrack_iters=0)
    check_hparams(natural, ppo.HParams(max_kl=0.02))
    call = lambda: check_hparams(natural, ppo.HParams(backtrack_coef=0.8))  # noqa: E731
    assert_refused(call, "hparams.backtrack_coef = 0.8", "backtrack_iters > 0")


def test_minibatches_of_a_recurrent_network_are_whole_environments():
    call = lambda: ppo.Config(network="gru", num_envs=6, num_minibatches=4)  # noqa: E731
    assert_refused(call, "config.num_minibatches = 4", "must divide num_envs = 6", "gru")
    assert ppo.Config(network="gru", num_envs=6, num_minibatches=3, num_steps=10).num_rows == 6
    assert ppo.Config(num_envs=6, num_minibatches=3, num_steps=10).num_rows == 60


def test_a_recurrent_network_has_no_shared_trunk():
    assert_refused(lambda: ppo.Config(network="gru", shared_trunk=True), "config.shared_trunk = True", "gru")


@pytest.mark.parametrize(("field", "value"), [("algorithm", "trpo"), ("network", "gru")])
def test_bfloat16_is_refused_where_it_is_not_supported(field, value):
    call = lambda: ppo.Config(compute_dtype="bfloat16", **{field: value})  # noqa: E731
    assert_refused(call, "config.compute_dtype = 'bfloat16'", "must be 'float32'", f"{field} = '{value}'")
    assert ppo.Config(compute_dtype="bfloat16", network="cnn").compute_dtype == "bfloat16"


def test_other_types_to_compute_in_are_refused():
    call = lambda: ppo.Config(compute_dtype="float16")  # noqa: E731
    assert_refused(call, "config.compute_dtype = 'float16'", "'float32', 'bfloat16'")


def test_squashed_actions_are_not_rescaled_as_well():
    call = lambda: ppo.Config(squash=True, rescale_actions=True)  # noqa: E731
    assert_refused(call, "config.rescale_actions = True", "must be false", "squash")


def test_an_entropy_schedule_with_trpo_is_refused():
    call = lambda: check_hparams(ppo.Config(algorithm="trpo"), ppo.HParams(final_ent_fraction=0.5))  # noqa: E731
    assert_refused(call, "hparams.final_ent_fraction = 0.5", "algorithm = 'ppo'")


def test_an_entropy_bonus_with_trpo_is_refused():
    call = lambda: check_hparams(ppo.Config(algorithm="trpo"), ppo.HParams(ent_coef=0.01))  # noqa: E731
    assert_refused(call, "hparams.ent_coef = 0.01", "algorithm = 'ppo'")


@pytest.mark.parametrize("config", [ppo.Config(), ppo.Config(algorithm="trpo", backtrack_iters=0)])
def test_defaults_as_float32_grid_leaves_are_not_refused(config):
    check_hparams(config, ppo.grid(ppo.HParams(), learning_rate=[1e-3, 1e-4]))
    check_hparams(config, ppo.HParams(*(np.float32(value) for value in ppo.HParams())))


@pytest.mark.parametrize("field", ["shared_trunk", "kl_early_stopping", "kl_penalty"])
def test_trpo_refuses_what_its_policy_step_does_not_read(field):
    call = lambda: ppo.Config(algorithm="trpo", **{field: True})  # noqa: E731
    assert_refused(call, f"config.{field} = True", "must be false", "algorithm = 'trpo'")
    assert getattr(ppo.Config(**{field: True}), field)


@pytest.mark.parametrize("function", ["train", "init", "run", "update"])
def test_every_entry_point_checks_hyperparameters(function):
    config, hparams = ppo.Config(), ppo.HParams(gamma=2.0)
    arguments = {
        "train": (config, hparams, jax.random.key(0)),
        "init": (config, hparams, jax.random.key(0)),
        "run": (config, hparams, None, 1),
        "update": (config, hparams, None),
    }[function]
    assert_refused(lambda: getattr(ppo, function)(*arguments), "hparams.gamma = 2", "[0, 1]")


def test_every_hyperparameter_has_an_interval():
    assert set(INTERVALS) == set(ppo.HParams._fields)


def test_every_field_is_documented():
    for settings in (ppo.Config, ppo.HParams):
        names = settings._fields if settings is ppo.HParams else [field.name for field in dataclasses.fields(settings)]
        for name in names:
            assert f"\n  {name}: " in inspect.cleandoc(settings.__doc__), name


def test_config_is_hashable_and_equal_by_value():
    first = ppo.Config(env_params={"gravity": 5.0}, hidden_sizes=[8, 8])
    second = ppo.Config(env_params=[["gravity", 5.0]], hidden_sizes=(8, 8))
    assert first == second
    assert hash(first) == hash(second)
    assert first.hidden_sizes == (8, 8)
    assert first.env_params == (("gravity", 5.0),)
    assert first != ppo.Config(hidden_sizes=[8, 8])


def test_config_with_a_list_valued_env_param_is_hashable():
    hash(ppo.Config(env="DiscountingChain-bsuite", env_params={"reward_timestep": [1, 2, 3, 4, 5]}))


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ppo.Config().num_envs = 8


def test_derived_sizes():
    config = ppo.Config(total_timesteps=500_000, num_envs=4, num_steps=128, num_minibatches=4)
    assert (config.batch_size, config.minibatch_size, config.num_updates) == (512, 128, 976)


def test_the_defaults_are_the_documented_ones():
    assert ppo.Config() == ppo.Config(
        env="CartPole-v1",
        env_params=(),
        algorithm="ppo",
        total_timesteps=500_000,
        num_envs=4,
        num_steps=128,
        num_epochs=4,
        num_minibatches=4,
        hidden_sizes=(64, 64),
        activation="tanh",
        network="mlp",
        shared_trunk=False,
        compute_dtype="float32",
        normalize_advantages=True,
        normalize_observations=False,
        normalize_rewards=False,
        squash=False,
        rescale_actions=False,
        bootstrap_truncated=True,
        kl_early_stopping=False,
        kl_penalty=False,
        cg_iters=10,
        backtrack_iters=10,
    )
    assert ppo.HParams() == ppo.HParams(
        learning_rate=2.5e-4,
        final_lr_fraction=0.0,
        adam_eps=1e-5,
        max_grad_norm=0.5,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        final_clip_fraction=1.0,
        value_clip_eps=INF,
        vf_coef=0.5,
        ent_coef=0.0,
        final_ent_fraction=1.0,
        log_std_init=0.0,
        target_kl=INF,
        kl_coef=0.0,
        kl_target=0.01,
        kl_coef_factor=2.0,
        max_kl=0.01,
        cg_damping=0.1,
        backtrack_coef=0.5,
    )
