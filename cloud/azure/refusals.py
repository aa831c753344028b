"""What each of Azure's errors means: one table from its code, status and text to one of ours.

The SDK's exceptions say nothing: it raises `ResourceExistsError` for every 409 and 412, whether a
name is taken, a quota is reached or a size is sold out. So the body of the answer decides. A code
that is not in the table is `Unknown`, and the next list shows what happened.
"""

import re
from typing import Literal

import msgspec

from cloud import errors
from cloud.clock import HOUR_S
from cloud.model import Market, Refusal, Scope

QUOTA_S = 600.0
NO_QUOTA_S = HOUR_S
SOLD_OUT_S = {"spot": HOUR_S, "on_demand": 23 * HOUR_S}
SAID_MAX = 300
NOT_DELETED = "InternalExecutionError"  # the deletion failed, not the creation
NOT_YET = ("NicReservedForAnotherVm", "NicInUse", "AttachDiskWhileBeingDetached")
"""Codes of a deletion that works later: the list goes on to show what it was for."""

Meaning = Literal[
    "refused", "quota", "sold_out", "throttled", "not_allowed", "misconfigured", "mismatch"
]


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An error as Azure wrote it."""

    status: int = 0
    code: str = ""
    text: str = ""
    retry_s: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table; `text` is looked for in the message, and the first row that fits counts."""

    code: str
    meaning: Meaning
    scope: Scope = "request"
    text: str = ""
    retry_s: float | None = None
    todo: str = ""


QUOTAS: tuple[tuple[str, Scope], ...] = (
    ("LowPriorityCores", "market"),
    ("Total Regional", "market"),
    ("Cores quota", "family"),
)
"""How far a quota reaches, by what its refusal says."""

TABLE = (
    # No machine to give now.
    Row(code="SkuNotAvailable", meaning="sold_out", scope="pool"),
    Row(code="AllocationFailed", meaning="refused", scope="pool", retry_s=HOUR_S),
    Row(code="ZonalAllocationFailed", meaning="refused", scope="pool", retry_s=HOUR_S),
    Row(code="OverconstrainedAllocationRequest", meaning="refused", scope="pool", retry_s=HOUR_S),
    Row(
        code="OverconstrainedZonalAllocationRequest",
        meaning="refused",
        scope="pool",
        retry_s=HOUR_S,
    ),
    Row(code="OSProvisioningTimedOut", meaning="refused"),
    Row(code="OSProvisioningClientError", meaning="refused"),
    Row(code=NOT_DELETED, meaning="refused"),
    # The size is not sold there at all.
    Row(code="VMSizeNotSupported", meaning="refused", scope="pool", retry_s=24 * HOUR_S),
    Row(
        code="AzureSpotIsNotSupportedForThisVMSize",
        meaning="refused",
        scope="pool",
        retry_s=24 * HOUR_S,
    ),
    Row(
        code="InvalidParameter",
        text="is not supported for subscription",
        meaning="refused",
        scope="pool",
        retry_s=24 * HOUR_S,
    ),
    Row(code="InvalidAvailabilityZone", meaning="refused", scope="zone", retry_s=24 * HOUR_S),
    Row(
        code="AzureSpotFeatureNotEnabledForSubscription",
        meaning="refused",
        scope="market",
        retry_s=24 * HOUR_S,
    ),
    Row(code="SpotPriceGreaterThanProvidedMaxPrice", meaning="refused", scope="pool"),
    # Quotas, which share two codes and differ in their text.
    *(
        Row(code=code, text=text, meaning="quota", scope=scope)
        for code in ("OperationNotAllowed", "QuotaExceeded")
        for text, scope in QUOTAS
    ),
    Row(code="QuotaExceeded", meaning="quota", scope="family"),
    Row(code="SubnetIsFull", meaning="refused", scope="place", retry_s=QUOTA_S),
    # Slower.
    Row(code="TooManyRequests", meaning="throttled", scope="place"),
    Row(code="SubscriptionRequestsThrottled", meaning="throttled", scope="place"),
    Row(code="OperationNotAllowed", text=r"too many requests", meaning="throttled", scope="place"),
    # The name.
    Row(code="PreconditionFailed", meaning="mismatch"),
    Row(code="PropertyChangeNotAllowed", meaning="mismatch"),
    # Keys, roles, policies.
    Row(
        code="ExpiredAuthenticationToken",
        meaning="not_allowed",
        scope="cloud",
        todo="sign in again, and check that this machine's clock is right",
    ),
    Row(
        code="InvalidAuthenticationToken",
        meaning="not_allowed",
        scope="cloud",
        todo="sign in again",
    ),
    Row(code="AuthenticationFailed", meaning="not_allowed", scope="cloud", todo="sign in again"),
    Row(
        code="AuthorizationFailed",
        meaning="not_allowed",
        scope="cloud",
        todo="give the manager's identity the role in cloud/azure/role.json on the resource group",
    ),
    Row(
        code="LinkedAuthorizationFailed",
        meaning="not_allowed",
        scope="cloud",
        todo="give the manager's identity the role in cloud/azure/role.json on the resource group",
    ),
    Row(
        code="ReadOnlyDisabledSubscription",
        meaning="not_allowed",
        scope="cloud",
        todo="pay or enable the subscription",
    ),
    Row(
        code="ScopeLocked",
        meaning="not_allowed",
        scope="place",
        todo="remove the lock on the resource group, which keeps machines from being deleted",
    ),
    Row(
        code="RequestDisallowedByPolicy",
        text="hardwareProfile.vmSize",
        meaning="not_allowed",
        scope="pool",
        todo="leave the size out of azure.types, or ask the administrator for an exemption",
    ),
    Row(
        code="RequestDisallowedByPolicy",
        meaning="not_allowed",
        scope="place",
        todo="ask the administrator for an exemption from the policy",
    ),
    # Settings.
    Row(
        code="SubscriptionNotFound",
        meaning="misconfigured",
        scope="cloud",
        todo="correct azure.subscription",
    ),
    Row(
        code="InvalidSubscriptionId",
        meaning="misconfigured",
        scope="cloud",
        todo="correct azure.subscription",
    ),
    Row(
        code="MissingSubscriptionRegistration",
        meaning="misconfigured",
        scope="cloud",
        todo="register the resource providers Microsoft.Compute and Microsoft.Network once",
    ),
    Row(
        code="ResourceGroupNotFound",
        meaning="misconfigured",
        scope="cloud",
        todo="correct azure.resource_group, or deploy cloud/azure/template.json",
    ),
    Row(
        code="ResourceNotFound",
        text=r"subnet",
        meaning="misconfigured",
        scope="place",
        todo="correct azure.subnets for this region",
    ),
    Row(
        code="InvalidResourceReference",
        meaning="misconfigured",
        scope="place",
        todo="correct azure.subnets, azure.image and azure.identity",
    ),
    Row(
        code="PlatformImageNotFound",
        meaning="misconfigured",
        scope="place",
        todo="correct azure.image, or replicate it to this region",
    ),
    Row(
        code="GalleryImageNotFound",
        meaning="misconfigured",
        scope="place",
        todo="correct azure.image, or replicate it to this region",
    ),
    Row(
        code="ImageNotFound",
        meaning="misconfigured",
        scope="place",
        todo="correct azure.image, or replicate it to this region",
    ),
    Row(
        code="MarketplacePurchaseEligibilityFailed",
        meaning="misconfigured",
        scope="place",
        todo="accept the terms of the image once, or use an image of your own",
    ),
    Row(
        code="ResourcePurchaseValidationFailed",
        meaning="misconfigured",
        scope="place",
        todo="accept the terms of the image once, or use an image of your own",
    ),
    Row(
        code="LocationNotAvailableForResourceType",
        meaning="misconfigured",
        scope="place",
        todo="remove the region from azure.subnets",
    ),
    Row(
        code="NoRegisteredProviderFound",
        meaning="misconfigured",
        scope="place",
        todo="remove the region from azure.subnets",
    ),
)


