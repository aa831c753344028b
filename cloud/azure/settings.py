"""What a person sets about Azure."""

import msgspec

ARM = "https://management.azure.com"
PRICES = "https://prices.azure.com"


class AzureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where machines are made, and of what. Names end in the ids that Azure writes in its answers.

    `subnets` holds a subnet's id by region. `image` is the id of one version of an image, never a
    name such as "latest". `identity` is the id of the identity that machines get: it may read
    their state store and delete them. `sign_in` says who the manager is: "default" tries what the
    SDK knows, "managed" is the machine's own identity, and anything else a managed identity's
    client id. A list may miss a machine for `lists_lag_s` after its launch.
    """

    subscription: str
    resource_group: str
    regions: tuple[str, ...]
    subnets: dict[str, str]
    image: str
    ssh_public_key: str
    types: tuple[str, ...] = ("Standard_NC*",)
    identity: str = ""
    disk_gb: int = 64
    disk_type: str = "StandardSSD_LRS"
    admin: str = "trainer"
    sign_in: str = "default"
    endpoint: str = ARM
    prices_endpoint: str = PRICES
    lists_lag_s: float = 120.0
    boot_script: str = ""
