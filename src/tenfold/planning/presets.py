"""Accelerators by name, in the nodes that they are mostly found in: figures of datasheets, and what is assumed of them.

Peaks are of dense matrices. What is reached of a peak is assumed, and told in `notes` with the rest: `tenfold doctor
--save` measures it. Rates of links are those of one direction.
"""

from __future__ import annotations

from typing import Any

_T, _G = 1e12, 1e9
_GIB = 2**30

# Passes over fp32 words that an optimizer's step makes for each weight. Fused AdamW reads weight, gradient and two
# moments, and writes three of them. Adafactor and Muon are PyTorch's own, in many operations: counted in its source.
_UPDATE_PASSES = {"adamw": 7, "adafactor": 16, "muon": 8}
_MEMORY_SHARE = (
    0.8  # of the memory's rate, in passes over large tensors: BabelStream reaches 0.8 to 0.9 on all of these
)
_HOST_SHARE = 0.1  # of a node's memory for the system, processes and data
_DRIVER_BYTES = 3 * _GIB // 2  # CUDA's context, cuBLAS's workspaces and NCCL's buffers
_FRAGMENTED = 0.04  # of the caching allocator's memory


def _accelerator(
    name: str,
    memory: int,
    bandwidth: float,
    fp32: float,
    bf16: float,
    *,
    share: float,
    attention: tuple[float, float],
    grouped: float,
    watts: float,
    idle: float,
    turns: bool = False,
) -> dict[str, Any]:
    """`share` of the peak in products of bf16, `attention` forward and backward, and `grouped` in those by expert."""
    forward, backward = attention
    return {
        "name": name,
        "kind": "cuda",
        "memory_bytes": memory,
        "reserve_bytes": _DRIVER_BYTES,
        "reserve_share": _FRAGMENTED,
        "memory_rate": {"peak": bandwidth, "share": _MEMORY_SHARE},
        "matrix": {"bf16": {"peak": bf16, "share": share}, "fp32": {"peak": fp32, "share": 0.85}},
        "attention": {
            "bf16": {"peak": bf16, "share": forward, "backward_share": backward},
            "fp32": {"peak": fp32, "share": 0.5, "backward_share": 0.35},
        },
        # In fp32 there is no grouped kernel: products by turns, as large as an expert's rows are many.
        "grouped": {"bf16": {"peak": bf16, "share": grouped}, "fp32": {"peak": fp32, "share": 0.6}},
        "groups_by_turns": turns,
        "update": {
            optimizer: {"peak": bandwidth / passes, "share": _MEMORY_SHARE}
            for optimizer, passes in _UPDATE_PASSES.items()
        },
        "launch_seconds": 8e-6,
        "watts": watts,
        "idle_watts": idle,
    }


def _node(
    accelerator: dict[str, Any],
    notes: list[str],
    *,
    inside: tuple[float, float],
    inside_all_to_all: float,
    network: float,
    host: float,
    host_memory: int,
    disk: float,
    disk_read: float,
    disk_write: float,
) -> dict[str, Any]:
    """`inside`: bytes a second of a link within the node and the share reached; `network` and `host` are a rank's."""
    rate, share = inside
    return {
        "name": accelerator["name"],
        "accelerator": accelerator,
        "node_link": {
            "latency_seconds": 6e-6,
            "bytes_per_second": rate,
            "share": share,
            "all_to_all_share": inside_all_to_all,
        },
        "network": {
            "latency_seconds": 12e-6,
            "bytes_per_second": network,
            "share": 0.85,
            "all_to_all_share": 0.6,
        },
        "host_read_bytes_per_second": host,
        "host_write_bytes_per_second": host,
        "host_memory_bytes": host_memory,
        "host_reserve_share": _HOST_SHARE,
        "disk_bytes": round(disk),
        "disk_read_bytes_per_second": disk_read,
        "disk_write_bytes_per_second": disk_write,
        "notes": [
            *notes,
            "assumed for every preset: 80% of the memory's rate in large passes; 85% of a network link, 60% of it when"
            " all send to all; latencies of 6 us in a node and 12 us between nodes (NCCL's, small messages); 8 us to "
            "start an operation from eager PyTorch; 1.5 GiB for driver and communication, and 4% of the rest lost to "
            "fragmentation; 10% of a node's memory for its system, processes and data",
        ],
    }


