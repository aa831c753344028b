"""What of a cloud's types a worker can train on, and how fast, before any machine has run."""

from typing import Any

import pytest
from cloudfake.arm_catalogue import SIZES, sku
from cloudfake.ec2_types import KINDS
from msgspec.structs import replace

from cloud.aws.answers import type_of
from cloud.aws.selling import _runs_our_image
from cloud.azure.offers import Capability, Sku, _type, wanted

G5, M7I = KINDS["g5.xlarge"].described(), KINDS["m7i.xlarge"].described()
T4 = SIZES["Standard_NC4as_T4_v3"]


def with_cards(name: str, maker: str = "NVIDIA", **more: Any) -> dict[str, Any]:
    """Return a type with cards as EC2 writes it."""
    gpu = {"Name": name, "Manufacturer": maker, "Count": 1, "MemoryInfo": {"SizeInMiB": 24576}}
    return G5 | {"GpuInfo": {"Gpus": [gpu | more], "TotalGpuMemoryInMiB": 24576}}


def on_azure(name: str) -> Any:
    """Return a size with one card as the settings' patterns find it."""
    (found,) = wanted([sku(replace(T4, name=name), "eastus")], ["*"])
    return _type(found, 1.0)


def test_an_eighth_of_a_card_is_an_eighth():
    """EC2 counts no whole card in a g6f.large, whose price is an eighth: it was taken for a whole one."""
    eighth = {"Count": 0, "LogicalGpuCount": 1, "GpuPartitionSize": 0.125}
    part, whole = type_of(with_cards("L4", **eighth), 0.2, 60), type_of(with_cards("L4"), 0.8, 60)
    assert (part.slots, part.accelerators, part.accelerator) == (1, 1, "l4/8")
    assert part.speed == whole.speed / 8


def test_a_card_that_ec2_does_not_count_is_one():
    """Botocore's model requires neither number, and one odd type may not hide a region's others."""
    odd = with_cards("L4")
    del odd["GpuInfo"]["Gpus"][0]["Count"]
    assert type_of(odd, 1.0, 60).slots == 1


def test_the_same_card_is_as_fast_in_every_cloud():
    """What AWS sold counted as a T4, whatever it was: the dearer cloud won, and the slower card."""
    a10g = type_of(with_cards("A10G"), 1.0, 60)
    assert a10g.speed == on_azure("Standard_NV36ads_A10_v5").speed
    assert type_of(with_cards("T4"), 1.0, 60).speed == on_azure(T4.name).speed < a10g.speed
    assert type_of(with_cards("H100"), 1.0, 60).speed == on_azure("Standard_NC40ads_H100_v5").speed
    assert type_of(with_cards("H100"), 1.0, 60).speed > a10g.speed
    assert on_azure("Standard_NV6ads_A10_v5").speed == pytest.approx(a10g.speed / 6)


@pytest.mark.parametrize(
    "told",
    [
        with_cards("Radeon Pro V520", "AMD"),
        with_cards("Gaudi HL-205", "Habana"),
        M7I | {"NeuronInfo": {"NeuronDevices": [{"Count": 16, "Name": "Trainium"}]}},
        M7I | {"InferenceAcceleratorInfo": {"Accelerators": [{"Count": 1, "Name": "Inferentia"}]}},
        M7I | {"FpgaInfo": {"Fpgas": [{"Name": "Virtex UltraScale", "Count": 1}]}},
        M7I | {"MediaAcceleratorInfo": {"Accelerators": [{"Count": 2, "Name": "U30"}]}},
        G5 | {"SupportedUsageClasses": ["capacity-block"]},
        G5 | {"BareMetal": True},
    ],
    ids=["AMD", "Habana", "Trainium", "Inferentia", "FPGA", "media", "capacity block", "metal"],
)
def test_ec2s_types_that_a_worker_cannot_train_on_are_not_sold(told: dict[str, Any]):
    """A g4ad.xlarge is the cheapest of g*; it cannot join, and then all of the family is left alone."""
    assert _runs_our_image(G5)
    assert _runs_our_image(M7I)
    assert not _runs_our_image(told)


@pytest.mark.parametrize(
    "name",
    [
        "Standard_NV4as_v4",
        "Standard_NG32ads_V620_v1",
        "Standard_NV4ads_V710_v5",
        "Standard_ND96isr_MI300X_v5",
    ],
)
def test_azures_sizes_with_amds_cards_are_not_sold(name: str):
    assert wanted([sku(replace(T4, name=name), "eastus")], ["*"]) == []


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("CpuArchitectureType", "Arm64", "x64"), ("ConfidentialComputingType", "SNP", "")],
)
def test_azures_sizes_that_do_not_boot_the_image_are_not_sold(name: str, value: str, other: str):
    """`Standard_D*` has Arm's sizes among it, the cheapest, and `Standard_NC*` a confidential one."""
    told = sku(T4, "eastus")
    told["capabilities"].append({"name": name, "value": value})
    assert wanted([told], ["*"]) == []
    told["capabilities"][-1]["value"] = other
    assert len(wanted([told], ["*"])) == 1


@pytest.mark.parametrize(
    ("name", "cards", "accelerator"),
    [
        ("Standard_D4s_v5", 0, "cpu"),
        ("Standard_NC4as_T4_v3", 1, "T4"),
        ("Standard_NC6s_v3", 1, "V100"),
        ("Standard_ND40rs_v2", 8, "V100"),
        ("Standard_NV6ads_A10_v5", 1, "A10/6"),
        ("Standard_NV12ads_A10_v5", 1, "A10/3"),
        ("Standard_NV36ads_A10_v5", 1, "A10"),
        ("Standard_NV36adms_A10_v5", 1, "A10"),
        ("Standard_ND96asr_v4", 8, "A100"),
        ("Standard_ND96amsr_A100_v4", 8, "A100"),
        ("Standard_NC24ads_A100_v4", 1, "A100"),
        ("Standard_NC40ads_H100_v5", 1, "H100"),
        ("Standard_ND96isr_H100_v5", 8, "H100"),
        ("Standard_ND96isr_H200_v5", 8, "H200"),
    ],
)
def test_a_size_of_azure_has_the_accelerators_of_its_series(
    name: str, cards: int, accelerator: str
):
    """Azure's list of capabilities says their number only."""
    cards_told = (Capability("GPUs", str(cards)), Capability("vCPUs", "4"))
    kind = _type(Sku(name=name, resource_type="virtualMachines", capabilities=cards_told), 1.0)
    assert (kind.accelerator, kind.accelerators) == (accelerator, cards)


def test_a_part_of_a_card_is_a_device_also_where_azure_counts_it_as_a_part():
    part = Capability("GPUs", "0.17")
    name = "Standard_NV6ads_A10_v5"
    kind = _type(Sku(name=name, resource_type="virtualMachines", capabilities=(part,)), 1.0)
    assert (kind.accelerator, kind.accelerators, kind.slots) == ("A10/6", 1, 1)
