"""NVML through nvidia-ml-py: which GPUs there are, and one reading of one GPU.

A field that a GPU does not have is null in the row; a GPU that does not answer at all gives a row that says so.
Source of what each call means: the NVML API reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.engines.live.gpu.facts import Absent, Gpu
from harness.engines.live.gpu.throttle import names_of
from harness.engines.live.gpu.visible import Card, select

Row = dict[str, Any]
Reader = Callable[[Any], int]

_ABSENT = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": (
        "no_library",
        "no NVIDIA driver library (libnvidia-ml.so.1) on this machine",
    ),
    "NVML_ERROR_DRIVER_NOT_LOADED": ("no_driver", "the NVIDIA driver is not loaded"),
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "driver_mismatch",
        "the NVIDIA driver and its library are of different versions: restart the machine",
    ),
    "NVML_ERROR_NO_PERMISSION": ("no_permission", "this user may not talk to the NVIDIA driver"),
    "NVML_ERROR_GPU_NOT_FOUND": ("no_gpu", "the NVIDIA driver lists no GPU"),
}
# What a whole GPU answers when it is gone; any other error belongs to the one field that was asked for.
_LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_UNINITIALIZED")
# A driver too old (or too new) for one way of asking is asked in the other.
_OTHER_WAY = (
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    "NVML_ERROR_DEPRECATED",
)


class _Lost(Exception):
    """The GPU does not answer."""


@dataclass(slots=True)
class Device:
    """An open GPU; `read` asks it once. `nulls` counts the fields that it did not give, by the driver's word."""

    nvml: Any
    facts: Gpu
    own: Any
    card: Any
    nulls: Counter[tuple[str, str]] = field(default_factory=Counter)
    _ways: dict[str, list[Reader]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.nvml
        # A binding that lacks the newer name leaves the older one.
        self._ways = {
            "throttle_mask": self._known(
                "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
            ),
            "temperature_c": [
                _of(ask, n.NVML_TEMPERATURE_GPU)
                for ask in self._known("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
            ],
            "sm_clock_mhz": [_of(n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_SM)],
            "memory_clock_mhz": [_of(n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_MEM)],
            "memory_used_bytes": [lambda handle: n.nvmlDeviceGetMemoryInfo(handle).used],
            "power_w": [n.nvmlDeviceGetPowerUsage],
            "energy_mj": [n.nvmlDeviceGetTotalEnergyConsumption],
        }

    def read(self, clock: Callable[[], int], epoch_ns: int, due_ns: int) -> Row:
        """One row of the `gpu` table; never raises what the driver says.

        Args:
            clock: the host's monotonic clock, ns.
            epoch_ns: where the run's clock starts on it.
            due_ns: when this reading was due, on the run's clock.
        """
        row: Row = dict.fromkeys(_FIELDS)
        row |= {"due_ns": due_ns, "gpu": self.facts.index, "uuid": self.facts.uuid, "error": ""}
        begun = clock()
        taken = None
        try:
            # These two first, and the time between: an integral over a window is only as good as its times.
            row["energy_mj"] = self._ask("energy_mj", self.card)
            power = self._ask("power_w", self.card)
            row["power_w"] = None if power is None else power / 1000
            taken = clock()
            row["gpu_util"], row["memory_util"] = self._utilisation()
            row["memory_used_bytes"] = self._ask("memory_used_bytes", self.own)
            for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_mask"):
                row[name] = self._ask(name, self.card)
            mask = row["throttle_mask"]
            row["throttle"] = None if mask is None else ",".join(names_of(mask))
        except _Lost as lost:
            # half a reading of a GPU that is going is none
            row |= dict.fromkeys(_FIELDS)
            row["error"] = str(lost)
        taken = taken or clock()
        row["t_ns"] = (begun + taken) // 2 - epoch_ns
        row["read_us"] = (taken - begun) / 1000
        return row

    def _known(self, *names: str) -> list[Any]:
        return [getattr(self.nvml, name) for name in names if hasattr(self.nvml, name)]

    def _utilisation(self) -> tuple[float | None, float | None]:
        try:
            rates = self.nvml.nvmlDeviceGetUtilizationRates(self.own)
        except self.nvml.NVMLError as error:
            self._null("gpu_util", error)
            return None, None
        return rates.gpu / 100, rates.memory / 100

    def _ask(self, name: str, handle: Any) -> int | None:
        ways = self._ways[name]
        while True:
            try:
                # the table's integers are signed
                return int(ways[0](handle)) & 0x7FFF_FFFF_FFFF_FFFF
            except self.nvml.NVMLError as error:
                if len(ways) > 1 and _is(self.nvml, error, _OTHER_WAY):
                    ways.pop(0)
                    continue
                self._null(name, error)
                return None

    def _null(self, name: str, error: Any) -> None:
        said = str(error)
        if _is(self.nvml, error, _LOST):
            raise _Lost(said)
        self.nulls[name, said] += 1


def _of(ask: Callable[[Any, int], int], which: int) -> Reader:
    return lambda handle: ask(handle, which)


_FIELDS = (
    "gpu_util",
    "memory_util",
    "memory_used_bytes",
    "power_w",
    "energy_mj",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "temperature_c",
    "throttle_mask",
    "throttle",
)


@dataclass(frozen=True, slots=True)
class Opened:
    """The GPUs of a run: `gpus` are all it was given, `devices` those of them that answer."""

    gpus: tuple[Gpu, ...]
    devices: tuple[Device, ...]
    driver: str


def open_gpus(visible: str | None, order: str | None = None, first: int | None = None) -> Opened | Absent:
    """Start NVML and open the GPUs that CUDA shows.

    Args:
        visible: CUDA_VISIBLE_DEVICES, None where it is not set.
        order: CUDA_DEVICE_ORDER.
        first: how many of them, from the front, the engine uses; None for all.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return Absent("no_module", "the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        driver = _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        for name, (code, text) in _ABSENT.items():
            if _is(nvml, error, (name,)):
                return Absent(code, text)
        return Absent("nvml_error", f"the NVIDIA driver answers: {error}")
    if count == 0:
        return Absent("no_gpu", "the NVIDIA driver lists no GPU")
    found = dict(_cards(nvml, count))
    selection = select(list(found), visible, order)
    picks = selection.picks[:first]
    if not picks:
        return Absent("none_visible", f"CUDA_VISIBLE_DEVICES={visible} shows none of {count} GPU(s)")
    gpus, devices = [], []
    for pick in picks:
        facts, own, card = (
            _open_slice(nvml, pick) if isinstance(pick, str) else _open(nvml, pick, found[pick])
        )
        if not selection.sure:
            facts = Gpu(facts.uuid, facts.index, facts.name, facts.mig, False, facts.fault)
        gpus.append(facts)
        if not facts.fault:
            devices.append(Device(nvml, facts, own, card))
    return Opened(tuple(gpus), tuple(devices), driver)


def _cards(nvml: Any, count: int) -> Iterable[tuple[Card, Any]]:
    """Each GPU and its handle; one that does not answer gives its fault for a handle."""
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield (
                Card(index, _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))),
                handle,
            )
        except nvml.NVMLError as error:
            # one that this user may not use, CUDA does not show either
            if not _is(nvml, error, ("NVML_ERROR_NO_PERMISSION",)):
                yield Card(index, f"number-{index}", ""), str(error)


def _open(nvml: Any, card: Card, handle: Any) -> tuple[Gpu, Any, Any]:
    if isinstance(handle, str):
        return Gpu(card.uuid, card.index, card.name, fault=handle), None, None
    try:
        split = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        split = False
    return Gpu(card.uuid, card.index, card.name, mig=split), handle, handle


def _open_slice(nvml: Any, uuid: str) -> tuple[Gpu, Any, Any]:
    try:
        own = nvml.nvmlDeviceGetHandleByUUID(uuid)
        card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(own)
        facts = Gpu(uuid, nvml.nvmlDeviceGetIndex(card), _text(nvml.nvmlDeviceGetName(card)), mig=True)
    except nvml.NVMLError as error:
        return Gpu(uuid, -1, "", mig=True, fault=str(error)), None, None
    return facts, own, card


def _is(nvml: Any, error: Any, names: Iterable[str]) -> bool:
    return any(error.value == getattr(nvml, name, None) for name in names)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
