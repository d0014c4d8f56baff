"""Number formats in models: rules by path, products, weights, static scales."""
