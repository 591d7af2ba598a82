"""Several processes on torch's own engines."""
