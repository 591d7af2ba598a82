"""From YAML and command line to one typed, checked object. Nothing here imports torch."""
