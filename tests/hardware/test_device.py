"""The machine as it is, and what `auto` means on it."""

import os
import pwd
import shutil
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.hardware import device, processor, rates
from pipeline.process.errors import CannotWriteError
from pipeline.process.storage import cache_dir


@pytest.fixture
def fresh():
    """device_info without what it remembers, before and after."""
    device.device_info.cache_clear()
    yield
    device.device_info.cache_clear()


@pytest.fixture
def unmeasured(monkeypatch, tmp_path):
    """Nothing kept and nothing decided of this processor."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "_decided", [])


def pretend_cuda(monkeypatch, name, *, bf16):
    properties = types.SimpleNamespace(name=name, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 and not including_emulation)


@pytest.mark.usefixtures("fresh")
def test_a_known_gpu_brings_its_peak_and_an_unknown_one_none(monkeypatch):
    pretend_cuda(monkeypatch, "NVIDIA H100 80GB HBM3", bf16=True)
    info = device.device_info()
    assert (info.kind, info.count, info.memory_gib) == ("cuda", 8, 80)
    assert info.peak_flops["bfloat16"] == pytest.approx(989.5e12)
    device.device_info.cache_clear()
    pretend_cuda(monkeypatch, "NVIDIA Nonesuch", bf16=True)
    info = device.device_info()
    assert info.peak_flops is None


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("local", "hosts"), [("8", 2), (None, 1)])
def test_the_hosts_of_a_training_are_those_of_its_launcher(monkeypatch, local, hosts):
    pretend_cuda(monkeypatch, "NVIDIA H100 80GB HBM3", bf16=True)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local) if local else monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert device.device_info().hosts == hosts


@pytest.mark.usefixtures("fresh")
def test_a_launcher_that_asks_for_the_cpu_gets_it_beside_a_gpu(monkeypatch):
    pretend_cuda(monkeypatch, "NVIDIA H100 80GB HBM3", bf16=True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert device.device_info().kind == "cpu"


@pytest.mark.usefixtures("fresh")
def test_auto_bf16_follows_the_hardware(monkeypatch):
    pretend_cuda(monkeypatch, "Tesla T4", bf16=False)
    assert device.decide_bf16("auto") is False
    device.device_info.cache_clear()
    pretend_cuda(monkeypatch, "NVIDIA L4", bf16=True)
    assert device.decide_bf16("auto") is True
    assert device.decide_bf16("auto", fp16=True) is False
    assert device.decide_bf16(False) is False
    assert device.decide_bf16(None) is False


@pytest.mark.usefixtures("fresh", "unmeasured")
def test_auto_bf16_on_a_cpu_follows_measured_products_and_not_flags(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for flags in (frozenset({"amx_tile", "amx_bf16"}), frozenset({"avx2"})):
        monkeypatch.setattr(rates, "cpu_flags", lambda flags=flags: flags)
        for faster in (True, False):
            measured = rates.ProductRates(float32=1e11, bfloat16=1e11 * (1.6 if faster else 1.4), time=0.0)
            monkeypatch.setattr(rates, "measure", lambda measured=measured: measured)
            shutil.rmtree(cache_dir() / "processors", ignore_errors=True)
            assert device.decide_bf16("auto") is faster


@pytest.mark.usefixtures("unmeasured")
def test_the_products_of_a_processor_are_measured_once_and_kept(monkeypatch):
    measured = rates.product_rates()
    assert min(measured.float32, measured.bfloat16) > 1e7
    monkeypatch.setattr(rates, "measure", lambda: pytest.fail("measured again"))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert rates.product_rates() == measured
    monkeypatch.setattr(rates, "cpu_flags", lambda: frozenset({"avx_of_another_one"}))
    assert rates.kept_rates() is None


@pytest.mark.usefixtures("unmeasured")
def test_a_user_without_a_home_measures_again_and_gets_a_hint(monkeypatch, tmp_path):
    monkeypatch.delenv("TANDEM_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
    assert rates.kept_rates() is None
    assert rates.product_rates().float32 > 1e7
    assert cache_dir(str(tmp_path)) == tmp_path
    with pytest.raises(CannotWriteError, match="no home folder"):
        cache_dir()


@pytest.mark.usefixtures("unmeasured")
def test_measuring_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rates.measure()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("fresh", "unmeasured")
def test_the_decision_for_all_ranks_outweighs_the_measurement_of_one(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for faster in (True, False):
        rates.decide_for_all_ranks(faster)
        assert device.decide_bf16("auto") is faster


@pytest.mark.usefixtures("fresh")
def test_auto_compile_on_a_cpu_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert device.decide_compile("auto") is False
    assert device.decide_compile(True) is True


def test_mps_is_taken_without_asking_cuda(monkeypatch, fresh):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    info = device.device_info()
    assert info.kind == "mps"
    assert info.peak_flops is None
    assert not device.decide_bf16("auto")
    assert not device.decide_compile("auto")


def test_a_container_quota_limits_cores_and_memory(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(processor, "CGROUP", tmp_path)
    assert processor.usable_cores() == 1
    assert processor.memory_bytes() == 2**30
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert processor.memory_bytes() > 2**30


def test_the_quota_of_a_container_of_cgroup_v1_counts_too(monkeypatch, tmp_path):
    for name, number in {"cpu/cpu.cfs_quota_us": 150_000, "cpu/cpu.cfs_period_us": 100_000}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{number}\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**30}\n")
    monkeypatch.setattr(processor, "CGROUP", tmp_path)
    assert processor.usable_cores() == 1
    assert processor.memory_bytes() == 2**30
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert processor.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("unmeasured")
def test_both_threads_of_a_core_are_used_only_where_faster(monkeypatch, tmp_path):
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(processor, "CGROUP", tmp_path)
    monkeypatch.setattr(processor, "TOPOLOGY", tmp_path)
    for number in range(8):  # 0 and 4 are one core
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(
            f"{number % 4},{number % 4 + 4}\n"
        )
    assert (processor.usable_cores(), processor.physical_cores()) == (8, 4)
    for with_both, expected in ((0.95, 4), (0.8, 8)):  # seconds beside one of one thread a core
        monkeypatch.setattr(rates, "seconds_of_product", {4: 1.0, 8: with_both}.get)
        shutil.rmtree(cache_dir() / "processors", ignore_errors=True)
        assert rates.best_threads() == expected
        monkeypatch.setattr(rates, "seconds_of_product", lambda _: pytest.fail("measured again"))
        assert rates.best_threads() == expected
    before = torch.get_num_threads()  # 8 is what was measured last
    try:
        assert [rates.set_threads(2, kept=kept) for kept in (None, 2, 4, 3)] == [4, 2, 4, 4]
    finally:
        torch.set_num_threads(before)
    shutil.rmtree(tmp_path / "cpu7")
    assert processor.physical_cores() == 8  # not said


def test_a_product_is_timed_on_given_threads_and_leaves_torch_unchanged():
    before = torch.get_num_threads()
    assert 0 < rates.seconds_of_product(1) < 5
    assert torch.get_num_threads() == before


def test_threads_are_shared_among_local_processes(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(rates, "usable_cores", lambda: 6)
        monkeypatch.setattr(rates, "physical_cores", lambda: 6)
        assert rates.set_threads(2) == 3 == torch.get_num_threads()
        assert rates.set_threads(12) == 1
    finally:
        torch.set_num_threads(before)


def test_vector_functions_are_first_called_on_one_number():
    # The race itself comes once in some thousand processes: docs/log.md has it measured.
    calls = set()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            calls.update((function.name(), a.dtype, a.numel()) for a in arguments if isinstance(a, torch.Tensor))
            return function(*arguments, **(keywords or {}))

    try:
        with Calls():
            processor.use_deterministic_kernels()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    for name in ("cos", "sin", "tanh", "exp", "log", "sqrt", "erf"):  # rotary angles, softcap, loss, optimizer, GELU
        assert {(f"aten::{name}", dtype, 1) for dtype in (torch.float32, torch.float64)} <= calls


def test_the_compute_format_names_a_peak():
    assert device.compute_format(bf16=True, fp16=False, tf32=True) == "bfloat16"
    assert device.compute_format(bf16=False, fp16=True, tf32=True) == "float16"
    assert device.compute_format(bf16=False, fp16=False, tf32=False) == "float32"
