"""A small causal transformer with an explicit cache, and what is read from any model of the protocol `types.LM`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from purejaxppo.config import check_size
from purejaxppo.tokens.types import LM, Responses, check_ids

# In place of -inf: probability 0 to the last bit, and no NaN from 0 * inf in values or gradients.
NEVER = -1e9


class Cache(NamedTuple):
    """Keys and values of the slots so far, one a layer."""

    key: tuple[jax.Array, ...]  # [B, L, heads, D / heads] float32
    value: tuple[jax.Array, ...]  # likewise


@dataclasses.dataclass(frozen=True)
class Gpt:
    """A decoder-only transformer shaped like GPT-2: learned positions, layer norm first, tied embedding, no dropout.

    Attributes:
      vocab_size: tokens, V.
      eos_id: token that ends a response.
      pad_id: token that fills up, in front of a prompt and behind EOS.
      context_len: slots at most, prompt and response together.
      num_layers: blocks of attention and feed-forward.
      width: of the hidden layers, D.
      num_heads: of the attention; divides `width`.
      forbidden: tokens that are never written, besides PAD.

    Raises:
      ValueError: naming the field, its value and what is allowed.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
    """

    vocab_size: int
    eos_id: int
    pad_id: int
    context_len: int
    num_layers: int = 1
    width: int = 32
    num_heads: int = 2
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_len", "num_layers", "width", "num_heads"):
            check_size(f"model.{name}", getattr(self, name))
        if self.width % self.num_heads:
            raise ValueError(f"model.num_heads = {self.num_heads}: must divide width = {self.width}")
        check_ids(self)

    def init(self, key: jax.Array) -> Any:
        """Parameters; every matrix is normal with standard deviation 1 / sqrt(inputs), the residual ones smaller."""
        width, normal = self.width, jax.nn.initializers.normal
        embedding_key, position_key, *keys = jax.random.split(key, 2 + 4 * self.num_layers)

        def dense(key: jax.Array, inputs: int, outputs: int, scale: float = 1.0) -> dict[str, jax.Array]:
            return {"kernel": normal(scale * inputs**-0.5)(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}

        def norm() -> dict[str, jax.Array]:
            return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

        residual = (2 * self.num_layers) ** -0.5
        blocks = [
            {
                "attention_norm": norm(),
                "qkv": dense(keys[4 * i], width, 3 * width),
                "merge": dense(keys[4 * i + 1], width, width, residual),
                "mlp_norm": norm(),
                "expand": dense(keys[4 * i + 2], width, 4 * width),
                "contract": dense(keys[4 * i + 3], 4 * width, width, residual),
            }
            for i in range(self.num_layers)
        ]
        return {
            "embedding": normal(width**-0.5)(embedding_key, (self.vocab_size, width)),
            "positions": normal(width**-0.5)(position_key, (self.context_len, width)),
            "blocks": blocks,
            "norm": norm(),
        }

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """An empty cache of `max_len` slots."""
        self._check_len(max_len)
        empty = jnp.zeros((batch, max_len, self.num_heads, self.width // self.num_heads))
        return Cache((empty,) * self.num_layers, (empty,) * self.num_layers)

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        kv_mask: jax.Array,
        cache: Cache | None = None,
        index: Any = None,
    ) -> tuple[tuple[jax.Array, jax.Array], Cache | None]:
        """As `types.LM`. Tables are read by products with one-hot rows: under `vmap`, and backwards, that is faster
        than gathers and scatters as long as the vocabulary is small."""
        self._check_len(kv_mask.shape[1])
        x = jax.nn.one_hot(tokens, self.vocab_size) @ params["embedding"]
        x += jax.nn.one_hot(positions, self.context_len) @ params["positions"]
        slots = (0 if index is None else index) + jnp.arange(tokens.shape[1])
        visible = kv_mask[:, None, :] & (jnp.arange(kv_mask.shape[1]) <= slots[:, None])  # [B, S, L]
        kept = []
        for layer, block in enumerate(params["blocks"]):
            past = None if cache is None else (cache.key[layer], cache.value[layer])
            mixed, past = self._attend(block, _layer_norm(block["attention_norm"], x), visible, past, index)
            kept.append(past)
            x += mixed
            hidden = jax.nn.gelu(_dense(block["expand"], _layer_norm(block["mlp_norm"], x)))
            x += _dense(block["contract"], hidden)
        hidden = _layer_norm(params["norm"], x)
        logits = hidden @ params["embedding"].T
        if self.forbidden:
            logits = jnp.where(_is_any(self.vocab_size, self.forbidden), NEVER, logits)
        return (logits, hidden), None if cache is None else Cache(*zip(*kept, strict=True))

    def _attend(
        self, block: Any, x: jax.Array, visible: jax.Array, past: Any, index: Any
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        heads = (self.num_heads, self.width // self.num_heads)
        query, key, value = (
            part.reshape(*x.shape[:2], *heads) for part in jnp.split(_dense(block["qkv"], x), 3, axis=-1)
        )
        if past is not None:
            key, value = (
                jax.lax.dynamic_update_slice_in_dim(old, new, index, axis=1)
                for old, new in zip(past, (key, value), strict=True)
            )
        scores = jnp.einsum("bshk,blhk->bhsl", query, key) * heads[1] ** -0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, NEVER), axis=-1)
        mixed = jnp.einsum("bhsl,blhk->bshk", weights, value).reshape(x.shape)
        return _dense(block["merge"], mixed), (key, value)

    def _check_len(self, length: int) -> None:
        if length > self.context_len:
            raise ValueError(f"prompt and response of {length} tokens: longer than the context of {self.context_len}")


def uniform(params: Any) -> Any:
    """The parameters of a `Gpt` with its last layer norm at 0: every token that may be written is equally likely."""
    return params | {"norm": jax.tree.map(jnp.zeros_like, params["norm"])}


def forward(model: LM, params: Any, responses: Responses) -> tuple[jax.Array, jax.Array]:
    """The full causal pass over prompts and responses, read where each token of the response is predicted.

    Returns:
      Logits [B, T, V] float32, PAD's at `NEVER`, and the hidden layer [B, T, D].
    """
    start = responses.prompt.shape[1] - 1
    logits, hidden = _slots(model, params, responses, responses.tokens[:, :-1])
    return without_pad(model, logits[:, start:]), hidden[:, start:]


def read(model: LM, params: Any, responses: Responses) -> jax.Array:
    """The hidden layer [B, T, D] at the slots of the response's own tokens, after each was read."""
    _, hidden = _slots(model, params, responses, responses.tokens)
    return hidden[:, responses.prompt.shape[1] :]


