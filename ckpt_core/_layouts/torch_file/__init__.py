"""The one-file layout: a file that plain ``torch.load`` reads, with digests of all bytes (``docs/format.md``)."""
