"""Pages for people, made of nothing but what lies in output folders: no torch, no network, no script."""
