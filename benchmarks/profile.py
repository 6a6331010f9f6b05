"""Where the time of one update goes, and how near its matrix products come to what this machine can do.

    python benchmarks/profile.py [--runs 16] [--repeats 5] [--out benchmarks/results/profile.md]

The pieces of an update are compiled apart, as `sweep` compiles the whole: each device its share of the runs, in blocks.
Each is repeated within its program on equal inputs, so that what it reads is as near in the cache as in the update.
The backward pass is the difference of the gradient's program and the forward one. What the pieces do not sum up to
stands in the table as the rest: fusion across pieces makes the whole cheaper, copies between them dearer.

FLOPs are those of the matrix products, two a multiply-add, counted from shapes. Peaks are those of batched matrix
products of the same shapes, timed in the same process in the same way: what is repeated reads a copy of its inputs,
which costs a small product more than a piece of many, so that a piece may be above "the peak of its shapes".
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this directory, from which this file would be imported as the standard library's `profile`

import argparse
import functools
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import purejaxppo as ppo
from purejaxppo import devices, plan
from purejaxppo.agent import envs, networks, rollout
from purejaxppo.agent import ppo as improver
from purejaxppo.config import as_float32
from purejaxppo.host import files
from purejaxppo.train import estimate, permutations, summarize
from purejaxppo.types import Improvement

ROOT = Path(__file__).parents[1]


class Piece(NamedTuple):
    """A part of one run's update."""

    function: Callable[..., Any]  # of the named inputs, for one run
    inputs: tuple[str, ...]  # names in what `prepare` gives


class Product(NamedTuple):
    """A matrix product of one run."""

    like: str  # what part of an update it stands for
    function: Callable[[jax.Array, jax.Array], jax.Array]
    left: tuple[int, int]
    right: tuple[int, int]

    @property
    def flops(self) -> int:
        """Two a multiply-add; the products differ in what they sum over, and not in their number."""
        return 2 * self.left[0] * self.left[1] * self.right[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="default: a block on every device")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls")
    parser.add_argument("--times", type=int, default=20, help="updates in a call")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "profile.md")
    arguments = parser.parse_args()
    ppo.use_all_cores()
    config = ppo.Config()
    runs = arguments.runs or plan.CPU_WIDTH * len(jax.local_devices())
    text = report(config, runs, *measure(config, runs, arguments.times, arguments.repeats))
    print(text)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)


