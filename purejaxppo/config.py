"""The two kinds of settings: `Config` is static, `HParams` is traced. Every field, default and check stands here, once.

`Config` holds whatever changes a shape, a loop length or which code runs. It is hashable: an argument of `jax.jit` by
`static_argnums`. `HParams` holds every real number. Any of its fields may carry a leading run axis, and no value of any
of them recompiles anything. A term is switched off by its neutral number (`clip_eps=inf`, `ent_coef=0`), so that one
compiled program compares with and without.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu")

# What a field may be. A value that only a later version understands is refused here, never silently ignored.
CHOICES: dict[str, tuple[Any, ...]] = {
    "algorithm": ("ppo", "trpo"),
    "activation": ACTIVATIONS,
    "network": ("mlp", "cnn", "gru"),
    "compute_dtype": ("float32", "bfloat16"),
}

TRPO_REFUSES = {
    "shared_trunk": "the constraint is on the policy alone, which the critic must not move",
    "kl_early_stopping": "its one policy step is bounded by hparams.max_kl",
    "kl_penalty": "its one policy step is bounded by hparams.max_kl",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Static settings of a run: shapes, loop lengths, and which code runs.

    Attributes:
      env: name of a registered gymnax environment.
      env_params: overrides of the environment's parameters, as (name, value) pairs (a mapping is accepted too).
      algorithm: how the policy is improved; "ppo", or "trpo": a natural gradient step within a KL bound.
      total_timesteps: environment steps of one run; the last incomplete update is not run.
      num_envs: environments stepped in parallel in one run, N.
      num_steps: steps of each environment in one rollout, T.
      num_epochs: passes over each rollout.
      num_minibatches: minibatches in an epoch; divides num_envs * num_steps.
      hidden_sizes: widths of the hidden layers of actor and critic.
      activation: nonlinearity of the hidden layers.
      network: kind of network: "mlp"; "cnn", with a convolution of 3 x 3 before the hidden layers; or "gru", whose last
        hidden layer is a gated recurrent unit, and whose minibatches are of whole environments.
      shared_trunk: whether actor and critic share their hidden layers.
      compute_dtype: "float32"; or "bfloat16" for what networks multiply by matrices and for the activations that they
        keep, which is faster where memory is what learning waits for. Weights, optimiser, losses and everything else
        stay float32. Not for TRPO, nor for a recurrent network.
      normalize_advantages: standardise the advantages within each minibatch.
      normalize_observations: give the networks standard scores: each feature by its mean and standard deviation over
        all rollouts before this one.
      normalize_rewards: learn from rewards divided by the running standard deviation of their discounted sums.
      squash: squash continuous actions by tanh onto their bounds; otherwise they are clipped there.
      rescale_actions: let -1 and 1 stand for the bounds of clipped continuous actions.
      bootstrap_truncated: whether a time limit bootstraps from the final observation; False treats it as a terminal.
      kl_early_stopping: stop the epochs of an update once the KL estimate is above `HParams.target_kl`.
      kl_penalty: subtract the exact KL to the rollout policy from the objective, times an adaptive coefficient.
      cg_iters: conjugate gradient iterations (TRPO).
      backtrack_iters: candidates of the line search (TRPO); 0 takes the full natural gradient step.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    env: str = "CartPole-v1"
    env_params: tuple[tuple[str, bool | int | float], ...] = ()
    algorithm: str = "ppo"
    total_timesteps: int = 500_000
    num_envs: int = 4
    num_steps: int = 128
    num_epochs: int = 4
    num_minibatches: int = 4
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    network: str = "mlp"
    shared_trunk: bool = False
    compute_dtype: str = "float32"
    normalize_advantages: bool = True
    normalize_observations: bool = False
    normalize_rewards: bool = False
    squash: bool = False
    rescale_actions: bool = False
    bootstrap_truncated: bool = True
    kl_early_stopping: bool = False
    kl_penalty: bool = False
    cg_iters: int = 10
    backtrack_iters: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "env_params", _pairs(self.env_params))
        object.__setattr__(self, "hidden_sizes", _tuple("hidden_sizes", self.hidden_sizes))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                check_size(f"config.{field.name}", value, lowest=0 if field.name == "backtrack_iters" else 1)
            elif field.type in (bool, str) and type(value) is not field.type:
                raise ValueError(f"config.{field.name} = {value!r}: must be a {_NOUNS[field.type]}")
            if field.name in CHOICES and value not in CHOICES[field.name]:
                allowed = ", ".join(repr(choice) for choice in CHOICES[field.name])
                raise ValueError(
                    f"config.{field.name} = {value!r}: allowed: {allowed}{_nearest(value, CHOICES[field.name])}"
                )
        for size in self.hidden_sizes:
            check_size("config.hidden_sizes", size)
        if self.algorithm == "trpo":
            for name, why in TRPO_REFUSES.items():
                if getattr(self, name):
                    raise ValueError(f"config.{name} = True: must be false with algorithm = 'trpo': {why}")
        if self.compute_dtype == "bfloat16" and (self.algorithm == "trpo" or self.network == "gru"):
            setting = "algorithm = 'trpo'" if self.algorithm == "trpo" else "network = 'gru'"
            raise ValueError(f"config.compute_dtype = 'bfloat16': must be 'float32' with {setting}")
        if self.network == "gru" and self.shared_trunk:
            raise ValueError("config.shared_trunk = True: must be false with network = 'gru'")
        if self.network == "gru" and self.num_envs % self.num_minibatches:
            raise ValueError(
                f"config.num_minibatches = {self.num_minibatches}: must divide num_envs = {self.num_envs} "
                "with network = 'gru', whose minibatches are of whole environments"
            )
        if self.squash and self.rescale_actions:
            raise ValueError("config.rescale_actions = True: must be false with squash = true, which does so itself")
        if self.batch_size % self.num_minibatches:
            raise ValueError(
                f"config.num_minibatches = {self.num_minibatches}: must divide num_envs * num_steps = {self.batch_size}"
            )
        if self.total_timesteps < self.batch_size:
            raise ValueError(
                f"config.total_timesteps = {self.total_timesteps}: must be at least one update, "
                f"num_envs * num_steps = {self.batch_size}"
            )
        if self.num_updates * self.num_epochs * self.num_minibatches >= 2**31:
            raise ValueError(
                f"config.total_timesteps = {self.total_timesteps}: must give fewer than 2**31 optimiser steps, "
                f"not {self.num_updates * self.num_epochs * self.num_minibatches}"
            )

    @property
    def batch_size(self) -> int:
        """Samples of one update, B = T * N."""
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        """Samples of one optimiser step."""
        return self.batch_size // self.num_minibatches

    @property
    def num_rows(self) -> int:
        """Rows that each epoch shuffles: the samples, or the environments for a recurrent network."""
        return self.num_envs if self.network == "gru" else self.batch_size

    @property
    def num_updates(self) -> int:
        """Updates of one run: whole rollouts that fit in `total_timesteps`."""
        return self.total_timesteps // self.batch_size


class HParams(NamedTuple):
    """Traced settings of a run: every real number. Each field is a float, or an array with a leading run axis.

    Attributes:
      learning_rate: Adam step size at update 0.
      final_lr_fraction: the learning rate falls linearly towards this fraction of itself; 1 keeps it constant.
      adam_eps: epsilon in the denominator of Adam.
      max_grad_norm: bound on the global norm of the gradient; inf leaves it alone.
      gamma: discount factor.
      gae_lambda: decay of the generalised advantage estimate.
      clip_eps: clip range of the probability ratio at update 0; inf gives the unclipped surrogate.
      final_clip_fraction: the clip range changes linearly towards this fraction of itself; 1 keeps it constant.
      value_clip_eps: clip range of the value around the value at sampling time; inf leaves it alone.
      vf_coef: weight of the value loss, which is half the squared error.
      ent_coef: weight of the entropy bonus at update 0.
      final_ent_fraction: the weight changes linearly towards this fraction of itself; 1 keeps it constant.
      log_std_init: log standard deviation of continuous actions at update 0, in their own units (half the bounds' width
        with `Config.rescale_actions`, before the tanh with `Config.squash`).
      target_kl: threshold of the early stop, in nats (read when `Config.kl_early_stopping`).
      kl_coef: coefficient of the KL penalty at update 0 (this and the next two read when `Config.kl_penalty`).
      kl_target: the KL of an update that the coefficient is adapted towards, in nats.
      kl_coef_factor: what the coefficient is multiplied or divided by; 1 keeps it fixed.
      max_kl: bound on the mean KL of an update, in nats (this and the next two read by TRPO).
      cg_damping: added to the diagonal of the Fisher matrix.
      backtrack_coef: factor between the candidates of the line search.
    """

    learning_rate: Any = 2.5e-4
    final_lr_fraction: Any = 0.0
    adam_eps: Any = 1e-5
    max_grad_norm: Any = 0.5
    gamma: Any = 0.99
    gae_lambda: Any = 0.95
    clip_eps: Any = 0.2
    final_clip_fraction: Any = 1.0
    value_clip_eps: Any = math.inf
    vf_coef: Any = 0.5
    ent_coef: Any = 0.0
    final_ent_fraction: Any = 1.0
    log_std_init: Any = 0.0
    target_kl: Any = math.inf
    kl_coef: Any = 0.0
    kl_target: Any = 0.01
    kl_coef_factor: Any = 2.0
    max_kl: Any = 0.01
    cg_damping: Any = 0.1
    backtrack_coef: Any = 0.5


class Interval(NamedTuple):
    """The values a hyperparameter may take; NaN is in no interval."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def contains(self, values: np.ndarray) -> np.ndarray:
        above = values > self.low if self.low_open else values >= self.low
        below = values < self.high if self.high_open else values <= self.high
        return above & below

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


