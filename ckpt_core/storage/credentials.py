"""Keep credentials out of everything that a person may read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

__all__ = ["Secrets"]

_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas|signature|connection_string|auth", re.IGNORECASE)
_SECRET_PART = re.compile(r"(?:AccountKey|SharedAccessSignature|Password)=([^;]+)", re.IGNORECASE)
_USER_INFO = re.compile(r"(://)[^/@\s]*:[^/@\s]*@")
_SIGNED_PARAMETER = re.compile(
    r"(?i)\b((?:sig|signature|x-amz-signature|x-amz-credential|x-amz-security-token|access_token)=)[^&\s'\"]+"
)
_SHORTEST = 6  # characters; blotting out shorter ones would make the text unreadable and hide nothing
_HIDDEN = "***"


class Secrets:
    """The credentials in ``storage_options``, to be blotted out of texts.

    Args:
        storage_options: As given by the user; strings under names that sound like credentials, at any depth.
    """

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        found = {text for text in _secret_texts(storage_options, secret=False) if len(text) >= _SHORTEST}
        # The longest first: one may contain another.
        self._texts = sorted(found | {quote(text, safe="") for text in found}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return ``text`` without credentials, those in URLs included."""
        for secret in self._texts:
            text = text.replace(secret, _HIDDEN)
        return _SIGNED_PARAMETER.sub(rf"\1{_HIDDEN}", _USER_INFO.sub(rf"\1{_HIDDEN}@", text))

    def are_in(self, error: BaseException) -> bool:
        """Return whether ``error``, or one that led to it, shows a credential when it is printed."""
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            text = f"{link!r} {link}"
            if self.hide(text) != text:
                return True
            link = link.__cause__ or link.__context__
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_HIDDEN})"


def _secret_texts(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secret_texts(inner, secret=secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secret_texts(inner, secret=secret)
    elif secret and isinstance(value, str):
        yield value
        yield from _SECRET_PART.findall(value)
