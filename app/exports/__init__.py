"""Models for other programs: merged or as an adapter, and the proof in a fresh process."""