def measure(config: ppo.Config, runs: int, times: int, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of each piece for all runs, and GFLOP/s of each shape over all devices."""
    mesh = devices.mesh_of(runs)
    width, padded = devices.layout(runs, mesh, plan.CPU_WIDTH)
    if padded != runs:
        raise SystemExit(f"profile.py: --runs {runs}: must fill the blocks of all devices; {padded} would")
    keys = jax.random.split(jax.random.key(0), runs)
    hparams = jax.tree.map(lambda value: jnp.full(runs, value), as_float32(ppo.HParams()))
    inputs = devices.shard(mesh, width, functools.partial(prepare, config), num_by_run=2)(hparams, keys)
    calls = {}
    for name, piece in pieces(config).items():
        arrays = [inputs[each] for each in piece.inputs]
        program = devices.shard(mesh, width, repeated(piece.function, times), num_by_run=len(arrays))
        calls[name] = functools.partial(program, *arrays)
    for name, product in products(config).items():
        arrays = [jax.random.normal(jax.random.key(1), (runs, *shape)) for shape in (product.left, product.right)]
        program = devices.shard(mesh, width, repeated(product.function, times * 16), num_by_run=2)
        calls[name] = functools.partial(program, *arrays)
    seconds = timed(calls, repeats)
    milliseconds = {name: 1e3 * seconds[name] / times for name in pieces(config)}
    rates = {
        name: 1e-9 * runs * times * 16 * product.flops / seconds[name] for name, product in products(config).items()
    }
    return milliseconds, rates


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median seconds of each call, taken in turn after one that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def repeated(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """`function` of the same inputs, computed `times` times one after another; the last result."""

    def run(*inputs: Any) -> Any:
        def body(index: jax.Array, _: Any) -> Any:
            return function(*jax.tree.map(lambda leaf: leaf[index % 2], copies))

        # Which of two equal copies is read depends on the index, so nothing can be computed once for all repetitions.
        # (The compiler for CPUs drops optimisation barriers before it moves what does not change out of loops.)
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), inputs)
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *inputs))
        return jax.lax.fori_loop(0, times, body, blank)

    return run


def prepare(config: ppo.Config, hparams: ppo.HParams, key: jax.Array) -> dict[str, Any]:
    """What the pieces of one run take, in the middle of training."""
    state, _ = ppo.update(config, hparams, ppo.init(config, hparams, key))
    _, transition = rollout.collect(config, *parts(config), state, key)
    batch = estimate(config, hparams, transition)
    return {
        "hparams": hparams,
        "key": jax.random.key_data(key),
        "state": state._replace(key=jax.random.key_data(key)),
        "transition": transition,
        "batch": batch,
        "minibatches": shuffle(config, key, batch),
        "gradients": jax.tree.map(lambda leaf: 1e-3 * leaf, state.params),
    }


def pieces(config: ppo.Config) -> dict[str, Piece]:
    """The whole update and its parts, in the order of the update."""
    env, network = parts(config)

    def whole(hparams: ppo.HParams, state: ppo.TrainState) -> Any:
        state, metrics = ppo.update(config, hparams, keyed(state))
        return state._replace(key=jax.random.key_data(state.key)), metrics

    def collect(state: ppo.TrainState) -> Any:
        state, transition = rollout.collect(config, env, network, keyed(state), keyed(state).key)
        return state._replace(key=jax.random.key_data(state.key)), transition

    def diagnose(hparams: ppo.HParams, state: ppo.TrainState, transition: ppo.Transition, batch: ppo.Batch) -> Any:
        found = improver.diagnose(hparams, network, state.params, batch)._asdict()
        rest = {name: jnp.zeros(()) for name in Improvement._fields if name not in found}
        improvement = Improvement(**found, **rest)
        return summarize(transition, batch, improvement, jnp.zeros(()), jnp.zeros(()), state.params)

    return {
        "whole": Piece(whole, ("hparams", "state")),
        "rollout": Piece(collect, ("state",)),
        "estimate": Piece(functools.partial(estimate, config), ("hparams", "transition")),
        "shuffle": Piece(
            lambda key, batch: shuffle(config, jax.random.wrap_key_data(key), batch),
            ("key", "batch"),
        ),
        "forward": Piece(functools.partial(forward, config, network), ("hparams", "state", "minibatches")),
        "gradient": Piece(functools.partial(gradient, config, network), ("hparams", "state", "minibatches")),
        "optimiser": Piece(functools.partial(optimise, config), ("hparams", "state", "gradients")),
        "diagnostics": Piece(diagnose, ("hparams", "state", "transition", "batch")),
    }


def shuffle(config: ppo.Config, key: jax.Array, batch: ppo.Batch) -> ppo.Batch:
    """The minibatches of all epochs, leaves [epochs * minibatches, size, ...]."""
    orders = permutations(key, config.num_epochs, config.num_rows)
    return jax.tree.map(lambda leaf: leaf[orders.reshape(-1, config.minibatch_size)], batch)


def forward(config: ppo.Config, network: Any, hparams: ppo.HParams, state: ppo.TrainState, batches: ppo.Batch) -> Any:
    """The loss of every minibatch."""
    return jax.lax.map(lambda batch: improver.loss(state.params, config, hparams, network, batch)[0], batches)


def gradient(config: ppo.Config, network: Any, hparams: ppo.HParams, state: ppo.TrainState, batches: ppo.Batch) -> Any:
    """The gradient of every minibatch; the last one."""

    def step(_: Any, batch: ppo.Batch) -> tuple[Any, None]:
        return jax.grad(lambda params: improver.loss(params, config, hparams, network, batch)[0])(state.params), None

    return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, state.params), batches)[0]


def optimise(config: ppo.Config, hparams: ppo.HParams, state: ppo.TrainState, gradients: Any) -> Any:
    """As many optimiser steps as an update has, along one gradient."""
    optimizer = improver.make_optimizer(hparams, hparams.learning_rate)

    def step(index: jax.Array, carry: Any) -> Any:
        params, opt_state = carry
        updates, opt_state = optimizer.update(jax.tree.map(lambda leaf: leaf[index % 2], copies), opt_state)
        return jax.tree.map(jnp.add, params, updates), opt_state

    copies = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), gradients)  # as in `repeated`
    steps = config.num_epochs * config.num_minibatches
    return jax.lax.fori_loop(0, steps, step, (state.params, state.opt_state))


def parts(config: ppo.Config) -> tuple[envs.Env, networks.ActorCritic]:
    """The environment and the network."""
    env = envs.make(config.env, config.env_params)
    return env, networks.make(config, env)


def keyed(state: ppo.TrainState) -> ppo.TrainState:
    """The state with its key as a key again; a barrier takes plain arrays only."""
    return state._replace(key=jax.random.wrap_key_data(state.key))


def layers(config: ppo.Config) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(inputs, outputs) of each layer of the actor and of the critic."""
    env, network = parts(config)
    sizes = (env.obs_shape[0], *config.hidden_sizes)
    hidden = list(itertools.pairwise(sizes))
    return [*hidden, (sizes[-1], network.actions.num_params)], [*hidden, (sizes[-1], 1)]


def work(config: ppo.Config) -> dict[str, int]:
    """FLOPs of the matrix products of one run and update, piece by piece."""
    actor, critic = (sum(2 * rows * columns for rows, columns in net) for net in layers(config))
    first = sum(2 * rows * columns for rows, columns in (layers(config)[0][0], layers(config)[1][0]))
    batch, samples = config.batch_size, config.batch_size * config.num_epochs
    counts = {
        "rollout": batch * (actor + 2 * critic),  # the critic on every state and on its successor
        "forward": samples * (actor + critic),
        "backward": samples * (2 * (actor + critic) - first),  # no gradient by the observations
        "diagnostics": batch * actor,
    }
    return counts | {"whole": sum(counts.values())}


def products(config: ppo.Config) -> dict[str, Product]:
    """The matrix products that peaks are taken from."""
    rows, hidden = config.minibatch_size, config.hidden_sizes[-1]
    return {
        "layer": Product("hidden layer, forward", lambda x, w: x @ w, (rows, hidden), (hidden, hidden)),
        "inputs": Product("its gradient by the input", lambda g, w: g @ w.T, (rows, hidden), (hidden, hidden)),
        "weights": Product("its gradient by the weights", lambda x, g: x.T @ g, (rows, hidden), (rows, hidden)),
        "step": Product(
            "hidden layer, one step of the rollout", lambda x, w: x @ w, (config.num_envs, hidden), (hidden, hidden)
        ),
        "large": Product("large, for comparison", lambda x, w: x @ w, (512, 512), (512, 512)),
    }


def peaks(config: ppo.Config, rates: dict[str, float]) -> dict[str, float]:
    """GFLOP/s of the hidden layers' products that a piece consists of, mixed as they are in it."""
    actor, critic = (sum(rows * columns for rows, columns in net) for net in layers(config))
    collecting = (actor / rates["step"] + 2 * critic / rates["layer"]) / (actor + 2 * critic)
    backward = (1 / rates["inputs"] + 1 / rates["weights"]) / 2
    return {
        "rollout": 1 / collecting,
        "forward": rates["layer"],
        "backward": 1 / backward,
        "diagnostics": rates["layer"],
    }


def report(config: ppo.Config, runs: int, milliseconds: dict[str, float], rates: dict[str, float]) -> str:
    """The tables as Markdown."""
    whole = milliseconds["whole"]
    times = {name: value for name, value in milliseconds.items() if name not in ("whole", "gradient")}
    times["backward"] = milliseconds["gradient"] - milliseconds["forward"]
    order = ("rollout", "estimate", "shuffle", "forward", "backward", "optimiser", "diagnostics")
    lines = [
        "# Where an update's time goes",
        "",
        f"{runs} runs of {config.env}, {config.num_envs} x {config.num_steps} steps, {config.num_epochs} epochs x "
        f"{config.num_minibatches} minibatches, on {len(jax.local_devices())} devices. jax {jax.__version__}, Python "
        f"{platform.python_version()}, {files.machine()}.",
        "",
        "| piece | ms an update | share | MFLOP a run | GFLOP/s | of the peak of its shapes |",
        "|---|---|---|---|---|---|",
    ]
    counts, limits = work(config), peaks(config, rates)
    lines += [row(name, times[name], whole, runs, counts.get(name), limits.get(name)) for name in order]
    rest = whole - sum(times[name] for name in order)
    lines.append(row("the rest", rest, whole, runs, None, None))
    lines.append(row("whole", whole, whole, runs, counts["whole"], None))
    lines += ["", "| matrix product of a run | shapes | GFLOP/s, all devices |", "|---|---|---|"]
    for name, product in products(config).items():
        shapes = " and ".join(f"{rows} x {columns}" for rows, columns in (product.left, product.right))
        lines.append(f"| {product.like} | {shapes} | {rates[name]:.1f} |")
    lines += ["", f"{1e3 * runs * config.batch_size / whole:,.0f} environment steps/s."]
    return "\n".join(lines) + "\n"


def row(name: str, time_ms: float, whole: float, runs: int, count: int | None, limit: float | None) -> str:
    """A line of the table."""
    rate = None if count is None else 1e-6 * runs * count / time_ms
    cells = [name, f"{time_ms:.2f}", f"{time_ms / whole:.0%}"]
    cells.append("-" if count is None else f"{1e-6 * count:.2f}")
    cells.append("-" if rate is None else f"{rate:.1f}")
    cells.append("-" if rate is None or limit is None else f"{rate / limit:.0%}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
