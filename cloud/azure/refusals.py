"""What Azure's errors mean to us; a row is as `cloud.error_codes` reads it.

The SDK's exceptions say nothing: it raises `ResourceExistsError` for every 409 and 412, whether a
name is taken, a quota is reached or a size is sold out. So the body of the answer decides.
"""

import re

import msgspec

from cloud import error_codes, errors
from cloud.clock import DAY_S, HOUR_S
from cloud.error_codes import Row, rows
from cloud.model import Market, Refusal

QUOTA_S = 600.0
NO_QUOTA_S = HOUR_S
SOLD_OUT_S = {"spot": HOUR_S, "on_demand": 23 * HOUR_S}
SAID_MAX = 300
NOT_DELETED = "InternalExecutionError"  # the deletion failed, not the creation
NOT_YET = (
    "NicReservedForAnotherVm",
    "NicInUse",
    "AttachDiskWhileBeingDetached",
    "is attached to",
)
"""What Azure says of a deletion that works later: the list goes on to show what it was for."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An error as Azure wrote it."""

    status: int = 0
    code: str = ""
    text: str = ""
    retry_s: float | None = None


TABLE = (
    # No machine to give now.
    Row("SkuNotAvailable", "sold_out", "pool"),
    *rows("AllocationFailed ZonalAllocationFailed", "refused", "pool", HOUR_S),
    Row("OverconstrainedAllocationRequest", "refused", "pool", HOUR_S),
    Row("OverconstrainedZonalAllocationRequest", "refused", "pool", HOUR_S),
    *rows(f"OSProvisioningTimedOut OSProvisioningClientError {NOT_DELETED}", "refused", "request"),
    # The size is not sold there at all.
    *rows("VMSizeNotSupported AzureSpotIsNotSupportedForThisVMSize", "refused", "pool", DAY_S),
    Row("InvalidParameter", "refused", "pool", DAY_S, text="is not supported for subscription"),
    Row("InvalidAvailabilityZone", "refused", "zone", DAY_S),
    Row("AzureSpotFeatureNotEnabledForSubscription", "refused", "market", DAY_S),
    Row("SpotPriceGreaterThanProvidedMaxPrice", "refused", "pool"),
    # Quotas, which share two codes and differ in their text.
    *rows("OperationNotAllowed QuotaExceeded", "quota", "market", text="LowPriorityCores"),
    *rows("OperationNotAllowed QuotaExceeded", "quota", "market", text="Total Regional"),
    *rows("OperationNotAllowed QuotaExceeded", "quota", "family", text="Cores quota"),
    Row("QuotaExceeded", "quota", "family"),
    *rows("SubnetIsFull ResourceQuotaExceeded", "refused", "place", QUOTA_S),
    # Slower.
    *rows("TooManyRequests SubscriptionRequestsThrottled", "throttled", "place"),
    Row("OperationNotAllowed", "throttled", "place", text="too many requests"),
    Row("OperationNotAllowed", "refused", "pool"),  # whatever else it is, it was not done
    # The name.
    *rows("PreconditionFailed PropertyChangeNotAllowed", "mismatch"),
    # Keys, roles, policies.
    Row(
        "ExpiredAuthenticationToken",
        "not_allowed",
        "cloud",
        advice="sign in again, and check that this machine's clock is right",
    ),
    *rows(
        "InvalidAuthenticationToken AuthenticationFailed",
        "not_allowed",
        "cloud",
        advice="sign in again",
    ),
    *rows(
        "AuthorizationFailed LinkedAuthorizationFailed",
        "not_allowed",
        "cloud",
        advice="give the manager's identity the role in cloud/azure/role.json on the resource group",
    ),
    Row(
        "ReadOnlyDisabledSubscription",
        "not_allowed",
        "cloud",
        advice="pay or enable the subscription",
    ),
    Row(
        "ScopeLocked",
        "not_allowed",
        "place",
        advice="remove the lock on the resource group, which keeps machines from being deleted",
    ),
    Row(
        "RequestDisallowedByPolicy",
        "not_allowed",
        "pool",
        text="hardwareProfile.vmSize",
        advice="leave the size out of azure.types, or ask the administrator for an exemption",
    ),
    Row(
        "RequestDisallowedByPolicy",
        "not_allowed",
        "place",
        advice="ask the administrator for an exemption from the policy",
    ),
    # Settings.
    *rows(
        "SubscriptionNotFound InvalidSubscriptionId",
        "misconfigured",
        "cloud",
        advice="correct azure.subscription",
    ),
    Row(
        "MissingSubscriptionRegistration",
        "misconfigured",
        "cloud",
        advice="register the resource providers Microsoft.Compute and Microsoft.Network once",
    ),
    Row(
        "ResourceGroupNotFound",
        "misconfigured",
        "cloud",
        advice="correct azure.resource_group, or deploy cloud/azure/template.json",
    ),
    Row(
        "ResourceNotFound",
        "misconfigured",
        "place",
        text="subnet",
        advice="correct azure.subnets for this region",
    ),
    *rows(
        "InvalidResourceReference LinkedInvalidPropertyId",
        "misconfigured",
        "place",
        advice="correct azure.subnets, azure.image and azure.identity",
    ),
    Row("FailedIdentityOperation", "misconfigured", "place", advice="correct azure.identity"),
    Row(
        "InvalidParameter",
        "misconfigured",
        "place",
        text="keyData",
        advice="set azure.ssh_public_key to one line of OpenSSH, as in id_ed25519.pub",
    ),
    Row(
        "InvalidParameter",
        "misconfigured",
        "place",
        text="Admin Username",
        advice="set azure.admin to another name; Azure keeps root, admin and some more",
    ),
    Row(
        "ResourceGroupBeingDeleted",
        "misconfigured",
        "cloud",
        advice="once it is gone, deploy cloud/azure/template.json again",
    ),
    *rows(
        "PlatformImageNotFound GalleryImageNotFound ImageNotFound",
        "misconfigured",
        "place",
        advice="correct azure.image, or replicate it to this region",
    ),
    *rows(
        "MarketplacePurchaseEligibilityFailed ResourcePurchaseValidationFailed",
        "misconfigured",
        "place",
        advice="accept the terms of the image once, or use an image of your own",
    ),
    *rows(
        "LocationNotAvailableForResourceType NoRegisteredProviderFound",
        "misconfigured",
        "place",
        advice="remove the region from azure.subnets",
    ),
)


