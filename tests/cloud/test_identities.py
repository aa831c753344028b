"""Each cloud's verifier takes what its cloud has signed, and doubts everything else."""

import base64
import time
from pathlib import Path

import pytest
from cloudfake.papers import AwsPapers, AzurePapers, certificate, key, signed, with_open_lengths
from cryptography.hazmat.primitives.serialization import pkcs7
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.aws.identity import AwsIdentity
from cloud.azure.identity import AzureIdentity
from cloud.identity.proof import Doubt, Identity, Proof
from cloud.identity.signed_message import NotSigned, SignedMessage, from_base64
from cloud.local.identity import EXPIRES_S, LocalIdentity, Signer
from cloud.model import Machine, Place, Pool

NONCE, NOW_S = "0123456789", time.time()
AWS, AZURE = AwsPapers(), AzurePapers()
SUBSCRIPTION = "00000000-0000-0000-0000-0000000000AA"
DOCUMENT = AWS.document("i-0abc", "us-east-1", "10.0.0.9")
is_aws = AwsIdentity([certificate("another region", key(4)), AWS.certificate])
is_azure = AzureIdentity([AZURE.root], SUBSCRIPTION)


def base64_of(message: bytes) -> str:
    return base64.b64encode(message).decode()


def attested(papers: AzurePapers = AZURE, **changed: object) -> Proof:
    said = {"vm_id": "VM-1", "nonce": NONCE, "at_s": NOW_S, "subscription": SUBSCRIPTION}
    return Proof(signature=papers.attested(**{**said, **changed})["signature"])


def test_a_machine_of_ec2_is_known_by_its_document():
    """With the content inside, apart, and in the indefinite lengths that AWS writes."""
    known = Identity(Place("aws", "us-east-1"), "i-0abc", "10.0.0.9")
    inside = AWS.rsa2048(DOCUMENT)
    assert is_aws(Proof(signature=inside), NONCE, NOW_S) == known
    opened = with_open_lengths(from_base64(inside))
    assert opened[:2] == b"\x30\x80"
    assert is_aws(Proof(signature=base64_of(opened)), NONCE, NOW_S) == known
    options = (pkcs7.PKCS7Options.DetachedSignature, pkcs7.PKCS7Options.NoAttributes)
    apart = signed(DOCUMENT.encode(), AWS.certificate, key(), (), *options)
    proof = Proof(signature=base64_of(apart), document=DOCUMENT)
    assert is_aws(proof, NONCE, NOW_S) == known
    assert isinstance(is_aws(Proof(signature=base64_of(apart)), NONCE, NOW_S), Doubt)


def test_a_machine_of_azure_is_known_by_its_document():
    """The signer comes with the document, and its authority may be known or come with it."""
    known = Identity(Place("azure", ""), "vm-1")
    assert is_azure(attested(), NONCE, NOW_S) == known
    assert AzureIdentity([AZURE.authority], SUBSCRIPTION)(attested(), NONCE, NOW_S) == known


def test_a_machine_of_the_local_cloud_is_known_by_its_document(tmp_path: Path):
    """The verifier may be there first; the key stays for the cloud's next life; others are doubted."""
    pool = Pool("local", "east", "east-a", "small")
    machine = Machine(
        id="i-1",
        token="t",
        pool=pool,
        market="spot",
        state="running",
        launched_at_s=0.0,
        tags={},
        address="127.1.1.1",
    )
    first, other = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    other.mkdir()
    is_local = LocalIdentity(first)
    proof = Proof(signature=Signer(first).sign(machine, NONCE, NOW_S))
    Signer(first)
    assert LocalIdentity(first)(proof, NONCE, NOW_S) == is_local(proof, NONCE, NOW_S)
    assert is_local(proof, NONCE, NOW_S) == Identity(Place("local", "east"), "i-1", "127.1.1.1")
    doubts = [
        is_local(proof, "9876543210", NOW_S),
        is_local(proof, NONCE, NOW_S + EXPIRES_S + 1),
        is_local(Proof(signature=Signer(other).sign(machine, NONCE, NOW_S)), NONCE, NOW_S),
    ]
    assert [doubt.why.rpartition(" ")[2] for doubt in doubts] == ["nonce", "expired", "cloud"]