def without_pad(model: LM, logits: jax.Array) -> jax.Array:
    """Logits [..., V] with PAD's at `NEVER`: it is never drawn."""
    return jnp.where(_is_any(model.vocab_size, (model.pad_id,)), NEVER, logits)


def prompt_positions(prompt_mask: jax.Array) -> jax.Array:
    """[B, P] int32: 0 at a prompt's first token, whatever stands before it."""
    return jnp.maximum(jnp.cumsum(prompt_mask, axis=-1, dtype=jnp.int32) - 1, 0)


def pick(log_probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """The log-probabilities [B, T] of the tokens [B, T] among those of all tokens [B, T, V].

    A product with one-hot rows, since the gradient of a gather is a scatter; nothing here is infinite.
    """
    return jnp.sum(log_probs * jax.nn.one_hot(tokens, log_probs.shape[-1]), axis=-1)


def token_log_prob(model: LM, params: Any, responses: Responses) -> jax.Array:
    """Log-probabilities [B, T] float32 of the tokens of responses, 0 after EOS, by a full pass."""
    log_probs = jax.nn.log_softmax(forward(model, params, responses)[0])
    return jnp.where(responses.mask, pick(log_probs, responses.tokens), 0.0)


def _slots(model: LM, params: Any, responses: Responses, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits and hidden layer of all slots, of prompts and the given response tokens [B, S]."""
    first = prompt_positions(responses.prompt_mask)
    following = first[:, -1:] + 1 + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    output, _ = model.apply(
        params,
        jnp.concatenate([responses.prompt, tokens], axis=1),
        jnp.concatenate([first, following], axis=1),
        jnp.concatenate([responses.prompt_mask, jnp.ones(tokens.shape, bool)], axis=1),
    )
    return output


def _is_any(size: int, tokens: tuple[int, ...]) -> jax.Array:
    """[size] bool, true at the given tokens."""
    return jnp.isin(jnp.arange(size), jnp.array(tokens))


def _dense(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def _layer_norm(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
