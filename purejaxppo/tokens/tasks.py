"""Tasks by name, two of which are small enough to know the best policy exactly.

Every policy maximises J = E[score] - kl_coef * KL(pi || reference). The best one is
pi*(y) = reference(y) exp(score(y) / kl_coef) / Z, and J* = kl_coef * log Z; for any other policy
J* - J = kl_coef * KL(pi || pi*).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.config import check_names, check_size
from purejaxppo.tokens import names, reward
from purejaxppo.tokens.config import TokenConfig
from purejaxppo.tokens.model import Gpt, token_log_prob, uniform
from purejaxppo.tokens.types import Pairs, Responses, Shared, Task

SIZES = {"num_layers": 1, "width": 32, "num_heads": 2}
PARAMS: dict[str, dict[str, int]] = {
    "token-count": {"vocab_size": 8, "response_len": 8, **SIZES},
    "enum": SIZES,
    "names": {"response_len": 12, **SIZES},
}
LETTERS, ENUM_EOS, ENUM_PAD, ENUM_LEN = 3, 3, 4, 5


class Optimum(NamedTuple):
    """What the best policy reaches, or any other."""

    reward: Any  # () expected score
    kl: Any  # () KL to the reference, nats per response
    objective: Any  # () reward - kl_coef * kl


def resolve(config: TokenConfig, shared: Shared | None) -> tuple[Task, Shared]:
    """The task of a config, and what its runs share, as given or as the task has it.

    Raises:
      ValueError: for a task that cannot do without given arrays, or arrays that do not suit it.
    """
    task = config.task if isinstance(config.task, Task) else make(config.task, config.task_params)
    if shared is None:
        if task.shared is None:
            name = "of its own" if isinstance(config.task, Task) else repr(config.task)
            raise ValueError(f"config.task {name}: needs `shared`, the reference and the prompts that its runs share")
        with jax.ensure_compile_time_eval():  # numbers, also while a program is traced
            arrays = jax.tree.map(np.asarray, task.shared())
        return task, jax.tree.map(jnp.asarray, arrays)
    _check_shared(task, shared)
    return task, jax.tree.map(jnp.asarray, shared)


@functools.cache
def make(name: str, params: tuple[tuple[str, int], ...] = ()) -> Task:
    """A task by name.

    Args:
      name: "token-count", "enum" or "names".
      params: sizes as (name, value) pairs: num_layers, width and num_heads of the model; response_len of "token-count"
        and "names"; vocab_size, the tokens to choose from, of "token-count".

    Raises:
      ValueError: for a size that the task does not have, or that is not allowed.
    """
    check_names("task_params", dict(params), PARAMS[name])
    for field, value in params:
        check_size(f"config.task_params.{field}", value)
    return {"token-count": token_count, "enum": enum, "names": names.task}[name](**(PARAMS[name] | dict(params)))


def token_count(vocab_size: int = 8, response_len: int = 8, **sizes: Any) -> Task:
    """T tokens out of V, without an end; the score is how many of them are token 0. The reference is uniform."""
    if vocab_size < 2:
        raise ValueError(f"config.task_params.vocab_size = {vocab_size}: must be 2 or more")
    eos_id, pad_id = vocab_size, vocab_size + 1
    model = Gpt(vocab_size + 2, eos_id, pad_id, 1 + response_len, forbidden=(eos_id,), **(SIZES | sizes))

    @functools.cache
    def shared() -> Shared:
        return _one_prompt(model, _first_params(model, uniform))

    return Task(model, response_len, _count_of_token_0, shared=shared)


def token_count_optimum(vocab_size: int, response_len: int, kl_coef: float) -> Optimum:
    """Of `token_count`: every token is token 0 with probability p = e^(1/kl_coef) / (e^(1/kl_coef) + V - 1)."""
    odds = np.exp(1.0 / kl_coef)
    p = odds / (odds + vocab_size - 1)
    kl = np.log(vocab_size) + p * np.log(p) + (1 - p) * np.log((1 - p) / (vocab_size - 1))
    log_z = np.log((odds + vocab_size - 1) / vocab_size)
    return Optimum(response_len * p, response_len * kl, response_len * kl_coef * log_z)


def enum(**sizes: Any) -> Task:
    """Three letters and EOS, five tokens at most: 364 sequences. The reference is a random model.

    The score looks at the whole sequence: `enum_scores`. All pairs of sequences, with the exact probability that a
    Bradley-Terry annotator prefers the first, are there for DPO.
    """
    model = Gpt(5, ENUM_EOS, ENUM_PAD, 1 + ENUM_LEN, **(SIZES | sizes))

    @functools.cache
    def shared() -> Shared:
        sequences = enum_sequences()
        first, second = np.triu_indices(len(sequences), 1)
        difference = enum_scores(sequences)[first] - enum_scores(sequences)[second]
        preference = (1.0 / (1.0 + np.exp(-difference))).astype(np.float32)
        prompt = np.full((len(first), 1), ENUM_PAD, np.int32)
        pairs = Pairs(prompt, np.ones(prompt.shape, bool), sequences[first], sequences[second], preference)
        return _one_prompt(model, _first_params(model))._replace(pairs=pairs)

    return Task(model, ENUM_LEN, _enum_score, shared=shared)


@functools.cache
def enum_sequences() -> np.ndarray:
    """All 364 responses, [364, 5] int32: 0, 1 and 2 are letters; then EOS and PAD, or no EOS after five letters."""
    rows = [
        (*word, *((ENUM_EOS,) + (ENUM_PAD,) * ENUM_LEN))[:ENUM_LEN]
        for length in range(ENUM_LEN + 1)
        for word in itertools.product(range(LETTERS), repeat=length)
    ]
    return np.array(rows, np.int32)


def enum_scores(tokens: Any) -> Any:
    """[B] float32: 1.5 for an "ab" anywhere, 1 for all three letters, 0.5 if no two neighbours are equal, 0.5 for EOS.

    Args:
      tokens: [B, 5] int32, NumPy or JAX.
    """
    a, b = tokens[:, :-1], tokens[:, 1:]
    has_ab = ((a == 0) & (b == 1)).any(-1)
    has_all = (tokens == 0).any(-1) & (tokens == 1).any(-1) & (tokens == 2).any(-1)
    changes = ((a != b) | (a >= LETTERS)).all(-1)
    ends = (tokens == ENUM_EOS).any(-1)
    return (1.5 * has_ab + 1.0 * has_all + 0.5 * changes + 0.5 * ends).astype(np.float32)


def enum_log_probs(task: Task, params: Any) -> jax.Array:
    """[364] float32, log-probability of every response under a policy of the task, nats."""
    sequences = jnp.asarray(enum_sequences())
    prompt = jnp.full((len(sequences), 1), ENUM_PAD, jnp.int32)
    responses = reward.as_responses(task.model, prompt, jnp.ones(prompt.shape, bool), sequences)
    return jnp.sum(token_log_prob(task.model, params, responses), axis=-1)


def enum_exact(task: Task, params: Any, reference: Any, kl_coef: Any) -> Optimum:
    """What a policy reaches, exactly; can be differentiated."""
    log_probs, ref_log_probs = (enum_log_probs(task, each) for each in (params, reference))
    probs, scores = jnp.exp(log_probs), jnp.asarray(enum_scores(enum_sequences()))
    expected, kl = probs @ scores, probs @ (log_probs - ref_log_probs)
    return Optimum(expected, kl, expected - kl_coef * kl)


def enum_optimum(ref_log_probs: np.ndarray, kl_coef: float) -> Optimum:
    """Of the best policy, from the log-probabilities [364] of the reference; in float64."""
    scores = enum_scores(enum_sequences()).astype(np.float64)
    tilted = np.asarray(ref_log_probs, np.float64) + scores / kl_coef
    log_z = np.logaddexp.reduce(tilted)
    probs = np.exp(tilted - log_z)
    return Optimum(probs @ scores, probs @ (tilted - log_z - ref_log_probs), kl_coef * log_z)


def _count_of_token_0(params: Any, responses: Responses) -> jax.Array:
    return jnp.sum((responses.tokens == 0) & responses.mask, axis=-1, dtype=jnp.float32)


def _enum_score(params: Any, responses: Responses) -> jax.Array:
    return enum_scores(responses.tokens)


def _first_params(model: Gpt, change: Callable[[Any], Any] = lambda params: params) -> Any:
    """The parameters of key 0, as NumPy arrays: constants of a program that is being traced, not part of it."""
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, change(model.init(jax.random.key(0))))


def _one_prompt(model: Gpt, reference: Any) -> Shared:
    """The prompt of one token, PAD, which stands for the beginning."""
    prompts = np.full((1, 1), model.pad_id, np.int32)
    return Shared(prompts, np.ones(prompts.shape, bool), reference)


def _check_shared(task: Task, shared: Shared) -> None:
    """Raises ValueError unless prompts and reference are of this task's model."""
    if shared.prompts.shape != shared.prompt_mask.shape or shared.prompts.ndim != 2 or not shared.prompts.size:
        raise ValueError(
            f"shared.prompts {shared.prompts.shape} and prompt_mask {shared.prompt_mask.shape}: must be [M, P] both"
        )
    if not isinstance(shared.prompt_mask, jax.core.Tracer) and not np.asarray(shared.prompt_mask)[:, -1].all():
        raise ValueError("shared.prompt_mask: must be true in the last slot: prompts are padded on the left")
    model, length = task.model, shared.prompts.shape[1] + task.response_len
    jax.eval_shape(lambda: model.init_cache(1, length))  # a model refuses what is longer than its context
    wanted: Any = jax.eval_shape(model.init, jax.random.key(0))
    structure: Any = jax.tree.structure(wanted)
    if structure != jax.tree.structure(shared.reference):
        raise ValueError("shared.reference: its parameters are not those of the task's model")
    for (path, leaf), given in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(shared.reference), strict=True
    ):
        if given.shape != leaf.shape:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"shared.reference: {name} of shape {given.shape}: must be {leaf.shape}, as the policy has it "
                f"(vocabulary of {model.vocab_size})"
            )
