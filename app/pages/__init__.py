"""HTML pages about runs, sweeps, comparisons and checks, made from output folders alone."""
