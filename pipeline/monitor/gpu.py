"""NVIDIA GPUs through their driver's library (pynvml, the extra `gpu`)."""

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.monitor.client import GIB, why_no_driver

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
# Of these, what takes speed from a GPU that has work: power or heat. The others are idleness or somebody's setting.
THROTTLING = {"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "board_limit", "reliability"}
NO_REASON = "none"


class GpuSampler:
    """One row of numbers for each GPU of this machine; no rows where there is no driver or no pynvml.

    uuids: the GPUs to look at, as the driver names them; default all. why_none says why there are no rows, for the one line
    that informs the user.
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
        """Return for each GPU index, name, util_pct, mem_busy_pct, mem_used_gib, mem_total_gib, temp_c, power_w, power_pct, sm_clock_mhz,
        mem_clock_mhz, throttle, energy_j.

        util_pct is the share of the last moments in which any kernel ran; power_pct is of the enforced limit; throttle holds
        REASONS joined by +, or NO_REASON; energy_j is the GPU's own counter, which runs since the driver was loaded. What a
        GPU does not tell is left out.
        """
        return [gpu.sample() for gpu in self.gpus]


def throttle_words(bits: int) -> str:
    """Return the reasons as words; a bit that NVML added later as its number."""
    words = [REASONS.get(1 << n, hex(1 << n)) for n in range(bits.bit_length()) if bits >> n & 1]
    return "+".join(words) or NO_REASON


def is_throttled(words: str) -> bool:
    return not THROTTLING.isdisjoint(words.split("+"))


class _Gpu:
    """The questions to one GPU, each by itself: consumer boards and virtual GPUs do not answer every one."""

    def __init__(self, nvml: Any, index: int, device: Any):
        self.nvml, self.device = nvml, device
        self.known: dict[str, Any] = {"index": index}
        self.questions: list[Callable[[], dict[str, Any]]] = [
            self._load,
            self._memory,
            self._temperature,
            self._power,
            self._limit,
            self._sm_clock,
            self._memory_clock,
            self._throttle,
            self._energy,
        ]
        self.known |= self._answer(self._name)

    def sample(self) -> dict[str, Any]:
        row = dict(self.known)
        for question in tuple(self.questions):
            row |= self._answer(question)
        if "power_w" in row and "limit_w" in row:
            row["power_pct"] = 100 * row["power_w"] / row["limit_w"]
        row.pop("limit_w", None)
        return row

    def _answer(self, question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        nvml = self.nvml
        try:
            return question()
        except nvml.NVMLError as error:
            never = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            if error.value in never and question in self.questions:
                self.questions.remove(question)  # a hundred times a second it would cost what an answer costs
            return {}

    def _name(self) -> dict[str, Any]:
        return {"name": self.nvml.nvmlDeviceGetName(self.device)}

    def _load(self) -> dict[str, Any]:
        rates = self.nvml.nvmlDeviceGetUtilizationRates(self.device)
        return {"util_pct": rates.gpu, "mem_busy_pct": rates.memory}

    def _memory(self) -> dict[str, Any]:
        memory = self.nvml.nvmlDeviceGetMemoryInfo(self.device)
        return {"mem_used_gib": memory.used / GIB, "mem_total_gib": memory.total / GIB}

    def _temperature(self) -> dict[str, Any]:
        return {"temp_c": self.nvml.nvmlDeviceGetTemperature(self.device, self.nvml.NVML_TEMPERATURE_GPU)}

    def _power(self) -> dict[str, Any]:
        return {"power_w": self.nvml.nvmlDeviceGetPowerUsage(self.device) / 1000}

    def _limit(self) -> dict[str, Any]:
        return {"limit_w": self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.device) / 1000}

    def _sm_clock(self) -> dict[str, Any]:
        return {"sm_clock_mhz": self.nvml.nvmlDeviceGetClockInfo(self.device, self.nvml.NVML_CLOCK_SM)}

    def _memory_clock(self) -> dict[str, Any]:
        return {"mem_clock_mhz": self.nvml.nvmlDeviceGetClockInfo(self.device, self.nvml.NVML_CLOCK_MEM)}

    def _throttle(self) -> dict[str, Any]:
        return {"throttle": throttle_words(self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.device))}

    def _energy(self) -> dict[str, Any]:
        return {"energy_j": self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device) / 1000}
