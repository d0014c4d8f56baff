"""Exchanges: ids to the devices that own their rows, rows back, gradients there again."""
