"""Plans of embedding tables: the placement of rows, and whether they fit."""
