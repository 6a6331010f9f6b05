"""PPO for people who want statistics instead of anecdotes.

`train(config, hparams, key)` scans `update = collect -> estimate -> improve`: a whole run is one pure function, so
`jax.jit(jax.vmap(...))` trains hundreds of seeds and hyperparameters as one program. Below it stands the maths, pure
functions of arrays; above it everything with a side effect.

    config, types    the two kinds of settings; the shapes
    ops/             the maths
    devices          runs over all local devices
    agent/           envs, layers, distributions, networks, rollout, ppo, trpo: the parts of one update;
                     acting: a policy without them
    train            init, update, run, train, evaluate
    bandit           the same ops on a bandit small enough to compute everything exactly
    tokens/          the same on token sequences: RLHF-PPO, GRPO, DPO; `from purejaxppo import tokens`
    kinds            what sweeps ask of runs on environments, and of runs on tokens
    settings         grids, random ranges and lists -> settings
    plan             settings x seeds -> programs and chunks
    segments         the runs of one chunk, in pieces between which the host looks and writes
    sweep            all chunks
    estimates        interquartile means, bootstrap intervals, comparisons seed by seed
    results          statistics over runs, and over the settings of a sweep
    host/            command line, progress, files, clusters, pictures

Arrows point one way:
host -> {results, settings, sweep} -> segments -> plan -> kinds -> {train, bandit, tokens} -> agent
-> {ops, types, config, devices, estimates}.
"""

from purejaxppo import bandit, ops, results
from purejaxppo.config import Config, HParams
from purejaxppo.devices import use_all_cores
from purejaxppo.host.policy import Policy
from purejaxppo.host.sweeps import SweepResult, sweep
from purejaxppo.settings import choice, draw, grid, log_uniform, product, sample, settings, uniform
from purejaxppo.train import evaluate, init, run, train, update
from purejaxppo.types import Batch, Episodes, Metrics, TrainState, Transition

__all__ = [
    "Batch",
    "Config",
    "Episodes",
    "HParams",
    "Metrics",
    "Policy",
    "SweepResult",
    "TrainState",
    "Transition",
    "bandit",
    "choice",
    "draw",
    "evaluate",
    "grid",
    "init",
    "log_uniform",
    "ops",
    "product",
    "results",
    "run",
    "sample",
    "settings",
    "sweep",
    "train",
    "uniform",
    "update",
    "use_all_cores",
]
