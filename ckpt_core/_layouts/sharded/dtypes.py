"""Where this was before; to be removed."""

from ckpt_core._layouts.safetensors import DTYPES, bits_of, bytes_in, dtype_name, is_memory, stored_as

__all__ = ["DTYPES", "bits_of", "bytes_in", "dtype_name", "is_memory", "stored_as"]
