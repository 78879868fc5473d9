"""NVIDIA GPUs through their driver's library (pynvml, the extra `gpu`)."""

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.monitor.host import GIB, why_no_driver

# Of a driver's reasons for a lower clock, what takes speed from a GPU that has work: power or heat. The others are
# idleness or somebody's setting.
THROTTLING = {
    "sw_power_cap",
    "hw_slowdown",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "board_limit",
    "reliability",
}


def is_throttled(words: str) -> bool:
    """Return whether one of a sample's reasons, joined by +, takes speed from a GPU that has work."""
    return not THROTTLING.isdisjoint(words.split("+"))


# Why the clocks are where they are, by NVML's bits (nvml.h, nvmlClocksThrottleReason*).
REASONS = {
    0x001: "gpu_idle",
    0x002: "application_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
NO_REASON = "none"


class GpuSampler:
    """One row of numbers for each GPU of this machine; no rows where there is no driver or no pynvml.

    uuids: the GPUs to look at, as the driver names them; default all. why_none says why there are no rows, for the one
    line that informs the user.
    """

    def __init__(self, uuids: Sequence[str] = ()) -> None:
        self.gpus: list[_Gpu] = []
        self.why_none = why_no_driver()
        if self.why_none:
            return
        import pynvml as nvml

        try:
            nvml.nvmlInit()
            devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            for index, device in enumerate(devices):
                if not uuids or nvml.nvmlDeviceGetUUID(device) in uuids:
                    self.gpus.append(_Gpu(nvml, index, device))
        except nvml.NVMLError as error:
            self.gpus, self.why_none = [], f"no GPU numbers: NVIDIA's driver does not answer ({error})"
            return
        if not self.gpus:
            self.why_none = f"no GPU numbers: NVIDIA's driver sees no GPU{' that the run uses' if uuids else ''}"

    def __str__(self) -> str:
        return f"{len(self.gpus)} GPU{'' if len(self.gpus) == 1 else 's'}"

    def sample(self) -> list[dict[str, Any]]:
        """Return for each GPU index, name, util_pct, mem_busy_pct, mem_used_gib, mem_total_gib, temp_c, power_w,
        power_pct, sm_clock_mhz, mem_clock_mhz, throttle, energy_j.

        util_pct is the share of the last moments in which any kernel ran; power_pct is of the enforced limit; throttle
        holds REASONS joined by +, or NO_REASON; energy_j is the GPU's own counter, which runs since the driver was
        loaded. What a GPU does not tell is left out.
        """
        return [gpu.sample() for gpu in self.gpus]


def throttle_words(bits: int) -> str:
    """Return the reasons as words; a bit that NVML added later as its number."""
    words = [REASONS.get(1 << n, hex(1 << n)) for n in range(bits.bit_length()) if bits >> n & 1]
    return "+".join(words) or NO_REASON


class _Gpu:
    """One GPU. Consumer boards and virtual GPUs do not answer every question; those are not repeated."""

    def __init__(self, nvml: Any, index: int, device: Any):
        self.nvml, self.device = nvml, device
        self.unknown: set[Callable] = set()
        self.index, self.name = index, self._ask(nvml.nvmlDeviceGetName)

    def sample(self) -> dict[str, Any]:
        nvml = self.nvml
        row: dict[str, Any] = {"index": self.index}
        if self.name is not None:
            row["name"] = self.name
        if rates := self._ask(nvml.nvmlDeviceGetUtilizationRates):
            row |= {"util_pct": rates.gpu, "mem_busy_pct": rates.memory}
        if memory := self._ask(nvml.nvmlDeviceGetMemoryInfo):
            row |= {"mem_used_gib": memory.used / GIB, "mem_total_gib": memory.total / GIB}
        row["temp_c"] = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage)
        limit_mw = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        if power_mw is not None:
            row["power_w"] = power_mw / 1000
            if limit_mw:
                row["power_pct"] = 100 * power_mw / limit_mw
        row["sm_clock_mhz"] = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        row["mem_clock_mhz"] = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        if reasons is not None:
            row["throttle"] = throttle_words(reasons)
        energy_mj = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        if energy_mj is not None:
            row["energy_j"] = energy_mj / 1000
        return {name: value for name, value in row.items() if value is not None}

    def _ask(self, question: Callable, *arguments: Any) -> Any:
        nvml = self.nvml
        if question in self.unknown:
            return None
        try:
            return question(self.device, *arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self.unknown.add(question)  # a hundred times a second it would cost what an answer costs
            return None
