"""The two kinds of settings of the token layer: `TokenConfig` is static, `TokenHParams` is traced.

Every field, default and check stands here, once; what they mean for a program is said in `purejaxppo.config`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.config import Interval, check_names, check_size, checked_numbers
from purejaxppo.tokens.types import Task

TASKS = ("token-count", "enum", "names")
ONLINE = ("ppo", "grpo")  # draw responses from the policy; the others learn from given pairs

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm": (*ONLINE, "dpo", "ipo"),
    "critic": ("separate", "shared"),
    "critic_from": ("reference", "reward_model"),
    "missing_eos": ("none", "replace", "subtract"),
    "group_baseline": ("mean", "leave_one_out"),
    "kl_in": ("reward", "loss"),
}


@dataclasses.dataclass(frozen=True)
class TokenConfig:
    """Static settings of a run on token sequences: shapes, loop lengths, and which code runs.

    Attributes:
      task: "token-count", "enum" or "names"; or a `Task` of one's own.
      task_params: sizes of a task by name, as (name, value) pairs (a mapping is accepted too); see `tasks.make`.
      algorithm: "ppo"; "grpo": groups of responses instead of a critic; "dpo" or "ipo": from pairs, without sampling.
      num_updates: updates of a run.
      batch_size: responses of an update, B; for DPO, pairs.
      num_epochs: passes over each batch.
      num_minibatches: minibatches in an epoch; divides batch_size.
      critic: a model of its own ("separate"), or a head on the policy's hidden layer ("shared").
      critic_from: what a separate critic's model starts from: the reference, or the reward model.
      normalize_advantages: whiten the advantages over the tokens of each batch (PPO).
      group_size: responses to each prompt, G (GRPO); divides batch_size.
      group_baseline: what a reward is compared with: the group's mean, or that of the others (GRPO).
      group_std: divide by the group's standard deviation (GRPO); False is Dr. GRPO.
      kl_in: where the KL to the reference stands (GRPO): in the reward, as k1, or in the loss, as k3.
      missing_eos: what a response without EOS gets: its score, a constant instead, or its score less a constant.
      kl_early_stopping: stop the epochs of an update once the KL to the rollout policy is above `target_kl`.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    task: str | Task = "token-count"
    task_params: tuple[tuple[str, int], ...] = ()
    algorithm: str = "ppo"
    num_updates: int = 200
    batch_size: int = 64
    num_epochs: int = 4
    num_minibatches: int = 2
    critic: str = "separate"
    critic_from: str = "reference"
    normalize_advantages: bool = True
    group_size: int = 8
    group_baseline: str = "mean"
    group_std: bool = True
    kl_in: str = "reward"
    missing_eos: str = "none"
    kl_early_stopping: bool = False

    def __post_init__(self) -> None:
        params = self.task_params.items() if isinstance(self.task_params, Mapping) else self.task_params
        object.__setattr__(self, "task_params", tuple((name, value) for name, value in params))
        if not isinstance(self.task, Task) and self.task not in TASKS:
            raise ValueError(f"config.task = {self.task!r}: allowed: {', '.join(map(repr, TASKS))}, or a Task")
        if isinstance(self.task, Task) and self.task_params:
            raise ValueError(f"config.task_params = {dict(self.task_params)!r}: is read only with a task by name")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                check_size(f"config.{field.name}", value)
            elif field.type is bool and type(value) is not bool:
                raise ValueError(f"config.{field.name} = {value!r}: must be a boolean")
            elif field.name in CHOICES and value not in CHOICES[field.name]:
                allowed = ", ".join(map(repr, CHOICES[field.name]))
                raise ValueError(f"config.{field.name} = {value!r}: allowed: {allowed}")
            if value != field.default and field.name in READERS and self.algorithm not in READERS[field.name]:
                only = " or ".join(map(repr, READERS[field.name]))
                raise ValueError(f"config.{field.name} = {value!r}: is read only with algorithm = {only}")
        self._check_together()

    def _check_together(self) -> None:
        if self.batch_size % self.num_minibatches:
            raise ValueError(
                f"config.num_minibatches = {self.num_minibatches}: must divide batch_size = {self.batch_size}"
            )
        if self.critic == "shared" and self.critic_from != "reference":
            raise ValueError(f"config.critic_from = {self.critic_from!r}: is read only with critic = 'separate'")
        if self.algorithm != "grpo":
            return
        if self.group_size == 1:
            raise ValueError("config.group_size = 1: must be 2 or more, for a response to be compared with others")
        if self.batch_size % self.group_size:
            raise ValueError(f"config.group_size = {self.group_size}: must divide batch_size = {self.batch_size}")


