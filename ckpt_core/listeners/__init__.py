"""Listeners that pass events on to monitoring systems, each with one dependency of its own."""
