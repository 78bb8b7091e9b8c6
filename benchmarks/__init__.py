"""Comparisons of grapeshot with other event loops and similar libraries: see README.md in this folder."""