# Fields that only some algorithms read. Elsewhere a value of one's own is refused: it would change nothing.
READERS: dict[str, tuple[str, ...]] = {
    "num_epochs": ONLINE,
    "num_minibatches": ONLINE,
    "critic": ("ppo",),
    "critic_from": ("ppo",),
    "normalize_advantages": ("ppo",),
    "group_size": ("grpo",),
    "group_baseline": ("grpo",),
    "group_std": ("grpo",),
    "kl_in": ("grpo",),
    "missing_eos": ONLINE,
    "kl_early_stopping": ONLINE,
}


class TokenHParams(NamedTuple):
    """Traced settings of a run on token sequences. Each field is a float, or an array with a leading run axis.

    Attributes:
      learning_rate: Adam step size at update 0.
      final_lr_fraction: the learning rate falls linearly towards this fraction of itself; 1 keeps it constant.
      adam_eps: epsilon in the denominator of Adam.
      max_grad_norm: bound on the global norm of the gradient; inf leaves it alone.
      kl_coef: coefficient of the KL to the reference at update 0, in units of score per nat; DPO's beta.
      kl_target: KL to the reference that the coefficient is adapted towards, in nats per response.
      kl_coef_factor: what the doubling rule multiplies or divides the coefficient by; 1 switches the rule off.
      kl_gain: strength of the proportional rule, per update; 0 switches it off.
      gamma: discount factor.
      gae_lambda: decay of the generalised advantage estimate.
      clip_eps_low, clip_eps_high: how far below and above 1 the probability ratio may go; inf leaves it alone.
      dual_clip: a bad token's objective is at least this many times its advantage; inf for no such floor.
      target_kl: threshold of the early stop, in nats per token (read when `TokenConfig.kl_early_stopping`).
      vf_coef: weight of the value loss, which is half the squared error.
      value_clip_eps: clip range of the value around the value at sampling time; inf leaves it alone.
      ent_coef: weight of the entropy bonus.
      missing_eos_score: the constant of `TokenConfig.missing_eos`.
      length_penalty: what the longest response costs, in units of score.
      length_start: share of the longest length up to which a response costs nothing.
      label_smoothing: share of preferences that are taken to be wrong (DPO).
    """

    learning_rate: Any = 1e-3
    final_lr_fraction: Any = 0.0
    adam_eps: Any = 1e-5
    max_grad_norm: Any = 1.0
    kl_coef: Any = 0.1
    kl_target: Any = 6.0
    kl_coef_factor: Any = 1.0
    kl_gain: Any = 0.0
    gamma: Any = 1.0
    gae_lambda: Any = 0.95
    clip_eps_low: Any = 0.2
    clip_eps_high: Any = 0.2
    dual_clip: Any = math.inf
    target_kl: Any = math.inf
    vf_coef: Any = 0.5
    value_clip_eps: Any = math.inf
    ent_coef: Any = 0.0
    missing_eos_score: Any = 0.0
    length_penalty: Any = 0.0
    length_start: Any = 0.5
    label_smoothing: Any = 0.0


_NON_NEGATIVE = Interval(0, math.inf, high_open=True)
_POSITIVE = Interval(0, math.inf, low_open=True, high_open=True)
_POSITIVE_OR_INF = Interval(0, math.inf, low_open=True)
_FINITE = Interval(-math.inf, math.inf, low_open=True, high_open=True)

INTERVALS: dict[str, Interval] = {
    "learning_rate": _NON_NEGATIVE,
    "final_lr_fraction": _NON_NEGATIVE,
    "adam_eps": _POSITIVE,
    "max_grad_norm": _POSITIVE_OR_INF,
    "kl_coef": _NON_NEGATIVE,
    "kl_target": _NON_NEGATIVE,
    "kl_coef_factor": Interval(1, math.inf, high_open=True),
    "kl_gain": Interval(0, 5, high_open=True),  # from 5 on the coefficient could reach 0
    "gamma": Interval(0, 1),
    "gae_lambda": Interval(0, 1),
    "clip_eps_low": _POSITIVE_OR_INF,
    "clip_eps_high": _POSITIVE_OR_INF,
    "dual_clip": Interval(1, math.inf, low_open=True),
    "target_kl": _POSITIVE_OR_INF,
    "vf_coef": _NON_NEGATIVE,
    "value_clip_eps": _POSITIVE_OR_INF,
    "ent_coef": _NON_NEGATIVE,
    "missing_eos_score": _FINITE,
    "length_penalty": _NON_NEGATIVE,
    "length_start": Interval(0, 1, high_open=True),
    "label_smoothing": Interval(0, 0.5, high_open=True),
}


