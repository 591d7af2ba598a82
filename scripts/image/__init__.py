"""Scripts of the Dockerfile: installation next to NVIDIA's packages, and checks without a GPU."""
