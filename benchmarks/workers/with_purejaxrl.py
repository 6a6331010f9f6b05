"""A checkout of PureJaxRL: `jax.jit(jax.vmap(make_train(config)))` over keys, as its README trains many agents.

It returns metrics of every environment step. Its networks are 64-64, and it always clips the value loss.
"""

import sys
import time
from typing import Any

import jax
from answering import Train, serve

NAMES = {
    "LR": "learning_rate",
    "NUM_ENVS": "num_envs",
    "NUM_STEPS": "num_steps",
    "TOTAL_TIMESTEPS": "total_timesteps",
    "UPDATE_EPOCHS": "num_epochs",
    "NUM_MINIBATCHES": "num_minibatches",
    "GAMMA": "gamma",
    "GAE_LAMBDA": "gae_lambda",
    "CLIP_EPS": "clip_eps",
    "ENT_COEF": "ent_coef",
    "VF_COEF": "vf_coef",
    "MAX_GRAD_NORM": "max_grad_norm",
    "ACTIVATION": "activation",
    "ENV_NAME": "env",
}


def prepare(work: dict[str, Any]) -> Train:
    sys.path.insert(0, work["checkout"])
    from purejaxrl.ppo import make_train

    config = {name: work[ours] for name, ours in NAMES.items()} | {"ANNEAL_LR": False, "DEBUG": False}
    one, compiled = work["num_runs"] == 1, None
    function = jax.jit(make_train(config) if one else jax.vmap(make_train(config)))

    def train(seed: int) -> dict[str, Any]:
        nonlocal compiled
        key = jax.random.PRNGKey(seed)
        keys = key if one else jax.random.split(key, work["num_runs"])
        started = time.perf_counter()
        compiled = compiled or function.lower(keys).compile()
        compile_seconds = time.perf_counter() - started
        jax.block_until_ready(compiled(keys))
        return {"compile": compile_seconds}

    return train


if __name__ == "__main__":
    serve(prepare)
