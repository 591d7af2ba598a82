"""What the Dockerfile runs: the installation beside NVIDIA's packages, and what can be checked without a GPU."""
