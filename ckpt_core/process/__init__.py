"""What belongs to a process rather than to a checkpoint: its threads, signals, console and end, and who waits there."""
