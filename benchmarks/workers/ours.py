"""This checkout: `sweep`, sharded over the cores, of which one run takes one."""

import functools
from typing import Any

import jax
import numpy as np
from answering import Train, serve

import purejaxppo as ppo


def prepare(work: dict[str, Any]) -> Train:
    ppo.use_all_cores(at_most=1 if work["num_runs"] == 1 else None)
    config = ppo.Config(
        env=work["env"],
        total_timesteps=work["total_timesteps"],
        num_envs=work["num_envs"],
        num_steps=work["num_steps"],
        num_epochs=work["num_epochs"],
        num_minibatches=work["num_minibatches"],
        hidden_sizes=tuple(work["hidden_sizes"]),
        activation=work["activation"],
    )
    hparams = ppo.HParams(
        learning_rate=work["learning_rate"],
        final_lr_fraction=1.0,
        gamma=work["gamma"],
        gae_lambda=work["gae_lambda"],
        clip_eps=work["clip_eps"],
        value_clip_eps=work["clip_eps"],
        vf_coef=work["vf_coef"],
        ent_coef=work["ent_coef"],
        max_grad_norm=work["max_grad_norm"],
    )

    def train(seed: int) -> dict[str, Any]:
        evaluated = bool(work["num_episodes"])
        result = ppo.sweep(config, hparams, work["num_runs"], seed, keep_state=evaluated)
        told: dict[str, Any] = {"compile": result.compile_seconds}
        if evaluated:
            told["returns"] = evaluate(config, jax.tree.map(lambda leaf: leaf[0], result.state), work, seed)
        return told

    return train


def evaluate(config: ppo.Config, state: ppo.TrainState, work: dict[str, Any], seed: int) -> list[float]:
    """The mean return of each run's episodes, of sampled actions."""
    of_run = functools.partial(ppo.evaluate, config, num_episodes=work["num_episodes"], deterministic=False)
    keys = jax.random.split(jax.random.key(seed + 2**20), work["num_runs"])
    episodes = jax.jit(jax.vmap(of_run))(state, keys)
    return np.asarray(episodes.episode_return).mean(axis=1).tolist()


if __name__ == "__main__":
    serve(prepare)
