"""Updates of the rows that a step looked up."""
