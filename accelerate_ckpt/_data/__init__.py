"""Where the data of prepared loaders is, and how it gets there again."""
