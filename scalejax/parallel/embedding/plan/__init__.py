"""Where the rows of each table live, and whether they fit."""
