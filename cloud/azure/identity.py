"""Verify a machine's identity on Azure: the attested document of its metadata service.

It is signed for one nonce and for a few hours, by a certificate of `metadata.azure.com` that comes
with it and that one of Microsoft's authorities has issued. It names the machine by its `vmId`, and
neither its region nor its address.
"""

from collections.abc import Sequence
from datetime import datetime

import msgspec
from cryptography import x509
from cryptography.x509.oid import NameOID

from cloud.identity.proof import Doubt, Identity, Proof
from cloud.identity.signed_message import NotSigned, SignedMessage, from_base64, is_issued
from cloud.model import Place

SIGNER = "metadata.azure.com"
TIME = "%m/%d/%y %H:%M:%S %z"
SKEW_S = 300.0  # a machine's and the manager's clock may differ


class _TimeStamp(msgspec.Struct, frozen=True, rename="camel"):
    created_on: str
    expires_on: str


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    vm_id: str
    nonce: str
    time_stamp: _TimeStamp
    subscription_id: str = ""


class AzureIdentity:
    """The verifier. `authorities` are the certificates that the signer's has to be issued by.

    Documents of other subscriptions than `subscription` are doubted.
    """

    def __init__(self, authorities: Sequence[x509.Certificate], subscription: str) -> None:
        self._authorities = authorities
        self._subscription = subscription.lower()

    def __call__(self, proof: Proof, nonce: str, now_s: float) -> Identity | Doubt:
        try:
            message = SignedMessage(from_base64(proof.signature))
            if (why := self._flaw(message, now_s)) is not None:
                return Doubt(why)
            document = msgspec.json.decode(message.content, type=_Document)
            created_s = datetime.strptime(document.time_stamp.created_on, TIME).timestamp()
            expires_s = datetime.strptime(document.time_stamp.expires_on, TIME).timestamp()
        except (NotSigned, ValueError) as error:
            return Doubt(f"the attested document: {error}")
        if document.nonce != nonce:
            return Doubt("the attested document was made for another nonce")
        if not created_s - SKEW_S <= now_s <= expires_s + SKEW_S:
            return Doubt("the attested document has expired, or a clock is wrong")
        if document.subscription_id.lower() != self._subscription:
            return Doubt("the attested document is of another subscription")
        return Identity(Place("azure", ""), document.vm_id.lower())

    def _flaw(self, message: SignedMessage, now_s: float) -> str | None:
        """Return why the signature proves nothing, or None."""
        certificates = message.certificates()
        signer = next((one for one in certificates if message.is_signed_by(one)), None)
        if signer is None:
            return "the attested document is not signed by a certificate that comes with it"
        if not _is_azures(signer):
            return f"the attested document is not signed by {SIGNER}"
        if not is_issued(signer, certificates, self._authorities, now_s):
            return "the attested document's signer is not issued by one of azure.certificates"
        return None


def _is_azures(signer: x509.Certificate) -> bool:
    names = [str(one.value) for one in signer.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return any(name == SIGNER or name.endswith(f".{SIGNER}") for name in names)