# NVIDIA V100 Tensor Core GPU datasheet (2020), SXM2: 125 TFLOP/s tensor (fp16), 15.7 fp32, 32 GB at 900 GB/s, 300 W,
# NVLink 300 GB/s both ways together. NVIDIA DGX-1 datasheet: 512 GB, 4 x 1.92 TB SSD RAID 0, 4 x InfiniBand EDR
# (100 Gb/s), 3,500 W; two GPUs share a PCIe 3.0 x16 uplink (DGX-1 system architecture white paper) of some 12 GB/s.
_V100 = _node(
    _accelerator(
        "V100 SXM2 32 GB",
        32 * _GIB,
        900 * _G,
        15.7 * _T,
        125 * _T,
        share=0.55,
        attention=(0.2, 0.15),
        grouped=0.4,
        watts=300 + 1100 / 8,
        idle=40 + 400 / 8,
        turns=True,
    ),
    [
        "V100 SXM2 32 GB in a DGX-1 (datasheets of both): 4 x EDR InfiniBand and two GPUs to a PCIe 3.0 x16 uplink",
        "a V100 has no bf16 unit: bf16 is planned at the rate of its fp16 tensor cores, as the runs of its time used "
        "them, and at 55% of their peak in large products, 40% in grouped ones; bf16 itself would be far slower there",
        "attention at 20% of the peak forward and 15% backward: FlashAttention-2 needs compute capability 8",
    ],
    inside=(150 * _G, 0.85),
    inside_all_to_all=0.5,  # a cube mesh: not every pair has a link of its own
    network=4 * 12.5 * _G / 8,
    host=6 * _G,
    host_memory=512 * _GIB,
    disk=4 * 1.92e12,
    disk_read=2.0 * _G,
    disk_write=1.5 * _G,
)


def _a100(memory: int, bandwidth: float, host_memory: int, disk: float) -> dict[str, Any]:
    # NVIDIA A100 datasheet (2021), SXM4: bf16 312 TFLOP/s, fp32 19.5, 1,555 or 2,039 GB/s, 400 W, NVLink 600 GB/s both
    # ways. DGX A100 datasheet: 1 or 2 TB of memory, 15 or 30 TB NVMe, 8 x 200 Gb/s InfiniBand, 6.5 kW.
    gigabytes = memory // _GIB
    return _node(
        _accelerator(
            f"A100 SXM4 {gigabytes} GB",
            memory,
            bandwidth,
            19.5 * _T,
            312 * _T,
            share=0.7,
            attention=(0.55, 0.4),
            grouped=0.55,
            watts=400 + 3300 / 8,
            idle=50 + 1200 / 8,
        ),
        [
            f"A100 SXM4 {gigabytes} GB in a DGX A100 (datasheets of both): 8 x 200 Gb/s InfiniBand, PCIe 4.0",
            "70% of the bf16 peak in large products; attention 55% forward and 40% backward (FlashAttention-2, "
            "arXiv 2307.08691, reports up to 73% and 63% on long sequences); grouped products 55%",
        ],
        inside=(300 * _G, 0.8),
        inside_all_to_all=0.9,
        network=25 * _G,
        host=20 * _G,
        host_memory=host_memory,
        disk=disk,
        disk_read=25 * _G,
        disk_write=12 * _G,
    )


# A node of eight with a link of 400 Gb/s each, PCIe 5.0, 2 TiB of memory and 8 disks.
_EIGHT_OF_400_GBIT: dict[str, Any] = {
    "network": 50 * _G,
    "host": 45 * _G,
    "host_memory": 2048 * _GIB,
    "disk": 8 * 3.84e12,
    "disk_read": 40 * _G,
    "disk_write": 20 * _G,
}


