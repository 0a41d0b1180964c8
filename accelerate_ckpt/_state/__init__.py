"""``save_state`` and ``load_state`` of one Accelerator, and the agreement of its ranks."""
