"""What a compiled program says of itself: collectives, memory, bytes moved, least time."""
