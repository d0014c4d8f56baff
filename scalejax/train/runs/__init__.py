"""One run: bound to its data and devices, its state, its steps, its scores."""
