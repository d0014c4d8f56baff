"""Small grey images: where they come from, their codes, and rows in which they stand among text."""
