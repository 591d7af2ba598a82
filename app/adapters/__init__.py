"""PEFT's methods: what they add to a base, their first numbers, and what they make of a weight."""
