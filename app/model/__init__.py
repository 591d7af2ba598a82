"""From a folder or numbers to a module that takes a Batch and returns its loss."""
