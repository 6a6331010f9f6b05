"""Scores of responses: a reward model trained on preferences by Bradley-Terry, best of n, and functions in Python."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.tokens.fitting import Fit, descend
from purejaxppo.tokens.model import read
from purejaxppo.tokens.objectives import last_token, response_mask
from purejaxppo.tokens.types import LM, Pairs, Responses


def init(model: LM, trunk: Any, key: jax.Array) -> Any:
    """A reward model: a language model's parameters, usually the reference's, and a linear head on its hidden layer.

    Args:
      trunk: parameters of `model`.
      key: of the head.

    Returns:
      Parameters for `score`, with gain 1 and bias 0.
    """
    slots = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    (_, hidden), _ = jax.eval_shape(model.apply, trunk, slots, slots, jax.ShapeDtypeStruct((1, 1), bool))
    head = jax.random.normal(key, hidden.shape[-1:]) / hidden.shape[-1]
    return {"trunk": trunk, "head": head, "gain": jnp.ones(()), "bias": jnp.zeros(())}


def score(model: LM, params: Any, responses: Responses) -> jax.Array:
    """[B] float32: gain * raw + bias, raw read from the hidden layer at the last token itself: EOS, if there is one."""
    hidden = read(model, params["trunk"], responses)
    last = last_token(responses.mask)[..., None]
    raw = jnp.sum(jnp.where(last, hidden, 0.0), axis=1) @ params["head"]
    return params["gain"] * raw + params["bias"]


def standardized(model: LM, params: Any, responses: Responses) -> Any:
    """The reward model with gain and bias such that these responses score mean 0 and standard deviation 1.

    Args:
      responses: of the reference, many.
    """
    raw = score(model, params | {"gain": jnp.ones(()), "bias": jnp.zeros(())}, responses)
    gain = 1.0 / (jnp.std(raw) + 1e-8)
    return params | {"gain": gain, "bias": -gain * jnp.mean(raw)}


def as_responses(model: LM, prompt: jax.Array, prompt_mask: jax.Array, tokens: jax.Array) -> Responses:
    """Given tokens [B, T] as responses that no policy of ours drew: their log-probabilities are 0."""
    mask, truncated = response_mask(tokens, model.eos_id)
    return Responses(prompt, prompt_mask, tokens, mask, truncated, jnp.zeros(tokens.shape), jnp.zeros(()))


def both(model: LM, pairs: Pairs) -> Responses:
    """The first responses of all pairs and then the second ones, [2N, ...]."""
    prompt, prompt_mask = (jnp.concatenate([leaf, leaf]) for leaf in (pairs.prompt, pairs.prompt_mask))
    return as_responses(model, prompt, prompt_mask, jnp.concatenate([pairs.first, pairs.second]))


def bradley_terry_loss(difference: jax.Array, preference: jax.Array) -> jax.Array:
    """-p log sigmoid(d) - (1 - p) log sigmoid(-d), the cross-entropy of a preference.

    Args:
      difference: [B] float32, score of the first response less that of the second.
      preference: [B] float32 in [0, 1], 1 where the first was chosen.

    Returns:
      [B] float32, nats.

    Source: Bradley and Terry 1952, "Rank analysis of incomplete block designs"; Ouyang et al. 2022, eq. 1.
    """
    return -preference * jax.nn.log_sigmoid(difference) - (1.0 - preference) * jax.nn.log_sigmoid(-difference)


def fit(
    model: LM, params: Any, pairs: Pairs, num_pairs: jax.typing.ArrayLike, key: jax.Array, settings: Fit
) -> tuple[Any, jax.Array]:
    """Trains a reward model on the first `num_pairs` pairs, by the Bradley-Terry loss. For `jit` and `vmap`.

    Args:
      params: as `init` makes them.
      pairs: [N, ...].
      num_pairs: () at most N; traced.
      key: () typed key.
      settings: static.

    Returns:
      Parameters, and the loss at each step [num_steps] float32, nats.
    """

    def loss(params: Any, batch: Pairs) -> jax.Array:
        raw = params | {"gain": jnp.ones(()), "bias": jnp.zeros(())}
        first, second = jnp.split(score(model, raw, both(model, batch)), 2)
        return jnp.mean(bradley_terry_loss(first - second, batch.preference))

    return descend(loss, params, pairs, num_pairs, key, settings)


def accuracy(model: LM, params: Any, pairs: Pairs) -> jax.Array:
    """() float32, share of pairs whose preferred response scores higher; pairs of equal strings are left out."""
    first, second = jnp.split(score(model, params, both(model, pairs)), 2)
    different = jnp.any(pairs.first != pairs.second, axis=-1)
    agrees = (first > second) == (pairs.preference > 0.5)
    return jnp.sum(agrees & different) / jnp.sum(different)


def num_equal_pairs(pairs: Pairs) -> int:
    """Pairs of equal strings, which teach nothing: to be counted and reported."""
    return int(np.sum(np.all(np.asarray(pairs.first) == np.asarray(pairs.second), axis=-1)))


def best_of_n(values: jax.Array, n: int, ranked_by: jax.Array) -> jax.Array:
    """Expected value of the response of the highest rank among `n`, drawn without replacement from those given.

    Unbiased and exact over the subsets: the k-th lowest of B is the best of C(k-1, n-1) of all C(B, n).

    Args:
      values: [B] float32, what is to be averaged, such as the gold reward.
      n: responses to choose from, at most B.
      ranked_by: [B] float32, what the choice is made by, such as the score.

    Returns:
      () float32, in units of `values`.

    Source: Nakano et al. 2021, "WebGPT", appendix I.
    """
    total = values.shape[0]
    if not 1 <= n <= total:
        raise ValueError(f"n = {n}: must be in [1, {total}], the number of responses")
    ranks = np.arange(1, total + 1, dtype=np.float64)
    # P(the k-th lowest is the best) by its recursion: weight_k / weight_{k+1} = (k - n + 1) / k, and n / B at the top
    steps = np.append(np.clip((ranks[:-1] - n + 1) / ranks[:-1], 0.0, None), n / total)
    weights = np.cumprod(steps[::-1])[::-1]
    return values[jnp.argsort(ranked_by)] @ jnp.asarray(weights, jnp.float32)


def from_python(function: Callable[[np.ndarray, np.ndarray, np.ndarray], Any]) -> Callable[[Any, Responses], jax.Array]:
    """A score, as `Task` takes it, from a Python function that is called on the host once an update.

    Args:
      function: (prompts [B, P], tokens [B, T], lengths [B], all int32 NumPy arrays; EOS counts) -> B numbers. With
        `vmap` B is all runs' responses together.

    Returns:
      (params, responses) -> [B] float32; the params are not looked at.

    Raises:
      ValueError: at run time, when it returns another number of scores.
    """

    def on_host(*arguments: Any) -> np.ndarray:
        prompt, tokens, lengths = (np.asarray(argument) for argument in arguments)
        prompt, tokens = (x.reshape(-1, x.shape[-1]) for x in (prompt, tokens))
        scores = np.asarray(function(prompt, tokens, lengths.reshape(-1)), np.float32)
        if scores.shape != (lengths.size,):
            raise ValueError(f"score function returned {scores.shape}: must be one number for each of {lengths.size}")
        return scores.reshape(lengths.shape)

    def python_score(params: Any, responses: Responses) -> jax.Array:
        del params
        lengths = jnp.sum(responses.mask, axis=-1, dtype=jnp.int32)
        shape = jax.ShapeDtypeStruct(lengths.shape, jnp.float32)
        arguments = (responses.prompt, responses.tokens, lengths)
        return jax.pure_callback(on_host, shape, *arguments, vmap_method="broadcast_all")

    return python_score
