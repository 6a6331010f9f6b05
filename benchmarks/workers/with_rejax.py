"""rejax: `jax.jit(jax.vmap(algo.train))` over keys, as its README trains many agents.

Its evaluations are off for speed (a callback that returns nothing); for learning it evaluates once, at the end. Its
learning rate is constant, it always clips the value loss, and it clips each element of the gradient instead of the
norm.
"""

import time
from typing import Any

import jax
import numpy as np
from answering import Train, serve
from rejax import PPO
from rejax.evaluate import evaluate


def prepare(work: dict[str, Any]) -> Train:
    algo = PPO.create(
        env=work["env"],
        agent_kwargs={"activation": work["activation"], "hidden_layer_sizes": work["hidden_sizes"]},
        eval_freq=work["total_timesteps"],
        skip_initial_evaluation=True,
        **{name: work[name] for name in ("total_timesteps", "num_envs", "num_steps", "num_epochs", "num_minibatches")},
        **{name: work[name] for name in ("learning_rate", "gamma", "gae_lambda", "clip_eps", "vf_coef", "ent_coef")},
        max_grad_norm=work["max_grad_norm"],
    )

    def at_the_end(algo: PPO, state: Any, key: jax.Array) -> Any:
        most = algo.env_params.max_steps_in_episode
        return evaluate(algo.make_act(state), key, algo.env, algo.env_params, work["num_episodes"], most)

    algo = algo.replace(eval_callback=at_the_end if work["num_episodes"] else lambda *_: ())
    one, compiled = work["num_runs"] == 1, None
    function = jax.jit(algo.train if one else jax.vmap(algo.train))

    def train(seed: int) -> dict[str, Any]:
        nonlocal compiled
        key = jax.random.PRNGKey(seed)
        keys = key if one else jax.random.split(key, work["num_runs"])
        started = time.perf_counter()
        compiled = compiled or function.lower(keys).compile()
        compile_seconds = time.perf_counter() - started
        _, evaluations = jax.block_until_ready(compiled(keys))
        told: dict[str, Any] = {"compile": compile_seconds}
        if work["num_episodes"]:
            told["returns"] = np.asarray(evaluations[1]).reshape(work["num_runs"], -1).mean(axis=1).tolist()
        return told

    return train


if __name__ == "__main__":
    serve(prepare)
