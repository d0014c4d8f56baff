"""Exchanges values between processes and fails on one of them; see test_distributed_processes.py."""

import argparse
import sys

import jax

from scalejax.errors import UserError
from scalejax.train import distributed

parser = argparse.ArgumentParser()
parser.add_argument("failing", type=int)
parser.add_argument("--coordinator")
parser.add_argument("--processes", type=int)
parser.add_argument("--process-id", type=int)
options = parser.parse_args()
distributed.initialize(options.coordinator, options.processes, options.process_id, timeout_s=60)
index = jax.process_index()
assert distributed.is_primary() == (index == 0)
assert distributed.gather({"from": index, "text": "ü" * 100 * index}) == [
    {"from": 0, "text": ""},
    {"from": 1, "text": "ü" * 100},
]
assert distributed.broadcast(f"value of {index}") == "value of 0"
assert distributed.on_primary(lambda: f"made on {index}") == "made on 0"
assert distributed.together(lambda: index) == index


def part() -> None:
    if index == options.failing:
        raise UserError("no such thing")


try:
    distributed.together(part)
except UserError as error:
    print(error)
sys.exit(0)
