"""Whom a client trusts over TLS, and what it says when it trusts nobody there. It knows no HTTP."""

import ssl
from urllib.parse import urlsplit

from tandem.errors import SettingError, TandemError

# OpenSSL's X509_V_ERR_…: the certificate, or that of who signed it, is not among the trusted ones.
_NOT_KNOWN = (2, 18, 19, 20, 21)
# It is for other names, or another address.
_OTHER_NAME = (62, 64)


class TrustError(TandemError):
    """There is a server, and no connection over TLS with it that can be trusted. Trying again changes nothing."""


def tls_context(url: str, cacert: str | None = None) -> ssl.SSLContext | None:
    """What a connection to an https URL needs; None for http.

    cacert: PEM file of the certificates to trust instead of the system's. Raises SettingError if it holds none.
    """
    if urlsplit(url).scheme != "https":
        if cacert is not None:
            raise SettingError(f"--cacert is given, and {url} has no TLS.", hint="write it as https://.")
        return None
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:  # SSLError is one
        if not isinstance(error, ssl.SSLError):
            raise SettingError(f"the certificates in {cacert} cannot be read: {error.strerror}.") from None
        raise SettingError(f"{cacert} holds no certificate in PEM form.") from None


def distrust(url: str, error: ssl.SSLError) -> TrustError:
    """The same failure, with what to do about it."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return TrustError(
            f"there is no TLS connection with {url}: {error.reason or error}.",
            hint="a server without a certificate has http:// in its URL.",
        )
    hint = None
    if error.verify_code in _NOT_KNOWN:
        hint = "give the file of its certificate, or of who signed it, with --cacert."
    elif error.verify_code in _OTHER_NAME:
        hint = "the URL must have a name or address that the certificate is for."
    return TrustError(f"the certificate of {url} is not trusted: {error.verify_message.rstrip('.')}.", hint=hint)
