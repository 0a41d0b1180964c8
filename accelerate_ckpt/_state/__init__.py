"""What one Accelerator saves and loads, and what its ranks agree on."""
