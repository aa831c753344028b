"""What AWS's error codes mean to us: one table, from a code to how far a refusal reaches.

The first row fits whose code is equal and whose text occurs in what AWS said. A code without a row
is `Unknown`: the call may have taken effect, so the list is asked.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from cloud import errors
from cloud.clock import DAY_S
from cloud.errors import CloudError
from cloud.model import Refusal, Scope

Means = Literal[
    "refused", "misconfigured", "not_allowed", "throttled", "unknown", "mismatch", "spent"
]

POOL_S = 180.0
FAMILY_S = 600.0
ZONE_S = 600.0


class Row(NamedTuple):
    """One code; `text` narrows it to what AWS said."""

    code: str
    means: Means
    scope: Scope = "request"
    retry_s: float | None = None
    text: str = ""
    advice: str = ""


ROWS = (
    Row("InsufficientInstanceCapacity", "refused", "pool", POOL_S),
    Row("Server.InsufficientInstanceCapacity", "refused", "pool", POOL_S),
    Row("InsufficientHostCapacity", "refused", "pool", POOL_S),
    Row("UnfulfillableCapacity", "refused", "pool", POOL_S),
    Row("ReservationCapacityExceeded", "refused", "pool", POOL_S),
    Row("SpotMaxPriceTooLow", "refused", "pool", POOL_S),
    Row("Unsupported", "refused", "pool", DAY_S),
    Row("UnsupportedOperation", "refused", "pool", DAY_S),
    Row(
        "InvalidParameterValue",
        "refused",
        "pool",
        DAY_S,
        text="not supported in your requested Availability Zone",
    ),
    Row("InsufficientFreeAddressesInSubnet", "refused", "zone", ZONE_S),
    Row("MaxSpotInstanceCountExceeded", "refused", "family", FAMILY_S),
    Row("VcpuLimitExceeded", "refused", "family", FAMILY_S),
    Row("InstanceLimitExceeded", "refused", "family", FAMILY_S),
    Row("Client.VolumeLimitExceeded", "refused", "place", FAMILY_S),
    Row("VolumeLimitExceeded", "refused", "place", FAMILY_S),
    Row("Client.InvalidSnapshot.NotFound", "refused", "place", FAMILY_S),
    Row("Client.InternalError", "refused", "pool", FAMILY_S),
    Row("Server.InternalError", "refused", "pool", POOL_S),
    Row(
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
        "refused",
        "market",
        DAY_S,
        advice="create the role once: aws iam create-service-linked-role "
        "--aws-service-name spot.amazonaws.com",
    ),
    Row("InvalidAMIID.NotFound", "misconfigured", advice="set aws.images to an image that exists"),
    Row("InvalidAMIID.Malformed", "misconfigured", advice="aws.images needs ids such as ami-0123"),
    Row("InvalidAMIID.Unavailable", "misconfigured", advice="set aws.images to an image in use"),
    Row("InvalidSubnetID.NotFound", "misconfigured", advice="correct aws.subnets"),
    Row("InvalidSubnet", "misconfigured", advice="correct aws.subnets"),
    Row("InvalidGroup.NotFound", "misconfigured", advice="correct aws.security_groups"),
    Row("InvalidSecurityGroupID.NotFound", "misconfigured", advice="correct aws.security_groups"),
    Row("InvalidParameterCombination", "misconfigured"),
    Row("InvalidParameterValue", "misconfigured"),
    Row("InvalidParameter", "misconfigured"),
    Row("MissingParameter", "misconfigured"),
    Row("UnknownParameter", "misconfigured"),
    Row("InvalidBlockDeviceMapping", "misconfigured", advice="correct aws.disk_gib"),
    Row(
        "OperationNotPermitted",
        "refused",
        advice="switch off the termination protection of the instance",
    ),
    Row("InvalidUserData.Malformed", "misconfigured", advice="the boot script is too long"),
    Row("InvalidAction", "misconfigured", advice="correct aws.endpoint_url"),
    Row("OptInRequired", "misconfigured", advice="enable the region, or accept the image's terms"),
    Row("PendingVerification", "misconfigured", advice="wait for AWS to verify the account"),
    Row("ValidationException", "misconfigured"),
    Row("Blocked", "misconfigured", advice="ask AWS's support why the account is blocked"),
    Row("UnauthorizedOperation", "not_allowed", advice="give the manager's role this permission"),
    Row("AccessDenied", "not_allowed", advice="give the manager's role this permission"),
    Row("AccessDeniedException", "not_allowed", advice="give the manager's role this permission"),
    Row("AuthFailure", "not_allowed", advice="check the keys"),
    Row("InvalidClientTokenId", "not_allowed", advice="check the keys"),
    Row("UnrecognizedClientException", "not_allowed", advice="check the keys"),
    Row("MissingAuthenticationToken", "not_allowed", advice="check the keys"),
    Row("ExpiredToken", "not_allowed", advice="the keys have expired: get new ones"),
    Row("ExpiredTokenException", "not_allowed", advice="the keys have expired: get new ones"),
    Row("RequestExpired", "not_allowed", advice="the keys have expired, or the clock is wrong"),
    Row("SignatureDoesNotMatch", "not_allowed", advice="the secret key or the clock is wrong"),
    Row("InvalidSignatureException", "not_allowed", advice="the secret key or the clock is wrong"),
    Row("RequestLimitExceeded", "throttled", "place", 5.0),
    Row("Throttling", "throttled", "place", 5.0),
    Row("ThrottlingException", "throttled", "place", 5.0),
    Row("TooManyRequestsException", "throttled", "place", 5.0),
    Row("IdempotentParameterMismatch", "mismatch"),
    Row("IdempotentInstanceTerminated", "spent"),
    Row("DryRunOperation", "unknown"),  # it would have worked; only an examination asks so
    Row("InternalError", "unknown"),
    Row("InternalFailure", "unknown"),
    Row("ServiceUnavailable", "unknown"),
    Row("Unavailable", "unknown"),
    Row("InvalidInstanceID.NotFound", "unknown"),
)

LAUNCH_FAILURES = frozenset(
    {
        "Server.InsufficientInstanceCapacity",
        "Client.VolumeLimitExceeded",
        "Client.InvalidSnapshot.NotFound",
        "Client.InternalError",
        "Server.InternalError",
    }
)
"""Reasons for which a machine ends before it has run."""

GONE = frozenset(
    {
        "InvalidVolume.NotFound",
        "InvalidNetworkInterfaceID.NotFound",
        "InvalidSpotInstanceRequestID.NotFound",
    }
)
"""Codes of a leftover that somebody ended before us."""


KINDS: dict[Means, Callable[[str], CloudError]] = {
    "misconfigured": errors.Misconfigured,
    "not_allowed": errors.NotAllowed,
    "mismatch": errors.TokenMismatch,
    "spent": errors.TokenSpent,
    "unknown": errors.Unknown,
}


def row_of(code: str, said: str) -> Row | None:
    return next((row for row in ROWS if row.code == code and row.text in said), None)


def error_of(code: str, said: str, where: str) -> CloudError:
    """Return the error that a code stands for. `where` is the place and the call."""
    row = row_of(code, said)
    text = f"{where}: {code}: {said}"
    if row is None:
        return errors.Unknown(f"{text} (a code that we do not know; the list will tell)")
    if row.advice:
        text = f"{text.rstrip('.')}; {row.advice}"
    if row.means == "refused":
        return errors.Refused(row.scope, code, text, row.retry_s)
    if row.means == "throttled":
        return errors.Throttled(text, row.retry_s)
    return KINDS[row.means](text)


def refusal_of(code: str, said: str) -> Refusal:
    """Return why a machine that was listed has never run."""
    row = row_of(code, said)
    if row is None:
        return Refusal(scope="request", code=code, said=said)
    return Refusal(scope=row.scope, code=code, said=said, retry_s=row.retry_s)