def row_of(code: str, text: str) -> Row | None:
    """Return the first row that fits; `None` if the code is unknown."""
    for row in TABLE:
        if row.code == code and re.search(row.text, text, re.IGNORECASE):
            return row
    return None


def error(said: Said, market: Market | None = None, doing: str = "") -> errors.CloudError:
    """Return the error that an answer of Azure stands for."""
    row = row_of(said.code, said.text)
    what = f"Azure, {doing}: {said.code or f'HTTP {said.status}'}: {said.text[:SAID_MAX]}"
    if row is None:
        return _unlisted(said, what)
    if row.meaning == "throttled":
        return errors.Throttled(what, said.retry_s)
    sentence = f"{what} ({row.todo})" if row.todo else what
    if row.meaning == "not_allowed":
        return errors.NotAllowed(sentence, row.scope)
    if row.meaning == "misconfigured":
        return errors.Misconfigured(sentence, row.scope)
    if row.meaning == "mismatch":
        return errors.TokenMismatch(what)
    return errors.Refused(row.scope, said.code, what, _retry_s(row, said, market))


def refusal(code: str, text: str, market: Market) -> Refusal:
    """Return why a creation failed after it was accepted; an unknown reason blocks nothing else."""
    row = row_of(code, text) or Row(code=code, meaning="refused")
    said = Said(code=code, text=text)
    return Refusal(
        scope=row.scope,
        code=code,
        said=f"Azure: {code}: {text[:SAID_MAX]}",
        retry_s=_retry_s(row, said, market),
    )


def _unlisted(said: Said, what: str) -> errors.CloudError:
    if said.status == 429:
        return errors.Throttled(what, said.retry_s)
    return errors.Unknown(what)


def _retry_s(row: Row, said: Said, market: Market | None) -> float | None:
    if said.retry_s is not None:
        return said.retry_s
    if row.meaning == "sold_out":
        return SOLD_OUT_S[market or "spot"]
    if row.meaning == "quota":
        return NO_QUOTA_S if re.search(r"Current Limit: 0\b", said.text) else QUOTA_S
    return row.retry_s
