"""Seconds until another process has the arrays of a step and has said so, over loopback.

    python benchmarks/step_announcement.py > benchmarks/results/step_announcement.md

The arrays are those of a block of tokens, for 8 and 64 slots with 16 and 2,048 units each. The other process is one of
its own and reads each message as `inference.processes.follow` does. Times are whole rounds, so more than what a step
waits.
"""

import pathlib
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np

from scalejax.bench import machine
from scalejax.inference import processes
from scalejax.inference.programs import Slots
from scalejax.inference.sampling import RowSampling

ROUNDS = 500
SIZES = ((8, 16), (8, 2_048), (64, 2_048))


def main() -> int:
    if len(sys.argv) > 1:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while processes.received(connection)[0] != "end":
                connection.sendall(b"!")
        return 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with subprocess.Popen([sys.executable, __file__, str(listener.getsockname()[1])]) as other:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            followers = processes.Followers([connection])
            print("# Announcing a step to another process\n")
            device = machine.device_name(None)
            print(f"`python benchmarks/step_announcement.py`, {device}, {machine.today()}, {ROUNDS} rounds.\n")
            print("| slots | units of each | bytes | median | 95 of 100 |")
            print("|---|---|---|---|---|")
            for slots, width in SIZES:
                row = np.zeros(slots, np.int32)
                given = Slots(
                    RowSampling.greedy(slots), row, row, np.zeros((slots, 8), np.int32),
                    np.zeros((slots, width), np.int32), row, row,
                )  # fmt: skip
                arguments = (np.int32(1), np.bool_(False), *jax.tree.leaves(given))
                seconds = []
                for _ in range(ROUNDS):
                    begin = time.perf_counter()
                    followers.announce("decode", arguments)
                    connection.recv(1)
                    seconds.append(time.perf_counter() - begin)
                size = len(processes.encoded("decode", arguments))
                middle, high = statistics.median(seconds), sorted(seconds)[int(0.95 * ROUNDS)]
                print(f"| {slots} | {width:,} | {size:,} | {middle * 1e3:.3f} ms | {high * 1e3:.3f} ms |")
            followers.end()
        return other.returncode


if __name__ == "__main__":
    sys.exit(main())
