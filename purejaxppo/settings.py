"""Lists of settings: every combination of given values, random ones, or ones written out.

A *point* is a mapping of field names to values, of static fields and of traced ones alike, of runs on environments or
on token sequences. `product` and `draw`
make lists of points, `settings` turns points into what `sweep` takes; `grid` and `sample` do both for hyperparameters
alone, which need no second program.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo import kinds
from purejaxppo.config import check_names, check_size

if TYPE_CHECKING:
    from purejaxppo.kinds import AnyConfig, AnyHParams

Point = Mapping[str, Any]


class Range(NamedTuple):
    """Where a random value comes from; made by `uniform`, `log_uniform` and `choice`."""

    kind: str
    values: tuple[Any, ...]  # (low, high), or what is chosen from


def uniform(low: float, high: float) -> Range:
    """Uniformly between `low` and `high`."""
    return _interval("uniform", low, high)


def log_uniform(low: float, high: float) -> Range:
    """Between `low` and `high`, the logarithm uniformly.

    Raises:
      ValueError: unless 0 < low < high.
    """
    return _interval("log_uniform", low, high, positive=True)


def choice(values: Sequence[Any]) -> Range:
    """One of the values, each as likely as the others."""
    return Range("choice", tuple(_listed("choice", values)))


def product(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Every combination of the given values as a point, the last axis varying fastest.

    Raises:
      ValueError: for a field that does not exist (with the nearest one) or an empty list.
    """
    _check_fields(axes)
    lists = [_listed(name, values) for name, values in axes.items()]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*lists)]


def draw(key: jax.Array, num: int, **ranges: Range) -> list[dict[str, Any]]:
    """`num` random points. A point's value of a field depends on nothing but the key, the point's index and the field.

    Args:
      key: () typed key.
      num: number of points.
      **ranges: field name = `uniform(...)`, `log_uniform(...)` or `choice(...)`.

    Raises:
      ValueError: for a field that does not exist (with the nearest one) or what is not a range.
    """
    check_size("num_settings", num)
    _check_fields(ranges)
    columns = {}
    for name, values in ranges.items():
        if not isinstance(values, Range):
            raise ValueError(f"{name} = {values!r}: must be uniform(...), log_uniform(...) or choice(...)")
        field = _known_fields(ranges).index(name)
        keys = jax.vmap(lambda i, field=field: jax.random.fold_in(jax.random.fold_in(key, i), field))(jnp.arange(num))
        columns[name] = _quantiles(values, np.asarray(jax.vmap(jax.random.uniform)(keys), np.float64))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def settings(config: "AnyConfig", hparams: "AnyHParams", points: Sequence[Point]) -> tuple[tuple[Any, ...], Any]:
    """The base settings with each point's values in place of their own, for `sweep(*settings(...), num_seeds)`.

    Args:
      config: the static fields that a point does not name.
      hparams: the traced fields that a point does not name; scalars.
      points: one a setting.

    Returns:
      Configs, one a setting (equal ones are one object), and hparams with float32 leaves [num_settings].

    Raises:
      ValueError: for an empty list, a field that does not exist (with the nearest one), or a static value that is not
        allowed, whichever setting has it.
    """
    if not points:
        raise ValueError("settings: must be a list of at least one point")
    kind = kinds.of(config)
    configs: dict[Any, Any] = {}
    chosen = []
    for point in points:
        check_names("sweep", point, kind.fields)
        changed = dataclasses.replace(config, **{name: point[name] for name in point if name in kind.config_fields})
        chosen.append(configs.setdefault(changed, changed))
    return tuple(chosen), _hparams(hparams, points)


def grid(hparams: "AnyHParams", **axes: Sequence[float]) -> Any:
    """Every combination of the given values, the last axis varying fastest.

    Args:
      hparams: the values of all other fields.
      **axes: field name = list of values.

    Returns:
      `hparams` with float32 leaves [num_settings], for `jax.vmap` or `sweep`.

    Raises:
      ValueError: for an unknown field (with the nearest one) or an empty list.
    """
    check_names("hparams", axes, hparams._fields)
    return _hparams(hparams, product(**axes))


def sample(hparams: "AnyHParams", key: jax.Array, num: int, **ranges: Range) -> Any:
    """`num` random settings of hyperparameters; the other fields keep their values.

    Args and Raises: as `draw`.

    Returns:
      `hparams` with float32 leaves [num].
    """
    check_names("hparams", ranges, hparams._fields)
    return _hparams(hparams, draw(key, num, **ranges))


def varying(configs: "Sequence[AnyConfig]", hparams: "AnyHParams") -> dict[str, tuple[Any, ...]]:
    """The fields that differ between settings: name -> its value in each, static fields first."""
    columns: dict[str, tuple[Any, ...]] = {
        name: tuple(getattr(config, name) for config in configs) for name in kinds.of(hparams).config_fields
    }
    # The shortest number that is this float32: 0.0003, not 0.0003000000142492354.
    columns |= {
        name: tuple(float(str(value)) for value in np.asarray(leaf)) for name, leaf in hparams._asdict().items()
    }
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def _hparams(hparams: "AnyHParams", points: Sequence[Point]) -> Any:
    """float32 leaves [num_settings]: the traced values of each point in place of the base's."""
    columns = [
        [_number(f"hparams.{name}", point.get(name, base)) for point in points]
        for name, base in hparams._asdict().items()
    ]
    return kinds.of(hparams).hparams(*(jnp.asarray(column, jnp.float32) for column in columns))


def _quantiles(values: Range, uniforms: np.ndarray) -> list[Any]:
    """The values of a range at uniform numbers in [0, 1)."""
    if values.kind == "choice":
        return [values.values[int(u * len(values.values))] for u in uniforms]
    low, high = values.values
    if values.kind == "uniform":
        return list((low + uniforms * (high - low)).tolist())
    return list(np.exp(np.log(low) + uniforms * (np.log(high) - np.log(low))).tolist())


def _interval(kind: str, low: float, high: float, positive: bool = False) -> Range:
    low, high = _number(kind, low), _number(kind, high)
    if not (low < high < float("inf") and low > (0 if positive else -float("inf"))):
        raise ValueError(f"{kind} = [{low:g}, {high:g}]: must be {'0 < ' if positive else ''}low < high, both finite")
    return Range(kind, (low, high))


def _listed(name: str, values: Any) -> list[Any]:
    """The values of an axis as a list; NumPy and JAX arrays are accepted."""
    if isinstance(values, np.ndarray | jax.Array):
        values = values.tolist()
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{name} = {values!r}: must be a list of at least one value")
    return list(values)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not np.issubdtype(np.asarray(value).dtype, np.number) or np.ndim(value):
        raise ValueError(f"{name} = {value!r}: must be a number")
    return float(value)


def _check_fields(names: Mapping[str, Any]) -> None:
    check_names("sweep", names, _known_fields(names))


def _known_fields(names: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of runs on environments; and behind them, where that does not suffice, those of runs on tokens."""
    known = kinds.ENVIRONMENTS.fields
    if set(names) <= set(known) or not set(names) & set(kinds.tokens().fields) - set(known):
        return known
    return (*known, *(name for name in kinds.tokens().fields if name not in known))
