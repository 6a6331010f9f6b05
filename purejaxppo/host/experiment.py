"""One experiment: what a configuration file says. Read from and written to TOML."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from purejaxppo.config import Config, HParams, check_names, check_size, config_from_mapping, hparams_from_mapping


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Settings, and how many seeds of them to run.

    Attributes:
      num_seeds: independent runs.
      seed: of the whole experiment; run j draws from fold_in(key(seed), j).
      config: static settings.
      hparams: traced settings.
      eval_every: updates of `train` after which each run is evaluated, and after the last one; 0 for never.
      eval_episodes: episodes of an evaluation.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    num_seeds: int = 16
    seed: int = 0
    config: Config = dataclasses.field(default_factory=Config)
    hparams: HParams = dataclasses.field(default_factory=HParams)
    eval_every: int = 0
    eval_episodes: int = 32

    def __post_init__(self) -> None:
        check_size("num_seeds", self.num_seeds)
        check_size("seed", self.seed, lowest=0)
        check_size("eval_every", self.eval_every, lowest=0)
        check_size("eval_episodes", self.eval_episodes)
        if not self.eval_every and self.eval_episodes != Experiment.eval_episodes:
            raise ValueError(f"eval_episodes = {self.eval_episodes}: is read only with eval_every > 0")


def read(path: Path) -> Experiment:
    """The experiment of a TOML file.

    Raises:
      ValueError: for a file that cannot be read or is not TOML, an unknown name, or an invalid value.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file ({error})") from None
    check_names(str(path), settings, [field.name for field in dataclasses.fields(Experiment)])
    for table in ("config", "hparams"):
        if not isinstance(settings.setdefault(table, {}), dict):
            raise ValueError(f"{path}: {table} = {settings[table]!r}: must be a table")
    settings["config"] = config_from_mapping(settings["config"])
    settings["hparams"] = hparams_from_mapping(settings["hparams"])
    return Experiment(**settings)


def differences(a: Experiment, b: Experiment) -> list[str]:
    """The settings in which they differ, by their names: `config.num_envs`."""
    names = [name for name in vars(a) if name not in ("config", "hparams") and getattr(a, name) != getattr(b, name)]
    names += [f"config.{name}" for name in vars(a.config) if getattr(a.config, name) != getattr(b.config, name)]
    pairs = zip(HParams._fields, a.hparams, b.hparams, strict=True)
    return names + [f"hparams.{name}" for name, mine, theirs in pairs if float(mine) != float(theirs)]


def to_toml(experiment: Experiment) -> str:
    """Every setting, defaults included: reading it back gives an equal experiment."""
    return tomli_w.dumps(to_mapping(experiment))


def to_mapping(experiment: Experiment) -> dict[str, Any]:
    """Every setting by its name, in tables as in a file."""
    settings: dict[str, Any] = dataclasses.asdict(experiment)
    settings["config"]["env_params"] = dict(experiment.config.env_params)
    settings["hparams"] = {name: float(value) for name, value in experiment.hparams._asdict().items()}
    return settings
