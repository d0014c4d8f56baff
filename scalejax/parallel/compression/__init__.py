"""Fewer bits between devices: number formats of parameters, gradients and activations on the wire."""
