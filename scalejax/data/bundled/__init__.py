"""Data sets that ship with the package; README.md has sources and licences."""
