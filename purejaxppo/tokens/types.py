"""What the token layer passes around: a model's protocol, a task, and NamedTuples of arrays with a shape a field.

Axes: `B` responses of an update, `P` slots of a prompt, `T` tokens of a response, `V` vocabulary, `D` hidden width,
`M` prompts of a task, `N` preference pairs. A leading run axis comes from `jax.vmap` and stands in no shape here.

Prompts are left-padded, so that every response begins at the same slot; `prompt_mask` says which slots hold a token.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import optax

from purejaxppo.config import check_size


class LM(Protocol):
    """A causal language model: sizes and pure functions; hashable. `check_lm` tests one.

    `init(key)` makes parameters. `init_cache(batch, max_len)` makes a cache of fixed shapes for `max_len` slots.
    `apply(params, tokens, positions, kv_mask, cache, index)` takes tokens and positions [B, S] int32 and which of the L
    slots hold a token, kv_mask [B, L] bool; slot i sees slots up to i that do. Without a cache S = L; with one the S
    tokens are those of slots `index` onwards. It returns (logits [B, S, V], hidden [B, S, D]) and the cache.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    def init(self, key: jax.Array) -> Any: ...

    def init_cache(self, batch: int, max_len: int) -> Any: ...

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        kv_mask: jax.Array,
        cache: Any = None,
        index: Any = None,
    ) -> tuple[tuple[jax.Array, jax.Array], Any]: ...


class Responses(NamedTuple):
    """Prompts and what a policy wrote after them, frozen at sampling time and never recomputed."""

    prompt: jax.Array  # [B, P] int32, left-padded
    prompt_mask: jax.Array  # [B, P] bool
    tokens: jax.Array  # [B, T] int32, PAD after EOS
    mask: jax.Array  # [B, T] bool, up to and including EOS
    truncated: jax.Array  # [B] bool, no EOS within T
    log_prob: jax.Array  # [B, T] float32, nats, of the drawn tokens; 0 after EOS
    log_probs: jax.Array  # [B, T, V] float32, nats, of all tokens


Score = Callable[[Any, Responses], jax.Array]


class Shared(NamedTuple):
    """What all runs of a task share, JAX or NumPy arrays.

    With `jax.vmap` its `in_axes` are None; or 0 for the leaves that each run has its own of, such as a reward model.
    """

    prompts: Any  # [M, P] int32, left-padded; each is drawn with equal probability
    prompt_mask: Any  # [M, P] bool
    reference: Any  # parameters of the frozen reference policy, which every policy starts from
    score: Any = ()  # parameters of `Task.score`
    gold: Any = ()  # parameters of `Task.gold`
    critic: Any = ()  # parameters that a critic with `critic_from = "reward_model"` starts from
    pairs: Any = ()  # Pairs, for DPO


class Pairs(NamedTuple):
    """Pairs of responses to one prompt, and which of them is preferred; JAX or NumPy arrays."""

    prompt: Any  # [N, P] int32, left-padded
    prompt_mask: Any  # [N, P] bool
    first: Any  # [N, T] int32
    second: Any  # [N, T] int32
    preference: Any  # [N] float32, 1 where the first was chosen; or the probability of that


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be learned: a model, a reward, and how long a response may be. Static; hashable by its parts.

    Attributes:
      model: of the policy and of the reference.
      response_len: tokens of a response, T.
      score: (Shared.score, Responses) -> [B] float32, the reward that is optimised, of whole responses.
      gold: (Shared.gold, Responses) -> [B] float32, what is only measured; None where it is the score itself.
      shared: () -> Shared, of a task whose arrays need no training; else None, and they are given to `train`.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    model: LM
    response_len: int
    score: Score
    gold: Score | None = None
    shared: Callable[[], Shared] | None = None

    def __post_init__(self) -> None:
        check_size("task.response_len", self.response_len)
        check_ids(self.model)


def check_ids(model: LM) -> None:
    """Raises ValueError unless EOS and PAD are two different tokens of the vocabulary."""
    for name in ("eos_id", "pad_id"):
        if not 0 <= getattr(model, name) < model.vocab_size:
            raise ValueError(f"model.{name} = {getattr(model, name)}: must be in [0, vocab_size = {model.vocab_size})")
    if model.eos_id == model.pad_id:
        raise ValueError(
            f"model.pad_id = {model.pad_id}: must differ from eos_id, or the model would never learn to stop"
        )


class TokenState(NamedTuple):
    """Everything that a run carries from one update to the next; its leaves are all a checkpoint needs."""

    params: Any  # {"policy": ..., "critic": ...}; the reference is in none of them
    opt_state: optax.OptState
    kl_coef: jax.Array  # () float32, coefficient of the KL to the reference in the next update
    key: jax.Array  # () typed key of the run; update i draws from fold_in(key, i)
    update_index: jax.Array  # () int32, updates done


class Batch(NamedTuple):
    """What policy and critic learn from in one update."""

    responses: Responses  # without `log_probs`, which nothing here reads
    ref_log_prob: jax.Array  # [B, T] float32, nats, of the drawn tokens under the reference
    value: jax.Array  # [B, T] float32, at sampling time; zeros without a critic
    advantages: jax.Array  # [B, T] float32
    value_targets: jax.Array  # [B, T] float32


class Improvement(NamedTuple):
    """What the epochs of one update did. Losses and gradient norm are means over the minibatches run; the rest is over
    the full batch, after the last epoch run. All means over tokens are over those in the mask."""

    policy_loss: jax.Array  # () float32
    value_loss: jax.Array  # () float32, half the mean squared error; 0 without a critic
    grad_norm: jax.Array  # () float32, global norm before clipping
    approx_kl: jax.Array  # () float32, nats per token, k3 estimate of KL(rollout policy || new)
    clip_fraction: jax.Array  # () float32, share of tokens whose ratio is outside the band
    num_epochs: jax.Array  # () int32, epochs run


class TokenMetrics(NamedTuple):
    """One value per update and run. Of the batch, so of the policy before the update, unless `Improvement` says else.

    DPO draws no responses: what is said of them is NaN there, and `accuracy` and `margin` are NaN elsewhere.
    """

    score: jax.Array  # () float32, mean over responses, before what a missing EOS or the length costs
    gold: jax.Array  # () float32, mean over responses
    ref_kl: jax.Array  # () float32, nats per response: exact KL(pi || reference) of each state, summed over tokens
    ref_kl_k1: jax.Array  # () float32, nats per response: the sampled log ratios, summed over tokens
    length: jax.Array  # () float32, mean tokens of a response, EOS included
    truncated: jax.Array  # () float32, share of responses without EOS
    entropy: jax.Array  # () float32, nats per token
    policy_loss: jax.Array  # () float32
    value_loss: jax.Array  # () float32
    grad_norm: jax.Array  # () float32
    approx_kl: jax.Array  # () float32, nats per token
    clip_fraction: jax.Array  # () float32
    num_epochs: jax.Array  # () int32
    explained_variance: jax.Array  # () float32, of the value targets by the values at sampling time
    accuracy: jax.Array  # () float32, share of pairs whose preferred response has the higher log ratio
    margin: jax.Array  # () float32, nats, how much higher it is, mean
    kl_coef: jax.Array  # () float32, in this update
    learning_rate: jax.Array  # () float32
    all_finite: jax.Array  # () bool, parameters, losses and scores


class Quality(NamedTuple):
    """Responses of one policy, `B` of them, and what they are worth."""

    responses: Responses
    score: jax.Array  # [B] float32
    gold: jax.Array  # [B] float32
    ref_kl: jax.Array  # [B] float32, nats, summed over the tokens of the response