_NON_NEGATIVE = Interval(0, math.inf, high_open=True)
_POSITIVE_OR_INF = Interval(0, math.inf, low_open=True)

INTERVALS: dict[str, Interval] = {
    "learning_rate": _NON_NEGATIVE,
    "final_lr_fraction": _NON_NEGATIVE,
    "adam_eps": Interval(0, math.inf, low_open=True, high_open=True),
    "max_grad_norm": _POSITIVE_OR_INF,
    "gamma": Interval(0, 1),
    "gae_lambda": Interval(0, 1),
    "clip_eps": _POSITIVE_OR_INF,
    "final_clip_fraction": Interval(0, math.inf, low_open=True, high_open=True),
    "value_clip_eps": _POSITIVE_OR_INF,
    "vf_coef": _NON_NEGATIVE,
    "ent_coef": _NON_NEGATIVE,
    "final_ent_fraction": _NON_NEGATIVE,
    "log_std_init": Interval(-10, 10),
    "target_kl": _POSITIVE_OR_INF,
    "kl_coef": _NON_NEGATIVE,
    "kl_target": Interval(0, math.inf, low_open=True, high_open=True),
    "kl_coef_factor": Interval(1, math.inf, high_open=True),
    "max_kl": Interval(0, math.inf, low_open=True, high_open=True),
    "cg_damping": _NON_NEGATIVE,
    "backtrack_coef": Interval(0, 1, low_open=True, high_open=True),
}


