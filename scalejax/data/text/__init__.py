"""Text and tokens: tokenizers, packing, mixtures and rows of tokens."""
