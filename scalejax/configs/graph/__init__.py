"""Recipes of graph networks."""
