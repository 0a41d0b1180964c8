"""The save pipeline: from a state to committed bytes, for both layouts."""
