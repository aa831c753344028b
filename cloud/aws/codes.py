"""What AWS's error codes mean to us; a row is as `cloud.error_codes` reads it."""

from cloud import error_codes, errors
from cloud.clock import DAY_S
from cloud.error_codes import Row, rows
from cloud.model import Refusal

GONE = (
    "InvalidVolume.NotFound",
    "InvalidNetworkInterfaceID.NotFound",
    "InvalidSpotInstanceRequestID.NotFound",
)
"""Codes of a leftover that somebody ended before us."""

IN_USE = "is currently in use"
NOT_YET = ("VolumeInUse", "IncorrectState", "InvalidNetworkInterface.InUse", IN_USE)
"""What EC2 says of a leftover that can be ended later: the list goes on to show it."""

POOL_S = 180.0
FAMILY_S = 600.0
ZONE_S = 600.0
KEYS = "check the keys, and that the account has the region enabled"
EXPIRED = "the keys have expired: get new ones"
DISK_KEY = (
    "if a key of yours encrypts disks, let the manager's role use it: kms:CreateGrant and more"
)
SIGNATURE = "the secret key or the clock is wrong"

ROWS = (
    *rows("InsufficientInstanceCapacity InsufficientHostCapacity", "refused", "pool", POOL_S),
    *rows("UnfulfillableCapacity ReservationCapacityExceeded", "refused", "pool", POOL_S),
    *rows("InsufficientCapacity InsufficientReservedInstanceCapacity", "refused", "pool", POOL_S),
    *rows("Server.InsufficientInstanceCapacity Server.InternalError", "refused", "pool", POOL_S),
    Row("SpotMaxPriceTooLow", "refused", "pool", POOL_S),
    Row("Client.InternalError", "refused", "pool", FAMILY_S, advice=DISK_KEY),
    Row("Client.InvalidKMSKey.InvalidState", "refused", "place", FAMILY_S, advice=DISK_KEY),
    *rows("Unsupported UnsupportedOperation", "refused", "pool", DAY_S),
    # The zone does not have the type, or the image does not run on it.
    *rows(
        "InvalidParameterValue InvalidParameterCombination",
        "refused",
        "pool",
        DAY_S,
        text="instance type",
    ),
    *rows(
        "InsufficientFreeAddressesInSubnet InsufficientVolumeCapacity", "refused", "zone", ZONE_S
    ),
    *rows("VcpuLimitExceeded InstanceLimitExceeded", "refused", "family", FAMILY_S),
    Row("MaxSpotInstanceCountExceeded", "refused", "family", FAMILY_S),
    *rows("Client.VolumeLimitExceeded VolumeLimitExceeded", "refused", "place", FAMILY_S),
    Row("Client.InvalidSnapshot.NotFound", "refused", "place", FAMILY_S),
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
    *rows(
        "InvalidSubnetID.NotFound InvalidSubnet",
        "misconfigured",
        "zone",
        advice="correct aws.subnets",
    ),
    *rows(
        "InvalidGroup.NotFound InvalidSecurityGroupID.NotFound",
        "misconfigured",
        advice="correct aws.security_groups",
    ),
    Row("NoSuchEntity", "misconfigured", advice="if your role has a path, allow iam:GetRole on it"),
    Row("InvalidParameterValue", "unknown", text=IN_USE),
    *rows("InvalidParameterCombination InvalidParameterValue InvalidParameter", "misconfigured"),
    *rows("MissingParameter UnknownParameter ValidationException", "misconfigured"),
    Row("InvalidBlockDeviceMapping", "misconfigured", advice="correct aws.disk_gib"),
    Row(
        "OperationNotPermitted",
        "refused",
        "request",
        advice="switch off the termination protection of the instance",
    ),
    Row("InvalidUserData.Malformed", "misconfigured", advice="the boot script is too long"),
    Row("InvalidAction", "misconfigured", advice="correct aws.endpoint_url"),
    Row("OptInRequired", "misconfigured", advice="enable the region, or accept the image's terms"),
    Row("RegionDisabledException", "misconfigured", advice="enable the region in the account"),
    Row("TagPolicyViolation", "misconfigured", advice="ask for an exemption from the tag policy"),
    Row("PendingVerification", "misconfigured", advice="wait for AWS to verify the account"),
    Row("Blocked", "misconfigured", advice="ask AWS's support why the account is blocked"),
    *rows(
        "UnauthorizedOperation AccessDenied AccessDeniedException",
        "not_allowed",
        advice="give the manager's role this permission",
    ),
    *rows("AuthFailure InvalidClientTokenId", "not_allowed", advice=KEYS),
    *rows("UnrecognizedClientException MissingAuthenticationToken", "not_allowed", advice=KEYS),
    *rows("ExpiredToken ExpiredTokenException", "not_allowed", advice=EXPIRED),
    Row("RequestExpired", "not_allowed", advice="the keys have expired, or the clock is wrong"),
    *rows("SignatureDoesNotMatch InvalidSignatureException", "not_allowed", advice=SIGNATURE),
    *rows("RequestLimitExceeded TooManyRequestsException", "throttled", "place", 5.0),
    *rows("Throttling ThrottlingException ThrottledException", "throttled", "place", 5.0),
    *rows("RequestThrottled RequestThrottledException SlowDown", "throttled", "place", 5.0),
    *rows("EC2ThrottledException BandwidthLimitExceeded", "throttled", "place", 5.0),
    *rows("LimitExceededException TransactionInProgressException", "throttled", "place", 5.0),
    Row("ProvisionedThroughputExceededException", "throttled", "place", 5.0),
    *rows("RequestTimeout RequestTimeoutException PriorRequestNotComplete", "unknown"),
    Row("IdempotentParameterMismatch", "mismatch"),
    Row("IdempotentInstanceTerminated", "spent"),
    Row("DryRunOperation", "unknown"),  # it would have worked; only an examination asks so
    *rows("InternalError InternalFailure ServiceUnavailable Unavailable", "unknown"),
    *rows("InvalidInstanceID.NotFound ResourceNotFoundException", "unknown"),
    *(Row(code, "unknown") for code in (*GONE, *NOT_YET) if code != IN_USE),
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


def row_of(code: str, said: str) -> Row | None:
    return error_codes.row_of(ROWS, code, said)


def error_of(code: str, said: str, where: str, status: int = 0) -> errors.CloudError:
    """Return the error that a code stands for. `where` is the place and the call."""
    row = row_of(code, said)
    text = f"{where}: {code}: {said}"
    if row is None:
        return error_codes.unlisted(code, f"{text} (a code that we do not know)", status)
    if row.advice:
        text = f"{text.rstrip('.')}; {row.advice}"
    return error_codes.error_of(row, text, row.retry_s)


def refusal_of(code: str, said: str) -> Refusal:
    """Return why a machine that was listed has never run."""
    row = row_of(code, said) or Row(code, "refused")
    said = f"{said.rstrip('.')}; {row.advice}" if row.advice else said
    return Refusal(scope=row.scope or "request", code=code, said=said, retry_s=row.retry_s)


def is_of_launch(code: str) -> bool:
    """Return whether a machine ended for this reason before it has run."""
    return code in LAUNCH_FAILURES or code.startswith("Client.Invalid")