_STOPS = ("kl_early_stopping = true", lambda config: config.kl_early_stopping)
_PENALISES = ("kl_penalty = true", lambda config: config.kl_penalty)
_PPO = ("algorithm = 'ppo'", lambda config: config.algorithm == "ppo")
_TRPO = ("algorithm = 'trpo'", lambda config: config.algorithm == "trpo")
_SEARCHES = ("backtrack_iters > 0 of algorithm = 'trpo'", lambda config: _TRPO[1](config) and config.backtrack_iters)

# Hyperparameters that only some configs read. Elsewhere a value of one's own is refused: it would change nothing.
NEEDS: dict[str, tuple[str, Callable[[Config], Any]]] = {
    "ent_coef": _PPO,
    "final_ent_fraction": _PPO,
    "target_kl": _STOPS,
    "kl_coef": _PENALISES,
    "kl_target": _PENALISES,
    "kl_coef_factor": _PENALISES,
    "max_kl": _TRPO,
    "cg_damping": _TRPO,
    "backtrack_coef": _SEARCHES,
}


def check_hparams(config: Config, hparams: HParams) -> None:
    """Refuses hyperparameters outside their range, and ones that this config would not read.

    Traced values cannot be looked at and pass: inside compiled code `Metrics.all_finite` reports what they did.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """
    for name, value in hparams._asdict().items():
        if isinstance(value, jax.core.Tracer):
            continue
        if not jnp.issubdtype(np.asarray(value).dtype, np.number):
            raise ValueError(f"hparams.{name} = {value!r}: must be a number")
        values = np.atleast_1d(np.asarray(value, np.float64))
        wrong = values[~INTERVALS[name].contains(values)]
        if len(wrong):
            raise ValueError(f"hparams.{name} = {wrong[0]:g}: must be in {INTERVALS[name]}")
        if name in NEEDS and not NEEDS[name][1](config):
            check_default(name, hparams, f"config.{NEEDS[name][0]}")


