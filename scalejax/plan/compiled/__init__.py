"""Figures read from a compiled program: collectives, memory, bytes moved, least time."""
