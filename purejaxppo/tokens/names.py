"""Task C: given its first letter, write a first name that an annotator likes. The arrays; the files are read in host/.

The annotator (`gold`) likes soft-sounding names that still look like names. A reward model learns from pairs that the
reference wrote, and so never sees implausible ones: a policy that trusts it too far writes what it likes and nobody
else does.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.tokens import reward
from purejaxppo.tokens.model import Gpt
from purejaxppo.tokens.types import Responses, Shared, Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
EOS, PAD, VOCAB = 26, 27, 28  # PAD in front of a name is its beginning
SOFT = tuple(ALPHABET.index(letter) for letter in "lmn")
MAX_SOFT = 3.0  # soft letters beyond that earn nothing
PLAUSIBILITY, LENGTH_COST, LONG, NO_END_COST = 1.0, 0.5, 8, 1.0
# How much the trigram, the bigram and the unigram say together; the rest is uniform.
INTERPOLATION = (0.6, 0.25, 0.1)


def task(response_len: int = 12, **sizes: Any) -> Task:
    """Letters a to z, EOS, and PAD; the prompt is a name's first letter, the response the others."""
    model = Gpt(VOCAB, EOS, PAD, 1 + response_len, **sizes)
    return Task(model, response_len, functools.partial(reward.score, model), gold)


def encode(words: Sequence[str], response_len: int) -> tuple[np.ndarray, np.ndarray]:
    """First letters [n, 1] int32 and what follows them [n, T] int32: letters, EOS, PAD.

    Raises:
      ValueError: for a word that is not of lower-case letters, or does not fit.
    """
    for word in words:
        if not word or not set(word) <= set(ALPHABET):
            raise ValueError(f"name {word!r}: must be of the letters a to z")
        if len(word) > response_len:
            raise ValueError(f"name {word!r}: must have at most {response_len} letters, to end within the response")
    rows = [[ALPHABET.index(letter) for letter in word] for word in words]
    rests = [row[1:] + [EOS] + [PAD] * (response_len - len(row)) for row in rows]
    return np.array([row[:1] for row in rows], np.int32), np.array(rests, np.int32)


def decode(prompt: np.ndarray, tokens: np.ndarray) -> list[str]:
    """The names of prompts [B, 1] and responses [B, T]; one without an end has "..." behind it."""
    words = []
    for first, row in zip(np.asarray(prompt)[:, -1], np.asarray(tokens), strict=True):
        letters = [*row]
        end = letters.index(EOS) if EOS in letters else len(letters)
        words.append("".join(ALPHABET[i] for i in [first, *letters[:end]]) + "..." * (EOS not in letters))
    return words


def trigram_log_probs(prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The interpolated trigram of names, [28, 28, 28] float32 nats: log p(third | first, second).

    Args:
      prompt: [n, 1] int32.
      tokens: [n, T] int32.
    """
    counts = np.zeros((VOCAB, VOCAB, VOCAB))
    beginning = np.full(prompt.shape, PAD, np.int32)
    sequence = np.concatenate([beginning, prompt, tokens], axis=1)
    first, second, third = sequence[:, :-2], sequence[:, 1:-1], sequence[:, 2:]
    real = third != PAD
    np.add.at(counts, (first[real], second[real], third[real]), 1)
    uniform = np.full(VOCAB, 1.0 / (VOCAB - 1))
    uniform[PAD] = 0.0
    shares = [_normalised(counts), _normalised(counts.sum(0))[None], _normalised(counts.sum((0, 1)))[None, None]]
    mixed = sum(weight * share for weight, share in zip(INTERPOLATION, shares, strict=True))
    return np.log(mixed + (1.0 - sum(INTERPOLATION)) * uniform + 1e-12).astype(np.float32)


def gold(params: Any, responses: Responses) -> jax.Array:
    """[B] float32, in standard deviations of the reference's samples: soft letters, at most `MAX_SOFT`; plus the mean
    log-probability of a character under the trigram; less what a long name and one without an end cost.

    Args:
      params: {"log_probs": [28, 28, 28], "mean": (), "std": ()}.
    """
    prompt, tokens, mask = responses.prompt[:, -1:], responses.tokens, responses.mask
    second = jnp.concatenate([prompt, tokens[:, :-1]], axis=1)
    first = jnp.concatenate([jnp.full_like(prompt, PAD), second[:, :-1]], axis=1)
    length = jnp.sum(mask, axis=-1)
    log_probs = jnp.where(mask, jnp.asarray(params["log_probs"])[first, second, tokens], 0.0)
    plausible = jnp.sum(log_probs, axis=-1) / length
    soft = jnp.isin(tokens, jnp.array(SOFT)) & mask
    num_soft = jnp.sum(soft, axis=-1) + jnp.isin(prompt[:, 0], jnp.array(SOFT))
    raw = jnp.minimum(num_soft, MAX_SOFT) + PLAUSIBILITY * plausible
    raw -= LENGTH_COST * jnp.maximum(length - LONG, 0) + NO_END_COST * responses.truncated
    return (raw - params["mean"]) / params["std"]


def first_shared(log_probs: np.ndarray, prompt: np.ndarray, reference: Any) -> Shared:
    """What the runs share before there is a reward model; the gold reward is not yet standardised.

    Args:
      log_probs: of `trigram_log_probs`.
      prompt: [n, 1] int32, first letters of the names: each is asked for as often as it occurs.
      reference: parameters of the task's model.
    """
    gold_params = {"log_probs": log_probs, "mean": np.float32(0.0), "std": np.float32(1.0)}
    return Shared(prompt, np.ones(prompt.shape, bool), reference, gold=gold_params)


def _normalised(counts: np.ndarray) -> np.ndarray:
    """Shares along the last axis; zeros where there is nothing."""
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
