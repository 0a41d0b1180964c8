"""The only files that touch private parts of Lightning, each with its reason and a guard."""
