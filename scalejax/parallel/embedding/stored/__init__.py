"""Tables outside of a step: fresh, saved, converted, and cached from the host."""
