"""Multi-layer perceptron."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import jax
from flax import nnx
from jax.typing import DTypeLike

from scalejax.errors import UserError, check_one_of, check_several, check_whole
from scalejax.nn.dropout import dropout
from scalejax.nn.linear import Linear
from scalejax.numerics.dtypes import FLOAT32, Dtypes

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

Activation = Literal["relu", "gelu", "silu", "linear"]

_ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu, "linear": lambda x: x}


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The activation of that name, element by element."""
    return _ACTIVATIONS[activation](x)


def check_mlp(name: str, *, activation: str = "relu", dropout: float = 0.0, **widths: Sequence[int]) -> None:
    """Refuses what no MLP has, by the names of the fields that say it.

    Args:
      name: The config that has them, for messages.
      activation: Of its hidden layers.
      dropout: After them.
      **widths: By field.

    Raises:
      UserError: widths that are no tuple, a width below 1, another activation, dropout outside [0, 1).
    """
    for field, sizes in widths.items():
        check_several(f"{name}: {field}", sizes, "256")
        for size in sizes:
            check_whole(f"{name}: {field}", size, 1)
    check_one_of(f"{name}: activation", activation, get_args(Activation))
    if not 0.0 <= dropout < 1.0:
        raise UserError(f"{name}: dropout must lie in [0, 1); got {dropout}.")


class Mlp(nnx.Module):
    """Linear layers with an activation, then dropout, after each but the last.

    Hidden matrices start with gain 2 (1 if the activation is linear), the last with gain 1, biases at zero.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        rngs: nnx.Rngs,
        activation: Activation = "relu",
        final_activation: Activation = "linear",
        dropout_rate: float = 0.0,
        dtypes: Dtypes = FLOAT32,
        out_dtype: DTypeLike | None = None,
    ):
        """Creates the layers.

        Args:
          sizes: Width of the input, of each hidden layer, and of the output; at least two.
          rngs: Source of the "params" key.
          activation: After each hidden layer.
          final_activation: After the last layer.
          dropout_rate: After each hidden activation.
          dtypes: Of the parameters, and of the products' operands.
          out_dtype: Dtype of the last layer's result; None = that of its operands.
        """
        check_mlp("Mlp", activation=activation, dropout=dropout_rate, sizes=sizes)
        check_one_of("Mlp: final_activation", final_activation, get_args(Activation))
        last = len(sizes) - 2
        self.layers = nnx.List(
            [
                Linear(
                    n_in,
                    n_out,
                    rngs=rngs,
                    gain=1.0 if (final_activation if i == last else activation) == "linear" else 2.0,
                    dtypes=dtypes,
                    out_dtype=out_dtype if i == last else None,
                )
                for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes))
            ]
        )
        self.activation: Activation = activation
        self.final_activation: Activation = final_activation
        self.dropout_rate = dropout_rate

    def __call__(
        self, x: "Float[Array, 'batch inputs']", *, key: jax.Array | None = None
    ) -> "Float[Array, 'batch outputs']":
        """x: float[B, sizes[0]] -> out_dtype[B, sizes[-1]]; `key` drives dropout, None = no dropout."""
        hidden = len(self.layers) - 1
        keys = [None] * hidden if key is None else list(jax.random.split(key, max(1, hidden)))
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < hidden:
                x = dropout(activate(x, self.activation), self.dropout_rate, keys[i])
        return activate(x, self.final_activation)
