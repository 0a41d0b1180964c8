"""The save pipeline of both layouts: stages a state, writes it in the background, and commits the checkpoint."""
