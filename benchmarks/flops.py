"""FLOPs of the matrix products in a JAX program, from what it says and not from how it is compiled."""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def matrix_flops(jaxpr: Any) -> int:
    """Two a multiply-add; a `while` is one iteration, a `cond` all its branches, and elementwise work is left out.

    Args:
      jaxpr: such as `jax.make_jaxpr(function)(*args).jaxpr`.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            size = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * size * math.prod(equation.outvars[0].aval.shape)
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += repeats * sum(map(matrix_flops, jaxprs_in_params(equation.params)))
    return total
