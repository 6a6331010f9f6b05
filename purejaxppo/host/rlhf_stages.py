"""What comes before RLHF: the names, the reference that is fitted to them, preference pairs, and reward models."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.host.rlhf_experiment import RlhfExperiment
from purejaxppo.tokens import names, preferences, reward, tasks
from purejaxppo.tokens.sample import draw_prompts, sample
from purejaxppo.tokens.segments import Own
from purejaxppo.tokens.types import Pairs, Responses, Shared, Task

LISTS = ("dist.male.first", "dist.female.first")  # of the package `names`, from the US Census of 1990
HELD_OUT = 10  # one name in so many is not learned from
NUM_REFERENCE = 4096  # responses of the reference that say what a standard deviation of a score is
REFERENCE_KEY, PAIRS_KEY, REWARD_KEY = 2**32 - 2, 2**32 - 3, 2**32 - 4  # no run's index


class Stages(NamedTuple):
    """What all runs stand on."""

    shared: Shared | None  # None for tasks that have it themselves
    scores: Any  # reward models, leaves [num_pairs, num_seeds, ...]; () without
    pairs: Any  # Pairs, leaves [num_pairs, num_seeds, N, ...]; () unless the policy learns from them
    report: dict[str, Any]  # what is worth knowing of it


def load_names() -> list[str]:
    """First names of the US Census of 1990, each once, in lower case, sorted.

    Raises:
      ValueError: where the package that carries them is not installed.
    """
    found = importlib.util.find_spec("names")
    if found is None or found.origin is None:
        raise ValueError("config.task = 'names': needs the package that carries the names: pip install names")
    folder = Path(found.origin).parent
    lines = [line for name in LISTS for line in (folder / name).read_text(encoding="ascii").splitlines()]
    return sorted({line.split()[0].lower() for line in lines if line.strip()})


def prepare(experiment: RlhfExperiment, say: Callable[[str], None]) -> Stages:
    """Everything before the runs.

    Args:
      experiment: the settings.
      say: called with what is being done, in a few words.

    Raises:
      ValueError: where the names are not to be had.
    """
    if experiment.config.task != "names":
        return Stages(None, (), (), {})
    task = tasks.make(experiment.config.task, experiment.config.task_params)
    words = [word for word in load_names() if len(word) <= task.response_len]
    prompt, tokens = names.encode(words, task.response_len)
    held_out = np.random.default_rng(experiment.seed).permutation(len(words)) % HELD_OUT == 0
    key = jax.random.key(experiment.seed)

    say(f"reference: {np.sum(~held_out):,} names")
    fit = jax.jit(functools.partial(preferences.fit_reference, task.model, settings=experiment.reference))
    reference, _ = fit(prompt[~held_out], tokens[~held_out], jax.random.fold_in(key, REFERENCE_KEY))
    measure = jax.jit(functools.partial(preferences.nll, task.model))
    ones = np.ones(prompt.shape, bool)
    unseen = reward.as_responses(task.model, prompt[held_out], ones[held_out], tokens[held_out])
    table = names.trigram_log_probs(prompt[~held_out], tokens[~held_out])
    shared = names.first_shared(table, prompt[~held_out], jax.tree.map(np.asarray, reference))
    shared, responses = _standardise_gold(task, shared, jax.random.fold_in(key, REFERENCE_KEY - 10))

    say(f"preference pairs: {experiment.num_seeds} x {max(experiment.num_pairs):,}")
    pairs = _draw_pairs(experiment, task, shared, key)
    equal = sum(reward.num_equal_pairs(jax.tree.map(lambda leaf, i=i: leaf[i], pairs)) for i in range(len(pairs.first)))
    say("reward models: " + ", ".join(f"{num:,}" for num in experiment.num_pairs) + " pairs each")
    scores, accuracy = _fit_rewards(experiment, task, shared, pairs, responses, key)
    agrees = functools.partial(preferences.agreement, task, shared.gold)
    report = {
        "num_names": len(words),
        "held_out_nats_per_character": float(measure(reference, unseen)),
        "equal_pairs": equal / experiment.num_seeds,
        "label_agreement": float(jnp.mean(jax.jit(jax.vmap(agrees))(pairs))),
        "reward_accuracy_on_all_pairs": dict(zip(map(str, experiment.num_pairs), accuracy, strict=True)),
    }
    kept = _by_number(pairs, experiment.num_pairs) if experiment.config.algorithm in ("dpo", "ipo") else ()
    return Stages(shared, jax.tree.map(np.asarray, scores), jax.tree.map(np.asarray, kept), report)


def own_of(experiment: RlhfExperiment, stages: Stages) -> Own:
    """What each run has of its own, leaves [num_pairs * coefficients * num_seeds, ...], seeds varying fastest."""
    settings = experiment.settings()
    num_models = len(experiment.num_pairs) if jax.tree.leaves(stages.scores) else 1
    num_coefs, num_seeds = len(settings.kl_coef), experiment.num_seeds
    model, coef, seed = np.unravel_index(
        np.arange(num_models * num_coefs * num_seeds), (num_models, num_coefs, num_seeds)
    )
    scores = jax.tree.map(lambda leaf: leaf[model, seed], stages.scores)
    return Own(
        jax.tree.map(lambda leaf: leaf[coef], settings),
        score=scores,
        critic=scores["trunk"] if scores and experiment.config.critic_from == "reward_model" else (),
        pairs=jax.tree.map(lambda leaf: leaf[model, seed], stages.pairs),
    )


def _standardise_gold(task: Task, shared: Shared, key: jax.Array) -> tuple[Shared, Any]:
    """Gold rewards with mean 0 and standard deviation 1 on responses of the reference, and those responses."""

    @jax.jit
    def draw(key: jax.Array) -> Responses:
        prompt_key, token_key = jax.random.split(key)
        prompt, mask = draw_prompts(shared.prompts, shared.prompt_mask, NUM_REFERENCE, 1, prompt_key)
        return sample(task.model, shared.reference, prompt, mask, task.response_len, token_key)

    responses = draw(key)
    raw = np.asarray(jax.jit(names.gold)(shared.gold, responses), np.float64)
    gold = shared.gold | {"mean": np.float32(raw.mean()), "std": np.float32(raw.std())}
    return shared._replace(gold=gold), responses


def _draw_pairs(experiment: RlhfExperiment, task: Task, shared: Shared, key: jax.Array) -> Pairs:
    """Leaves [num_seeds, N, ...]."""
    keys = jax.random.split(jax.random.fold_in(key, PAIRS_KEY), experiment.num_seeds)
    most = max(experiment.num_pairs)
    one = functools.partial(preferences.draw_pairs, task, shared, most, experiment.sharpness)
    return jax.jit(lambda keys: jax.lax.map(one, keys))(keys)


def _fit_rewards(
    experiment: RlhfExperiment, task: Task, shared: Shared, pairs: Pairs, responses: Any, key: jax.Array
) -> tuple[Any, list[float]]:
    """Reward models [num_pairs, num_seeds, ...], standardised on responses of the reference; and their accuracies."""
    keys = jax.random.split(jax.random.fold_in(key, REWARD_KEY), experiment.num_seeds)

    def one(num: jax.Array, pairs: Pairs, key: jax.Array) -> tuple[Any, jax.Array]:
        init_key, fit_key = jax.random.split(key)
        params = reward.init(task.model, jax.tree.map(jnp.asarray, shared.reference), init_key)
        params, _ = reward.fit(task.model, params, pairs, num, fit_key, experiment.reward)
        params = reward.standardized(task.model, params, responses)
        return params, reward.accuracy(task.model, params, pairs)

    @jax.jit
    def fit(nums: jax.Array, pairs: Pairs) -> tuple[Any, jax.Array]:
        return jax.lax.map(lambda num: jax.vmap(one, (None, 0, 0))(num, pairs, keys), nums)

    scores, accuracy = fit(jnp.asarray(experiment.num_pairs, jnp.int32), pairs)
    return scores, [float(value) for value in np.asarray(accuracy).mean(axis=1)]


def _by_number(pairs: Pairs, nums: tuple[int, ...]) -> Pairs:
    """The first pairs of each seed, repeated to one length: leaves [num_pairs, num_seeds, N, ...]."""
    rows = np.stack([np.arange(max(nums)) % num for num in nums])
    return jax.tree.map(lambda leaf: np.moveaxis(np.asarray(leaf)[:, rows], 1, 0), pairs)
