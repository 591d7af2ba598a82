"""Board: runs of a folder in a browser."""
