"""Trained models put to use: folders that hold them, conversion between formats, generation of text."""
