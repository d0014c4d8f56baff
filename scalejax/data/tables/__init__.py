"""Tables of examples: their schema, and columns of files as records."""
