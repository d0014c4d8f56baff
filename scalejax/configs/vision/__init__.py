"""Recipes of models of pictures."""
