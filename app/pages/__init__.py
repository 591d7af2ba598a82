"""Pages about runs, sweeps, comparisons and checks, and the model card, made from output folders alone."""