def check_default(name: str, hparams: HParams, reader: str) -> None:
    """Refuses a value of one's own, unless it is traced, for a hyperparameter that only `reader` would read.

    Raises:
      ValueError: naming the field, its value and what reads it.
    """
    value = getattr(hparams, name)
    if not isinstance(value, jax.core.Tracer):
        values = np.atleast_1d(np.asarray(value, np.float32))
        changed = values[values != np.float32(HParams._field_defaults[name])]
        if len(changed):
            raise ValueError(f"hparams.{name} = {changed[0]:g}: is read only with {reader}")


def as_float32(hparams: HParams) -> HParams:
    """The hyperparameters as float32 arrays, whatever numbers they were given as."""
    return HParams(*(jnp.asarray(value, jnp.float32) for value in hparams))


def check_size(name: str, value: Any, lowest: int = 1) -> None:
    """Raises ValueError unless the value is an integer of at least `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < lowest:
        kind = "a positive integer" if lowest == 1 else f"an integer of at least {lowest}"
        raise ValueError(f"{name} = {value!r}: must be {kind}")


def check_names(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises ValueError at the first name that is not allowed, with the nearest one that is."""
    allowed = tuple(allowed)
    for name in names:
        if name not in allowed:
            hint = _nearest(name, allowed) or f"; allowed: {', '.join(allowed)}"
            raise ValueError(f"{what}.{name}: there is no such setting{hint}")


def config_from_mapping(settings: Mapping[str, Any]) -> Config:
    """A Config from names and values, as read from a file.

    Raises:
      ValueError: for an unknown name (with the nearest valid one) or an invalid value.
    """
    check_names("config", settings, [field.name for field in dataclasses.fields(Config)])
    return Config(**settings)


def hparams_from_mapping(settings: Mapping[str, Any]) -> HParams:
    """HParams from names and values, as read from a file.

    Raises:
      ValueError: for an unknown name (with the nearest valid one) or a value that is not a number.
    """
    return HParams(**checked_numbers(settings, HParams._fields))


def checked_numbers(settings: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, float]:
    """Hyperparameters as floats, by name.

    Raises:
      ValueError: for a name that is not allowed (with the nearest one that is) or a value that is not a number.
    """
    check_names("hparams", settings, allowed)
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"hparams.{name} = {value!r}: must be a number")
    return {name: float(value) for name, value in settings.items()}


_NOUNS = {bool: "boolean", str: "string"}


def _nearest(value: Any, allowed: Iterable[Any]) -> str:
    close = difflib.get_close_matches(str(value), [str(choice) for choice in allowed], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"config.{name} = {value!r}: must be a list")
    return tuple(value)


def _pairs(value: Any) -> tuple[tuple[str, Any], ...]:
    items = value.items() if isinstance(value, Mapping) else _tuple("env_params", value)
    pairs = tuple(tuple(item) if isinstance(item, list | tuple) else (item,) for item in items)
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"config.env_params = {value!r}: must be (name, value) pairs")
    return tuple((name, tuple(item) if isinstance(item, list) else item) for name, item in pairs)
