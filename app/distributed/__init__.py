"""Training with several processes on the engines of torch."""
