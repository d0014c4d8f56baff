"""Trained models in, other models out."""
