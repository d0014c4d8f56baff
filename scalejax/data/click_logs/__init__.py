"""Readers of public click logs, and the bundled flights."""
