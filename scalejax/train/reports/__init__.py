"""What people see of a run: the terminal, its records, its pages."""
