"""Tell unsafe pickles from damaged ones when ``torch.load(weights_only=True)`` refuses a checkpoint.

torch raises the same exception with the same advice, ``weights_only=False``, for a valid pickle that could run code and
for a damaged one. The advice helps only for the first, and the user must decide about it; for the second, the remedy is
an older checkpoint. All code that reads pickles uses this module. It runs nothing: torch's message is enough.
"""

from __future__ import annotations

import pickle
import pickletools
import re

# The three kinds of message in which torch gives its reason.
_REASON = re.compile(
    r"WeightsUnpickler error:\s*(.+)|(Trying to load unsupported GLOBAL .+)|Weights only load failed\. (``.+)"
)
_REFUSED = re.compile(
    r"Unsupported global: GLOBAL \S+"
    r"|Trying to load unsupported GLOBAL \S+"
    r"|``.+ must be imported to load .+"
    # A valid pickle can fail in these ways by using a type or function that the program has allowed. Names without a
    # dot are builtins: a pickle that sets elements of a number, or calls a string, is damaged.
    r"|Trying to call reduce for unrecognized function <.*"
    r"|Can only create new object for .* but got <class .*"
    r"|Can only .*, but got <class '[^']*\.[^']*'>"
)
_OPERAND = re.compile(r"Unsupported operand (\d+)")
# Opcodes of protocols 0 and 1, which are rarely used, are letters: data with these is taken for text, not a pickle.
_VALID_OPERANDS = {
    ord(operation.code)
    for operation in pickletools.opcodes
    if operation.proto >= 2 or operation.name in ("POP", "POP_MARK")  # used for a tuple that holds itself
}
_LONGEST = 600  # characters


def reason_of(error: BaseException) -> str:
    """Return what is wrong with a pickle, from the message of torch or Python, without torch's advice.

    Example:
        >>> reason_of(EOFError("Ran out of input"))
        'Ran out of input'
    """
    found = _REASON.search(str(error))
    text = str(error) if found is None else next(filter(None, found.groups()))
    return " ".join(text.split())[:_LONGEST]


def refused_in(error: BaseException) -> str | None:
    """Return torch's reason for refusing a valid pickle with ``weights_only=True``; None if the pickle is damaged.

    Pickles of newer protocols, which torch does not read, count as valid, and so do numbers that are too long for it.

    Args:
        error: The exception that ``torch.load(..., weights_only=True)`` has raised.

    Example:
        >>> refused_in(pickle.UnpicklingError("Unsupported operand 149")), refused_in(EOFError("Ran out of input"))
        ('Unsupported operand 149', None)
    """
    if not isinstance(error, pickle.UnpicklingError):
        return None
    reason = reason_of(error)
    if found := _REFUSED.match(reason):
        return found[0]
    operand = _OPERAND.match(reason)
    return reason if operand and int(operand[1]) in _VALID_OPERANDS else None
