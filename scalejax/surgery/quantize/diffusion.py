"""Error diffusion: a matrix rounded column by column, each column's error passed on to those still to come.

For y = W x, with W [rows, columns] and inputs x of covariance H = sum x x^T, what counts is

    sum ||W x - Q x||^2 = trace((W - Q) H (W - Q)^T)

not the distance of Q from W. Let column j be rounded, w_j -> q_j, and let the columns behind it be free. The change of
these that makes up for the error best is, row by row and in closed form,

    W_k -= (w_j - q_j) / U_jj U_jk  for k > j,    U upper triangular with U^T U = H^-1

since row j of U is, but for a factor, row j of the inverse of H restricted to j, j + 1, ... . So one factorisation
serves all columns. Blocks along the columns share scales: these are chosen, from what the columns have become by then,
before the first column of their block is rounded, and stay.

H gets `damping` times the mean of its diagonal added to it, which bounds what directions without data may do.

Source: Frantar et al., "GPTQ", ICLR 2023 (the order of columns is that of the matrix); the formula for one column is
that of the Optimal Brain Surgeon (Hassibi & Stork, 1993).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from scalejax.errors import UserError
from scalejax.numerics import bits as float32
from scalejax.numerics import blocks
from scalejax.numerics.blocks import EncodedBlocks
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.quantize import Quantized
from scalejax.surgery.quantize import calibration as calibrations
from scalejax.surgery.quantize.calibration import Calibration

DAMPING = 0.01

_CHUNK = 2**24  # values that are rounded together


def factor(hessian: np.ndarray, damping: float = DAMPING) -> np.ndarray:
    """float64[n, n], U upper triangular with U^T U = (H + damping mean(diag H))^-1.

    Args:
      hessian: float[n, n], symmetric and positive semidefinite.
      damping: Above 0.

    Raises:
      UserError: H is not finite, or cannot be factorised even so.
    """
    if damping <= 0:
        raise UserError(f"--damping must be above 0; got {damping}. 0.01 is usual.")
    whole = np.array(hessian, np.float64)
    mean = float(np.trace(whole)) / len(whole)
    if not np.isfinite(mean):
        raise UserError("error diffusion: the calibration text gives activations that are not finite. Check the model.")
    whole[np.diag_indices_from(whole)] += damping * mean if mean > 0 else 1.0
    # H = R R^T with R upper triangular: Cholesky's of H with both axes turned round. Then U = R^-1.
    try:
        lower = np.linalg.cholesky(whole[::-1, ::-1])
    except np.linalg.LinAlgError as error:
        raise UserError(
            f"error diffusion: the covariance of activations is not positive definite with a damping of {damping}. "
            "Take more text, or a larger damping."
        ) from error
    return scipy.linalg.solve_triangular(lower[::-1, ::-1], np.eye(len(whole)), lower=False)


def diffuse(
    weight: jax.Array,
    upper: np.ndarray,
    format: BlockFormat,
    calibration: Calibration,
    tensor_scale: jax.Array | None = None,
) -> Quantized:
    """Rounds a matrix, passing errors on.

    Args:
      weight: float32[rows, columns].
      upper: float[columns, columns] of `factor`.
      format: Of the blocks along the columns; a last block is padded with zeros.
      calibration: How the scales of a block are chosen.
      tensor_scale: float32[] for NVFP4; None = chosen from the weight.
    """
    rows, columns = weight.shape
    scale = tensor_scale
    if scale is None:
        scale = calibrations.choose_tensor_scale(weight, format, calibration)
    padding = -columns % format.k1
    whole = jnp.pad(jnp.asarray(upper, jnp.float32), ((0, padding), (0, padding)))
    behind = jnp.arange(columns + padding) >= columns
    whole = whole + jnp.diag(behind.astype(jnp.float32))  # padded columns have no errors to pass on
    step = max(1, _CHUNK // columns)
    parts = [
        _diffuse(
            jnp.pad(weight[start : start + step], ((0, 0), (0, padding))),
            whole,
            scale,
            calibrations.ranks(columns, format, calibration),
            format,
            calibration,
        )
        for start in range(0, rows, step)
    ]
    return calibrations.join(parts, format, columns, scale)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _diffuse(
    weight: jax.Array,
    upper: jax.Array,
    tensor_scale: jax.Array | None,
    percentiles: jax.Array,
    format: BlockFormat,
    calibration: Calibration,
) -> EncodedBlocks:
    """Codes [rows, blocks, k1 / k2, k2] and scales alike."""
    rows, columns = weight.shape
    k1, k2 = format.k1, format.k2
    within = jnp.arange(k1)

    def block(weight: jax.Array, number: jax.Array) -> tuple[jax.Array, EncodedBlocks]:
        start = number * k1
        own = jax.lax.dynamic_slice(weight, (0, start), (rows, k1))
        passed = jax.lax.dynamic_slice(upper, (start, 0), (k1, columns))
        inside = jax.lax.dynamic_slice(passed, (0, start), (k1, k1))
        fixed = calibrations.choose_scales(
            float32.float_bits(own).reshape(rows, 1, k1 // k2, k2),
            format,
            calibration,
            tensor_scale,
            jax.lax.dynamic_slice(percentiles, (number,), (1,)),
        )

        def column(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            own, errors, codes = carry
            exact = jax.lax.dynamic_slice(own, (0, j), (rows, 1))
            subs = fixed.sub_scales
            here = fixed._replace(
                sub_scales=None if subs is None else jax.lax.dynamic_slice_in_dim(subs, j // k2, 1, axis=2)
            )
            words = float32.float_bits(exact).reshape(rows, 1, 1, 1)
            code = blocks.encode_under(words, here, format, rounding="ties_to_even", tensor_scale=tensor_scale)
            decoded = blocks.decode_blocks(here._replace(codes=code), format, tensor_scale)
            inexact = jax.lax.bitcast_convert_type(decoded, jnp.float32).reshape(rows, 1)
            row = jax.lax.dynamic_slice(inside, (j, 0), (1, k1))
            error = (exact - inexact) / jax.lax.dynamic_slice(row, (0, j), (1, 1))
            own = own - error * jnp.where(within > j, row[0], 0.0)[None, :]
            errors = jax.lax.dynamic_update_slice(errors, error, (0, j))
            codes = jax.lax.dynamic_update_slice(codes, code.reshape(rows, 1), (0, j))
            return own, errors, codes

        empty = (own, jnp.zeros((rows, k1), jnp.float32), jnp.zeros((rows, k1), jnp.int32))
        _, errors, codes = jax.lax.fori_loop(0, k1, column, empty)
        later = jnp.where((jnp.arange(columns) >= start + k1)[None, :], passed, 0.0)
        weight = weight - jnp.matmul(errors, later, precision=jax.lax.Precision.HIGHEST)
        return weight, fixed._replace(codes=codes.reshape(rows, 1, k1 // k2, k2))

    _, made = jax.lax.scan(block, weight, jnp.arange(columns // k1))  # [blocks, rows, 1, ...]
    return jax.tree.map(lambda array: jnp.moveaxis(array[:, :, 0], 0, 1), made)


def output_error(exact: np.ndarray, inexact: np.ndarray, hessian: np.ndarray) -> float:
    """sum ||W x - Q x||^2 = trace((W - Q) H (W - Q)^T), of float[rows, columns] and H float[columns, columns]."""
    apart = np.asarray(exact, np.float64) - np.asarray(inexact, np.float64)
    return float(np.einsum("ij,ij->", apart @ np.asarray(hessian, np.float64), apart))
