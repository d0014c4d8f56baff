"""What arithmetic says of a step before anything is compiled."""
