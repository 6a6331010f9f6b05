"""RLHF on token sequences as whole runs in one program: PPO against a frozen reference, GRPO and DPO.

`train(config, hparams, key, shared)` scans `update`; a run is a pure function, so that seeds, coefficients of the KL to
the reference and reward models are axes of `jax.vmap`: a frontier of reward against KL is one call.

    types        the protocol of a model, tasks, and the shapes
    objectives   the maths, on `ops`
    config       the two kinds of settings
    model        a small transformer with a cache; checks: `check_lm`, for one's own
    sample       prefill and a scan over tokens
    reward       reward models, best of n, rewards in Python
    fitting      AdamW on data
    tasks        two tasks whose best policy is known exactly; names: one with a learned reward
    improve      epochs of minibatches; dpo: a step on pairs
    rlhf         init, update, run, train, evaluate
    preferences  the reference and the pairs
    segments     many runs over all local devices
"""

from purejaxppo.tokens import objectives, preferences, reward, tasks
from purejaxppo.tokens.checks import check_lm
from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.fitting import Fit
from purejaxppo.tokens.model import Gpt
from purejaxppo.tokens.rlhf import evaluate, init, run, train, update
from purejaxppo.tokens.sample import sample
from purejaxppo.tokens.types import LM, Pairs, Quality, Responses, Shared, Task, TokenMetrics, TokenState

__all__ = [
    "LM",
    "Fit",
    "Gpt",
    "Pairs",
    "Quality",
    "Responses",
    "Shared",
    "Task",
    "TokenConfig",
    "TokenHParams",
    "TokenMetrics",
    "TokenState",
    "check_lm",
    "evaluate",
    "init",
    "objectives",
    "preferences",
    "reward",
    "run",
    "sample",
    "tasks",
    "train",
    "update",
]
