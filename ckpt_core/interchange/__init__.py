"""Read, write and convert other programs' checkpoints: PyTorch's DCP, safetensors models, stock Accelerate.

``dcp_reader``, ``dcp_writer``: what ``torch.distributed.checkpoint`` needs to load and save our checkpoints.
``dcp_format``, ``dcp_files``: DCP's own format; ``dcp_extras``: structure that DCP cannot represent. ``model_files``: a
model as safetensors files. ``accelerate_files``: directories of stock Accelerate. ``converting``: between all layouts.
``flat_names``, ``unconnected_save``, ``streaming``: shared code. ``foreign``: which program wrote a checkpoint, and
whether it is complete. ``into_model``: load a checkpoint into a model that differs from the saved one.
"""

from ckpt_core.interchange.accelerate_files import is_stock_accelerate
from ckpt_core.interchange.converting import (
    convert_to_accelerate,
    convert_to_dcp,
    convert_to_directory,
    convert_to_file,
    import_dcp,
    is_stock_distributed,
    load_whole,
)
from ckpt_core.interchange.dcp_files import check_dcp, export_dcp
from ckpt_core.interchange.dcp_reader import CkptStorageReader
from ckpt_core.interchange.dcp_writer import CkptStorageWriter
from ckpt_core.interchange.foreign import Foreign, recognize
from ckpt_core.interchange.into_model import LoadReport, load_into
from ckpt_core.interchange.model_files import export_model, import_model

__all__ = [
    "CkptStorageReader",
    "CkptStorageWriter",
    "Foreign",
    "LoadReport",
    "check_dcp",
    "convert_to_accelerate",
    "convert_to_dcp",
    "convert_to_directory",
    "convert_to_file",
    "export_dcp",
    "export_model",
    "import_dcp",
    "import_model",
    "is_stock_accelerate",
    "is_stock_distributed",
    "load_into",
    "load_whole",
    "recognize",
]
