"""Pages of runs, sweeps, comparisons and checks, and the model card, created from output folders."""
