"""Several processes for one run: torch's elastic agent starts them, watches them and tells once how they ended."""
