"""The maths: arrays in, arrays out, per element. The caller takes the mean or the masked mean."""

from purejaxppo.ops.activations import tanh, tanh_slope
from purejaxppo.ops.advantages import discounted_sums, gae, standardize
from purejaxppo.ops.choices import log_softmax, sum_choices
from purejaxppo.ops.kl import adapt_kl_coef, kl_categorical, kl_k1, kl_k2, kl_k3, kl_normal
from purejaxppo.ops.optimizer import clipped_adam
from purejaxppo.ops.stats import (
    Moments,
    clip_fraction,
    explained_variance,
    merge_moments,
    moments,
    standard_score,
)
from purejaxppo.ops.surrogates import clipped_surrogate, clipped_value_loss, surrogate, value_loss
from purejaxppo.ops.trust_region import (
    backtracking_line_search,
    conjugate_gradient,
    fisher_vector_product,
    natural_step,
)

__all__ = [
    "Moments",
    "adapt_kl_coef",
    "backtracking_line_search",
    "clip_fraction",
    "clipped_adam",
    "clipped_surrogate",
    "clipped_value_loss",
    "conjugate_gradient",
    "discounted_sums",
    "explained_variance",
    "fisher_vector_product",
    "gae",
    "kl_categorical",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_normal",
    "log_softmax",
    "merge_moments",
    "moments",
    "natural_step",
    "standard_score",
    "standardize",
    "sum_choices",
    "surrogate",
    "tanh",
    "tanh_slope",
    "value_loss",
]
