"""Runs `SCRIPT ARGS` or `-m MODULE ARGS` with Python's standard output apart from that of C++ libraries.

Gloo writes a remark on standard output for every connection, from several threads, in torn lines: what file
descriptor 1 gets goes to standard error here, and `sys.stdout` keeps the original file.
"""

import os
import runpy
import sys

sys.stdout = open(os.dup(1), "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - it stays open to the end
os.dup2(2, 1)
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
