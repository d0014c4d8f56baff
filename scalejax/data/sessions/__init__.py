"""Logs clustered by session, and deduplicated features (RecD)."""
