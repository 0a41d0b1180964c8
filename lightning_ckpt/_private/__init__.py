"""The only modules that use private parts of Lightning, each with its reason and a check."""
