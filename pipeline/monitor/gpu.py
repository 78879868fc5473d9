"""NVIDIA GPUs through their driver's library (pynvml, the extra `nvidia`)."""

from collections.abc import Callable
from typing import Any

GIB = 2**30


class GpuSampler:
    """One row of numbers for each GPU of this machine; no rows where there is no driver or no pynvml.

    why_none says which of the two it is, for the one line that tells the user.
    """

    def __init__(self) -> None:
        self.devices: list[Any] = []
        self.why_none = ""
        try:
            import pynvml
        except ImportError:
            self.why_none = (
                "GPU numbers need the package nvidia-ml-py, which is not installed: pip install nvidia-ml-py"
            )
            return
        self.nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.why_none = f"no GPU numbers: NVIDIA's driver does not answer ({error})"
            return
        self.devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if not self.devices:
            self.why_none = "no GPU numbers: NVIDIA's driver sees no GPU"

    def sample(self) -> list[dict[str, Any]]:
        """Per GPU: index, name, util_pct, mem_busy_pct, mem_used_gib, mem_total_gib, temp_c, power_w, power_pct, sm_clock_mhz.

        util_pct is the share of the last moments in which any kernel ran; power_pct is of the enforced limit. What a GPU
        does not tell is left out.
        """
        return [self._sample(index, device) for index, device in enumerate(self.devices)]

    def _sample(self, index: int, device: Any) -> dict[str, Any]:
        nvml = self.nvml
        row: dict[str, Any] = {"index": index}

        def ask(read: Callable[[], dict[str, Any]]) -> None:
            try:
                row.update(read())
            except nvml.NVMLError:
                return  # consumer boards and virtual GPUs do not answer every question

        def power() -> dict[str, float]:
            watts = nvml.nvmlDeviceGetPowerUsage(device) / 1000
            limit = nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000
            return {"power_w": watts, "power_pct": 100 * watts / limit}

        def memory() -> dict[str, float]:
            info = nvml.nvmlDeviceGetMemoryInfo(device)
            return {"mem_used_gib": info.used / GIB, "mem_total_gib": info.total / GIB}

        def load() -> dict[str, float]:
            rates = nvml.nvmlDeviceGetUtilizationRates(device)
            return {"util_pct": rates.gpu, "mem_busy_pct": rates.memory}

        ask(lambda: {"name": nvml.nvmlDeviceGetName(device)})
        ask(load)
        ask(memory)
        ask(lambda: {"temp_c": nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)})
        ask(power)
        ask(lambda: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)})
        return row
