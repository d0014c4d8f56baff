"""`scalejax ARGS` where the devices of processes take turns along a mesh of all devices, as they may on a pod.

    alternating_worker.py train RECIPE ... [--coordinator HOST:PORT --processes N --process-id I]

Of two processes with 4 devices each the order is 0 1 1 0 0 1 1 0.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from scalejax.cli import main


def make_mesh(shape, axes, *, axis_types, devices):
    """In place of `jax.make_mesh`, which leaves devices of a CPU in the order of processes."""
    half = max(len(devices) // 2, 1)
    devices = [devices[i] for i in sorted(range(len(devices)), key=lambda i: (i % half, (i // half + i % half) % 2))]
    return Mesh(np.array(devices).reshape(shape), axes, axis_types=axis_types)


jax.make_mesh = make_mesh

if __name__ == "__main__":
    main()
