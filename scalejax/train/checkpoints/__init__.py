"""What runs save, and the one way into it."""
