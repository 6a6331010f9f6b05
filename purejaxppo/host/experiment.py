"""One experiment, or a sweep of them: what a configuration file says. Read from and written to TOML."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import jax
import tomli_w

from purejaxppo.config import Config, HParams, check_names, check_size, config_from_mapping, hparams_from_mapping
from purejaxppo.settings import Range, choice, draw, log_uniform, product, uniform

# The tables that make settings, and what each must be.
AXES = {
    "grid": "a table of lists",
    "random": "a table of ranges",
    "list": "an array of tables",
}
RANGES = {"uniform": uniform, "log_uniform": log_uniform}

Axes = tuple[str, Any]  # one of AXES, and the table as TOML has it
ONE: Axes = ("list", [{}])  # the base setting alone


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
    return Experiment(**_fields(path, _load(path)))


def read_sweep(path: Path) -> tuple[Experiment, Axes]:
    """The base settings of a TOML file, and the table that says which settings to make of them; without one, one.

    Raises:
      ValueError: as `read`; and for a file with more than one such table.
    """
    content = _load(path)
    kinds = [kind for kind in AXES if kind in content]
    if not kinds:
        return Experiment(**_fields(path, content)), ONE
    if len(kinds) > 1:
        raise ValueError(f"{path}: has {' and '.join(kinds)}: must have one of [grid], [random] and [[list]]")
    axes = content.pop(kinds[0])
    if not isinstance(axes, list if kinds[0] == "list" else dict):
        raise ValueError(f"{path}: {kinds[0]} must be {AXES[kinds[0]]}")
    return Experiment(**_fields(path, content)), (kinds[0], axes)


def points_of(axes: Axes) -> list[dict[str, Any]]:
    """The points that the table of a sweep means, one a setting.

    Raises:
      ValueError: for an unknown field (with the nearest one), an empty list, or what is no list, range or number.
    """
    kind, table = axes
    if kind == "grid":
        return product(**table)
    if kind == "list":
        if not table or not all(isinstance(point, dict) for point in table):
            raise ValueError(f"list = {table!r}: must be at least one table of fields")
        return table
    table = dict(table)
    num, seed = table.pop("num_settings", None), table.pop("seed", 0)
    check_size("random.num_settings", num)
    check_size("random.seed", seed, lowest=0)
    return draw(jax.random.key(seed), num, **{name: _range(name, value) for name, value in table.items()})


def check_base(base: Experiment, axes: Axes) -> None:
    """Raises ValueError for a base value that every setting replaces by its own: it would change nothing."""
    kind, table = axes
    default = Experiment()
    for name in table if kind != "list" else ():
        where = "config" if hasattr(default.config, name) else "hparams"
        value = getattr(getattr(base, where), name, None)
        if value != getattr(getattr(default, where), name, None):
            raise ValueError(f"{where}.{name} = {value!r}: is an axis of the sweep too; leave one of the two out")


def to_toml(experiment: Experiment, axes: Axes | None = None) -> str:
    """Every setting, defaults included: reading it back gives an equal experiment, or sweep if it has axes."""
    return tomli_w.dumps(to_mapping(experiment) | (dict([axes]) if axes else {}))


def to_mapping(experiment: Experiment) -> dict[str, Any]:
    """Every setting by its name, in tables as in a file."""
    settings: dict[str, Any] = dataclasses.asdict(experiment)
    settings["config"]["env_params"] = dict(experiment.config.env_params)
    settings["hparams"] = {name: float(value) for name, value in experiment.hparams._asdict().items()}
    return settings


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file ({error})") from None


def _fields(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The fields of an Experiment."""
    check_names(str(path), content, [field.name for field in dataclasses.fields(Experiment)])
    for table in ("config", "hparams"):
        if not isinstance(content.setdefault(table, {}), dict):
            raise ValueError(f"{path}: {table} = {content[table]!r}: must be a table")
    settings = {"config": config_from_mapping(content["config"]), "hparams": hparams_from_mapping(content["hparams"])}
    return content | settings


def differences(a: Experiment, b: Experiment) -> list[str]:
    """The settings in which they differ, by their names: `config.num_envs`."""
    names = [name for name in vars(a) if name not in ("config", "hparams") and getattr(a, name) != getattr(b, name)]
    names += [f"config.{name}" for name in vars(a.config) if getattr(a.config, name) != getattr(b.config, name)]
    pairs = zip(HParams._fields, a.hparams, b.hparams, strict=True)
    return names + [f"hparams.{name}" for name, mine, theirs in pairs if float(mine) != float(theirs)]


def _range(name: str, value: Any) -> Range:
    """`{ log_uniform = [low, high] }` and the like."""
    if isinstance(value, dict) and len(value) == 1:
        ((kind, values),) = value.items()
        if kind == "choice":
            return choice(values)
        if kind in RANGES and isinstance(values, list) and len(values) == 2:
            return RANGES[kind](*values)
    kinds = "{ uniform = [low, high] }, { log_uniform = [low, high] } or { choice = [...] }"
    raise ValueError(f"random.{name} = {value!r}: must be {kinds}")