def _hopper(name: str, memory: int, bandwidth: float) -> dict[str, Any]:
    # NVIDIA H100 datasheet (SXM5): bf16 989 TFLOP/s dense, fp32 67, 80 GB at 3.35 TB/s, 700 W, NVLink 900 GB/s both
    # ways; H200 datasheet: the same with 141 GB at 4.8 TB/s. DGX H100/H200 datasheets: 2 TB of memory, 8 x 3.84 TB
    # NVMe, 8 x 400 Gb/s, 10.2 kW.
    return _node(
        _accelerator(
            name,
            memory,
            bandwidth,
            67 * _T,
            989 * _T,
            share=0.6,
            attention=(0.38, 0.3),
            grouped=0.5,
            watts=700 + 4600 / 8,
            idle=75 + 1600 / 8,
        ),
        [
            f"{name} in a DGX of its kind (datasheets of both): 8 x 400 Gb/s InfiniBand, PCIe 5.0",
            "60% of the bf16 peak in large products (power lowers the clock); attention 38% forward and 30% backward "
            "(FlashAttention-2 on an H100: 335 to 400 TFLOP/s, arXiv 2407.08608); grouped products 50%",
        ],
        inside=(450 * _G, 0.8),
        inside_all_to_all=0.9,
        **_EIGHT_OF_400_GBIT,
    )


# NVIDIA HGX B200 and DGX B200 datasheets: bf16 2,250 TFLOP/s dense and fp32 80 a GPU, 180 GB at 8 TB/s, 1,000 W, NVLink
# 1.8 TB/s both ways; 2 TB of memory, 8 x 3.84 TB NVMe, 8 x 400 Gb/s, 14.3 kW.
_B200 = _node(
    _accelerator(
        "B200 180 GB",
        180 * 10**9,
        8000 * _G,
        80 * _T,
        2250 * _T,
        share=0.6,
        attention=(0.3, 0.22),
        grouped=0.45,
        watts=1000 + 6300 / 8,
        idle=140 + 2000 / 8,
    ),
    [
        "B200 180 GB in a DGX B200 (datasheet): 8 x 400 Gb/s, PCIe 5.0",
        "60% of the bf16 peak in large products; attention 30% forward and 22% backward, grouped products 45%: "
        "assumed, for there are few measurements",
    ],
    inside=(900 * _G, 0.75),
    inside_all_to_all=0.9,
    **_EIGHT_OF_400_GBIT,
)

# AMD Instinct MI300X datasheet: bf16 1,307.4 TFLOP/s dense, fp32 163.4, 192 GB at 5.3 TB/s, 750 W, 7 Infinity Fabric
# links of 128 GB/s both ways, one to each other GPU.
_MI300X = _node(
    _accelerator(
        "MI300X 192 GB",
        192 * 10**9,
        5300 * _G,
        163.4 * _T,
        1307.4 * _T,
        share=0.42,
        attention=(0.3, 0.2),
        grouped=0.35,
        watts=750 + 4000 / 8,
        idle=140 + 1200 / 8,
    ),
    [
        "MI300X 192 GB (datasheet) on a board of eight; its node is assumed: 8 x 400 Gb/s, PCIe 5.0, 2 TiB of memory",
        "42% of the bf16 peak in large products; attention 30% forward and 20% backward; grouped products 35%",
    ],
    inside=(448 * _G, 0.7),
    inside_all_to_all=1.0,  # every pair has its link
    **_EIGHT_OF_400_GBIT,
)

