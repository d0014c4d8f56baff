"""Recipes of language models."""
