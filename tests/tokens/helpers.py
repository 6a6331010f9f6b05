"""What several tests of the token layer share: a small model, a small task, and responses of many lengths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from purejaxppo.tokens import rlhf
from purejaxppo.tokens.config import TokenConfig, TokenHParams
from purejaxppo.tokens.model import Gpt
from purejaxppo.tokens.types import Responses, Shared, Task

EOS, PAD = 4, 5
MODEL = Gpt(vocab_size=6, eos_id=EOS, pad_id=PAD, context_len=8, num_layers=2, width=8, num_heads=2)
SMALL = dataclasses.replace(MODEL, num_layers=1)
RESPONSE_LEN = 4
# Three prompts of one token, two and three; the padding holds tokens that must not be looked at.
PROMPTS = np.array([[2, 4, 0], [3, 1, 2], [0, 1, 3]], np.int32)
PROMPT_MASK = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1]], bool)


@functools.cache
def params(model: Gpt = MODEL):
    """Of a model, moved from the start of a training, so that every bias matters."""
    return jax.tree.map(lambda leaf: leaf + 0.05, model.init(jax.random.key(0)))


def weighted_count(weight, responses: Responses) -> jax.Array:
    """The score of `TASK`: how often token 0 was written, times a weight."""
    return weight * jnp.sum((responses.tokens == 0) & responses.mask, axis=-1, dtype=jnp.float32)


TASK = Task(SMALL, RESPONSE_LEN, weighted_count)


def shared(**changes) -> Shared:
    """Of `TASK`."""
    return Shared(PROMPTS, PROMPT_MASK, params(SMALL), score=np.float32(1.0))._replace(**changes)


TINY = TokenConfig(task=TASK, num_updates=3, batch_size=12, num_epochs=2, num_minibatches=2)


def tiny(**changes) -> TokenConfig:
    """A run of three updates of twelve responses, unless told otherwise."""
    return dataclasses.replace(TINY, **changes)


@functools.cache
def compiled_train(config: TokenConfig):
    """`train` of this config, compiled once for all tests: (hparams, key, shared) -> (state, metrics)."""
    return jax.jit(functools.partial(rlhf.train, config))


@functools.cache
def batched_train(config: TokenConfig):
    """`train` of this config for many runs, whose hyperparameters and keys have a run axis."""
    return jax.jit(jax.vmap(functools.partial(rlhf.train, config), (0, 0, None)))


def floats(hparams: TokenHParams) -> TokenHParams:
    """The same numbers as arrays, so that another value is not another program."""
    return TokenHParams(*(np.float32(value) for value in hparams))
