"""What a run says of an exchange that compresses: its error, its residual, and whether that grows.

exchange_error      the norm of what devices left out of their messages in the first step of a window, the
                    squares of all of them added up, over the norm of the gradient that the exchange gave
exchange_residual   at the end of a window the norm of the errors that are kept for later steps, over the mean norm
                    of the gradient in the window; of SDP4Bit that of master parameters minus copies, over that of
                    the masters
"""

from collections.abc import Sequence

from scalejax.train.metrics.protocol import Value

ERROR, RESIDUAL = "exchange_error", "exchange_residual"
VALUES = (
    Value(name=ERROR, title="Error of the exchange", unit="what messages lack, over the norm of the gradient"),
    Value(name=RESIDUAL, title="Residual of the exchange", unit="norm of errors over that of what they are of"),
)

GROWING = 10
"""Windows in a row in which the residual grows, before a warning."""


def warning(windows: Sequence[tuple[int, float | None]]) -> str:
    """What is said where the last of these windows is the one with which a value has grown often enough; "" = nothing.

    Args:
      windows: Step at the end and value of each; None and NaN end a row.
    """
    (step, now), begun, row = windows[-1], windows[-1], 0
    for (first, before), (_, after) in zip(windows[-2::-1], windows[:0:-1], strict=True):
        if before is None or after is None or not after > before:
            break
        row += 1
        begun = first, before
    if row != GROWING:
        return ""
    return (
        f"The residual of the exchange has grown for {row} windows in a row, from {begun[1]:.3g} at step {begun[0]} to "
        f"{now:.3g} at step {step} ({RESIDUAL}). So it does at the beginning of a run; if it goes on, more is left "
        "out than comes back: let more travel (a larger k, more bits), or lower the learning rate."
    )


def warnings(windows: Sequence[tuple[int, float | None]]) -> list[str]:
    """All that was said in a run with these windows."""
    return [text for end in range(GROWING + 1, len(windows) + 1) if (text := warning(windows[:end]))]
