"""What the fake EC2 sells: sizes as DescribeInstanceTypes gives them, and prices per hour."""

from typing import Any

import msgspec

GROUPS = {
    "g": ("L-DB2E81BA", "L-3819A6DF"),
    "p": ("L-417A185B", "L-7212CCBC"),
    "c": ("L-1216C47A", "L-34B43A08"),
}
"""Quota codes by the first letter of a type: on demand, spot. Both count vCPUs."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One instance type."""

    name: str
    vcpus: int
    memory_mib: int
    usd_per_h: float
    gpus: int = 0
    gpu: str = ""
    gpu_mib: int = 0
    network: str = "Up to 10 Gigabit"
    gbps: float = 5.0
    efa: bool = False
    architecture: str = "x86_64"

    @property
    def group(self) -> str:
        return "c" if self.name[0] in "acdhimrtz" else self.name[0]

    def described(self) -> dict[str, Any]:
        """Return what DescribeInstanceTypes says."""
        told: dict[str, Any] = {
            "InstanceType": self.name,
            "CurrentGeneration": True,
            "SupportedUsageClasses": ["on-demand", "spot"],
            "BareMetal": False,
            "ProcessorInfo": {"SupportedArchitectures": [self.architecture]},
            "VCpuInfo": {"DefaultVCpus": self.vcpus},
            "MemoryInfo": {"SizeInMiB": self.memory_mib},
            "NetworkInfo": {
                "NetworkPerformance": self.network,
                "EfaSupported": self.efa,
                "MaximumNetworkInterfaces": 4,
                "NetworkCards": [
                    {
                        "NetworkCardIndex": 0,
                        "NetworkPerformance": self.network,
                        "BaselineBandwidthInGbps": self.gbps,
                        "PeakBandwidthInGbps": self.gbps * 2,
                    }
                ],
            },
        }
        if self.gpus:
            memory = {"SizeInMiB": self.gpu_mib}
            gpu = {"Name": self.gpu, "Manufacturer": "NVIDIA", "Count": self.gpus}
            told["GpuInfo"] = {
                "Gpus": [gpu | {"MemoryInfo": memory}],
                "TotalGpuMemoryInMiB": self.gpus * self.gpu_mib,
            }
        return told


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="c7i.large", vcpus=2, memory_mib=4096, usd_per_h=0.08925, gbps=0.781),
        Kind(name="m7i.xlarge", vcpus=4, memory_mib=16384, usd_per_h=0.2016, gbps=1.562),
        Kind(
            name="g5.xlarge",
            vcpus=4,
            memory_mib=16384,
            usd_per_h=1.006,
            gpus=1,
            gpu="A10G",
            gpu_mib=24576,
            gbps=2.5,
        ),
        Kind(
            name="g5.12xlarge",
            vcpus=48,
            memory_mib=196608,
            usd_per_h=5.672,
            gpus=4,
            gpu="A10G",
            gpu_mib=24576,
            network="40 Gigabit",
            gbps=40.0,
        ),
        Kind(
            name="p4d.24xlarge",
            vcpus=96,
            memory_mib=1179648,
            usd_per_h=21.957642,
            gpus=8,
            gpu="A100",
            gpu_mib=40960,
            network="4x 100 Gigabit",
            gbps=100.0,
            efa=True,
        ),
        Kind(name="c7g.large", vcpus=2, memory_mib=4096, usd_per_h=0.0725, architecture="arm64"),
    )
}
