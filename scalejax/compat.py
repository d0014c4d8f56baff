"""The only place that knows differences between jax versions."""
