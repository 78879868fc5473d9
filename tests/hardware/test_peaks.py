"""The table of peaks: whole names only, dense numbers, nothing guessed."""

import pytest

from pipeline.hardware.accelerators import ACCELERATORS, find_by_device_name, parse_hardware


@pytest.mark.parametrize(
    ("device_name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_a_known_device_has_its_dense_peak(device_name, bfloat16):
    assert find_by_device_name(device_name).peak_flops["bfloat16"] == pytest.approx(bfloat16)


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H20",
        "NVIDIA A10G",
        "NVIDIA A100X",
        "Apple M3",
        "",
    ],
)
def test_a_device_that_only_resembles_a_known_one_has_no_peak(device_name):
    assert find_by_device_name(device_name) is None


@pytest.mark.parametrize("name", ["T4", "V100"])
def test_devices_without_bfloat16_have_no_bfloat16_peak(name):
    assert "bfloat16" not in parse_hardware(name)[-1].peak_flops


def test_every_row_names_its_source_and_no_name_fits_two_rows():
    for row in ACCELERATORS:
        assert row.source
        assert row.peak_flops["float32"] < max(row.peak_flops.values()) <= 5e15
    assert len({row.name for row in ACCELERATORS}) == len(ACCELERATORS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8xH100", (1, 8, "H100")),
        ("h100", (1, 1, "H100")),
        ("2 x RTX4090", (1, 2, "RTX4090")),
        ("16xa100-40gb", (1, 16, "A100-40GB")),
        ("64x8xH100", (64, 8, "H100")),
        ("2 x 4 x a100", (2, 4, "A100")),
    ],
)
def test_planned_hardware_is_read_as_hosts_count_and_device(text, found):
    hosts, count, row = parse_hardware(text)
    assert (hosts, count, row.name) == found


@pytest.mark.parametrize("text", ["8xH900", "0xH100", "", "eight H100", "8x", "0x8xH100", "2x2x2xH100", "8x0xH100"])
def test_unknown_planned_hardware_is_refused_with_the_known_names(text):
    with pytest.raises(ValueError, match=r"one of: .*H100.*RTX4090"):
        parse_hardware(text)
