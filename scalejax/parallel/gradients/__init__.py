"""Gradients of a loss whose parameters are fetched by block: how they are fetched, taken, clipped and scaled."""
