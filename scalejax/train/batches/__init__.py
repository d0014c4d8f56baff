"""Batches on their way to a step: placed, prepared ahead, exchanged a step ahead."""
