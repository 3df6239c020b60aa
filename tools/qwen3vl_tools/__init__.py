"""What a user types: the command line, the demo, and the checkpoints it needs."""
