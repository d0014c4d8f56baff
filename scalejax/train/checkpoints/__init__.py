"""Checkpoints: saving, restoring, publishing, and the one way into what runs have saved."""
