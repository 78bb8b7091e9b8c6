"""Certificates for localhost and 127.0.0.1, from an authority that exists only for one run of the tests."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Certificates:
    """One authority and one server certificate, as text, as files in `folder` and as contexts."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        self.authority = authority.cert_pem.bytes().decode()
        self.chain = "".join(pem.bytes().decode() for pem in issued.cert_chain_pems)
        self.key = issued.private_key_pem.bytes().decode()
        self.authority_file, self.chain_file, self.key_file = (
            folder / name for name in ("authority.pem", "chain.pem", "key.pem")
        )
        self.authority_file.write_text(self.authority)
        self.chain_file.write_text(self.chain)
        self.key_file.write_text(self.key)

    def for_server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.chain_file, self.key_file)
        return context

    def for_client(self) -> ssl.SSLContext:
        """Return a context that trusts only this authority."""
        return ssl.create_default_context(cafile=str(self.authority_file))
