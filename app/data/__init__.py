"""From files to `Batch`: sources, formats, rendering, encoding, overflow, cache, loader."""
