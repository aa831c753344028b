"""What an Azure size has of accelerators, which its list of capabilities does not say but for their number."""

import pytest

from cloud.azure.offers import GIB, Capability, Sku, _type


@pytest.mark.parametrize(
    ("name", "cards", "accelerator", "gib"),
    [
        ("Standard_D4s_v5", 0, "cpu", 0),
        ("Standard_NC4as_T4_v3", 1, "T4", 16),
        ("Standard_NC6s_v3", 1, "V100", 16),
        ("Standard_ND40rs_v2", 8, "V100", 32),
        ("Standard_NV6ads_A10_v5", 1, "A10/6", 4),
        ("Standard_NV12ads_A10_v5", 1, "A10/3", 8),
        ("Standard_NV36ads_A10_v5", 1, "A10", 24),
        ("Standard_NV36adms_A10_v5", 1, "A10", 24),
        ("Standard_ND96asr_v4", 8, "A100", 40),
        ("Standard_ND96amsr_A100_v4", 8, "A100", 80),
        ("Standard_NC24ads_A100_v4", 1, "A100", 80),
        ("Standard_NC40ads_H100_v5", 1, "H100", 94),
        ("Standard_ND96isr_H100_v5", 8, "H100", 80),
        ("Standard_ND96isr_H200_v5", 8, "H200", 141),
        ("Standard_NV4as_v4", 1, "gpu", 0),
    ],
)
def test_a_size_has_the_accelerators_of_its_series(
    name: str, cards: int, accelerator: str, gib: int
) -> None:
    """A planner that took 94 GiB for 80 would choose stages that do not fit."""
    size = Sku(
        name=name,
        resource_type="virtualMachines",
        capabilities=(Capability("GPUs", str(cards)), Capability("vCPUs", "4")),
    )
    kind = _type(size, 1.0)
    assert (kind.accelerator, kind.accelerators) == (accelerator, cards)
    assert kind.accelerator_memory_bytes == gib * GIB
