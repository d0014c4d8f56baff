"""Examples in memory: their schema, columns as ids and numbers, records, and batches cut from them."""