# NVIDIA Ada GPU architecture white paper (GeForce RTX 4090): bf16 tensor 165.2 TFLOP/s dense with fp32 sums, fp32 82.6,
# 24 GB at 1,008 GB/s, 450 W; PCIe 4.0 x16, no NVLink.
_RTX_4090 = _node(
    _accelerator(
        "GeForce RTX 4090",
        24 * _GIB,
        1008 * _G,
        82.6 * _T,
        165.2 * _T,
        share=0.85,
        attention=(0.6, 0.45),
        grouped=0.6,
        watts=450 + 100,
        idle=25 + 30,
    ),
    [
        "GeForce RTX 4090 (white paper); its machine is assumed: PCIe 4.0 x16, ranks talk through the host's memory, "
        "25 Gb/s of network for eight of them, 128 GiB of memory, one NVMe disk of 2 TB",
        "85% of the bf16 peak in large products; attention 60% forward and 45% backward; grouped products 60%",
    ],
    inside=(16 * _G, 0.6),
    inside_all_to_all=0.6,
    network=3.125 * _G / 8,
    host=22 * _G,
    host_memory=128 * _GIB,
    disk=2e12,
    disk_read=6 * _G,
    disk_write=4 * _G,
)


def _cpu() -> dict[str, Any]:
    """A process with eight cores of a server's processor of today, without a bf16 unit; all of it is assumed."""
    peak = 8 * 2.6 * _G * 32  # 8 cores of 2.6 GHz, two fused multiply-adds of 8 fp32 a cycle (AVX2)
    product = {"peak": peak, "share": 0.75}
    attention = {"peak": peak, "share": 0.4, "backward_share": 0.25}
    bandwidth = 40 * _G
    return {
        "name": "cpu",
        "accelerator": {
            "name": "8 cores with AVX2",
            "kind": "cpu",
            "memory_bytes": 64 * _GIB,
            "reserve_bytes": 512 * 2**20,
            "reserve_share": 0.05,
            "memory_rate": {"peak": bandwidth, "share": 0.5},
            "matrix": {"fp32": product, "bf16": {**product, "share": 0.65}},
            "attention": {"fp32": attention, "bf16": {**attention, "share": 0.35}},
            "grouped": {"fp32": {**product, "share": 0.6}, "bf16": {**product, "share": 0.5}},
            "groups_by_turns": True,
            "update": {
                optimizer: {"peak": bandwidth / passes, "share": 0.5} for optimizer, passes in _UPDATE_PASSES.items()
            },
            "launch_seconds": 15e-6,
            "watts": 100.0,
            "idle_watts": 40.0,
        },
        "node_link": {"latency_seconds": 50e-6, "bytes_per_second": 4 * _G, "share": 0.5, "all_to_all_share": 0.8},
        "network": {"latency_seconds": 100e-6, "bytes_per_second": 1.25 * _G, "share": 0.8, "all_to_all_share": 0.6},
        "host_memory_bytes": 64 * _GIB,
        "host_reserve_share": _HOST_SHARE,
        "disk_bytes": 10**12,
        "disk_read_bytes_per_second": 2 * _G,
        "disk_write_bytes_per_second": 1.5 * _G,
        "notes": [
            "cpu stands for no machine: each rank has eight AVX2 cores at 2.6 GHz and no bf16 unit, 64 GiB a node, "
            "gloo over memory and 10 Gb/s; tenfold doctor --save measures the one that is there"
        ],
    }


_H100 = _hopper("H100 SXM5 80 GB", 80 * _GIB, 3350 * _G)
PRESETS: dict[str, dict[str, Any]] = {
    "v100-32gb": _V100,
    "a100-40gb": _a100(40 * _GIB, 1555 * _G, 1024 * _GIB, 15e12),
    "a100-80gb": _a100(80 * _GIB, 2039 * _G, 2048 * _GIB, 30e12),
    "h100": _H100,
    "h100-80gb": _H100,
    "h200": _hopper("H200 SXM5 141 GB", 141 * 10**9, 4800 * _G),
    "b200": _B200,
    "mi300x": _MI300X,
    "rtx-4090": _RTX_4090,
    "cpu": _cpu(),
}
"""Raw sections of `cluster.Cluster` by name."""
