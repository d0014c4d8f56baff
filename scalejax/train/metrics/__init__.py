"""Metrics as objects, which a task names and everything else asks.

`protocol` says what a metric is, `sums` keeps sums on devices and on the host without loss, `steps` counts what every
run counts; the others are metrics: `loss`, `classification`, `click`.
"""
