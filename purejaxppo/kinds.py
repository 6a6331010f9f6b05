"""The two kinds of runs that a sweep can have, and what planning, training and keeping them ask of each."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from purejaxppo import config, train
from purejaxppo.agent import envs
from purejaxppo.config import Config, HParams
from purejaxppo.types import Metrics

if TYPE_CHECKING:
    from purejaxppo.tokens.config import TokenConfig, TokenHParams
    from purejaxppo.tokens.types import TokenMetrics, TokenState
    from purejaxppo.types import TrainState

    AnyConfig = Config | TokenConfig
    AnyHParams = HParams | TokenHParams
    AnyMetrics = Metrics | TokenMetrics
    AnyState = TrainState | TokenState


class Kind(NamedTuple):
    """A kind of run: pure functions with its config as their first argument, and the names of its numbers."""

    name: str
    config: Any  # class of the static settings
    hparams: Any  # NamedTuple of the traced settings
    metrics: Any  # NamedTuple of what an update reports
    check: Callable[..., None]  # (config, hparams): refuses what is invalid, before anything is compiled
    init: Callable[..., Any]  # (config, hparams, key) -> state
    update: Callable[..., tuple[Any, Any]]  # (config, hparams, state) -> (state, metrics)
    needs: Mapping[str, tuple[str, Callable[[Any], Any]]]  # hyperparameters that only some configs read
    from_mapping: Callable[[Mapping[str, Any]], Any]  # what a file says -> config
    num_bytes: Callable[[Any, Any], float]  # (config, state of one run): what a run works in, roughly
    is_known: Callable[[Any], bool]  # whether versions say what the code of a run with this config is

    @property
    def config_fields(self) -> tuple[str, ...]:
        """Names of the static settings."""
        return tuple(field.name for field in dataclasses.fields(self.config))

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of all settings, static ones first."""
        return (*self.config_fields, *self.hparams._fields)


def _num_bytes(config: Config, state: Any) -> float:
    """The rollout and the activations of one run; within a factor of four."""
    rollout = config.num_steps * state.obs.size * state.obs.dtype.itemsize
    activations = 4 * config.batch_size * sum(config.hidden_sizes)
    return float(4 * rollout + 2 * activations)


ENVIRONMENTS = Kind(
    name="environments",
    config=Config,
    hparams=HParams,
    metrics=Metrics,
    check=train.check,
    init=train.init,
    update=train.update,
    needs=config.NEEDS,
    from_mapping=config.config_from_mapping,
    num_bytes=_num_bytes,
    is_known=lambda config: envs.comes_with_gymnax(config.env, config.env_params),
)


@functools.cache
def tokens() -> Kind:
    """Runs on token sequences; their modules are imported when the first is asked for."""
    from purejaxppo.tokens import config, rlhf
    from purejaxppo.tokens.types import TokenMetrics

    def check(each: "TokenConfig", hparams: "TokenHParams") -> None:
        one = jax.tree.map(lambda leaf: leaf[0], hparams)
        config.check_hparams(each, hparams)
        jax.eval_shape(functools.partial(rlhf.init, each), one, jax.random.key(0))

    return Kind(
        name="tokens",
        config=config.TokenConfig,
        hparams=config.TokenHParams,
        metrics=TokenMetrics,
        check=check,
        init=rlhf.init,
        update=rlhf.update,
        needs=config.NEEDS,
        from_mapping=config.config_from_mapping,
        num_bytes=lambda config, state: math.inf,  # a model of one's own can take anything: compile to know
        is_known=lambda config: isinstance(config.task, str),
    )


def of(settings: "AnyConfig | AnyHParams") -> Kind:
    """The kind that settings are of, static or traced."""
    return ENVIRONMENTS if isinstance(settings, Config | HParams) else tokens()


def named(name: str) -> Kind:
    """The kind of that name."""
    return ENVIRONMENTS if name == ENVIRONMENTS.name else tokens()
