"""Lets the tests of this folder `from launch import run_workers`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
