"""Many runs of a task in segments, sharded over the local devices: what the host drives."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.devices import layout, mesh_of, shard
from purejaxppo.tokens import rlhf
from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.types import Quality, Shared, TokenMetrics, TokenState

CPU_WIDTH = 12  # runs side by side on a core; what that buys is measured by benchmarks/tokens.py
CAPACITY = 50  # updates of the longest segment


class Own(NamedTuple):
    """What each run has of its own, leaves [R, ...]; () where the runs share it."""

    hparams: TokenHParams
    score: Any = ()
    critic: Any = ()
    pairs: Any = ()


class Runs:
    """The compiled programs of R runs.

    Args:
      config: of all runs.
      common: what they share.
      own: what each has of its own, in place of what is shared.
    """

    def __init__(self, config: TokenConfig, common: Shared | None, own: Own) -> None:
        self.config, self.common, self.num_runs = config, common, len(own.hparams.kl_coef)
        mesh = mesh_of(self.num_runs)
        width, padded = layout(self.num_runs, mesh, CPU_WIDTH)
        self.rows = np.minimum(np.arange(padded), self.num_runs - 1)  # the last run, repeated, fills up
        self.own = self._pad(own)
        on_devices = functools.partial(shard, mesh, width)
        self._start = on_devices(functools.partial(_start, config), num_shared=1, num_by_run=2)
        self._segment = on_devices(functools.partial(_segment, config), num_shared=2, num_by_run=2)
        self._on_devices = on_devices

    def start(self, keys: jax.Array) -> TokenState:
        """The states before the first update, padded, of keys [R]."""
        return self._start(self.common, self.own, self._pad(keys))

    def advance(self, state: TokenState, num_updates: int) -> tuple[TokenState, TokenMetrics]:
        """At most `CAPACITY` updates of every run: the state, and metrics with NumPy leaves [R, num_updates]."""
        state, metrics = self._segment(jnp.int32(num_updates), self.common, self.own, state)
        return state, jax.tree.map(lambda leaf: np.asarray(leaf)[: self.num_runs, :num_updates], metrics)

    def evaluate(self, state: TokenState, keys: jax.Array, num_responses: int) -> Quality:
        """Responses of every run's policy, NumPy leaves [R, B, ...], without the log-probabilities of all tokens."""
        function = functools.partial(_evaluate, self.config, num_responses)
        program = self._on_devices(function, num_shared=1, num_by_run=3)
        quality = program(self.common, self.own, state, self._pad(keys))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: self.num_runs], quality)

    def take(self, state: TokenState) -> TokenState:
        """The states without the padding, NumPy leaves [R, ...]; of keys, their data."""
        data = state._replace(key=jax.random.key_data(state.key))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: self.num_runs], data)

    def put(self, state: TokenState) -> TokenState:
        """The states that `take` gave, padded again."""
        return self._pad(state._replace(key=jax.random.wrap_key_data(jnp.asarray(state.key))))

    def _pad(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[self.rows], tree)


def _shared(common: Shared | None, own: Own) -> Shared | None:
    if common is None:
        return None
    parts = {name: part for name, part in own._asdict().items() if name != "hparams" and jax.tree.leaves(part)}
    return common._replace(**parts)


def _start(config: TokenConfig, common: Shared | None, own: Own, key: jax.Array) -> TokenState:
    return rlhf.init(config, own.hparams, key, _shared(common, own))


def _segment(
    config: TokenConfig, num_updates: jax.Array, common: Shared | None, own: Own, state: TokenState
) -> tuple[TokenState, TokenMetrics]:
    """A number of updates that is known only when it runs, so that one program runs segments of every length."""
    one_update = jax.jit(functools.partial(rlhf.update, config), inline=True)
    shared = _shared(common, own)
    one = jax.eval_shape(one_update, own.hparams, state, shared)[1]
    blank = jax.tree.map(lambda leaf: jnp.zeros((CAPACITY, *leaf.shape), leaf.dtype), one)

    def step(index: jax.Array, carry: tuple[TokenState, TokenMetrics]) -> tuple[TokenState, TokenMetrics]:
        state, metrics = carry
        state, latest = one_update(own.hparams, state, shared)
        return state, jax.tree.map(lambda whole, leaf: whole.at[index].set(leaf), metrics, latest)

    return jax.lax.fori_loop(0, num_updates, step, (state, blank))


def _evaluate(
    config: TokenConfig, num_responses: int, common: Shared | None, own: Own, state: TokenState, key: jax.Array
) -> Quality:
    quality = rlhf.evaluate(config, state, key, num_responses, _shared(common, own))
    return quality._replace(responses=quality.responses._replace(log_probs=jnp.zeros(())))
