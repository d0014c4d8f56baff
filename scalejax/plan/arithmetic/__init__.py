"""Estimates of a step by arithmetic, before anything is compiled."""
