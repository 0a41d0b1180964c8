"""One file that plain ``torch.load`` reads, with a digest of every byte (``docs/format.md``, "torch file")."""
