"""stable-baselines3, and sbx, which has its interface: one run, its environments stepped in this process.

Both have 64-64 tanh networks for vectors. The environments are Gymnasium's. Later seeds go on with the same model, so
that nothing is compiled again. stable-baselines3 computes in one thread or in PyTorch's default number, whichever is
faster here; products as small as these mostly lose by being shared.
"""

import importlib
import time
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

    if work["module"] == "stable_baselines3":
        take_faster_threads(model, 2 * work["num_envs"] * work["num_steps"])

    def train(seed: int) -> dict[str, Any]:
        model.set_random_seed(seed)
        model.learn(work["total_timesteps"], reset_num_timesteps=False)
        return {}

    return train


def take_faster_threads(model: Any, num_steps: int) -> None:
    """Sets PyTorch's number of threads to 1, if so many steps take less time with it than with the default."""
    import torch

    default, seconds = torch.get_num_threads(), {}
    for threads in (default, 1) * 2:  # the first time of each warms up
        torch.set_num_threads(threads)
        started = time.perf_counter()
        model.learn(num_steps)
        seconds[threads] = time.perf_counter() - started
    torch.set_num_threads(min(seconds, key=lambda threads: seconds[threads]))


if __name__ == "__main__":
    serve(prepare)
