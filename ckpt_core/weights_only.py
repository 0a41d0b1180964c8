"""What torch's default reading (``weights_only=True``) refuses: a valid pickle that could run code, or a damaged one.

torch answers both with the same exception and the same advice, to read the file with ``weights_only=False``. That is of
use for the first only, which a user has to decide; of the second, an older checkpoint is the remedy. So everything that
reads pickles asks here. Nothing is run to find out: what torch says of its reason is enough.
"""

from __future__ import annotations

import pickle
import pickletools
import re

# What stands before torch's reason, in its three kinds of message.
_REASON = re.compile(
    r"WeightsUnpickler error:\s*(.+)|(Trying to load unsupported GLOBAL .+)|Weights only load failed\. (``.+)"
)
_REFUSED = re.compile(
    r"Unsupported global: GLOBAL \S+"
    r"|Trying to load unsupported GLOBAL \S+"
    r"|``.+ must be imported to load .+"
    # A pickle that is valid gets here by a type or a function of a name that the program has allowed. What has no dot
    # in its name is Python's own: nothing writes elements into a number, or calls a text.
    r"|Trying to call reduce for unrecognized function <.*"
    r"|Can only create new object for .* but got <class .*"
    r"|Can only .*, but got <class '[^']*\.[^']*'>"
)
_OPERAND = re.compile(r"Unsupported operand (\d+)")
# Those of protocols 0 and 1, which nobody chooses, are letters: what they stand in is text rather than a pickle.
_VALID_OPERANDS = {
    ord(operation.code)
    for operation in pickletools.opcodes
    if operation.proto >= 2 or operation.name in ("POP", "POP_MARK")  # a tuple that holds itself
}
_LONGEST = 600  # characters


def reason_of(error: BaseException) -> str:
    """Return what is wrong with a pickle, in the words of torch or of Python, without torch's advice.

    Example:
        >>> reason_of(EOFError("Ran out of input"))
        'Ran out of input'
    """
    found = _REASON.search(str(error))
    text = str(error) if found is None else next(filter(None, found.groups()))
    return " ".join(text.split())[:_LONGEST]


def refused_in(error: BaseException) -> str | None:
    """Return what in a valid pickle torch's default reading refuses; None if the pickle is damaged.

    Pickles of newer protocols, which torch does not read, are valid, and so are numbers that are too long for it.

    Args:
        error: What ``torch.load(..., weights_only=True)`` has raised.

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