def test_what_aws_has_not_signed_is_doubted():
    """Other content, another key, and a signer that only says that it is AWS."""
    forged = AWS.rsa2048(DOCUMENT).encode()
    changed = base64_of(from_base64(forged.decode()).replace(b"i-0abc", b"i-0abd"))
    self_made = certificate("Amazon Web Services LLC", key(5))
    doubts = [
        is_aws(Proof(signature=changed), NONCE, NOW_S),
        is_aws(Proof(signature=base64_of(signed(b"{}", self_made, key(5)))), NONCE, NOW_S),
        is_aws(Proof(signature=base64_of(signed(b"[]", AWS.certificate, key()))), NONCE, NOW_S),
    ]
    assert ["content" in doubts[0].why, "aws.certificates" in doubts[1].why] == [True, True]
    assert "instanceId" in doubts[2].why or "object" in doubts[2].why


def test_what_azure_has_not_signed_for_us_now_is_doubted():
    """Nonce, time, subscription, name of the signer, and who issued it."""
    stranger = AzurePapers()
    stranger.authority = certificate("Fake Issuing CA", key(6), authority=True)
    stranger.signer = certificate("metadata.azure.com", key(3), stranger.authority, key(6))
    leaf_as_authority = AzurePapers()
    leaf_as_authority.authority = AZURE.signer
    leaf_as_authority.signer = certificate("metadata.azure.com", key(3), AZURE.signer, key(3))
    expired = AzurePapers()
    expired.authority = AZURE.authority
    days = (-30, -1)
    expired.signer = certificate("metadata.azure.com", key(3), AZURE.authority, key(2), days)
    doubts = {
        "nonce": attested(nonce="9876543210"),
        "expired": attested(at_s=NOW_S - 30_000),
        "clock": attested(at_s=NOW_S + 1000),
        "subscription": attested(subscription="someone-else"),
        "signed by metadata.azure.com": attested(AzurePapers("metadata.azure.com.evil")),
        "issued": attested(stranger),
        "is not issued": attested(leaf_as_authority),
        "not issued by": attested(expired),
    }
    for word, proof in doubts.items():
        doubt = is_azure(proof, NONCE, NOW_S)
        assert isinstance(doubt, Doubt), word
        assert word in doubt.why


MESSAGE = from_base64(AWS.rsa2048(DOCUMENT))
OPENED = with_open_lengths(MESSAGE)


@settings(max_examples=600)
@given(
    data=st.sampled_from([MESSAGE, OPENED]),
    at=st.integers(0, len(OPENED)),
    put=st.binary(max_size=4),
    cut=st.integers(0, 4),
)
def test_no_changed_message_is_a_proof(data: bytes, at: int, put: bytes, cut: int):
    """Bytes that are changed, added or left out give the same content under the signature, or none."""
    changed = data[:at] + put + data[at + cut :]
    try:
        message = SignedMessage(changed)
    except NotSigned:
        return
    if message.is_signed_by(AWS.certificate):
        assert message.content == DOCUMENT.encode()


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes):
    """Whatever a stranger sends, the reader raises nothing else."""
    for message in (data, b"\x30\x80" + data, MESSAGE[: len(MESSAGE) // 2] + data):
        try:
            SignedMessage(message).certificates()
        except NotSigned:
            continue


@pytest.mark.parametrize("data", [b"\x30\x80" * 40_000, b"\x30\x80" * 30_000, b"\xa0\x02" * 100])
def test_depth_and_length_are_bounded(data: bytes):
    """Neither takes the stack nor long."""
    with pytest.raises(NotSigned):
        SignedMessage(data)
