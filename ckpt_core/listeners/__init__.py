"""Listeners that export checkpoint events to monitoring systems; each needs one optional dependency."""
