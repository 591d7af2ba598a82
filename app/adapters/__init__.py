"""PEFT methods: adapters on a base model, their initialization, and merged weights."""