def row_of(code: str, text: str) -> Row | None:
    return error_codes.row_of(TABLE, code, text)


def error(said: Said, market: Market | None = None, doing: str = "") -> errors.CloudError:
    """Return the error that an answer of Azure stands for."""
    row = row_of(said.code, said.text)
    what = f"Azure, {doing}: {said.code or f'HTTP {said.status}'}: {said.text[:SAID_MAX]}"
    if row is None:
        if said.status == 429:
            return errors.Throttled(what, said.retry_s)
        return error_codes.unlisted(said.code, what, said.status)
    sentence = f"{what} ({row.advice})" if row.advice else what
    return error_codes.error_of(row, sentence, _retry_s(row, said, market))


def refusal(code: str, text: str, market: Market) -> Refusal:
    """Return why a creation failed after it was accepted; an unknown reason blocks nothing else."""
    row = row_of(code, text) or Row(code, "refused")
    return Refusal(
        scope=row.scope or "request",
        code=code,
        said=f"Azure: {code}: {text[:SAID_MAX]}",
        retry_s=_retry_s(row, Said(code=code, text=text), market),
    )


def _retry_s(row: Row, said: Said, market: Market | None) -> float | None:
    if said.retry_s is not None:
        return said.retry_s
    if row.means == "sold_out":
        return SOLD_OUT_S[market or "spot"]
    if row.means == "quota":
        return NO_QUOTA_S if re.search(r"Current Limit: 0\b", said.text) else QUOTA_S
    return row.retry_s
