"""Memory and arithmetic of a configuration, known before it runs: its real step, traced without weights."""
