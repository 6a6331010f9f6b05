"""The maths: arrays in, arrays out, per element. The caller takes the mean or the masked mean."""

from purejaxppo.ops.advantages import gae, standardize
from purejaxppo.ops.kl import kl_categorical, kl_k1, kl_k2, kl_k3
from purejaxppo.ops.stats import clip_fraction, explained_variance
from purejaxppo.ops.surrogates import clipped_surrogate, clipped_value_loss, surrogate, value_loss

__all__ = [
    "clip_fraction",
    "clipped_surrogate",
    "clipped_value_loss",
    "explained_variance",
    "gae",
    "kl_categorical",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "standardize",
    "surrogate",
    "value_loss",
]
