"""What the headers and the errors of a server's answer say. Nothing in them is trusted."""

import contextlib
import email.utils
import re
import time


def strong_tag(tag: str) -> str:
    """An ETag that may be sent back, or "". A weak one (W/"...") does not promise the same bytes."""
    return tag if re.fullmatch(r'"[!#-~]{0,200}"', tag) else ""


def safe(text: object) -> str:
    """The words of a server for a terminal: control characters could change what a person sees there."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:80])


def announced_sha256(answers: list) -> str | None:
    """The SHA-256 of a file that Hugging Face gives in the header of a redirect, or None."""
    for answer in answers:
        tag = answer.headers.get("X-Linked-ETag", "").strip('"')
        if re.fullmatch("[0-9a-f]{64}", tag):
            return tag
    return None


def retry_after(value: str | None) -> float | None:
    """Seconds to wait by the header Retry-After, which holds seconds or a date."""
    if value is None:
        return None
    if re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return float(value)
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def kind_of(error: Exception) -> str:
    """A failure of the connection in a few words."""
    import requests

    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke"
    return f"no connection ({type(error).__name__})"
