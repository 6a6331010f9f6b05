"""stable-baselines3, and sbx, which has its interface: one run, its environments stepped in this process.

Both have 64-64 tanh networks for vectors. The environments are Gymnasium's. Later seeds go on with the same model, so
that nothing is compiled again.
"""

import importlib
from typing import Any

from answering import Train, serve
from stable_baselines3.common.env_util import make_vec_env


def prepare(work: dict[str, Any]) -> Train:
    algorithm = importlib.import_module(work["module"]).PPO
    model = algorithm(
        "MlpPolicy",
        make_vec_env(work["env"], n_envs=work["num_envs"]),
        learning_rate=work["learning_rate"],
        n_steps=work["num_steps"],
        batch_size=work["num_envs"] * work["num_steps"] // work["num_minibatches"],
        n_epochs=work["num_epochs"],
        gamma=work["gamma"],
        gae_lambda=work["gae_lambda"],
        clip_range=work["clip_eps"],
        ent_coef=work["ent_coef"],
        vf_coef=work["vf_coef"],
        max_grad_norm=work["max_grad_norm"],
        policy_kwargs={"net_arch": {"pi": work["hidden_sizes"], "vf": work["hidden_sizes"]}},
        device="cpu",
    )

    def train(seed: int) -> dict[str, Any]:
        model.set_random_seed(seed)
        model.learn(work["total_timesteps"], reset_num_timesteps=False)
        return {}

    return train


if __name__ == "__main__":
    serve(prepare)
