"""Ids: their device form, checks on the host, and maps from unbounded ids to rows."""
