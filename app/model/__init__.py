"""The model of a run: a network with adapters, as a module that takes a Batch and returns its loss."""
