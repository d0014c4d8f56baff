"""Reports of a run: the terminal, its records, its pages."""