_ONLINE = ("algorithm = 'ppo' or 'grpo'", lambda config: config.algorithm in ONLINE)
_PPO = ("algorithm = 'ppo'", lambda config: config.algorithm == "ppo")

# Hyperparameters that only some configs read; elsewhere a value of one's own is refused.
NEEDS: dict[str, tuple[str, Callable[[TokenConfig], Any]]] = {
    "kl_target": _ONLINE,
    "kl_coef_factor": _ONLINE,
    "kl_gain": _ONLINE,
    "gamma": _PPO,
    "gae_lambda": _PPO,
    "clip_eps_low": _ONLINE,
    "clip_eps_high": _ONLINE,
    "dual_clip": _ONLINE,
    "target_kl": ("kl_early_stopping = true", lambda config: config.kl_early_stopping),
    "vf_coef": _PPO,
    "value_clip_eps": _PPO,
    "ent_coef": _ONLINE,
    "missing_eos_score": ("missing_eos = 'replace' or 'subtract'", lambda config: config.missing_eos != "none"),
    "length_penalty": _ONLINE,
    "length_start": _ONLINE,
    "label_smoothing": ("algorithm = 'dpo'", lambda config: config.algorithm == "dpo"),
}


def check_hparams(config: TokenConfig, hparams: TokenHParams) -> None:
    """Refuses hyperparameters outside their range, ones that this config would not read, and controllers that cannot
    move. Traced values cannot be looked at and pass.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """
    concrete = {name: value for name, value in hparams._asdict().items() if not isinstance(value, jax.core.Tracer)}
    for name, value in concrete.items():
        if not jnp.issubdtype(np.asarray(value).dtype, np.number):
            raise ValueError(f"hparams.{name} = {value!r}: must be a number")
        values = np.atleast_1d(np.asarray(value, np.float64))
        wrong = values[~INTERVALS[name].contains(values)]
        if wrong.size:
            raise ValueError(f"hparams.{name} = {wrong.flat[0]:g}: must be in {INTERVALS[name]}")
        changed = values[values.astype(np.float32) != np.float32(TokenHParams._field_defaults[name])]
        if name in NEEDS and changed.size and not NEEDS[name][1](config):
            raise ValueError(f"hparams.{name} = {changed.flat[0]:g}: is read only with config.{NEEDS[name][0]}")
    _check_controllers({name: np.asarray(value, np.float64) for name, value in concrete.items()})
    if config.algorithm not in ONLINE and np.any(np.asarray(concrete.get("kl_coef", 1.0)) == 0):
        raise ValueError("hparams.kl_coef = 0: must be above 0: it scales the margin of a pair")


def _check_controllers(values: dict[str, np.ndarray]) -> None:
    """The coefficient follows one rule at most, and one that can move it."""
    gain, factor = (values.get(name, np.zeros(())) for name in ("kl_gain", "kl_coef_factor"))
    if np.any((gain > 0) & (factor > 1)):
        raise ValueError(
            f"hparams.kl_gain = {gain.max():g}: must be 0 with kl_coef_factor > 1: the coefficient follows one rule"
        )
    for name in ("kl_coef", "kl_target"):
        if name in values and np.any((values[name] == 0) & ((gain > 0) | (factor > 1))):
            raise ValueError(f"hparams.{name} = 0: must be above 0 with kl_gain > 0 or kl_coef_factor > 1")


def as_float32(hparams: TokenHParams) -> TokenHParams:
    """The hyperparameters as float32 arrays, whatever numbers they were given as."""
    return TokenHParams(*(jnp.asarray(value, jnp.float32) for value in hparams))


def config_from_mapping(settings: Mapping[str, Any]) -> TokenConfig:
    """A TokenConfig from names and values, as read from a file.

    Raises:
      ValueError: for an unknown name (with the nearest valid one) or an invalid value.
    """
    check_names("config", settings, [field.name for field in dataclasses.fields(TokenConfig)])
    return TokenConfig(**settings)


def hparams_from_mapping(settings: Mapping[str, Any]) -> TokenHParams:
    """TokenHParams from names and values, as read from a file.

    Raises:
      ValueError: for an unknown name (with the nearest valid one) or a value that is not a number.
    """
    return TokenHParams(**checked_numbers(settings, TokenHParams._fields))
