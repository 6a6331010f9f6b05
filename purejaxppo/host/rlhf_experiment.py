"""What a configuration file of `purejaxppo rlhf` says. Read from and written to TOML."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from purejaxppo.config import Interval, check_names, check_size
from purejaxppo.tokens import fitting, tasks
from purejaxppo.tokens.config import (
    TokenConfig,
    TokenHParams,
    check_hparams,
    config_from_mapping,
    hparams_from_mapping,
)
from purejaxppo.tokens.fitting import Fit

REFERENCE = Fit(num_steps=3000, batch_size=128, learning_rate=5e-3)
REWARD = Fit(num_steps=600, batch_size=64, learning_rate=1e-3, weight_decay=0.05)


@dataclasses.dataclass(frozen=True)
class RlhfExperiment:
    """Runs of RLHF for every coefficient, reward model and seed; and what comes before them on the task "names".

    Attributes:
      num_seeds: runs of each setting; on "names" each has preference pairs and reward models of its own.
      seed: of the whole experiment.
      kl_coefs: coefficients of the KL to the reference; empty for the one of `hparams` alone.
      num_pairs: preference pairs that a reward model learns from, one model each ("names").
      sharpness: of the annotator, per unit of gold reward; inf for one without noise ("names").
      eval_responses: responses that each policy is measured by, at the end.
      config: static settings of all runs.
      hparams: traced settings of all runs.
      reference: how the reference is fitted to the names ("names").
      reward: how the reward models are fitted to the pairs ("names").

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    num_seeds: int = 4
    seed: int = 0
    kl_coefs: tuple[float, ...] = ()
    num_pairs: tuple[int, ...] = (1000,)
    sharpness: float = 1.5
    eval_responses: int = 1024
    config: TokenConfig = dataclasses.field(default_factory=TokenConfig)
    hparams: TokenHParams = dataclasses.field(default_factory=TokenHParams)
    reference: Fit = REFERENCE
    reward: Fit = REWARD

    def __post_init__(self) -> None:
        object.__setattr__(self, "kl_coefs", _numbers("kl_coefs", self.kl_coefs))
        object.__setattr__(self, "num_pairs", tuple(self.num_pairs))
        check_size("num_seeds", self.num_seeds)
        check_size("seed", self.seed, lowest=0)
        check_size("eval_responses", self.eval_responses, lowest=2)
        for num in self.num_pairs:
            check_size("num_pairs", num)
        if not self.num_pairs:
            raise ValueError("num_pairs = []: must be a list of at least one number of pairs")
        if not Interval(0, float("inf"), low_open=True).contains(np.asarray(self.sharpness)):
            raise ValueError(f"sharpness = {self.sharpness!r}: must be in (0, inf]")
        fitting.check("reference", self.reference)
        fitting.check("reward", self.reward)
        self._check_task()
        check_hparams(self.config, self.settings())

    def _check_task(self) -> None:
        """Refuses what only the task "names" reads."""
        tasks.make(self.config.task, self.config.task_params)
        for name in ("num_pairs", "sharpness", "reference", "reward"):
            value, default = getattr(self, name), getattr(RlhfExperiment, name)
            if self.config.task != "names" and value != default:
                raise ValueError(f"{name} = {value!r}: is read only with config.task = 'names'")

    def settings(self) -> TokenHParams:
        """The hyperparameters of every coefficient, NumPy leaves [coefficients] float32."""
        coefs = np.asarray(self.kl_coefs or (self.hparams.kl_coef,), np.float32)
        leaves = (np.full(coefs.shape, leaf, np.float32) for leaf in self.hparams)
        return TokenHParams(*leaves)._replace(kl_coef=coefs)


TABLES = ("config", "hparams", "reference", "reward")


def read(path: Path) -> RlhfExperiment:
    """The experiment of a TOML file.

    Raises:
      ValueError: for a file that cannot be read or is not TOML, an unknown name, or an invalid value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file ({error})") from None
    check_names(str(path), content, [field.name for field in dataclasses.fields(RlhfExperiment)])
    for table in TABLES:
        if not isinstance(content.setdefault(table, {}), dict):
            raise ValueError(f"{path}: {table} = {content[table]!r}: must be a table")
    for table in ("reference", "reward"):
        check_names(table, content[table], Fit._fields)
        content[table] = getattr(RlhfExperiment, table)._replace(**content[table])
    content["config"] = config_from_mapping(content["config"])
    content["hparams"] = hparams_from_mapping(content["hparams"])
    return RlhfExperiment(**content)


def to_toml(experiment: RlhfExperiment) -> str:
    """Every setting, defaults included: reading it back gives an equal experiment."""
    settings: dict[str, Any] = {field.name: getattr(experiment, field.name) for field in dataclasses.fields(experiment)}
    settings["config"] = dataclasses.asdict(experiment.config) | {"task_params": dict(experiment.config.task_params)}
    settings["hparams"] = {name: float(value) for name, value in experiment.hparams._asdict().items()}
    for table in ("reference", "reward"):
        settings[table] = getattr(experiment, table)._asdict()
    return tomli_w.dumps(settings)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise ValueError(f"{name} = {values!r}: must be a list of numbers")
    return tuple(float(value) for value in values)
